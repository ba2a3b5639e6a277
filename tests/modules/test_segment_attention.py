import math

import pytest
import torch

from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.modules.segment_attention import SegmentAttention, distance_encodings, segment_mask
from mixhead_plugin.ops import NORMALIZERS
from tests.helpers import shake

C, H, D, B, M, N = 6, 3, 5, 2, 3, 4
GAIN = 2  # where the distances of learned gains end

every_normalizer = pytest.mark.parametrize("normalizer", NORMALIZERS)
every_mixing = pytest.mark.parametrize("mixing", HEAD_MIXINGS)


def module(normalizer="softmax", mixing="position-wise", **options):
    torch.manual_seed(2)
    attention = SegmentAttention(C, H, normalizer=normalizer, head_mixing=mixing, head_dim=D, **options)
    if attention.relative_gain is not None:
        torch.nn.init.normal_(attention.relative_gain.weight)
    return shake(attention).double()


def inputs(memory=M, n=N):
    shapes = [(n, B, C), (memory, B, C), (memory + n, C), (H, D), (H, D)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def by_definition(attention, x, memory, positions, u, v, span=None):
    """One score after the other, as they are written in the paper."""
    source = torch.cat([memory, x])
    n, past = x.size(0), memory.size(0)
    outputs = []
    for b in range(B):
        query = attention.q_proj(x[:, b]).view(n, H, D)
        key = attention.k_proj(source[:, b]).view(past + n, H, D)
        value = attention.v_proj(source[:, b]).view(past + n, H, D)
        rows = []
        for t in range(n):
            scores = torch.full((H, past + n), -math.inf, dtype=torch.float64)
            for k in range(past + n):
                distance = past + t - k
                if distance < 0 or (span is not None and distance >= span):
                    continue
                r = attention.position_proj(positions[past + n - 1 - distance]).view(H, D)
                for h in range(H):
                    content = (query[t, h] + u[h]) @ key[k, h]
                    scores[h, k] = (content + (query[t, h] + v[h]) @ r[h]) / math.sqrt(D)
            weights = NORMALIZERS[attention.normalizer].weights(scores)
            if attention.relative_gain is not None:
                offsets = (torch.arange(past + n) - past - t).clamp(-GAIN, GAIN) + GAIN
                weights = weights * attention.relative_gain.weight[:, offsets]
            matrix = torch.eye(H, dtype=torch.float64)
            if attention.head_mixing_kind == "position-wise":
                matrix = query[t] @ attention.head_mixing.query_weight + attention.head_mixing.bias
            elif attention.head_mixing is not None:
                matrix = attention.head_mixing.weight
            mixed = matrix.T @ weights  # row i: the sum over j of M[j, i] P_j
            rows.append(torch.stack([mixed[h] @ value[:, h] for h in range(H)]).flatten())
        outputs.append(attention.out_proj(torch.stack(rows)))
    return torch.stack(outputs, 1)


def mask_of(x, memory, span=None):
    return segment_mask(x.size(0), x.size(0) + memory.size(0), span, x)


@every_mixing
@every_normalizer
def test_output_and_gradients_are_those_of_the_definition(normalizer, mixing):
    attention, tensors = module(normalizer, mixing), inputs()
    x, memory, *others = tensors
    sources = [*tensors, *attention.parameters()]
    expected = by_definition(attention, *tensors)
    out = attention(x, memory, *others, attn_mask=mask_of(x, memory))
    torch.testing.assert_close(out, expected)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    wanted = torch.autograd.grad((expected * weight).sum(), sources)
    for i, gradient in enumerate(torch.autograd.grad((out * weight).sum(), sources)):
        torch.testing.assert_close(gradient, wanted[i], msg=str(i))
        assert gradient.abs().max() > 0


def test_the_gradient_is_the_slope():
    attention = module("sigsoftmax")
    x, memory, *others = inputs()
    mask = mask_of(x, memory)
    assert torch.autograd.gradcheck(lambda *a: attention(*a, attn_mask=mask), (x, memory, *others))


@pytest.mark.parametrize("impl", ["auto", "blockwise", "reference"])
@pytest.mark.parametrize("span", [None, 3])
@pytest.mark.parametrize("gain", [0, GAIN])
def test_every_implementation_sees_the_same(impl, span, gain):
    attention, tensors = module(impl=impl, relative_gain=gain), inputs(memory=7, n=6)
    out = attention(*tensors, attn_mask=mask_of(*tensors[:2], span))
    torch.testing.assert_close(out, by_definition(attention, *tensors, span=span))


def test_autocast_leaves_room_for_float32_biases():
    attention = module().float()
    tensors = [tensor.float() for tensor in inputs()]
    mask = mask_of(*tensors[:2])
    expected = attention(*tensors, attn_mask=mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(*tensors, attn_mask=mask)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1 * float(expected.detach().abs().max()))


@pytest.mark.parametrize("limit", [2, 4, 20])
@pytest.mark.parametrize("gain", [0, GAIN])
def test_steps_are_the_segment_as_far_as_the_cache_reaches(limit, gain):
    attention = module(relative_gain=gain)
    x, _, positions, u, v = inputs(memory=0, n=6)
    state, steps = {}, []
    for t in range(6):
        assert attention.cached(state) == min(t, limit)
        n_keys = min(t + 1, limit)
        steps.append(attention(x[t : t + 1], None, positions[-n_keys:], u, v, incremental_state=state))
    expected = attention(x, None, positions, u, v, attn_mask=segment_mask(6, 6, limit, x))
    torch.testing.assert_close(torch.cat(steps), expected)


def test_distances_are_encoded_by_sines_and_then_cosines():
    encodings = distance_encodings(5, 4, 0, torch.zeros((), dtype=torch.float64))
    for row, distance in enumerate([4, 3, 2, 1, 0]):
        angles = [distance, distance / 100]
        expected = [*map(math.sin, angles), *map(math.cos, angles)]
        torch.testing.assert_close(encodings[row], torch.tensor(expected, dtype=torch.float64))


def test_clamped_distances_are_all_the_farthest():
    like = torch.zeros(())
    clamped, plain = distance_encodings(6, 8, 2, like), distance_encodings(6, 8, -1, like)
    assert torch.equal(clamped[-3:], plain[-3:])
    assert torch.equal(clamped[:3], plain[-3].expand(3, 8))


def test_far_distances_stay_apart_in_half_precision():
    encodings = distance_encodings(5000, 64, 0, torch.zeros((), dtype=torch.float16))
    assert encodings.dtype == torch.float16
    assert (encodings[:100, None] - encodings[None, :100]).abs().amax(2).fill_diagonal_(1).min() > 0.1


@pytest.mark.parametrize("span", [None, 1, 3])
def test_a_mask_hides_the_future_and_what_is_out_of_the_span(span):
    mask = segment_mask(4, 7, span, torch.zeros(()))
    for t in range(4):
        visible = (mask[t] == 0).nonzero().flatten().tolist()
        assert visible == list(range(0 if span is None else max(0, t + 3 - span + 1), t + 3 + 1))
    assert set(mask.flatten().tolist()) == {0, -math.inf}


def test_nothing_but_head_mixing_adds_biases():
    assert not any("bias" in name for name, _ in module(mixing="none").named_parameters())
