"""Describe the heads of one attention: what a hook sees, and gates that scale heads."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Heads(NamedTuple):
    """Give a hook the heads of one attention in one pass."""

    mixing: Tensor | None  # M [H, H'] or [B, Nq, H, H']
    weights: Callable[[], Tensor]  # computes P [B, H, Nq, Nk], before mixing and dropout, in float32 or better


class HeadGates(NamedTuple):
    """Scale the heads of one attention, by one factor for each head, or [B, ...] also for each sentence; None is 1."""

    source: Tensor | None = None  # on the weights P_j where heads mix, [H] or [B, H]
    mixed: Tensor | None = None  # on the outputs O_i, [H'] or [B, H']

    def on_sources(self, mixing: Tensor | None) -> Tensor | None:
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
