import math

import pytest
import torch

from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.modules.relative_position import RELATIVE_POSITIONS, BucketedBias, DistanceGain
from mixhead_plugin.ops import IMPLEMENTATIONS, NORMALIZERS

E, H, D, B, N = 12, 3, 4, 2, 9
INF = float("inf")

POSITIONS = [name for name, kind in RELATIVE_POSITIONS.items() if kind.build]
every_position = pytest.mark.parametrize("position", POSITIONS)
every_normalizer = pytest.mark.parametrize("normalizer", NORMALIZERS)
# Each of the relative positions, and the gain.
VARIANTS = [*({"relative_position": name} for name in POSITIONS), {"relative_gain": 3}]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: str(*v.values()))


def future(n=N):
    return torch.full((n, n), -INF).triu(1)


def build(causal=True, **options):
    torch.manual_seed(1)
    module = MixheadAttention(E, H, head_dim=D, self_attention=True, causal=causal, **options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))  # away from the initial identity
    return module


def projected(module, x):
    projections = (module.q_proj, module.k_proj, module.v_proj)
    return [p(x).view(-1, B, H, D).permute(1, 2, 0, 3) for p in projections]  # [B, H, N, D]


def output(module, weights, v):
    return module.out_proj((weights @ v).permute(2, 0, 1, 3).flatten(2))


def bucket_by_hand(distance, buckets, exact):
    """T5's section 2.1, one distance at a time"""
    if distance < exact:
        return distance
    return min(buckets - 1, exact + int(math.log(distance / exact) / math.log(128 / exact) * (buckets - exact)))


@pytest.mark.parametrize("causal", [True, False])
def test_distances_have_the_buckets_of_t5(causal):
    bias = BucketedBias(H, D, causal)
    offsets = torch.arange(-300, 301)
    expected = []
    for offset in offsets.tolist():
        if causal:
            expected.append(bucket_by_hand(max(0, -offset), 32, 16))
        else:
            expected.append((16 if offset > 0 else 0) + bucket_by_hand(abs(offset), 16, 8))
    assert bias.buckets(offsets).tolist() == expected
    assert set(expected) == (set(range(32)) if causal else set(range(32)) - {16})  # 16: a later key at distance 0


@pytest.mark.parametrize("causal", [True, False])
@every_normalizer
def test_a_bias_is_added_to_the_scores(normalizer, causal):
    module = build(causal, relative_position="t5", normalizer=normalizer, head_mixing="position-wise")
    x = torch.randn(N, B, E).double()
    q, k, v = projected(module, x)
    scores = q @ k.transpose(2, 3) * D**-0.5
    for t in range(N):
        for s in range(N):
            bucket = module.relative_position.buckets(torch.tensor(s - t))
            scores[:, :, t, s] += module.relative_position.weight[bucket]
    mask = future().double() if causal else None
    weights = NORMALIZERS[normalizer].weights(scores if mask is None else scores + mask)
    mixed = torch.einsum("btji,bjts->bits", module.head_mixing(q), weights)
    found = module(x, x, x, attn_mask=mask, need_weights=False)[0]
    torch.testing.assert_close(found, output(module, mixed, v))


