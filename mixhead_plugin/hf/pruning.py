"""Cut heads off one attention for good."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mixhead_plugin.heads.cutting import cut_part, cutting_problem, replace
from mixhead_plugin.hf.attention_hooks import mixed_heads_of
from mixhead_plugin.hf.cut_checks import FewerHeads, check_fewer
from mixhead_plugin.hf.layouts import FoundAttention, several, slices
from mixhead_plugin.parts import AttentionSizes, PartKind

# Numbers of heads that stay, by field of Layout.
HeadsLeft = dict[str, list[int]]


def sizes_of(attention: FoundAttention, model: nn.Module) -> AttentionSizes:
    """Return the present sizes of an attention, mixed or not."""
    mixed = mixed_heads_of(attention.module)
    return attention.sizes(model) if mixed is None else mixed.sizes


def mixes(attention: FoundAttention) -> bool:
    """Return whether heads mix: then a head needs the queries and keys of all."""
    return getattr(attention.module, "head_mixing", None) is not None


def problem(sizes: AttentionSizes, parts: Mapping[str, PartKind], heads: Sequence[int]) -> str:
    """Return why some heads of an attention cannot be cut off, or an empty string if they can.

    Args:
        sizes: the present ones of the attention
        parts: what it is mixed by, by the name of the option
        heads: the numbers of those that would go
    """
    general = cutting_problem(parts, len(heads), sizes.mixed_heads)
    if general:
        return general
    group = sizes.heads_per_key
    for head in range(sizes.mixed_heads):
        first_of_group = head // group * group
        if (head in heads) != (first_of_group in heads):
            return f"must be whole groups of {group} that share keys"
    return ""


def _heads_left(
    attention: FoundAttention, sizes: AttentionSizes, heads: Sequence[int]
) -> HeadsLeft:
    """Return what is left of an attention without some heads."""
    kept = [head for head in range(sizes.mixed_heads) if head not in heads]
    # Whole groups go, `problem` has made sure of that: so every first one of a group stands for it.
    groups = [head // sizes.heads_per_key for head in kept[:: sizes.heads_per_key]]
    if mixes(attention):
        queries = list(range(sizes.num_heads))
        keys = list(range(sizes.key_heads))
    else:
        queries = kept
        keys = groups
    return {"queries": queries, "keys": keys, "values": groups, "output": kept}


def try_out(attention: FoundAttention, model: nn.Module, heads: Sequence[int]) -> None:
    """Raise ValueError if an attention would not go on without some heads."""
    sizes = sizes_of(attention, model)
    left = _heads_left(attention, sizes, heads)
    # Where values were cut before, zeros stand in their place: they have the width of keys.
    keys = sizes.key_heads * sizes.head_dim
    widths = {"queries": sizes.num_heads * sizes.head_dim, "keys": keys, "values": keys}
    fewer = FewerHeads(
        kept=left,
        numbers=_attributes_that_count_heads(attention, left),
        output=(len(left["output"]), sizes.value_dim),
    )
    check_fewer(attention, model, widths, fewer)


def _attributes_that_count_heads(attention: FoundAttention, left: HeadsLeft) -> dict[str, int]:
    """Return the attributes of an attention that count its heads, as they are afterwards."""
    # With mixing, queries and keys still have all heads. T5's layers share biases of all heads.
    if mixes(attention) or hasattr(attention.module, "has_relative_attention_bias"):
        return {}
    kept = len(left["output"])
    numbers = {
        **dict.fromkeys(several(attention.layout.heads), kept),
        "split_size": kept * attention.head_dim,
        "all_head_size": kept * attention.head_dim,
    }
    return {name: number for name, number in numbers.items() if name in vars(attention.module)}


def cut_heads(attention: FoundAttention, model: nn.Module, heads: Sequence[int]) -> None:
    """Remove heads of an attention that `add_mixing` has seen, where `problem` finds none."""
    mixed = mixed_heads_of(attention.module)
    assert mixed is not None
    sizes = mixed.sizes
    left = _heads_left(attention, sizes, heads)

    for path, roles in attention.packed().items():
        rows: list[int] = []
        for role, where in slices(roles, mixed.widths()).items():
            rows += [where.start + row for row in _features(left[role], sizes.head_dim)]
        _keep(model.get_submodule(path), rows, of_outputs=True)
    kept = left["output"]
    columns = _features(kept, sizes.value_dim)
    _keep(model.get_submodule(attention.paths["output"]), columns, of_outputs=False)

    stay = {"source": left["queries"], "mixed": kept}
    for option, part_kind in mixed.variant.part_kinds().items():
        part = getattr(attention.module, option)
        if part is not None:
            cut_part(part, part_kind, stay, sizes)

    if mixes(attention):
        before = sizes.mixed_heads // sizes.heads_per_key
        mixed.missing_values += (before - len(left["values"])) * sizes.head_dim
    kept_before = mixed.kept
    mixed.kept = {}
    for stage, some in stay.items():
        mixed.kept[stage] = [kept_before[stage][head] for head in some]
    mixed.sizes = sizes._replace(
        num_heads=len(left["queries"]), key_heads=len(left["keys"]), mixed_heads=len(kept)
    )
    vars(attention.module).update(_attributes_that_count_heads(attention, left))


def _features(heads: Sequence[int], size: int) -> list[int]:
    """Return the numbers of the features of some heads, which lie one head after another."""
    features: list[int] = []
    for head in heads:
        features += range(head * size, (head + 1) * size)
    return features


def _keep(projection: Any, features: Sequence[int], of_outputs: bool) -> None:
    """Keep some input or output features of an nn.Linear or of a Conv1D of GPT-2.

    The weight of a Conv1D is transposed.
    """
    is_linear = isinstance(projection, nn.Linear)
    rows = of_outputs == is_linear  # else columns of the weight
    dims = {"weight": 0 if rows else 1}
    if of_outputs and projection.bias is not None:
        dims["bias"] = 0

    index = torch.tensor(features, device=projection.weight.device)
    for name, dim in dims.items():
        tensor = getattr(projection, name).detach()
        replace(projection, name, tensor.index_select(dim, index))

    if is_linear:
        number = "out_features" if of_outputs else "in_features"
    else:
        number = "nf" if of_outputs else "nx"
    setattr(projection, number, len(features))
