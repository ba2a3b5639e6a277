"""Test the attention of Transformer-XL against its definition."""

import math

import pytest
import torch

from mixhead_plugin.fairseq.models.transformer_xl.decoder import (
    SegmentAttention,
    distance_encodings,
    span_mask,
)
from tests.attention_equations import (
    COMBINATIONS,
    SOME_NORMALIZERS,
    check_half_precision,
    features,
    finish,
    variant,
)
from tests.covering import each_once
from tests.helpers import shake

C, H, D, B, M, N = 6, 4, 5, 2, 3, 4
GAIN = 2  # the farthest distance of learned gains


def module(normalizer="softmax", mixing="position-wise", **options):
    torch.manual_seed(2)
    attention = SegmentAttention(C, H, head_dim=D, **variant(normalizer, mixing), **options)
    if attention.relative_gain is not None:
        torch.nn.init.normal_(attention.relative_gain.weight)
    return shake(attention).double()


def inputs(memory=M, n=N):
    shapes = [(n, B, C), (memory, B, C), (memory + n, C), (H, D), (H, D)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def by_definition(attention, x, memory, positions, u, v, span=None):
    """Compute one score after the other, as they are written in the paper."""
    source = torch.cat([memory, x])
    past = memory.size(0)
    query = features(attention, "query", attention.q_proj(x), H)
    key = features(attention, "key", attention.k_proj(source), H)
    # [H, Nk, D], the last at distance 0
    r = attention.position_proj(positions).unflatten(1, (H, D)).transpose(0, 1)
    hidden = torch.ones(x.size(0), source.size(0), dtype=torch.bool)
    content = x.new_zeros(B, H, *hidden.shape)
    places = x.new_zeros(B, H, *hidden.shape)
    for t in range(x.size(0)):
        for k in range(past + t + 1 if span is None else span):
            distance = past + t - k if span is None else k
            k = past + t - distance
            if k < 0:
                continue
            content[:, :, t, k] = ((query[:, :, t] + u) * key[:, :, k]).sum(-1) / math.sqrt(D)
            places[:, :, t, k] = ((query[:, :, t] + v) * r[:, -1 - distance]).sum(-1) / math.sqrt(D)
            hidden[t, k] = False
    values = features(attention, "value", attention.v_proj(source), attention.num_mixed_heads)
    return finish(attention, content, hidden, values, query, x, places)[0]


def mask_of(x, memory, span=None):
    return span_mask(x.size(0), x.size(0) + memory.size(0), span, x)


@each_once(
    normalizer=SOME_NORMALIZERS,
    mixing=COMBINATIONS,
    impl=["auto", "blockwise", "reference"],
    span=[None, 3],
    gain=[0, GAIN],
    sizes=[(M, N), (7, 6)],
)
def test_output_and_gradients_are_those_of_the_definition(
    normalizer, mixing, impl, span, gain, sizes
):
    attention = module(normalizer, mixing, impl=impl, relative_gain=gain)
    tensors = inputs(*sizes)
    sources = [*tensors, *attention.parameters()]
    expected = by_definition(attention, *tensors, span=span)
    out = attention(*tensors, attn_mask=mask_of(*tensors[:2], span))
    torch.testing.assert_close(out, expected)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    found = torch.autograd.grad((out * weight).sum(), sources)
    wanted = torch.autograd.grad((expected * weight).sum(), sources)
    for i, gradient in enumerate(found):
        torch.testing.assert_close(gradient, wanted[i], msg=str(i))
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_close_as_the_formula_in_half_precision(dtype):
    tensors = [tensor.detach() for tensor in inputs()]
    found = lambda attention, *tensors: attention(*tensors, attn_mask=mask_of(*tensors[:2]))  # noqa: E731
    check_half_precision(found, by_definition, module(), tensors, dtype)


def test_autocast_takes_the_float32_biases():
    attention = module().float()
    tensors = [tensor.float() for tensor in inputs()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(*tensors, attn_mask=mask_of(*tensors[:2])).dtype == torch.bfloat16


@pytest.mark.parametrize("limit", [2, 4, 20])
@pytest.mark.parametrize("gain", [0, GAIN])
def test_steps_are_the_segment_as_far_as_the_cache_reaches(limit, gain):
    attention = module(relative_gain=gain)
    x, _, positions, u, v = inputs(memory=0, n=6)
    state = {}
    steps = []
    for t in range(6):
        assert attention.cached(state) == min(t, limit)
        n_keys = min(t + 1, limit)
        steps.append(
            attention(x[t : t + 1], None, positions[-n_keys:], u, v, incremental_state=state)
        )
    expected = attention(x, None, positions, u, v, attn_mask=span_mask(6, 6, limit, x))
    torch.testing.assert_close(torch.cat(steps), expected)


def test_distances_are_encoded_by_sines_and_then_cosines():
    encodings = distance_encodings(5, 4, 0, torch.zeros((), dtype=torch.float64))
    for row, distance in enumerate([4, 3, 2, 1, 0]):
        angles = [distance, distance / 100]
        expected = [*map(math.sin, angles), *map(math.cos, angles)]
        torch.testing.assert_close(encodings[row], torch.tensor(expected, dtype=torch.float64))


def test_clamped_distances_are_all_the_farthest():
    like = torch.zeros(())
    clamped = distance_encodings(6, 8, 2, like)
    plain = distance_encodings(6, 8, -1, like)
    assert torch.equal(clamped[-3:], plain[-3:])
    assert torch.equal(clamped[:3], plain[-3].expand(3, 8))


def test_far_distances_stay_apart_in_half_precision():
    encodings = distance_encodings(5000, 64, 0, torch.zeros((), dtype=torch.float16))
    assert encodings.dtype == torch.float16
    distances = (encodings[:100, None] - encodings[None, :100]).abs().amax(2)  # [100, 100]
    assert distances.fill_diagonal_(1).min() > 0.1


def test_nothing_but_head_mixing_adds_biases():
    assert not any("bias" in name for name, _ in module(mixing="none").named_parameters())


def test_relative_positions_are_refused_because_the_attention_has_its_own():
    with pytest.raises(ValueError) as error:
        SegmentAttention(12, 3, relative_position="rotary")
    assert str(error.value) == "relative_position rotary: must be none, Transformer-XL has its own"
