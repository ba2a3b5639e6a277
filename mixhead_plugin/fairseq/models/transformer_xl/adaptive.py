"""Adaptive input and softmax with the parameters of Transformer-XL's published code.

fairseq's own classes have no biases, one more projection in the input, and none for the first band
of the softmax. Projections are never tied. The published code ties some for div_val > 1 on
WikiText-103, which no table reports.
"""

from typing import Any

import torch
import torch.nn.functional as F
from fairseq.modules import AdaptiveSoftmax, FairseqDropout
from torch import Tensor, nn

from mixhead_plugin.ops.precision import upcast


class AdaptiveEmbedding(nn.Module):
    """Embeddings by bands of the vocabulary, with fewer columns for rare words.

    They are scaled by sqrt(dim).

    Args:
        cutoffs: where each band ends, ascending; the last one is the size of the vocabulary
        dim: columns of the result
        div_val: band i has dim // div_val**i columns; if it is not 1, every band has a projection
            to dim
    """

    def __init__(self, cutoffs: list[int], dim: int, div_val: int):
        super().__init__()
        self.cutoffs = cutoffs
        self.dim = dim
        columns = [dim // div_val**i for i in range(len(cutoffs))]
        self.bands = nn.ModuleList()
        for i, stop in enumerate(cutoffs):
            start = cutoffs[i - 1] if i > 0 else 0
            self.bands.append(nn.Embedding(stop - start, columns[i]))
        self.projections = nn.ModuleList()  # empty if div_val is 1
        if div_val != 1:
            for number in columns:
                self.projections.append(nn.Linear(number, dim, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., dim] of tokens [...], in the dtype of the weights."""
        weight = next(self.bands.parameters())
        out = weight.new_empty(*tokens.shape, self.dim)
        # The number of each token's band. The first and the last band have no outer limit, so that
        # nn.Embedding refuses a token outside the vocabulary.
        bands = torch.zeros_like(tokens)
        for stop in self.cutoffs[:-1]:
            bands += tokens >= stop
        starts = [0, *self.cutoffs[:-1]]
        for i, (band, start) in enumerate(zip(self.bands, starts, strict=True)):
            # A band without tokens runs too: DistributedDataParallel needs a gradient of every
            # parameter.
            rows = band(tokens[bands == i] - start)  # [words of the band, its columns]
            if self.projections:
                rows = self.projections[i](rows)
            out[bands == i] = rows.to(out.dtype)
        return out * self.dim**0.5


class Band(nn.Module):
    """The logits of the words of one band, in float32 or better.

    The first band has one more logit for each of the other bands, a cluster of words.

    Args:
        embedding: the embedding of the band's words, whose weights the band shares
        dim: columns of the input
        projected: whether a projection maps them to the columns of the embedding
        clusters: how many other bands there are, in the first band; 0 in the others
    """

    def __init__(self, embedding: nn.Embedding, dim: int, projected: bool, clusters: int = 0):
        super().__init__()
        columns = embedding.embedding_dim
        self.weight = embedding.weight  # [words, columns]
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings))
        self.projection = nn.Linear(dim, columns, bias=False) if projected else None
        self.cluster_weight: nn.Parameter | None = None
        if clusters:
            self.cluster_weight = nn.Parameter(torch.zeros(clusters, columns))
            self.cluster_bias = nn.Parameter(torch.zeros(clusters))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [N, words + clusters] of x [N, dim]."""
        x = x.to(self.weight.dtype)
        if self.projection is not None:
            x = self.projection(x)
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if self.cluster_weight is not None:
            weight = torch.cat([weight, self.cluster_weight])
            bias = torch.cat([bias, self.cluster_bias])
        # fairseq normalizes logits and sums losses in the dtype of the logits.
        return upcast(F.linear(x, weight, bias))


class BandedAdaptiveSoftmax(AdaptiveSoftmax):
    """fairseq's adaptive softmax with the bands of `embedding`; one band is a plain softmax.

    It shares the words' weights with the input, but not the projections. `forward` is fairseq's.
    """

    def __init__(self, embedding: AdaptiveEmbedding):
        # fairseq's own __init__ makes other parameters
        super(AdaptiveSoftmax, self).__init__()
        self.vocab_size = embedding.cutoffs[-1]
        self.cutoff = embedding.cutoffs
        self.input_dim = embedding.dim
        # Transformer-XL has its dropout before the softmax.
        self.dropout_module = FairseqDropout(0.0, module_name=AdaptiveSoftmax.__name__)
        self.lsm = nn.LogSoftmax(dim=1)
        bands: list[Any] = list(embedding.bands)
        first, *others = bands
        projected = len(embedding.projections) > 0
        self.head = Band(first, embedding.dim, projected, clusters=len(others))
        self.tail = nn.ModuleList(Band(band, embedding.dim, projected) for band in others)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Do nothing: fairseq's method needs a version number, which its moving averages lack."""

    def get_log_prob(self, input: Tensor, target: Tensor | None) -> Tensor:
        """Return the log-probabilities of the words, [B, N, vocabulary] in float32 or better.

        fairseq's method overwrites tensors that its backward pass needs, so only the adaptive loss
        could train with it.

        Args:
            input: the outputs of the decoder, [B, N, dim]
            target: the right words, [B, N]; words outside the band of the target, and of the first
                band, get -inf. None for the log-probabilities of all words
        """
        x = input.flatten(0, 1)  # [B * N, dim]
        head = self.lsm(self.head(x))  # [B * N, words + bands]
        first = self.cutoff[0]
        parts = [head[:, :first]]
        for i, band in enumerate(self.tail):
            cluster = head[:, first + i, None]
            start = self.cutoff[i]
            stop = self.cutoff[i + 1]
            if target is None:
                parts.append(self.lsm(band(x)) + cluster)
                continue
            rows = ((target >= start) & (target < stop)).flatten().nonzero()[:, 0]
            # A band without targets runs too: DistributedDataParallel needs a gradient of every
            # parameter.
            words = self.lsm(band(x[rows])) + cluster[rows]
            hidden = head.new_full((x.size(0), stop - start), float("-inf"))
            parts.append(hidden.index_copy(0, rows, words))
        return torch.cat(parts, 1).view(*input.shape[:2], -1)
