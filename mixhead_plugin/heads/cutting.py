"""Cut heads off the attentions of a model for good."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from mixhead_plugin.heads.attention import Attention, HeadsError
from mixhead_plugin.heads.choosing import choose
from mixhead_plugin.parts import AttentionSizes, PartKind, entries_of_heads


def chosen_to_cut(
    attentions: Sequence[Attention], heads: Mapping[int | str, Iterable[int]]
) -> dict[int, list[int]]:
    """Return chosen mixed heads by the number of their attention, as `choose`.

    Args:
        attentions: those of the model, in its order
        heads: as in `choose`

    Raises:
        HeadsError: an attention or a head that does not exist, or heads that cannot go
    """
    chosen = choose(attentions, heads)
    refuse_what_cannot_go(attentions, chosen)
    return chosen


def refuse_what_cannot_go(
    attentions: Sequence[Attention], chosen: Mapping[int, Sequence[int]]
) -> None:
    """Raise HeadsError if some chosen heads cannot be cut off.

    Args:
        attentions: those of the model, in its order
        chosen: as `choose` returns it
    """
    for layer, some in chosen.items():
        problem = attentions[layer].cut_problem(some)
        if problem:
            raise HeadsError(f"heads {some} of layer {layer}: {problem}")


@torch.inference_mode(False)  # of tensors that were made in it, none can be trained
def cut_chosen(attentions: Sequence[Attention], chosen: Mapping[int, Sequence[int]]) -> None:
    """Remove chosen heads for good; `refuse_what_cannot_go` must have let them pass."""
    for layer, some in chosen.items():
        if some:
            attentions[layer].cut({"mixed": some})


def prune(attentions: Sequence[Attention], heads: Mapping[int | str, Iterable[int]]) -> None:
    """Remove some mixed heads for good.

    Args:
        attentions: those of the model, in its order
        heads: numbers of heads by layer; a layer is the number of an attention, from 0, or its name

    Raises:
        HeadsError: a layer or a head that does not exist, or heads that cannot go; the model is as
            before
    """
    cut_chosen(attentions, chosen_to_cut(attentions, heads))


def whole_part(parts: Mapping[str, PartKind]) -> tuple[str, str]:
    """Return the option and the reason of the first part that forbids to remove single heads.

    Two empty strings if no part does.

    Args:
        parts: what an attention has, by the name of the option
    """
    for option, row in parts.items():
        if row.why_not_cut:
            return option, row.why_not_cut
    return "", ""


def cutting_problem(parts: Mapping[str, PartKind], going: int, total: int) -> str:
    """Return why heads of an attention cannot be cut off; empty if nothing general forbids it.

    Args:
        parts: what the attention has, by the name of the option
        going: how many mixed heads would go
        total: how many there are
    """
    if going == total:
        return "must leave one head"
    option, why = whole_part(parts)
    if option:
        return f"{option} must have all heads, {why}; ablate them instead"
    return ""


def cut_part(
    part: nn.Module, row: PartKind, kept: Mapping[str, Sequence[int]], sizes: AttentionSizes
) -> None:
    """Keep what some heads need of the tensors of a part.

    Args:
        part: a part of an attention
        row: the row of the part in its table
        kept: the heads that stay, by stage
        sizes: the sizes of the attention before
    """
    for name, tensor in part.state_dict().items():
        smaller = entries_of_heads(tensor, row.parameters[name], kept, sizes._asdict())
        replace(part, name, smaller)


def replace(owner: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a smaller tensor in the place of a parameter or a buffer of a module.

    A parameter stays frozen if it was, and keeps its attributes.
    """
    former = getattr(owner, name)
    if isinstance(former, nn.Parameter):
        new = nn.Parameter(tensor, former.requires_grad)
        # Such an attribute is the factor on its learning rate.
        vars(new).update(vars(former))
        setattr(owner, name, new)
    else:
        setattr(owner, name, tensor)
