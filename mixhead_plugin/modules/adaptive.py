"""Adaptive input and softmax with the parameters of Transformer-XL's published code.

fairseq's own have others: no biases, one projection more in the input, none for the first band of the softmax.
Projections are never tied; the published code ties some of a WikiText-103 model with div_val > 1, which no row has.
"""

from typing import Dict, List, Optional

import torch
import torch.nn.functional as F
from fairseq.modules import AdaptiveSoftmax as StockSoftmax
from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from mixhead_plugin.ops.reference import upcast


class AdaptiveEmbedding(nn.Module):
    """Embeddings by bands of the vocabulary, those of rare words with fewer columns; scaled by sqrt(dim).

    Args:
        cutoffs: the first word of each band but the first, ascending, and at last the size of the vocabulary
        dim: columns of the result
        div_val: band i has dim // div_val**i columns; where that is not 1 every band has a projection to dim
    """

    def __init__(self, cutoffs: List[int], dim: int, div_val: int):
        super().__init__()
        self.cutoffs = cutoffs
        self.dim = dim
        self.bands = nn.ModuleList(
            nn.Embedding(stop - start, dim // div_val**i) for i, (start, stop) in enumerate(zip([0, *cutoffs], cutoffs))
        )
        self.projections = nn.ModuleList(
            nn.Linear(band.embedding_dim, dim, bias=False) for band in self.bands if div_val != 1
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] -> [..., dim], in the dtype of the weights

        Raises:
            IndexError: a token is none of the vocabulary
        """
        out = self.bands[0].weight.new_empty(*tokens.shape, self.dim)
        start, last = 0, len(self.bands) - 1
        for i, (band, stop) in enumerate(zip(self.bands, self.cutoffs)):
            # The outer bands have no outer ends: what lies beyond, the embedding refuses.
            inside = torch.ones_like(tokens, dtype=torch.bool) if i == 0 else tokens >= start
            if i < last:
                inside = inside & (tokens < stop)
            # also for a band without a token: all parameters then have a gradient, as torch's DDP wants
            rows = band(tokens[inside] - start)  # [words of the band, its columns]
            if self.projections:
                rows = self.projections[i](rows)
            out[inside] = rows.to(out.dtype)
            start = stop
        return out * self.dim**0.5


class Band(nn.Module):
    """Logits of the words of one band, and of as many bands as a whole; in float32 or better.

    Args:
        embedding: of the band's words; its weights are those of the words here
        dim: columns of the input
        projected: whether a projection of its own leads to the embedding's columns
        clusters: how many bands get a logit each behind those of the words
    """

    def __init__(self, embedding: nn.Embedding, dim: int, projected: bool, clusters: int = 0):
        super().__init__()
        columns = embedding.embedding_dim
        self.weight = embedding.weight  # [words, columns]
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings))
        self.projection = nn.Linear(dim, columns, bias=False) if projected else None
        self.cluster_weight: Optional[nn.Parameter] = None
        if clusters:
            self.cluster_weight = nn.Parameter(torch.zeros(clusters, columns))
            self.cluster_bias = nn.Parameter(torch.zeros(clusters))

    def forward(self, x: Tensor) -> Tensor:
        """x [N, dim] -> [N, words + clusters]"""
        x = x.to(self.weight.dtype)
        if self.projection is not None:
            x = self.projection(x)
        weight, bias = self.weight, self.bias
        if self.cluster_weight is not None:
            weight, bias = torch.cat([weight, self.cluster_weight]), torch.cat([bias, self.cluster_bias])
        # fairseq normalizes in the dtype of the logits and sums the losses in it
        return upcast(F.linear(x, weight, bias))


class AdaptiveSoftmax(StockSoftmax):
    """fairseq's adaptive softmax with the bands of `embedding`; with one band alone a plain softmax.

    The words' weights are those of the input, the projections are not. `forward` is fairseq's, for its adaptive loss.
    """

    def __init__(self, embedding: AdaptiveEmbedding):
        super(StockSoftmax, self).__init__()  # builds other parameters
        self.vocab_size = embedding.cutoffs[-1]
        self.cutoff = embedding.cutoffs
        self.input_dim = embedding.dim
        self.dropout_module = FairseqDropout(0.0, module_name=StockSoftmax.__name__)  # Transformer-XL has it before
        self.lsm = nn.LogSoftmax(dim=1)
        first, *others = embedding.bands
        projected = len(embedding.projections) > 0
        self.head = Band(first, embedding.dim, projected, clusters=len(others))
        self.tail = nn.ModuleList(Band(band, embedding.dim, projected) for band in others)

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """Nothing: fairseq's own wants a version of its own in checkpoints, which its moving averages have not."""

    def get_log_prob(self, input: Tensor, target: Optional[Tensor]) -> Tensor:
        """Log-probabilities of all words, in float32 or better; with `target` those that may be asked for.

        fairseq's own changes what its backward pass needs: no criterion but the adaptive loss could train with it.

        Args:
            input: [B, N, dim]
            target: [B, N]; for bands that a target is not in, its place has -inf. None: all words everywhere

        Returns:
            [B, N, vocabulary]
        """
        x = input.flatten(0, 1)  # [B * N, dim]
        head = self.lsm(self.head(x))  # [B * N, words + bands]
        first = self.cutoff[0]
        parts = [head[:, :first]]
        for i, band in enumerate(self.tail):
            cluster = head[:, first + i, None]
            start, stop = self.cutoff[i : i + 2]
            if target is None:
                parts.append(self.lsm(band(x)) + cluster)
                continue
            rows = ((target >= start) & (target < stop)).flatten().nonzero()[:, 0]
            # also for a band without a target: all parameters then have a gradient, as torch's DDP wants
            words = self.lsm(band(x[rows])) + cluster[rows]
            parts.append(head.new_full((x.size(0), stop - start), float("-inf")).index_copy(0, rows, words))
        return torch.cat(parts, 1).view(*input.shape[:2], -1)
