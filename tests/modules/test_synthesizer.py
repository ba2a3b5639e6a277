"""Attention with synthetic scores, against the formulas in float64."""

import math
import socket
from typing import Dict, List, Optional

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.modules.synthesizer import SYNTHESIZERS, SynthesizerAttention
from mixhead_plugin.ops import NORMALIZERS
from tests.helpers import shake
from tests.ops import definitions

E, H, D, B, N, LONGEST = 12, 3, 4, 2, 6, 10
OWN_SIZES = {"factorized-dense": 3, "factorized-random": 2}

every_synthesizer = pytest.mark.parametrize("synthesizer", SYNTHESIZERS)
every_normalizer = pytest.mark.parametrize("normalizer", NORMALIZERS)
every_mixing = pytest.mark.parametrize("mixing", HEAD_MIXINGS)


def build(synthesizer, mixing="none", normalizer="softmax", **arguments):
    torch.manual_seed(5)
    own_size = OWN_SIZES.get(synthesizer)
    arguments = {"head_mixing": mixing, "normalizer": normalizer, **arguments}
    return shake(SynthesizerAttention(E, H, LONGEST, synthesizer, own_size, **arguments))


def future(n=N):
    return torch.full((n, n), float("-inf")).triu(1)


def padding():
    mask = torch.zeros(B, N, dtype=torch.bool)
    mask[1, -2:] = True
    return mask


def heads_of(rows):
    """[N, B, H * D] -> [B, N, H, D]"""
    return rows.transpose(0, 1).unflatten(2, (H, -1))


def network(part, q):
    """One value for each output: [B, N, H, outputs]"""
    hidden = part.hidden(q.flatten(2)).clamp(min=0).unflatten(2, (H, -1))  # [B, N, H, D]
    return torch.einsum("bthd,od->btho", hidden, part.output)


