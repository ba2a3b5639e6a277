"""Cut heads off one attention for good."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from mixhead_plugin.heads.cutting import whole_part
from mixhead_plugin.hf.checks import check_fewer
from mixhead_plugin.hf.layouts import MIXHEAD, Site, several
from mixhead_plugin.hf.mixed import MixedHeads
from mixhead_plugin.parts import PartKind, parameters


def _outputs(model: nn.Module, site: Site) -> tuple[int, int]:
    """Return how many heads have an output, and how many of them share keys and values."""
    mixed: MixedHeads | None = vars(site.module).get(MIXHEAD)
    if mixed is None:
        return site.heads, site.heads_per_key(model)
    return mixed.sizes.mixed_heads, mixed.heads_per_key


class Rest(NamedTuple):
    """What is left of an attention without some heads."""

    mixes: bool  # then queries and keys stay, because other heads use them
    size: int  # features of a head of queries
    heads: dict[str, list[int]]  # of each field of Layout, by its present number
    cut_groups: int  # heads of values that go


def _rest(model: nn.Module, site: Site, heads: Sequence[int]) -> Rest:
    mixed: MixedHeads | None = vars(site.module).get(MIXHEAD)
    mixes = mixed is not None and site.module.head_mixing is not None
    source = site.heads if mixed is None else mixed.sizes.num_heads
    total, group = _outputs(model, site)

    kept = [head for head in range(total) if head not in heads]
    groups = [head // group for head in kept[::group]]
    stays = {
        "queries": list(range(source)) if mixes else kept,
        "keys": list(range(source // group)) if mixes else groups,
        "values": groups,
        "output": kept,
    }
    return Rest(mixes, site.head_dim, stays, total // group - len(groups))


def problem(model: nn.Module, site: Site, heads: Sequence[int]) -> str:
    """Return why some heads of an attention cannot be cut off, or an empty string if they can."""
    mixed: MixedHeads | None = vars(site.module).get(MIXHEAD)
    total, group = _outputs(model, site)
    if len(heads) == total:
        return "must leave one head"
    option, why = whole_part({} if mixed is None else mixed.variant.parts())
    if option:
        return f"{option} must have all heads, {why}; ablate them instead"
    for head in range(total):
        first_of_group = head // group * group
        if (head in heads) != (first_of_group in heads):
            return f"must be whole groups of {group} that share keys"
    return ""


def try_out(model: nn.Module, site: Site, heads: Sequence[int]) -> None:
    """Raise ValueError if an attention would not go on without some heads."""
    rest = _rest(model, site, heads)
    mixed: MixedHeads | None = vars(site.module).get(MIXHEAD)
    if mixed is None:
        widths = site.widths(model)
        value_dim = rest.size
    else:
        keys = mixed.sizes.key_heads * rest.size
        # Where values were cut before, zeros stand in their place.
        widths = {"queries": mixed.sizes.num_heads * rest.size, "keys": keys, "values": keys}
        value_dim = mixed.sizes.value_dim
    output = len(rest.heads["output"]), value_dim
    check_fewer(site, model, widths, rest.heads, _numbers(site, rest), output)


def _numbers(site: Site, rest: Rest) -> dict[str, int]:
    """Return the attributes of an attention that count its heads, as they are afterwards."""
    # With mixing, queries and keys still have all heads. T5's layers share biases of all heads.
    if rest.mixes or hasattr(site.module, "has_relative_attention_bias"):
        return {}
    kept = len(rest.heads["output"])
    numbers = {
        **dict.fromkeys(several(site.layout.heads), kept),
        "split_size": kept * rest.size,
        "all_head_size": kept * rest.size,
    }
    return {name: number for name, number in numbers.items() if name in vars(site.module)}


def cut(model: nn.Module, site: Site, heads: Sequence[int]) -> None:
    """Remove heads of an attention that `attach` has seen, where `problem` finds none."""
    mixed: MixedHeads = getattr(site.module, MIXHEAD)
    rest = _rest(model, site, heads)
    for path, kinds in site.packed().items():
        columns: list[int] = []
        for kind, where in mixed.slices(kinds).items():
            features = _features(rest.heads[kind], rest.size)
            columns.extend(where.start + feature for feature in features)
        _keep(model.get_submodule(path), columns, of_outputs=True)
    kept = rest.heads["output"]
    _keep(model.get_submodule(site.paths["output"]), _features(kept, rest.size), of_outputs=False)

    stay = {"source": rest.heads["queries"], "mixed": kept}
    sizes = {"head_dim": rest.size, "value_dim": mixed.sizes.value_dim}
    for option, row in mixed.variant.parts().items():
        part = getattr(site.module, option)
        if part is not None:
            _cut_part(part, row, stay, sizes)
    mixed.sizes = mixed.sizes._replace(
        num_heads=len(stay["source"]), key_heads=len(rest.heads["keys"]), mixed_heads=len(kept)
    )
    mixed.kept = {kind: [mixed.kept[kind][i] for i in some] for kind, some in stay.items()}
    if rest.mixes:
        mixed.missing_values += rest.cut_groups * rest.size
    vars(site.module).update(_numbers(site, rest))


def _cut_part(
    part: nn.Module, row: PartKind, stay: dict[str, list[int]], sizes: dict[str, int]
) -> None:
    """Keep what some heads need of the tensors of a part."""
    for name, parameter in list(part.named_parameters()):
        smaller = parameters.cut(parameter.detach(), row.parameters[name], stay, sizes)
        setattr(part, name, nn.Parameter(smaller, parameter.requires_grad))
    for name, buffer in list(part.named_buffers()):
        setattr(part, name, parameters.cut(buffer.detach(), row.parameters[name], stay, sizes))


def _features(heads: Sequence[int], size: int) -> list[int]:
    return [head * size + feature for head in heads for feature in range(size)]


def _keep(projection: Any, features: Sequence[int], of_outputs: bool) -> None:
    """Keep some input or output features of an nn.Linear or of a Conv1D of GPT-2.

    The weight of a Conv1D is transposed.
    """
    is_linear = isinstance(projection, nn.Linear)
    rows = of_outputs == is_linear  # else columns of the weight
    tensors = {"weight": 0 if rows else 1}
    if of_outputs:
        tensors["bias"] = 0

    index = torch.tensor(features, device=projection.weight.device)
    for name, dim in tensors.items():
        tensor = getattr(projection, name)
        if tensor is not None:
            smaller = tensor.detach().index_select(dim, index)
            setattr(projection, name, nn.Parameter(smaller, tensor.requires_grad))

    if is_linear:
        number = "out_features" if of_outputs else "in_features"
    else:
        number = "nf" if of_outputs else "nx"
    setattr(projection, number, len(features))
