"""Find, group and cut the parameters of parts."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mixhead_plugin.errors import wrong_argument
from mixhead_plugin.parts.kinds import Axis, Part
from mixhead_plugin.parts.tables import PART_NAMES


def part_of(tensor_name: str) -> str:
    """Return the name in PART_NAMES of the part that a tensor may belong to; empty for none.

    Args:
        tensor_name: as in a state dict, "decoder.layers.0.self_attn.head_mixing.weight"
    """
    for module in reversed(tensor_name.split(".")):  # a part has no other one inside
        if module in PART_NAMES:
            return module
    return ""


def name_in_attention(tensor_name: str) -> str:
    """Return what a tensor of a part is called in its attention, such as "head_mixing.bias".

    Args:
        tensor_name: as in `part_of`; must be of a part
    """
    part = part_of(tensor_name)
    _, _, inside = f".{tensor_name}".rpartition(f".{part}.")
    return f"{part}.{inside}"


def is_of_a_part(tensor_name: str) -> bool:
    """Return whether a tensor may belong to a part; the name is as in `part_of`."""
    return part_of(tensor_name) != ""


def tensors_of_parts(model: nn.Module) -> dict[str, Tensor]:
    """Return by name the parameters and buffers that belong to parts of a model."""
    ids: set[int] = set()
    for module in model.modules():
        if isinstance(module, Part):
            ids.update(id(tensor) for tensor in (*module.parameters(), *module.buffers()))
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: tensor for name, tensor in named if id(tensor) in ids}


def mixing_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name the parameters of mixings, sinks, gates and relative positions.

    They are more than those of --mixing-lr-scale, which has mixings alone.

    None of them needs weight decay, which pulls M to 0, not to the identity.

    Args:
        model: any module with attentions of this package inside
    """
    if not isinstance(model, nn.Module):
        raise ValueError(wrong_argument("model", model, "a module of torch"))
    of_parts = tensors_of_parts(model)
    return {name: p for name, p in model.named_parameters() if name in of_parts}


def parameter_groups(
    model: nn.Module, weight_decay: float, mixing_lr: float | None = None
) -> list[dict[str, Any]]:
    """Return the trained parameters as groups for an optimizer of torch.

    Args:
        model: any model
        weight_decay: the decay of the matrices; vectors and `mixing_parameters` do not decay
        mixing_lr: the learning rate of all `mixing_parameters`, not of mixings alone as with
            --mixing-lr-scale; None for that of the optimizer
    """
    names_of_mixing = mixing_parameters(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    mixing = [trained.pop(name) for name in names_of_mixing if name in trained]
    matrices = [p for p in trained.values() if p.dim() > 1]
    vectors = [p for p in trained.values() if p.dim() <= 1]

    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
        {"params": mixing, "weight_decay": 0.0},
    ]
    if mixing_lr is not None:
        groups[-1]["lr"] = mixing_lr
    return [group for group in groups if group["params"]]


def entries_of_heads(
    tensor: Tensor,
    axes: Iterable[Axis],
    kept: Mapping[str, Sequence[int]],
    sizes: Mapping[str, int],
) -> Tensor:
    """Return the entries of a tensor that belong to some heads.

    Args:
        tensor: a parameter or a buffer
        axes: its dimensions that go by heads
        kept: the heads that stay, by stage: "source" and "mixed"
        sizes: how many entries a whole head has, by the `size` of an axis: "head_dim", "value_dim"
    """
    for dim, stage, size in axes:
        entries = torch.tensor(kept[stage], dtype=torch.long, device=tensor.device)
        if size:
            # Head 2 of size 4 has the entries 8, 9, 10 and 11.
            inside = torch.arange(sizes[size], device=tensor.device)
            entries = (entries[:, None] * sizes[size] + inside).flatten()
        tensor = tensor.index_select(dim, entries)
    return tensor