def scores_by_definition(module, x):
    """[B, H, N, N]"""
    own = module.synthesizer
    if module.synthesizer_kind == "factorized-random":
        assert own.query.shape == own.key.shape == (H, LONGEST, 2)
        return torch.einsum("htr,hkr->htk", own.query[:, :N], own.key[:, :N]).expand(B, H, N, N)
    if "random" in module.synthesizer_kind:
        assert own.scores.shape == (H, LONGEST, LONGEST)
        return own.scores[:, :N, :N].expand(B, H, N, N)
    q = heads_of(module.q_proj(x))
    if module.synthesizer_kind == "dense":
        return network(own.network, q).transpose(1, 2)[..., :N]
    a, b = network(own.first, q), network(own.second, q)
    assert a.shape[-1] == 3 and b.shape[-1] == math.ceil(LONGEST / 3)
    return torch.stack([a[..., k % 3] * b[..., k // 3] for k in range(N)], -1).transpose(1, 2)


def definition(module, x, visible):
    """Output [N, B, E] and the weights of each head [H, B, N, N]"""
    weights = definitions.weights(module.normalizer, scores_by_definition(module, x), visible.expand(B, H, N, N))
    if module.head_mixing_kind == "position-wise":
        mixing, q = module.head_mixing, heads_of(module.q_proj(x))
        weights = torch.einsum("bjtk,btji->bitk", weights, q @ mixing.query_weight + mixing.bias)
    elif module.head_mixing_kind != "none":
        weights = torch.einsum("bjtk,ji->bitk", weights, module.head_mixing.weight)
    out = torch.einsum("bhtk,bkhd->tbhd", weights, heads_of(module.v_proj(x)))
    return module.out_proj(out.flatten(2)), weights.transpose(0, 1)


@every_mixing
@every_normalizer
@every_synthesizer
def test_outputs_and_gradients_are_those_of_the_formulas(synthesizer, normalizer, mixing):
    module = build(synthesizer, mixing, normalizer, impl="blockwise").double()
    x = torch.randn(N, B, E).double().requires_grad_()
    visible = ~(padding()[:, None, None] | future().isinf())
    expected, expected_weights = definition(module, x, visible)
    parameters = list(module.parameters())
    wanted = torch.autograd.grad(expected.square().sum(), [x, *parameters])
    masks = dict(key_padding_mask=padding(), attn_mask=future().double())
    out = module(x, x, x, need_weights=False, **masks)[0]
    torch.testing.assert_close(out, expected)
    for gradient, value in zip(torch.autograd.grad(out.square().sum(), [x, *parameters]), wanted, strict=True):
        torch.testing.assert_close(gradient, value)
    out, weights = module(x, x, x, need_head_weights=True, **masks)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, expected_weights)


@every_mixing
@every_synthesizer
def test_every_parameter_gets_a_gradient(synthesizer, mixing):
    """Else torch's DistributedDataParallel waits for one."""
    module = build(synthesizer, mixing)
    x = torch.randn(N, B, E)
    module(x, x, x, attn_mask=future(), need_weights=False)[0].square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def backward(module, rank):
    torch.manual_seed(20 + rank)
    x = torch.randn(N, B, E)
    for _ in range(2):  # torch notices in the next pass that a parameter had no gradient
        module.zero_grad()
        module(x, x, x, attn_mask=future(), need_weights=False)[0].square().sum().backward()
    return {name.removeprefix("module."): p.grad for name, p in module.named_parameters()}


def _train(rank, port, results):
    address = f"tcp://localhost:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    for synthesizer in SYNTHESIZERS:
        for mixing in HEAD_MIXINGS:
            found = backward(DistributedDataParallel(build(synthesizer, mixing)), rank)
            results[synthesizer, mixing, rank] = {name: gradient.tolist() for name, gradient in found.items()}
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_workers_have_the_mean_gradients_of_both():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_train, (port, results), nprocs=2)
        found = dict(results)
    assert len(found) == 2 * len(SYNTHESIZERS) * len(HEAD_MIXINGS)
    for (synthesizer, mixing, rank), gradients in found.items():
        alone = [backward(build(synthesizer, mixing), other) for other in (0, 1)]
        for name, gradient in gradients.items():
            expected = (alone[0][name] + alone[1][name]) / 2
            torch.testing.assert_close(torch.tensor(gradient), expected, msg=f"{synthesizer} {name} of worker {rank}")


@every_synthesizer
def test_weights_may_be_averaged_over_the_heads_and_scores_asked_for(synthesizer):
    module = build(synthesizer).double()
    x = torch.randn(N, B, E).double()
    each = module(x, x, x, need_head_weights=True)[1]
    torch.testing.assert_close(module(x, x, x)[1], each.mean(0))
    scores, values = module(x, x, x, attn_mask=future().double(), before_softmax=True)
    expected = scores_by_definition(module, x) + future().double()
    torch.testing.assert_close(scores, expected.reshape(B * H, N, N))
    torch.testing.assert_close(values, heads_of(module.v_proj(x)).transpose(1, 2).flatten(0, 1))


def decode(module, x, state):
    steps = [module(row[None], None, None, incremental_state=state, need_weights=False)[0] for row in x]
    return torch.cat(steps)


@every_mixing
@every_normalizer
@every_synthesizer
def test_step_by_step_with_reordered_hypotheses_is_the_full_pass(synthesizer, normalizer, mixing):
    module = build(synthesizer, mixing, normalizer).eval()
    x, order = torch.randn(N, 3, E), torch.tensor([2, 0, 0, 1])
    state = {}
    first = decode(module, x[:4], state)
    torch.testing.assert_close(first, module(x, x, x, attn_mask=future())[0][:4])
    module.reorder_incremental_state(state, order)
    chosen = torch.cat([x[:4, order], torch.randn(2, 4, E)])
    rest = decode(module, chosen[4:], state)
    torch.testing.assert_close(rest, module(chosen, chosen, chosen, attn_mask=future())[0][4:])
    # no keys in the cache
    cached = {name: rows for name, rows in module._get_input_buffer(state).items() if rows is not None}
    assert {name: rows.shape for name, rows in cached.items()} == {"prev_value": (4, H, N, D)}


@every_synthesizer
def test_padding_that_was_decoded_stays_hidden(synthesizer):
    module = build(synthesizer, "position-wise").eval()
    x, state, steps = torch.randn(N, B, E), {}, []
    for t in range(N):
        hidden = padding()[:, t : t + 1]
        steps.append(module(x[t : t + 1], None, None, hidden, state, need_weights=False)[0])
    full = module(x, x, x, padding(), attn_mask=future())[0]
    torch.testing.assert_close(torch.cat(steps)[:, 0], full[:, 0])
    torch.testing.assert_close(torch.cat(steps)[:-2, 1], full[:-2, 1])


@every_synthesizer
def test_an_input_beyond_the_scores_is_refused(synthesizer):
    module = build(synthesizer).eval()
    x, state = torch.randn(LONGEST + 1, B, E), {}
    assert module(x[:-1], None, None)[0].shape == (LONGEST, B, E)
    decode(module, x[:-1], state)
    message = f"--tokens-per-sample: an input has {LONGEST + 1} tokens, this --synthesizer scores for {LONGEST}"
    with pytest.raises(OptionError, match=message):
        module(x, None, None)
    with pytest.raises(OptionError, match=message):
        decode(module, x[-1:], state)


def test_frozen_scores_are_no_parameters_but_in_the_checkpoint():
    module = build("fixed-random", "position-wise")
    assert not any("synthesizer" in name for name, _ in module.named_parameters())
    torch.manual_seed(6)
    other = SynthesizerAttention(E, H, LONGEST, "fixed-random", head_mixing="position-wise")
    assert not torch.equal(other.synthesizer.scores, module.synthesizer.scores)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.synthesizer.scores, module.synthesizer.scores)


