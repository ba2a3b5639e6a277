"""Compare attention with synthetic scores with the formulas in float64."""

import math

import pytest
import torch

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.models.synthesizer.attention import SYNTHESIZERS, SynthesizerAttention
from tests.attention_equations import (
    COMBINATIONS,
    LONGEST,
    OWN_SIZES,
    SOME_NORMALIZERS,
    E,
    H,
    StepByStep,
    decode,
    features,
    finish,
    heads,
)
from tests.attention_equations import build_synthesizer as build
from tests.covering import each_once

D, B, N = 4, 2, 6
FUTURE = torch.full((N, N), -math.inf).triu(1)
PADDING = torch.zeros(B, N, dtype=torch.bool)
PADDING[1, -2:] = True
HIDDEN = PADDING[:, None, None] | FUTURE.isinf()

every_synthesizer = pytest.mark.parametrize("synthesizer", SYNTHESIZERS)


def network(part, q):
    """Return one value for each output, [B, H, N, outputs]."""
    hidden = part.hidden(q.permute(2, 0, 1, 3).flatten(2)).clamp(min=0)  # [N, B, H * D]
    return heads(hidden, H) @ part.output.T


def scores_by_definition(module, q):
    """Return [B, H, N, N]."""
    own = module.synthesizer
    if module.synthesizer_name == "factorized-random":
        assert own.query.shape == own.key.shape == (H, LONGEST, 2)
        return torch.einsum("htr,hkr->htk", own.query[:, :N], own.key[:, :N]).expand(B, H, N, N)
    if "random" in module.synthesizer_name:
        assert own.scores.shape == (H, LONGEST, LONGEST)
        return own.scores[:, :N, :N].expand(B, H, N, N)
    if module.synthesizer_name == "dense":
        return network(own.network, q)[..., :N]
    a = network(own.first, q)
    b = network(own.second, q)
    assert a.shape[-1] == 3 and b.shape[-1] == math.ceil(LONGEST / 3)
    return torch.stack([a[..., k % 3] * b[..., k // 3] for k in range(N)], -1)


def definition(module, x):
    """Return the output and the weights of each head, where padding and the future are hidden."""
    q = None if module.q_proj is None else heads(module.q_proj(x), H)
    values = features(module, "value", module.v_proj(x), module.num_mixed_heads)
    return finish(module, scores_by_definition(module, q), HIDDEN, values, q, x)


@each_once(
    synthesizer=SYNTHESIZERS,
    normalizer=SOME_NORMALIZERS,
    mixing=COMBINATIONS,
    impl=["blockwise", "reference"],
    gain=[0, 0, 3],
)
def test_outputs_and_gradients_are_those_of_the_formulas(
    synthesizer, normalizer, mixing, impl, gain
):
    module = build(synthesizer, mixing, normalizer, impl=impl, relative_gain=gain).double()
    x = torch.randn(N, B, E).double().requires_grad_()
    expected, weights = definition(module, x)
    sources = [x, *module.parameters()]
    wanted = torch.autograd.grad(expected.square().sum(), sources)
    masks = dict(key_padding_mask=PADDING, attn_mask=FUTURE.double())
    out = module(x, x, x, need_weights=False, **masks)[0]
    torch.testing.assert_close(out, expected)
    # an error if a parameter has none: DDP would wait for it
    found = torch.autograd.grad(out.square().sum(), sources)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        module(x, x, x, need_head_weights=True, **masks), (expected, weights)
    )
    torch.testing.assert_close(module(x, x, x, **masks)[1], weights.mean(0))


@every_synthesizer
def test_scores_may_be_asked_for_before_the_softmax(synthesizer):
    module = build(synthesizer).double()
    x = torch.randn(N, B, E).double()
    scores, values = module(x, x, x, attn_mask=FUTURE.double(), before_softmax=True)
    q = None if module.q_proj is None else heads(module.q_proj(x), H)
    expected = scores_by_definition(module, q) + FUTURE.double()
    torch.testing.assert_close(scores, expected.reshape(B * H, N, N))
    torch.testing.assert_close(values, features(module, "value", module.v_proj(x)).flatten(0, 1))


@each_once(synthesizer=SYNTHESIZERS, normalizer=SOME_NORMALIZERS, mixing=COMBINATIONS)
def test_step_by_step_with_reordered_hypotheses_is_the_full_pass(synthesizer, normalizer, mixing):
    module = build(synthesizer, mixing, normalizer).double()
    x = torch.randn(N, 3, E).double()
    order = torch.tensor([2, 0, 0, 1])
    first, state = decode(module, x[:4])
    torch.testing.assert_close(first, module(x, x, x, attn_mask=FUTURE)[0][:4])
    module.reorder_incremental_state(state, order)
    chosen = torch.cat([x[:4, order], torch.randn(2, 4, E).double()])
    rest, _ = decode(module, chosen[4:], state=state)
    torch.testing.assert_close(rest, module(chosen, chosen, chosen, attn_mask=FUTURE)[0][4:])
    # no keys in the cache
    cached = {
        name: rows for name, rows in module._get_input_buffer(state).items() if rows is not None
    }
    heads = module.num_mixed_heads
    assert {name: rows.shape for name, rows in cached.items()} == {
        "prev_value": (4, heads, N, E // heads)
    }


@every_synthesizer
def test_padding_that_was_decoded_stays_hidden(synthesizer):
    module = build(synthesizer, "position-wise")
    x = torch.randn(N, B, E)
    state = {}
    steps = [
        decode(module, x[t : t + 1], state=state, key_padding_mask=PADDING[:, t : t + 1])[0]
        for t in range(N)
    ]
    full = module(x, x, x, PADDING, attn_mask=FUTURE)[0]
    torch.testing.assert_close(torch.cat(steps)[:, 0], full[:, 0])
    torch.testing.assert_close(torch.cat(steps)[:-2, 1], full[:-2, 1])


@every_synthesizer
def test_an_input_beyond_the_scores_is_refused(synthesizer):
    module = build(synthesizer)
    x = torch.randn(LONGEST + 1, B, E)
    _, state = decode(module, x[:-1])
    message = f"^--tokens-per-sample: an input has {LONGEST + 1} tokens, .* scores for {LONGEST}"
    with pytest.raises(OptionError, match=message):
        module(x, None, None)
    with pytest.raises(OptionError, match=message):
        decode(module, x[-1:], state=state)


@every_synthesizer
def test_the_table_says_what_the_module_has(synthesizer):
    kind = SYNTHESIZERS[synthesizer]
    module = build(synthesizer)
    assert {name.split(".")[0] for name in module.synthesizer.state_dict()} == set(kind.parameters)
    assert (module.q_proj is not None) == kind.reads_query
    bias = module.synthesizer(torch.randn(B, H, N, D), N).bias
    assert (bias is not None and bias.requires_grad) == kind.trained_bias
    other = SynthesizerAttention(E, H, LONGEST, synthesizer, OWN_SIZES.get(synthesizer))
    other.load_state_dict(module.state_dict())  # frozen scores too
    x = torch.randn(N, B, E)
    assert torch.equal(other(x, x, x)[0], module(x, x, x)[0])


@every_synthesizer
def test_scores_start_at_a_size_that_lets_them_learn(synthesizer):
    """Weights are neither flat nor all on one key, whatever the sizes."""
    module = SynthesizerAttention(64, 4, 200, synthesizer)
    x = torch.randn(200, 4, 64)  # of the size that layer normalisation gives
    assert 0.05 < module(x, x, x, before_softmax=True)[0].std() < 2


@every_synthesizer
def test_autocast_leaves_weights_and_gradients_in_float32(synthesizer):
    module = build(synthesizer, "position-wise").train()
    x = torch.randn(N, B, E)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x, x, x, attn_mask=FUTURE)[1].dtype == torch.float32
        plain = module(x, x, x, attn_mask=FUTURE, need_weights=False)[0]
    plain.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in module.parameters())


@pytest.mark.parametrize(
    "synthesizer, mixing",
    [("random", "none"), *((synthesizer, "position-wise") for synthesizer in SYNTHESIZERS)],
)
def test_torchscript_gives_the_same_outputs(synthesizer, mixing):
    module = build(synthesizer, mixing)
    x = torch.randn(N, B, E)
    scripted = torch.jit.script(StepByStep(module))
    masks = dict(key_padding_mask=PADDING, attn_mask=FUTURE)
    torch.testing.assert_close(
        scripted.attention(x, None, None, **masks), module(x, None, None, **masks)
    )
    torch.testing.assert_close(scripted(x, None), decode(module, x)[0])
    with pytest.raises(torch.jit.Error, match="--tokens-per-sample"):
        scripted(torch.randn(LONGEST + 1, B, E), None)


@pytest.mark.parametrize("synthesizer", ["dense", "factorized-dense"])
def test_quantisation_noise_reaches_the_networks(synthesizer):
    module = build(synthesizer, q_noise=0.5, qn_block_size=4).train()
    q = torch.randn(B, H, N, D)
    first, second = (module.synthesizer(q, N) for _ in range(2))
    assert not all(torch.equal(a, b) for a, b in zip(first, second) if a is not None)


@pytest.mark.parametrize("synthesizer", SYNTHESIZERS)
def test_the_usual_loop_after_to_empty_draws_every_number(synthesizer):
    with torch.device("meta"):
        module = build(synthesizer)
    module.to_empty(device="cpu")
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.fill_(torch.nan)
    for each in module.modules():
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()
    assert not any(tensor.isnan().any() for tensor in module.state_dict().values())


FACTORS = {"synthesizer": "factorized-dense"}
# The whole message, and the arguments.
REFUSED = {
    "relative_position t5: must be none, the scores are absolute": {"relative_position": "t5"},
    "synthesizer 'mean': must be one of dense, random, fixed-random, factorized-dense, "
    "factorized-random": {"synthesizer": "mean"},
    "max_length 0: must be a whole number of at least 1": {"max_length": 0},
    "rank_or_factor 0: must be a whole number of at least 1": {**FACTORS, "rank_or_factor": 0},
    "rank_or_factor 2.5: must be a whole number of at least 1": {**FACTORS, "rank_or_factor": 2.5},
    f"rank_or_factor {LONGEST + 1}: must be at most the length, {LONGEST}": {
        **FACTORS,
        "rank_or_factor": LONGEST + 1,
    },
    "rank_or_factor 4: must be None, the synthesizer dense has neither": {"rank_or_factor": 4},
    "score_mixing position-wise: must be none, or the synthesizer one of dense, factorized-random, "
    "whose products it can mix": {"synthesizer": "random", "score_mixing": "position-wise"},
    "feature_mixing heads: must be none or output, or the mixed features v; a Synthesizer has no "
    "queries and keys to mix": {"feature_mixing": "heads"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_refused(message):
    with pytest.raises(ValueError) as error:
        SynthesizerAttention(E, H, **{"max_length": LONGEST, **REFUSED[message]})
    assert str(error.value) == message
