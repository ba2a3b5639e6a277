"""Describe one value of a flag that adds a part to the attention, and the sizes that it is built
for.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn


class PartError(ValueError):
    """An option whose value does not fit the others, and why."""

    def __init__(self, option: str, value: object, problem: str):
        super().__init__(f"{option} {value}: {problem}")
        self.option, self.value, self.problem = option, value, problem


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
    # of size head_dim, where heads of queries share keys and values; 0 where they do not
    key_heads: int = 0
    mixed_features: str = "qkv"  # which of queries, keys and values the feature mixing mixes
    mixing_start: str = "identity"  # what the M of the head mixing starts as, one of MIXING_STARTS


class Part(nn.Module):
    """A part of an attention whose parameters may do nothing, as at the start of the training.

    Each part with tensors of its own has `reset_parameters`, which gives them their start again:
    programs that build a model on the device meta call it after `to_empty`, on every module that
    has it.
    """

    def identity(self) -> dict[str, Tensor]:
        """Return values with which a trained part does nothing; empty for one that never does
        nothing.
        """
        return {}

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Complete a checkpoint without any of the part: a trained one then does nothing, a frozen
        one stays.
        """
        own = self.state_dict()
        start = {
            f"{name}.{key}": value.to(own[key].dtype)
            for key, value in {**own, **self.identity()}.items()
        }
        if start.keys().isdisjoint(state_dict) and not any(
            value.is_meta for value in start.values()
        ):
            state_dict.update(start)


class PartKind(NamedTuple):
    """Describe one value of a flag that adds a part to the attention; `build` is None for the value
    `none`.
    """

    build: Callable[[AttentionSizes], nn.Module] | None
    formula: str
    source: str
    # its parameters and buffers, and the dimensions that go by heads
    parameters: dict[str, tuple[Axis, ...]]
    # whether a checkpoint without it loads; only if it starts as a no-op
    loads_without: bool = True
    frozen: bool = False  # whether its tensors are buffers
    # Of mixings alone:
    orthogonal: bool = False  # whether --orthogonal-weight acts on it
    starts: bool = False  # whether --mixing-start chooses what it starts as
    # "query": the projected query; "input": that of the attention; "" for one matrix for all
    # positions
    reads: str = ""
    # source heads for each mixed head, whose values have `group` times the head size
    group: int = 1
    uncut: str = ""  # why none of its heads can be cut off; empty if they can

    @property
    def trained(self) -> bool:
        return bool(self.parameters) and not self.frozen
