"""Adaptive input and softmax with the parameters of Transformer-XL's published code.

fairseq's own classes have no biases, one more projection in the input, and none for the first band
of the softmax. Projections are never tied. The published code ties some for div_val > 1 on
WikiText-103, which no table reports.
"""

import torch
import torch.nn.functional as F
from fairseq.modules import AdaptiveSoftmax as FairseqAdaptiveSoftmax
from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from mixhead_plugin.ops.reference import upcast


class AdaptiveEmbedding(nn.Module):
    """Embeddings by bands of the vocabulary, with fewer columns for rare words; scaled by
    sqrt(dim).

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
        self.bands = nn.ModuleList(
            nn.Embedding(stop - start, dim // div_val**i)
            for i, (start, stop) in enumerate(zip([0, *cutoffs], cutoffs))
        )
        self.projections = nn.ModuleList(
            nn.Linear(band.embedding_dim, dim, bias=False) for band in self.bands if div_val != 1
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., dim] of tokens [...], in the dtype of the weights."""
        out = self.bands[0].weight.new_empty(*tokens.shape, self.dim)
        # The first and the last band have no outer limit, so that nn.Embedding refuses other
        # tokens.
        bands = sum((tokens >= stop for stop in self.cutoffs[:-1]), torch.zeros_like(tokens))
        for i, (band, start) in enumerate(zip(self.bands, [0, *self.cutoffs])):
            # A band without tokens runs too: DistributedDataParallel needs a gradient of every
            # parameter.
            rows = band(tokens[bands == i] - start)  # [words of the band, its columns]
            if self.projections:
                rows = self.projections[i](rows)
            out[bands == i] = rows.to(out.dtype)
        return out * self.dim**0.5


class Band(nn.Module):
    """Logits of the words of one band and, in the first band, of `clusters` other bands; in float32
    or better.

    The weights of `embedding` are shared. A projection, if wanted, maps `dim` to the columns of the
    embedding.
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
        weight, bias = self.weight, self.bias
        if self.cluster_weight is not None:
            weight, bias = (
                torch.cat([weight, self.cluster_weight]),
                torch.cat([bias, self.cluster_bias]),
            )
        # fairseq normalizes logits and sums losses in the dtype of the logits.
        return upcast(F.linear(x, weight, bias))


class AdaptiveSoftmax(FairseqAdaptiveSoftmax):
    """fairseq's adaptive softmax with the bands of `embedding`; one band is a plain softmax.

    It shares the words' weights with the input, but not the projections. `forward` is fairseq's.
    """

    def __init__(self, embedding: AdaptiveEmbedding):
        # fairseq's own __init__ makes other parameters
        super(FairseqAdaptiveSoftmax, self).__init__()
        self.vocab_size = embedding.cutoffs[-1]
        self.cutoff = embedding.cutoffs
        self.input_dim = embedding.dim
        # Transformer-XL has its dropout before the softmax.
        self.dropout_module = FairseqDropout(0.0, module_name=FairseqAdaptiveSoftmax.__name__)
        self.lsm = nn.LogSoftmax(dim=1)
        first, *others = embedding.bands
        projected = len(embedding.projections) > 0
        self.head = Band(first, embedding.dim, projected, clusters=len(others))
        self.tail = nn.ModuleList(Band(band, embedding.dim, projected) for band in others)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Do nothing: fairseq's method needs a version number, which its moving averages do not
        contain.
        """

    def get_log_prob(self, input: Tensor, target: Tensor | None) -> Tensor:
        """Return log-probabilities of the words, in float32 or better.

        fairseq's method overwrites tensors that its backward pass needs, so only the adaptive loss
        can train with it.

        Shapes: input [B, N, dim], target [B, N], result [B, N, vocabulary]. Words outside the band
        of a target, and of the first band, get -inf. Without targets all words get their
        log-probability.
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
            # A band without targets runs too: DistributedDataParallel needs a gradient of every
            # parameter.
            words = self.lsm(band(x[rows])) + cluster[rows]
            parts.append(
                head.new_full((x.size(0), stop - start), float("-inf")).index_copy(0, rows, words)
            )
        return torch.cat(parts, 1).view(*input.shape[:2], -1)