@every_synthesizer
def test_scores_start_at_a_size_that_lets_them_learn(synthesizer):
    """Neither flat nor all on one key, whatever the maximal length and the sizes."""
    torch.manual_seed(5)
    module = SynthesizerAttention(64, 4, 200, synthesizer)
    x = torch.randn(200, 4, 64)  # of the size that layer normalisation gives
    deviation = module(x, x, x, before_softmax=True)[0].std()
    assert 0.05 < deviation < 2


@every_synthesizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_close_to_float32(synthesizer, dtype):
    module = build(synthesizer, "position-wise", "sigsoftmax").eval()
    x = torch.randn(N, B, E)
    expected = module(x, x, x, attn_mask=future(), need_weights=False)[0]
    rounded = x.to(dtype)
    out = module.to(dtype)(rounded, rounded, rounded, attn_mask=future().to(dtype), need_weights=False)[0]
    assert out.dtype == dtype
    assert (out.float() - expected).abs().max() <= 16 * torch.finfo(dtype).eps * expected.abs().max()


@every_synthesizer
def test_autocast_gives_the_outputs_of_half_precision(synthesizer):
    module = build(synthesizer, "position-wise").train()
    x = torch.randn(N, B, E)
    expected = module(x, x, x, attn_mask=future(), need_weights=False)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, weights = module(x, x, x, attn_mask=future())
        plain = module(x, x, x, attn_mask=future(), need_weights=False)[0]
    assert weights.dtype == torch.float32
    torch.testing.assert_close(plain, out, rtol=2e-2, atol=2e-2)
    assert (plain.float() - expected).abs().max() <= 16 * torch.finfo(torch.bfloat16).eps * expected.abs().max()
    plain.sum().backward()


class StepByStep(torch.nn.Module):
    """`decode` inside of TorchScript, where alone its dictionaries can be changed in place."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor):
        state: Dict[str, Dict[str, Optional[torch.Tensor]]] = {}
        steps: List[torch.Tensor] = []
        for t in range(x.size(0)):
            steps.append(self.attention(x[t : t + 1], None, None, incremental_state=state, need_weights=False)[0])
        return torch.cat(steps)


@pytest.mark.parametrize(
    "synthesizer, mixing", [("random", "none"), *((synthesizer, "position-wise") for synthesizer in SYNTHESIZERS)]
)
def test_torchscript_gives_the_same_outputs(synthesizer, mixing):
    module = build(synthesizer, mixing).eval()
    x = torch.randn(N, B, E)
    scripted = torch.jit.script(StepByStep(module))
    masks = dict(key_padding_mask=padding(), attn_mask=future())
    torch.testing.assert_close(scripted.attention(x, None, None, **masks), module(x, None, None, **masks))
    torch.testing.assert_close(scripted(x), decode(module, x, {}))
    with pytest.raises(torch.jit.Error, match="--tokens-per-sample"):
        scripted(torch.randn(LONGEST + 1, B, E))


@pytest.mark.parametrize("synthesizer", ["dense", "factorized-dense"])
def test_quantisation_noise_reaches_the_networks(synthesizer):
    module = build(synthesizer, q_noise=0.5, qn_block_size=4).train()
    x = torch.randn(N, B, E)
    q = module._split_heads(x)
    first = module.synthesizer(q, N)
    second = module.synthesizer(q, N)
    assert not all(torch.equal(a, b) for a, b in zip(first, second) if a is not None)
