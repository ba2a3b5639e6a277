"""Cut heads off one attention for good."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mixhead_plugin.hf.attend import MixedHeads
from mixhead_plugin.hf.layouts import NAME, Site
from mixhead_plugin.parts import parameters


def check(model: nn.Module, site: Site, layer: int, heads: Sequence[int]) -> None:
    """Raise ValueError if some heads of an attention cannot be cut off."""
    mixed: MixedHeads | None = vars(site.module).get(NAME)
    if mixed is None:
        total, group = site.heads, site.group(model)
    else:
        total, group = mixed.sizes.mixed_heads, mixed.group
    if site.packs_by_own_numbers() and (mixed is None or mixed.head_mixing is None):
        kind = type(site.module).__name__
        raise ValueError(
            f"{kind}: cuts its one projection by numbers of its own, which stay; ablate heads, or "
            "mix first"
        )
    if len(heads) == total:
        raise ValueError(f"heads {heads} of layer {layer}: must leave one head")
    for option, kind in ({} if mixed is None else mixed.parts()).items():
        if kind.uncut:
            raise ValueError(
                f"layer {layer}: {option} must have all heads, {kind.uncut}; ablate them instead"
            )
    if any(heads.count(head // group * group) != heads.count(head) for head in range(total)):
        raise ValueError(
            f"heads {heads} of layer {layer}: must be whole groups of {group} that share keys"
        )


def cut(model: nn.Module, site: Site, heads: Sequence[int]) -> None:
    """Remove heads of an attention that `attach` has seen and `check` has allowed."""
    mixed: MixedHeads = getattr(site.module, NAME)
    size, group, source, total = (
        site.head_dim,
        mixed.group,
        mixed.sizes.num_heads,
        mixed.sizes.mixed_heads,
    )
    kept = [head for head in range(total) if head not in heads]
    groups = [head // group for head in kept[::group]]
    mixes = mixed.head_mixing is not None
    stays = {
        "queries": range(source) if mixes else kept,
        "keys": range(source // group) if mixes else groups,
        "values": groups,
    }
    for path, kinds in site.packed().items():
        columns: list[int] = []
        for kind, where in mixed.slices(kinds).items():
            for head in stays[kind]:
                start = where.start + head * size
                columns.extend(range(start, start + size))
        _keep(model.get_submodule(path), columns, of_outputs=True)
    _keep(
        model.get_submodule(site.path("output")),
        [h * size + i for h in kept for i in range(size)],
        of_outputs=False,
    )

    stay = {"source": list(stays["queries"]), "mixed": kept}
    for option, row in mixed.parts().items():
        part = getattr(mixed, option)
        for name, tensor in (
            [] if part is None else [*part.named_parameters(), *part.named_buffers()]
        ):
            smaller = parameters.cut(tensor.detach(), row.parameters[name], stay, size)
            is_buffer = name in dict(part.named_buffers())
            setattr(
                part, name, smaller if is_buffer else nn.Parameter(smaller, tensor.requires_grad)
            )
    mixed.sizes = mixed.sizes._replace(
        num_heads=len(stay["source"]), key_heads=len(stays["keys"]), mixed_heads=len(kept)
    )
    mixed.kept = {kind: [mixed.kept[kind][i] for i in some] for kind, some in stay.items()}
    if mixes:
        mixed.missing_values += (total // group - len(groups)) * size
        return
    # T5's layers share biases of all heads
    if not hasattr(site.module, "has_relative_attention_bias"):
        names = {
            site.layout.heads: len(kept),
            **dict.fromkeys(("split_size", "all_head_size"), len(kept) * size),
        }
        vars(site.module).update(
            {name: number for name, number in names.items() if hasattr(site.module, name)}
        )


def _keep(projection: Any, features: Sequence[int], of_outputs: bool) -> None:
    """Keep some input or output features of an nn.Linear or of a Conv1D of GPT-2, whose weight is
    transposed.
    """
    linear, index = (
        isinstance(projection, nn.Linear),
        torch.tensor(features, device=projection.weight.device),
    )
    tensors = {"weight": 0 if of_outputs == linear else 1} | ({"bias": 0} if of_outputs else {})
    for name, dim in tensors.items():
        tensor = getattr(projection, name)
        if tensor is not None:
            smaller = tensor.detach().index_select(dim, index)
            setattr(projection, name, nn.Parameter(smaller, tensor.requires_grad))
    number = (
        ("out_features" if of_outputs else "in_features")
        if linear
        else ("nf" if of_outputs else "nx")
    )
    setattr(projection, number, len(features))
