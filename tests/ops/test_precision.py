"""A product of two dtypes has the finer one."""

import pytest
import torch

from mixhead_plugin.ops.precision import finer_matmul

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("coarse", DTYPES, ids=str)
@pytest.mark.parametrize("fine", [torch.float32, torch.float64], ids=str)
def test_a_product_is_that_of_both_in_the_finer_dtype(coarse, fine):
    first = torch.randn(3, 4, dtype=coarse, requires_grad=True)
    second = torch.randn(4, 5, dtype=fine, requires_grad=True)
    finer = torch.promote_types(coarse, fine)
    expected = first.to(finer) @ second.to(finer)
    for product in (finer_matmul, torch.jit.script(finer_matmul)):
        found = product(first, second)
        assert found.dtype == finer
        assert torch.equal(found, expected)
        gradients = torch.autograd.grad(found.sum(), [first, second])
        assert [gradient.dtype for gradient in gradients] == [coarse, fine]


def test_under_autocast_nothing_is_copied_to_the_finer_dtype():
    """The copy would only be rounded again, and it would be kept for the gradients."""
    features = torch.randn(3, 4).bfloat16()
    weight = torch.randn(4, 5, requires_grad=True)
    kept = []

    def keep(tensor):
        kept.append(tensor.data_ptr())
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        assert finer_matmul(features, weight).dtype == torch.bfloat16
    assert features.data_ptr() in kept


def test_a_product_on_the_device_meta_has_the_finer_dtype():
    first = torch.empty(3, 4, dtype=torch.bfloat16, device="meta")
    assert finer_matmul(first, torch.empty(4, 5, device="meta")).dtype == torch.float32