def test_rotary_turns_pairs_by_their_place():
    module = build(relative_position="rotary")
    x = torch.randn(N, B, E).double()
    q, k, _ = projected(module, x)
    scores = torch.zeros(B, H, N, N).double()
    for t in range(N):
        for s in range(N):
            for pair in range(D // 2):
                # as complex numbers: the product of one with the other's conjugate, turned by the distance
                a = torch.complex(q[..., t, pair], q[..., t, pair + D // 2])
                b = torch.complex(k[..., s, pair], k[..., s, pair + D // 2])
                angle = torch.tensor((t - s) * 10000.0 ** (-2 * pair / D), dtype=torch.float64)
                scores[..., t, s] += (a * b.conj() * torch.polar(torch.ones_like(angle), angle)).real
    found, _ = module(x, x, x, before_softmax=True, need_weights=False)
    torch.testing.assert_close(found.view_as(scores), scores * D**-0.5)


@every_normalizer
def test_a_gain_is_a_factor_on_the_weights(normalizer):
    module = build(relative_gain=3, normalizer=normalizer, head_mixing="position-independent")
    x = torch.randn(N, B, E).double()
    q, k, v = projected(module, x)
    weights = NORMALIZERS[normalizer].weights(q @ k.transpose(2, 3) * D**-0.5 + future().double())
    for t in range(N):
        for s in range(N):
            weights[:, :, t, s] *= module.relative_gain.weight[:, min(3, max(-3, s - t)) + 3]
    mixed = torch.einsum("ji,bjts->bits", module.head_mixing.weight, weights)
    found, returned = module(x, x, x, attn_mask=future().double(), need_head_weights=True)
    torch.testing.assert_close(found, output(module, mixed, v))
    torch.testing.assert_close(returned, mixed.transpose(0, 1))


@every_variant
@pytest.mark.parametrize("impl", ["auto", *(name for name in IMPLEMENTATIONS if name != "triton")])
def test_every_implementation_gives_the_same(variant, impl):
    results = []
    for name in ("reference", impl):
        module = build(**variant, impl=name, head_mixing="position-wise")
        x = torch.randn(N, B, E, generator=torch.Generator().manual_seed(4)).double().requires_grad_()
        out = module(x, x, x, attn_mask=future().double(), need_weights=False)[0]
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@every_variant
@pytest.mark.parametrize("mixing", HEAD_MIXINGS)
@every_normalizer
def test_step_by_step_is_the_full_pass(normalizer, mixing, variant):
    module = build(**variant, normalizer=normalizer, head_mixing=mixing)
    x = torch.randn(N, B, E).double()
    full = module(x, x, x, attn_mask=future().double(), need_weights=False)[0]
    state, steps = {}, []
    for t in range(N):
        step = x[t : t + 1]
        steps.append(module(step, step, step, incremental_state=state, need_weights=False)[0])
    torch.testing.assert_close(torch.cat(steps), full)


@every_variant
def test_only_distances_count(variant):
    """The same words, some places later, behind others that nobody sees."""
    module = build(**variant)
    x = torch.randn(N + 3, B, E).double()
    hidden = torch.zeros(B, N + 3, dtype=torch.bool)
    hidden[:, :3] = True
    later = module(x, x, x, attn_mask=future(N + 3).double(), key_padding_mask=hidden, need_weights=False)[0]
    alone = module(x[3:], x[3:], x[3:], attn_mask=future().double(), need_weights=False)[0]
    torch.testing.assert_close(later[3:], alone)


@every_variant
def test_order_counts(variant):
    module = build(causal=False, **variant)
    x = torch.randn(N, B, E).double()
    swapped = x[[*range(N - 3), N - 2, N - 3, N - 1]]
    last = [module(rows, rows, rows, need_weights=False)[0][-1] for rows in (x, swapped)]
    assert not torch.allclose(*last)


@every_variant
def test_torchscript_gives_the_same_outputs(variant):
    module = build(**variant, head_mixing="position-wise").float().eval()
    x = torch.randn(N, B, E)
    scripted = torch.jit.script(module)
    for need in (False, True):
        expected = module(x, x, x, attn_mask=future(), need_weights=need)
        torch.testing.assert_close(scripted(x, x, x, attn_mask=future(), need_weights=need), expected)


@pytest.mark.parametrize("variant", [{"relative_position": "t5"}, {"relative_gain": 3}])
def test_untrained_it_changes_nothing_and_takes_a_checkpoint_without_it(variant):
    torch.manual_seed(3)
    plain = MixheadAttention(E, H, self_attention=True)
    torch.manual_seed(3)
    module = MixheadAttention(E, H, self_attention=True, **variant)
    x = torch.randn(N, B, E)
    torch.testing.assert_close(module(x, x, x)[0], plain(x, x, x)[0])
    state = plain.state_dict()
    for name, child in module.named_children():
        if hasattr(child, "upgrade_state_dict_named"):
            child.upgrade_state_dict_named(state, name)
    module.load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_variant
def test_half_precision_stays_close(variant, dtype):
    module = build(**variant).float()
    x = torch.randn(N, B, E)
    expected = module(x, x, x, attn_mask=future(), need_weights=False)[0]
    half = module.to(dtype)(*[x.to(dtype)] * 3, attn_mask=future(), need_weights=False)[0]
    assert half.dtype == dtype
    torch.testing.assert_close(half.float(), expected, rtol=0.1, atol=0.1)


def test_what_has_no_place_is_refused():
    with pytest.raises(ValueError, match="self-attention without constant keys"):
        MixheadAttention(E, H, encoder_decoder_attention=True, relative_position="t5")
    with pytest.raises(ValueError, match="self-attention without constant keys"):
        MixheadAttention(E, H, self_attention=True, add_zero_attn=True, relative_gain=2)
    with pytest.raises(ValueError, match="head size 3 is odd"):
        MixheadAttention(E, H, head_dim=3, self_attention=True, relative_position="rotary")


def test_the_gain_of_far_distances_is_shared():
    gain = DistanceGain(H, 2)
    torch.nn.init.normal_(gain.weight)
    table = gain(6, 6)
    assert table.shape == (H, 11)
    assert torch.equal(table[:, :4], gain.weight[:, :1].expand(H, 4))
    assert torch.equal(table[:, 5], gain.weight[:, 2])  # a key at its query's own place
