"""Benchmark a low-rank mixing by its factors beside the same mixing by its matrix; causal, from
queries, keys, values and factors.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Case, end_if_wrong, fault_of
from mixhead_plugin.ops import LowRank, attention

Size = tuple[int, int, int, int]  # batch, heads, length, head size
PARTS = ("output", "query", "key", "value", "left", "right", "diagonal")
SOFTMAX = "the plugin's softmax"


class Inputs:
    """The tensors that all contenders of one size share, in a dtype."""

    def __init__(self, size: Size, rank: int, dtype: torch.dtype = torch.float32):
        batch, heads, length, head_dim = size
        generator = torch.Generator().manual_seed(1)

        def tensor(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        # as projections leave them
        self.query, self.key, self.value, self.d_output = (
            tensor(batch, length, heads, head_dim).transpose(1, 2) for _ in range(4)
        )
        self.factors = LowRank(
            tensor(batch, length, heads, rank) / heads,
            tensor(batch, length, heads, rank),
            tensor(batch, length, heads) / 10,
        )
        self.given = [self.query, self.key, self.value, *self.factors]
        for each in self.given:
            each.requires_grad_()

    def torchs(self) -> tuple[Tensor, ...]:
        out = F.scaled_dot_product_attention(self.query, self.key, self.value, is_causal=True)
        return self.differentiated(out, self.given[:3])

    def softmax(self) -> tuple[Tensor, ...]:
        out = attention(self.query, self.key, self.value, causal=True, impl="blockwise")
        return self.differentiated(out, self.given[:3])

    def by_matrix(self, impl: str = "blockwise") -> tuple[Tensor, ...]:
        mixing = self.factors.matrix()
        out = attention(self.query, self.key, self.value, mixing=mixing, causal=True, impl=impl)
        return self.differentiated(out, self.given)

    def by_factors(self) -> tuple[Tensor, ...]:
        mixing = self.factors
        out = attention(
            self.query, self.key, self.value, mixing=mixing, causal=True, impl="blockwise"
        )
        return self.differentiated(out, self.given)

    def differentiated(self, out: Tensor, given: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the output and the gradients."""
        return out.detach(), *torch.autograd.grad(out, given, self.d_output)


def case(size: Size, rank: int) -> Case:
    """Return what is timed at a size; end the command if the factors give something else."""
    # A check at full length would take as long as the times.
    short = (1, size[1], min(size[2], 100), size[3])
    exact = Inputs(short, rank, torch.float64).by_matrix("reference")
    formula = Inputs(short, rank).by_matrix("reference")
    end_if_wrong(fault_of("factors", PARTS, Inputs(short, rank).by_factors(), formula, exact))

    inputs = Inputs(size, rank)
    return Case(
        name="factors",
        size=f"{'x'.join(map(str, size))}, rank {rank}",
        contenders={
            "torch's softmax": inputs.torchs,
            SOFTMAX: inputs.softmax,
            "low-rank, M built": functools.partial(inputs.by_matrix, "blockwise"),
            "low-rank, by factors": inputs.by_factors,
        },
        softmax=SOFTMAX,
    )
