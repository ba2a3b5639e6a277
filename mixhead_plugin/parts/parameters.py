"""List the tables of the parts that flags add to an attention; find, group and cut the parameters
of parts.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mixhead_plugin.parts.feature_mixing import FEATURE_MIXINGS
from mixhead_plugin.parts.gate import ATTENTION_GATES
from mixhead_plugin.parts.head_mixing import HEAD_MIXINGS, SCORE_MIXINGS
from mixhead_plugin.parts.kinds import Axis
from mixhead_plugin.parts.relative_position import RELATIVE_POSITIONS
from mixhead_plugin.parts.sink import ATTENTION_SINKS

# An `Assembly` builds them in this order, each as the child module of its option's name.
PARTS = {
    "head_mixing": HEAD_MIXINGS,
    "score_mixing": SCORE_MIXINGS,
    "feature_mixing": FEATURE_MIXINGS,
    "attention_sink": ATTENTION_SINKS,
    "attention_gate": ATTENTION_GATES,
    "relative_position": RELATIVE_POSITIONS,
}

# The options whose parameters mix heads; --mixing-lr-scale acts on them.
MIXINGS = ("head_mixing", "score_mixing", "feature_mixing")


def mixing_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name the parameters of mixings, sinks, gates and relative positions; none of them
    needs weight decay.

    Weight decay pulls M to 0, not to the identity.
    """
    options = {*PARTS, "relative_gain"}
    return {
        name: p for name, p in model.named_parameters() if options.intersection(name.split("."))
    }


def parameter_groups(
    model: nn.Module, weight_decay: float, mixing_lr: float | None = None
) -> list[dict[str, Any]]:
    """Return the trained parameters as groups for an optimizer: matrices decay, vectors and
    `mixing_parameters` do not.

    `mixing_lr` is the learning rate of the mixing parameters; None for that of the optimizer.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    mixing = [trained.pop(name) for name in mixing_parameters(model) if name in trained]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained.values() if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained.values() if p.dim() <= 1], "weight_decay": 0.0},
        {"params": mixing, "weight_decay": 0.0} | ({} if mixing_lr is None else {"lr": mixing_lr}),
    ]
    return [group for group in groups if group["params"]]


def effective(parts: Mapping[str, nn.Module | None]) -> str:
    """Return the name of the first part without which an attention would compute something else, or
    an empty string.
    """
    for name, part in parts.items():
        start: dict[str, Tensor] = getattr(part, "identity", dict)()
        state = {} if part is None else part.state_dict()
        same = bool(start) and all(
            torch.equal(state[key].cpu().float(), start[key]) for key in start
        )
        if not (part is None or same):
            return name
    return ""


def cut(
    tensor: Tensor, axes: Iterable[Axis], kept: Mapping[str, Sequence[int]], head_dim: int
) -> Tensor:
    """Return a tensor with only the heads of `kept`, by kind,
    in the dimensions that go by heads.
    """
    for dim, kind, whole_heads in axes:
        heads = torch.tensor(kept[kind], dtype=torch.long, device=tensor.device)
        if whole_heads:
            heads = (
                heads[:, None] * head_dim + torch.arange(head_dim, device=tensor.device)
            ).flatten()
        tensor = tensor.index_select(dim, heads)
    return tensor
