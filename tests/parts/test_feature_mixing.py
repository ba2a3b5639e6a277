"""Feature mixing folds into projections without a loss of digits."""

import torch

from mixhead_plugin.parts import AttentionSizes
from mixhead_plugin.parts.feature_mixing import OutputMixing

HEADS, SIZE = 4, 8


def test_a_small_mixing_of_outputs_in_half_precision_is_folded_in_float64():
    """I + U V^T in bfloat16 has no digits for a U V^T below 0.004."""
    width = HEADS * SIZE
    part = OutputMixing(AttentionSizes(HEADS, SIZE, HEADS, SIZE, width))
    torch.nn.init.normal_(part.right, std=0.002)
    part.bfloat16()
    weight = torch.randn(width, width, dtype=torch.float64)
    product = part.left.detach().double() @ part.right.detach().double().t()
    expected = torch.einsum("jh,chd->cjd", product, weight.unflatten(1, (HEADS, SIZE))).flatten(1)
    folded = weight.clone()
    part.fold({"output": [folded]})
    torch.testing.assert_close(folded - weight, expected)
