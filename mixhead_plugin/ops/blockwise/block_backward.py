"""The backward pass of one block: its weights are kept or computed again, and the gradients added.

The equations stand in blockwise.md. With the names of forward.py, for one block:

    dO [b * h', n, Dv]  x  V [b * h', k, Dv]   ->  dPbar  [b * h', n, k]
    P x dPbar, over the keys                   ->  dM     [H, H'] or [b, n, H, H']
    dPbar    M mixes back                      ->  dP     [b * h, n, k]
    dP, P    normalizer's gradient             ->  dS     [b * h, n, k]
    dS x K   ->  dQ [b * h, n, D];    dS^T x Q  ->  dK [b * h, k, D];    Pbar^T x dO  ->  dV
"""

import torch
from torch import Tensor

from mixhead_plugin.ops.blockwise.block import NARROW, Block
from mixhead_plugin.ops.blockwise.forward import Mixed, Scored, Steps
from mixhead_plugin.ops.blockwise.masks import add_mask_grad
from mixhead_plugin.ops.blockwise.products import product
from mixhead_plugin.ops.blockwise.turns import Turns
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.low_rank import LowRank

# With no more heads, the gradient of M [h, h] is computed whole: the products for its factors alone
# would be fewer, but too narrow to be fast.
FEW_HEADS = 16


