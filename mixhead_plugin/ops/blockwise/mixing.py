"""Mix the heads of a block: Pbar_i = sum_j M[j, i] P_j.

M multiplies matrices with a row for each head. Which matrices these are depends on M:

    M [H, H'], shared by all queries       ByHead     [b, h, n * k]    one for each sentence
    M [B, Nq, H, H'], one for each query   ByQuery    [b * n, h, k]    one for each query

Either way mixing takes three steps:

    arrange     P [b * h, n, k]          ->  matrices with a row for each head
    multiply    M^T times each matrix    ->  matrices with a row for each mixed head
    restore     these                    ->  Pbar [b * h', n, k]

The backward pass mixes dPbar by M^T in the same three steps, and scores are mixed like weights.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from mixhead_plugin.ops.blockwise.buffers import Buffers
from mixhead_plugin.ops.blockwise.products import product


class HeadMatrices(ABC):
    """How the weights of a block lie in the matrices that M multiplies.

    Args:
        buffers: memory for the results. The `name` of a method is that of a buffer.
    """

    def __init__(self, buffers: Buffers):
        self.buffers = buffers

    def mix(self, arranged: Tensor, mixing: Tensor, n: int, name: str) -> Tensor:
        """Return sum_j M[j, i] P_j, [b * h', n, k].

        Args:
            arranged: P, as `arrange` returns it
            mixing: M, [H, H'] or [b, n, H, H']
            n: queries of the block
            name: name of the result's buffer
        """
        products = self.multiply(arranged, mixing, f"{name}, arranged")
        return self.restore(products, n, name)

    @abstractmethod
    def arrange(self, weights: Tensor, heads: int, name: str) -> Tensor:
        """Return weights [b * h, n, k] of h = `heads` heads as matrices with a row for each."""

    @abstractmethod
    def multiply(self, arranged: Tensor, mixing: Tensor, name: str) -> Tensor:
        """Return M^T times each matrix."""

    @abstractmethod
    def restore(self, products: Tensor, n: int, name: str) -> Tensor:
        """Return matrices of n queries as weights [b * h', n, k]."""

    @abstractmethod
    def write_product(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Write left times right to `out`, for each matrix; so dM = P dPbar^T.

        Args:
            left: matrices with J rows
            right: matrices with I columns
            out: [J, I] for the sum of all products; or [b, n, J, I]
        """


class ByHead(HeadMatrices):
    """For an M [H, H'] that all queries share: a matrix holds a sentence, [b, h, n * k].

    The weights lie so in memory already. So nothing is copied.
    """

    def arrange(self, weights: Tensor, heads: int, name: str) -> Tensor:
        return weights.unflatten(0, (-1, heads)).flatten(2)

    def multiply(self, arranged: Tensor, mixing: Tensor, name: str) -> Tensor:
        b, _, columns = arranged.shape
        products = self.buffers.get(name, (b, mixing.shape[1], columns))
        # Not by `product`, which helps matrices with few columns: these have n * k.
        return torch.bmm(mixing.t().expand(b, -1, -1), arranged, out=products)

    def restore(self, products: Tensor, n: int, name: str) -> Tensor:
        b, heads, _ = products.shape
        return products.view(b * heads, n, -1)

    def write_product(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        out.copy_(torch.bmm(left, right).sum(0))


class ByQuery(HeadMatrices):
    """For an M [b, n, H, H'] with a matrix for each query, or its factors: [b * n, h, k].

    If the block has one sentence, this is a view of its weights. With several it is a copy.
    """

    def arrange(self, weights: Tensor, heads: int, name: str) -> Tensor:
        by_query = weights.unflatten(0, (-1, heads)).transpose(1, 2)  # [b, n, h, k]
        if by_query.shape[0] > 1:
            by_query = self.buffers.get(name, by_query.shape).copy_(by_query)
        return by_query.flatten(0, 1)

    def multiply(self, arranged: Tensor, mixing: Tensor, name: str) -> Tensor:
        queries, _, keys = arranged.shape
        products = self.buffers.get(name, (queries, mixing.shape[3], keys))
        # By `product`, because the columns are the keys, which may be few.
        return product(mixing.transpose(2, 3).flatten(0, 1), arranged, out=products)

    def restore(self, products: Tensor, n: int, name: str) -> Tensor:
        by_head = products.unflatten(0, (-1, n)).transpose(1, 2)  # [b, h', n, k]
        if by_head.shape[0] > 1:
            by_head = self.buffers.get(name, by_head.shape).copy_(by_head)
        return by_head.flatten(0, 1)

    def write_product(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        if out.is_contiguous():
            torch.bmm(left, right, out=out.flatten(0, 1))
        else:
            out.copy_(torch.bmm(left, right).view(out.shape))

    # Where M is given by factors, `combine` and `distribute` take the place of `mix`.

    def combine(self, arranged: Tensor, factor: Tensor, name: str) -> Tensor:
        """Return C_r = sum_j left[j, r] P_j, [b * n, R, k].

        Args:
            arranged: P, [b * n, h, k]
            factor: left, [b, n, h, R]; in the backward pass right
            name: name of the result's buffer
        """
        queries, heads, keys = arranged.shape
        rank = factor.shape[3]
        # The largest block has largest / h pairs of a query and a key.
        most = self.buffers.largest // heads * rank
        combined = self.buffers.get(name, (queries, rank, keys), most)
        return product(factor.transpose(2, 3).flatten(0, 1), arranged, out=combined)

    def distribute(
        self, arranged: Tensor, combined: Tensor, factor: Tensor, diagonal: Tensor, name: str
    ) -> Tensor:
        """Return (1 + diagonal_i) P_i + sum_r right[i, r] C_r, [b * h, n, k].

        Args:
            arranged: P, [b * n, h, k]
            combined: C, [b * n, R, k]
            factor: right, [b, n, h, R]; in the backward pass left
            diagonal: [b, n, h]
            name: name of the result's buffer
        """
        sums = self.buffers.get(f"{name}, arranged", arranged.shape)
        torch.mul(arranged, (1 + diagonal).flatten(0, 1)[:, :, None], out=sums)
        sums.baddbmm_(factor.flatten(0, 1), combined)
        return self.restore(sums, diagonal.shape[1], name)
