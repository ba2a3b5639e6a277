"""Mixhead A is softmax with the same patterns, each with a value map of its own.

See docs/does-it-help.md, 'Why'.
"""

import pytest
import torch

from mixhead_plugin.ops import attention

BATCH, HEADS, TOKENS, WIDTH, SIZE = 2, 4, 7, 12, 3


def drawn(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def value_maps(to_value, to_output, mixing):
    """Return U_j = sum_i m_ji V_i O_i, [H, C, C]."""
    return torch.einsum("ji,icd,ide->jce", mixing, to_value, to_output)


@pytest.mark.parametrize("normalizer", ["softmax", "sigsoftmax", "l2"])
def test_mixing_by_one_matrix_is_a_value_map_for_each_pattern(normalizer):
    inputs = drawn(BATCH, TOKENS, WIDTH)
    query = drawn(BATCH, HEADS, TOKENS, SIZE)
    key = drawn(BATCH, HEADS, TOKENS, SIZE).flip(2)
    to_value = drawn(HEADS, WIDTH, SIZE)
    to_output = drawn(HEADS, SIZE, WIDTH)
    mixing = drawn(HEADS, HEADS)

    value = torch.einsum("bnc,hcd->bhnd", inputs, to_value)
    heads = attention(query, key, value, normalizer=normalizer, mixing=mixing, impl="reference")
    mixed = torch.einsum("bhnd,hde->bne", heads, to_output)

    # the pattern of each head, unmixed: its output for values that name the keys
    names = torch.eye(TOKENS, dtype=torch.float64).expand(BATCH, HEADS, TOKENS, TOKENS)
    patterns = attention(query, key, names, normalizer=normalizer, impl="reference")
    mapped = torch.einsum(
        "bjnk,bkc,jce->bne", patterns, inputs, value_maps(to_value, to_output, mixing)
    )

    torch.testing.assert_close(mixed, mapped, rtol=1e-12, atol=1e-12)