class BlockBackward:
    """Go back through the steps of one block, from its output to its inputs.

    Each method takes the gradient of what its step of the forward pass returned, adds to the
    gradients of the tensors that the step read, and returns the gradient of the weights or scores
    that went into the step.

    Args:
        steps: the steps of the forward pass
        turns: in which blocks add to the same memory
        block: the block
        part: the block's part of the inputs, as `inputs_of_block` shapes it
        grads: the block's part of the gradients
    """

    scored: Scored  # S and P, with the column of a sink
    weights: Tensor  # P, [b * h, n, k]
    mixed: Mixed  # Pbar, of P with the gain

    def __init__(
        self,
        steps: Steps,
        turns: Turns,
        block: Block,
        part: AttentionInputs,
        grads: dict[str, Tensor],
    ):
        self.steps = steps
        self.turns = turns
        self.block = block
        self.part = part
        self.factors = part.factors()
        self.grads = grads
        self.n = block.shape[2]

    def add_gradients(self, d_output: Tensor) -> None:
        """Add the block's terms to all gradients; d_output is [b * h', n, Dv]."""
        self._repeat_forward()
        d_mixed = self._through_values(d_output)
        d_with_gain = self._through_mixing(d_mixed)
        d_weights = self._through_gain(d_with_gain)
        d_scores = self._through_normalizer(d_weights)
        self._through_biases(d_scores)
        d_unmixed = self._through_score_mixing(d_scores)
        self._through_product(d_unmixed)

    def _repeat_forward(self) -> None:
        """Take the weights that were kept, or compute them again, and mix them again."""
        steps = self.steps
        self.scored = steps.scores_and_weights(self.block, self.part)
        self.weights = steps.without_sink(self.scored.weights, self.part, "P without sink")
        with_gain = steps.apply_gain(self.weights, self.block, self.part.gain)
        self.mixed = steps.mixed(with_gain, self.part)

    def _through_values(self, d_output: Tensor) -> Tensor:
        """Go back through O = dropout(Pbar) V; return dPbar [b * h', n, k]."""
        steps = self.steps
        mixed = self.mixed.weights
        d_mixed = steps.buffers.get("dPbar", mixed.shape)
        product(d_output, self.part.value.transpose(1, 2), steps.dropout_scale, d_mixed)

        mask = steps.dropout_mask(self.block, mixed.shape)
        if mask is not None:
            d_mixed.mul_(mask)
        if "value" in self.grads:
            dropped = steps.drop(mixed, mask)
            with self.turns.turn("value", self.block):
                self._add_products("value", dropped, d_output, steps.dropout_scale)
        return d_mixed

    def _through_mixing(self, d_mixed: Tensor) -> Tensor:
        """Go back through Pbar_i = sum_j M[j, i] P_j; return dP [b * h, n, k], with the gain."""
        steps = self.steps
        arranged = self.mixed.arranged
        if arranged is None:
            return d_mixed

        # Where heads mix, Pbar has a buffer. `_through_values` was the last to read it, so dP takes
        # it.
        buffer = "Pbar"
        if self.part.mixing is not None:
            back = self.part.mixing.transpose(-2, -1)
            d_arranged = steps.matrices.arrange(d_mixed, back.shape[-2], "dPbar, arranged")
            if "mixing" in self.grads:
                d_mixing = self.grads["mixing"]
                steps.matrices.write_product(arranged, d_arranged.transpose(1, 2), d_mixing)
            return steps.matrices.mix(d_arranged, back, self.n, buffer)

        assert self.factors is not None
        left, right, diagonal = self.factors
        d_arranged = steps.by_query.arrange(d_mixed, right.shape[2], "dPbar, arranged")
        d_combined = steps.by_query.combine(d_arranged, right, "dC")
        self._add_factor_grads(self.factors, d_arranged, d_combined)
        return steps.by_query.distribute(d_arranged, d_combined, left, diagonal, buffer)

    def _add_factor_grads(self, factors: LowRank, d_arranged: Tensor, d_combined: Tensor) -> None:
        """Write the gradients of the factors of M.

        Args:
            factors: [b, n, h, R] twice and [b, n, h]
            d_arranged: the gradient of Pbar, [b * n, h, k]
            d_combined: the gradient of C_r, [b * n, R, k]
        """
        d_left = self.grads.get("mixing_left")
        d_right = self.grads.get("mixing_right")
        d_diagonal = self.grads.get("mixing_diagonal")
        if d_left is None and d_right is None and d_diagonal is None:
            return
        by_query = self.steps.by_query
        _, arranged, combined = self.mixed
        assert arranged is not None and combined is not None
        if arranged.shape[1] > FEW_HEADS:
            if d_left is not None:
                by_query.write_product(arranged, d_combined.transpose(1, 2), d_left)
            if d_right is not None:
                by_query.write_product(d_arranged, combined.transpose(1, 2), d_right)
            if d_diagonal is not None:
                d_diagonal.copy_(self._sums_of_products(arranged, d_arranged).view_as(d_diagonal))
            return

        # By the gradient of M itself, [b * n, h, h]. This multiplies more than the products with C,
        # but reads the weights once.
        if arranged.shape[1] == 1:
            # For fewer than 400 keys, torch's product would add one number after the other, which
            # makes two to three times the error of a sum.
            d_matrix = self._sums_of_products(arranged, d_arranged)[..., None]
        else:
            d_matrix = torch.bmm(arranged, d_arranged.transpose(1, 2))
        if d_left is not None:
            by_query.write_product(d_matrix, factors.right.flatten(0, 1), d_left)
        if d_right is not None:
            by_query.write_product(d_matrix.transpose(1, 2), factors.left.flatten(0, 1), d_right)
        if d_diagonal is not None:
            d_diagonal.copy_(d_matrix.diagonal(dim1=1, dim2=2).view(d_diagonal.shape))

    def _sums_of_products(self, weights: Tensor, d_weights: Tensor) -> Tensor:
        """Return the sums over the keys of P * dPbar, [b * n, h], of two tensors [b * n, h, k]."""
        terms = self.steps.buffers.get("P * dPbar", weights.shape)
        torch.mul(weights, d_weights, out=terms)
        return terms.sum(2)

    def _through_gain(self, d_with_gain: Tensor) -> Tensor:
        """Go back through the gain of distances; return dP [b * h, n, k], in the same memory."""
        if self.part.gain is None:
            return d_with_gain
        if "gain" in self.grads:
            # First, because the product below overwrites what it reads.
            d_gain = self._gain_grad(d_with_gain)
            with self.turns.turn("gain", self.block):
                self.grads["gain"].add_(d_gain)
        by_key = self.steps.gain_by_key(self.block, self.part.gain)
        d_with_gain.view(self.block.shape).mul_(by_key)
        return d_with_gain

    def _gain_grad(self, d_with_gain: Tensor) -> Tensor:
        """Return the gain's gradient, [h, n + k - 1]: for each distance a sum over its pairs."""
        distances, by_key = self.steps.memory_by_distance(self.block, 1)
        distances.zero_()
        terms = self.weights.view(self.block.shape) * d_with_gain.view(self.block.shape)
        torch.sum(terms, 0, keepdim=True, out=by_key)
        return distances.sum(1)

    def _through_normalizer(self, d_weights: Tensor) -> Tensor:
        """Go back through the normalizer; return dS [b * h, n, k]."""
        normalizer = self.steps.normalizer
        scores, weights, _ = self.scored
        # dS must share no memory with dP. Where heads do not mix, dPbar is dP. Where they mix, dP
        # has its own buffer, and `_through_mixing` was the last to read dPbar.
        buffer = "dPbar" if self.part.mixes() else "dS"
        out = self.steps.buffers.get(buffer, weights.shape)

        if self.part.sink is None:
            return normalizer.grad(scores, weights, d_weights, out)

        # A row has one column more. The sink has no value, so its weight has no gradient.
        d_with_sink = self.steps.buffers.get("dP with sink", weights.shape)
        d_with_sink[..., :-1] = d_weights
        d_with_sink[..., -1] = 0.0
        d_scores = normalizer.grad(scores, weights, d_with_sink, out)
        if "sink" in self.grads:
            of_sink = d_scores[..., -1].view(self.block.shape[:3])  # [b, h, n]
            self.grads["sink"].copy_(of_sink.sum((0, 2)))
        return self.steps.without_sink(d_scores, self.part, "dS without sink")

    def _through_biases(self, d_scores: Tensor) -> None:
        """Add to the gradients of what was added to the scores: a mask, and relative scores."""
        if "attn_mask" in self.grads:
            with self.turns.turn("attn_mask", self.block):
                by_head = d_scores.view(self.block.shape)
                add_mask_grad(self.grads["attn_mask"], by_head, self.block)
        if "relative_query" in self.grads or "relative_key" in self.grads:
            self._add_relative_grads(d_scores)

    def _add_relative_grads(self, d_scores: Tensor) -> None:
        """Add to the gradients of relative_query, [b, h, n, R], and relative_key."""
        b, _, n, _ = self.block.shape
        d_distances, by_key = self.steps.memory_by_distance(self.block, b)
        d_distances.zero_()  # [h, b * n, n + k - 1]
        by_key.copy_(d_scores.view(self.block.shape))
        assert self.part.relative_query is not None and self.part.relative_key is not None
        if "relative_query" in self.grads:
            d_query = torch.bmm(d_distances, self.part.relative_key)  # [h, b * n, R]
            self.grads["relative_query"].copy_(d_query.unflatten(1, (b, n)).transpose(0, 1))
        if "relative_key" in self.grads:
            d_key = torch.bmm(d_distances.transpose(1, 2), self.part.relative_query)
            with self.turns.turn("relative_key", self.block):
                self.grads["relative_key"].add_(d_key)  # [h, n + k - 1, R]

    def _through_score_mixing(self, d_scores: Tensor) -> Tensor:
        """Go back through the mixing of scores; return the gradient of Q K^T, [b * h, n, k]."""
        if self.part.score_mixing is None:
            return d_scores
        steps = self.steps
        matrices = steps.score_matrices
        back = self.part.score_mixing.transpose(-2, -1)
        d_arranged = matrices.arrange(d_scores, back.shape[-2], "dS, arranged")
        if "score_mixing" in self.grads:
            assert self.scored.unmixed is not None
            heads = self.part.score_mixing.shape[-2]
            # The buffer may hold the same already, but not if Q K^T was kept.
            arranged = matrices.arrange(self.scored.unmixed, heads, "QK^T, arranged")
            matrices.write_product(arranged, d_arranged.transpose(1, 2), self.grads["score_mixing"])
        return matrices.mix(d_arranged, back, self.n, "dQK^T")

    def _through_product(self, d_unmixed: Tensor) -> None:
        """Go back through scale * Q K^T, to the queries and keys."""
        scale = self.steps.scale
        if "query" in self.grads:
            d_query = product(d_unmixed, self.part.key, scale)  # [b * h, n, D]
            self.grads["query"].copy_(d_query.view(self.grads["query"].shape))
        if "key" in self.grads:
            with self.turns.turn("key", self.block):
                self._add_products("key", d_unmixed, self.part.query, scale)

    def _add_products(self, name: str, matrix: Tensor, vectors: Tensor, factor: float) -> None:
        """Add factor * W^T X to the gradient of keys or values; the first block writes it.

        Args:
            name: "key" or "value"
            matrix: W, [b * h, n, k]: mixed weights, or dS
            vectors: X, [b * h, n, D]: dO, or the queries
            factor: a number
        """
        total = self.grads[name]  # [b, h, k, D]
        first = self.block.is_first
        one_sentence = total.shape[0] == 1
        if one_sentence and first:
            product(matrix.transpose(1, 2), vectors, factor, total[0])
        elif one_sentence and vectors.shape[2] >= NARROW:
            total[0].baddbmm_(matrix.transpose(1, 2), vectors, alpha=factor)
        else:
            # Into a view of several sentences, torch would start a product for each sentence and
            # head. So all products at once, which are then added.
            found = product(matrix.transpose(1, 2), vectors, factor).unflatten(0, total.shape[:2])
            if first:
                total.copy_(found)
            else:
                total.add_(found)
