"""What the studies of heads need to know of one attention, of any model.

A model is a list of `Attention` here. The adapters that make one are `assembly_attention.py` for
the modules of this package, fairseq's and torch's, `nn/adapter.py` for modules that call
F.scaled_dot_product_attention, and `hf/studied_attention.py` for those of `transformers`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from mixhead_plugin.ops.precision import without_autocast
from mixhead_plugin.ops.reference import mix_heads

# A head lives in one of two stages. Source heads have weights P_j, and mixed heads have
# Pbar_i = sum_j M[j, i] P_j, values and an output. Without mixing both are one: a mixed head.
STAGES = {"source": "source heads", "mixed": "mixed heads"}

# A number for each head of a model, [H], by the name of the attention, then by stage.
HeadNumbers = dict[str, dict[str, Tensor]]


class HeadsError(ValueError):
    """What was asked of the heads of a model cannot be done; the message is one line."""


class Heads(NamedTuple):
    """What the heads of one attention do in one call.

    Attributes:
        mixing: M [H, H'] or [B, Nq, H, H']; None where heads do not mix
        weights: computes P [B, H, Nq, Nk], before mixing and dropout, in float32 or better; it can
            be called while the call of the attention lasts
    """

    mixing: Tensor | None
    weights: Callable[[], Tensor]


def mixed_weights(source: Tensor, mixing: Tensor | None) -> Tensor:
    """Return the mixed weights [B, H', Nq, Nk] in the dtype of P, also under autocast.

    Args:
        source: P [B, H, Nq, Nk]
        mixing: M [H, H'] or [B, Nq, H, H']; None to return P
    """
    # Autocast would multiply them in half precision.
    with without_autocast(source.device):
        return mix_heads(source, mixing)


class LayerHeads(NamedTuple):
    """The weights of the heads of one attention in one call, without gradients.

    Attributes:
        name: the name of the attention in the model
        source: P [B, H, Nq, Nk], before mixing, in float32 or better
        mixing: M [H, H'] or [B, Nq, H, H'], a copy in the dtype in which the model had it; None
            where heads do not mix
        mixed: the mixed weights [B, H', Nq, Nk], in the dtype of P; P where heads do not mix
    """

    name: str
    source: Tensor
    mixing: Tensor | None
    mixed: Tensor


class Attention(Protocol):
    """One attention of a model."""

    @property
    def name(self) -> str:
        """Its name in the model."""
        ...

    @property
    def heads(self) -> Mapping[str, int]:
        """The number of its heads, by the stages that can be studied.

        They are 'mixed', and 'source' where heads mix and the adapter can reach them.
        """
        ...

    def gate(self, stage: str, change: Callable[[Tensor], Tensor]) -> RemovableHandle:
        """Let `change` replace what heads give in each call, until the handle is removed.

        Args:
            stage: a key of STAGES that `heads` has
            change: a function. It gets the outputs of mixed heads [B, Nq, H', Dv], or [B, H', Dv]
                where the model has no dimension of positions, or the rows of M of source heads,
                [H, H'] or [B, Nq, H, H']. It returns the same shape, or [B, 1, H, H'] for M
        """
        ...

    def view(self, see: Callable[[Heads], None]) -> RemovableHandle:
        """Let `see` have the heads of each call, until the handle is removed.

        Args:
            see: a function of the `Heads` of a call, called while the call lasts
        """
        ...

    def cut_problem(self, heads: Sequence[int]) -> str:
        """Return why these mixed heads cannot be cut off, or an empty string if they can.

        Args:
            heads: their numbers, from 0
        """
        ...

    def cut(self, heads: Mapping[str, Sequence[int]]) -> None:
        """Remove heads of each stage for good.

        Where heads do not mix, a head goes with its queries and keys.

        Args:
            heads: the numbers of those that go, from 0, by stage

        Raises:
            HeadsError: they cannot go; the attention is as before
        """
        ...
