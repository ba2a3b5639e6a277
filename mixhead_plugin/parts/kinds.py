"""Describe one value of a flag that adds a part, and the sizes that a part is built for."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class PartError(ValueError):
    """A field of a `Variant`, or a size, whose value cannot work; `PartError.of` makes one.

    Args:
        message: one line that names all below
        option: the name of the field or of the size, as in Python
        value: its value
        problem: what is wrong, and what would be valid
    """

    # The message alone is enough, because an exception of another process is built again from it:
    # by pickle, which then sets the attributes, and by torch, for a worker of a DataLoader.
    def __init__(self, message: str, option: str = "", value: object = None, problem: str = ""):
        super().__init__(message)
        self.option = option
        self.value = value
        self.problem = problem

    @classmethod
    def of(cls, option: str, value: object, problem: str, shown: str | None = None) -> "PartError":
        """Return the error of one value.

        Args:
            option: as above
            value: as above
            problem: as above
            shown: the value in the message; None for str(value)
        """
        if shown is None:
            shown = str(value)
        return cls(f"{option} {shown}: {problem}", option, value, problem)


class Axis(NamedTuple):
    """Name a dimension of a parameter that has one entry, or several, for each head."""

    dim: int
    stage: str  # of the heads: "source", before mixing, or "mixed"
    # How many entries each head has: the name of a size, "head_dim" or "value_dim"; empty for one.
    size: str = ""


class AttentionSizes(NamedTuple):
    """The sizes that a part of an attention is built for; `Variant.sizes` derives them.

    There are `num_heads` source heads, whose weights P mix to those of `mixed_heads` mixed heads.
    `value_dim` is the size of a mixed head's values: that of a source head's, times the
    `heads_per_mixed` of the mixing.

        queries [B, num_heads, Nq, head_dim]     values [B, mixed_heads, Nk, value_dim]
        keys    [B, num_heads, Nk, head_dim]     x      [B, Nq, embed_dim], the query input
    """

    num_heads: int
    head_dim: int
    mixed_heads: int
    value_dim: int
    embed_dim: int
    causal: bool = False  # whether no query sees later keys
    # Where heads of queries share keys and values, as in grouped-query attention: how many heads
    # of keys and of values there are, all of size head_dim. 0 where they share none.
    key_heads: int = 0

    @property
    def heads_per_key(self) -> int:
        """How many heads of queries share a head of keys and of values."""
        return self.num_heads // self.key_heads if self.key_heads else 1


class Part(nn.Module):
    """A part of an attention. Its parameters may do nothing, as at the start of the training.

    Every part is of this class, so that it is known in a model whose other modules may have any
    name.

    Each part with tensors of its own has `reset_parameters`, which gives them their start again:
    programs that build a model on the device meta call it after `to_empty`, on every module that
    has it.
    """

    def identity(self) -> dict[str, Tensor]:
        """Return values with which a trained part does nothing; empty if there are none."""
        return {}

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Add the part to a checkpoint that has nothing of it; fairseq calls this for every module.

        A trained part then does nothing, and a frozen one keeps its numbers. A trained part that
        never does nothing is not added, so torch says that its tensors are missing.

        Args:
            state_dict: the tensors of the checkpoint, changed in place
            name: the name of this module in the model
        """
        with torch.device("cpu"):  # whatever the default device is
            identity = self.identity()
        is_trained = next(self.parameters(), None) is not None
        if is_trained and not identity:
            return
        own = self.state_dict()
        start = {**own, **identity}
        if any(value.is_meta for value in start.values()):
            return  # a model without numbers yet has no start to give
        if any(f"{name}.{key}" in state_dict for key in start):
            return
        # By `assign=True` the tensors of the state become the parameters, so the part belongs where
        # the attention around it lies there.
        around = "".join(name.rpartition(".")[:2])  # "layers.0.self_attn."
        device = _device_of(state_dict, around)
        for key, value in start.items():
            state_dict[f"{name}.{key}"] = value.to(device or own[key].device, own[key].dtype)


def _device_of(state_dict: dict[str, Tensor], prefix: str) -> torch.device | None:
    """Return the device of the first tensor whose name begins with `prefix`; None if none does."""
    for name, tensor in state_dict.items():
        if name.startswith(prefix) and isinstance(tensor, Tensor):  # others may be anything
            return tensor.device
    return None


class PartKind(NamedTuple):
    """Describe one value of a flag that adds a part to the attention."""

    # Called with `AttentionSizes`, and with the fields of `Variant` in `options` as keywords.
    # None for the value `none`.
    build: Callable[..., Part] | None
    formula: str
    source: str
    # Its parameters and buffers, and along which dimensions heads are cut from them: () where none
    # goes by heads, and where `why_not_cut` says that no head can be cut.
    parameters: dict[str, tuple[Axis, ...]]
    # The fields of `Variant` that `build` takes. With parts that take none of them, another value
    # than the default is refused.
    options: tuple[str, ...] = ()
    # Whether a checkpoint without it loads: a trained part must be able to do nothing, see
    # `Part.identity`; a frozen one keeps its numbers.
    loads_without: bool = True
    frozen: bool = False  # whether its tensors are buffers
    # What a mixing computes M from, or a gate its factors: "query" for the projected query, "input"
    # for the attention's query input, "" for numbers that are the same for all positions.
    reads: str = ""
    # Of mixings alone:
    orthogonal: bool = False  # whether --orthogonal-weight acts on it
    # How many source heads one mixed head combines; its values are so many times as large.
    heads_per_mixed: int = 1
    # Why none of its heads can be cut off; empty if they can.
    why_not_cut: str = ""

    @property
    def trained(self) -> bool:
        """Whether an optimizer changes it."""
        return bool(self.parameters) and not self.frozen

    @property
    def leaves_no_trace(self) -> bool:
        """Whether it changes what an attention computes, but has no tensor in a checkpoint."""
        return not self.loads_without and not self.parameters
