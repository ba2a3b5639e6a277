"""Describe the heads of one attention: what a hook sees, gates that scale heads, and the parts that flags add."""

from typing import Callable, Dict, NamedTuple, Optional, Tuple

from torch import Tensor, nn


class Heads(NamedTuple):
    """Give a hook the heads of one attention in one pass."""

    mixing: Optional[Tensor]  # M [H, H'] or [B, Nq, H, H']
    weights: Callable[[], Tensor]  # computes P [B, H, Nq, Nk], before mixing and dropout, in float32 or better


class HeadGates(NamedTuple):
    """Scale the heads of one attention, by one factor for each head, or [B, ...] also for each sentence; None is 1."""

    source: Optional[Tensor] = None  # on the weights P_j where heads mix, [H] or [B, H]
    mixed: Optional[Tensor] = None  # on the outputs O_i, [H'] or [B, H']

    def on_sources(self, mixing: Optional[Tensor]) -> Optional[Tensor]:
        """Return M, [H, H'] or [B, Nq, H, H'], with the gates of its source heads."""
        if self.source is None:
            return mixing
        if mixing is None:
            raise ValueError("gates on source heads need head mixing: gate the outputs instead")
        gates = self.source[..., None]  # [H, 1] or [B, H, 1]
        return mixing * (gates if gates.dim() == 2 else gates[:, None])  # [H, H'] or [B, Nq or 1, H, H']

    def on_output(self, out: Tensor) -> Tensor:
        """Return O [B, H', Nq, D] with the gates of its heads."""
        return out if self.mixed is None else out * self.mixed[..., None, None]


class Axis(NamedTuple):
    """Name a dimension of a parameter that has one entry, or `head_dim` entries, for each head."""

    dim: int
    kind: str  # "source" or "mixed"
    whole_heads: bool = False  # whether each head has head_dim entries


class AttentionSizes(NamedTuple):
    """The sizes that a part of an attention is built for."""

    num_heads: int
    head_dim: int
    mixed_heads: int
    value_dim: int  # of a mixed head
    embed_dim: int  # of the attention's query input
    causal: bool = False


class PartKind(NamedTuple):
    """Describe one value of a flag that adds a part to the attention; `build` is None for the value `none`."""

    build: Optional[Callable[[AttentionSizes], nn.Module]]
    formula: str
    source: str
    parameters: Dict[str, Tuple[Axis, ...]]  # its parameters and buffers, and the dimensions that go by heads
    loads_without: bool = True  # whether a checkpoint without it loads; only if it starts as a no-op
    trained: bool = False  # whether it has parameters
    # Of head and score mixings alone:
    orthogonal: bool = False  # whether --orthogonal-weight acts on it
    reads: str = ""  # "query": the projected query; "input": that of the attention; "" for one matrix for all positions
    group: int = 1  # source heads for each mixed head, whose values have `group` times the head size
    uncut: str = ""  # why none of its heads can be cut off; empty if they can
