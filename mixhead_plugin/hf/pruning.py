"""Cut heads off a model for good."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mixhead_plugin.hf.attend import NAME, MixedHeads
from mixhead_plugin.hf.heads import choose, outputs_of
from mixhead_plugin.hf.layouts import Site, sites_of
from mixhead_plugin.hf.mixing import PRUNED, attach
from mixhead_plugin.parts import complete, cut


def prune(model: PreTrainedModel, heads: Mapping[int | str, Iterable[int]]) -> PreTrainedModel:
    """Remove some heads of `model`, in place, and return it; it computes what it does while they are ablated.

    Where heads mix, mixed heads lose their values, their columns of M and their share of the output projection. Else
    queries and keys shrink, too. `save_pretrained` writes the smaller model, and `load` reads it.

    Args:
        heads: as in `ablate`, in the present numbering; grouped keys lose whole groups

    Raises:
        ValueError: a layer or a head that does not exist, a part of a group, all heads of a layer, heads that need each
            other, or a model with adapters
    """
    chosen, sites = choose(model, heads), sites_of(model)
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise ValueError(f"{type(model).__name__}: has adapters; must be pruned before they are added")
    for layer, some in chosen.items():
        _check(model, sites[layer], layer, some)
    if not hasattr(sites[0].module, NAME):
        attach(model, complete({}), "auto")
    for layer, some in chosen.items():
        _cut(model, sites[layer], some)
    config: Any = model.config
    each = {layer: getattr(site.module, NAME) for layer, site in enumerate(sites)}
    gone = {layer: sorted({*range(mixed.outputs)} - {*mixed.kept["mixed"]}) for layer, mixed in each.items()}
    setattr(config, PRUNED, {layer: heads for layer, heads in gone.items() if heads})
    return model


def _check(model: nn.Module, site: Site, layer: int, heads: Sequence[int]) -> None:
    mixed: MixedHeads | None = vars(site.module).get(NAME)
    total, group = outputs_of(site), site.group(model)
    if len(heads) == total:
        raise ValueError(f"heads {heads} of layer {layer}: must leave one head")
    for option, kind in ({} if mixed is None else mixed.parts()).items():
        if kind.uncut:
            raise ValueError(f"layer {layer}: {option} must have all heads, {kind.uncut}; ablate them instead")
    if any(heads.count(head // group * group) != heads.count(head) for head in range(total)):
        raise ValueError(f"heads {heads} of layer {layer}: must be whole groups of {group} that share keys")


def _cut(model: nn.Module, site: Site, heads: Sequence[int]) -> None:
    mixed: MixedHeads = getattr(site.module, NAME)
    size, group, source, total = site.head_dim, site.group(model), mixed.sizes.num_heads, outputs_of(site)
    kept = [head for head in range(total) if head not in heads]
    groups, mixes = [head // group for head in kept[::group]], mixed.head_mixing is not None
    queries, keys = (range(source), range(source // group)) if mixes else (kept, groups)
    features: dict[str, list[int]] = {}  # that stay, by projection; several kinds may be one projection
    for kind, some in (("queries", queries), ("keys", keys), ("values", groups)):
        start = mixed.slices(mixed.names[kind])[kind].start
        features.setdefault(site.path(kind), []).extend(start + head * size + i for head in some for i in range(size))
    for path, columns in features.items():
        _keep(model.get_submodule(path), columns, of_outputs=True)
    _keep(model.get_submodule(site.path("output")), [h * size + i for h in kept for i in range(size)], of_outputs=False)

    stay = {"source": list(queries), "mixed": kept}
    for option, row in mixed.parts().items():
        part = getattr(mixed, option)
        for name, tensor in [] if part is None else [*part.named_parameters(), *part.named_buffers()]:
            smaller = cut(tensor.detach(), row.parameters[name], stay, size)
            is_buffer = name in dict(part.named_buffers())
            setattr(part, name, smaller if is_buffer else nn.Parameter(smaller, tensor.requires_grad))
    mixed.sizes = mixed.sizes._replace(num_heads=len(stay["source"]), mixed_heads=len(kept))
    mixed.kept = {kind: [mixed.kept[kind][i] for i in some] for kind, some in stay.items()}
    if mixes:
        mixed.missing_values += (total // group - len(groups)) * size
        return
    if not hasattr(site.module, "has_relative_attention_bias"):  # T5's layers share biases of all heads
        names = {site.layout.heads: len(kept), **dict.fromkeys(("split_size", "all_head_size"), len(kept) * size)}
        vars(site.module).update({name: number for name, number in names.items() if hasattr(site.module, name)})


def _keep(projection: Any, features: Sequence[int], of_outputs: bool) -> None:
    """Keep some input or output features of an nn.Linear or of a Conv1D of GPT-2, whose weight is transposed."""
    linear, index = isinstance(projection, nn.Linear), torch.tensor(features, device=projection.weight.device)
    tensors = {"weight": 0 if of_outputs == linear else 1} | ({"bias": 0} if of_outputs else {})
    for name, dim in tensors.items():
        tensor = getattr(projection, name)
        if tensor is not None:
            smaller = tensor.detach().index_select(dim, index)
            setattr(projection, name, nn.Parameter(smaller, tensor.requires_grad))
    number = ("out_features" if of_outputs else "in_features") if linear else ("nf" if of_outputs else "nx")
    setattr(projection, number, len(features))
