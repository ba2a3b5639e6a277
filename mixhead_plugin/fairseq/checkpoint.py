"""Refuse a checkpoint that was trained with other attention flags, in one line, before torch lists
tensors.

A model's `load_state_dict` calls `check_checkpoint` first. Then fairseq calls the
`upgrade_state_dict_named` of every module, which completes what an accepted checkpoint lacks.
"""

import logging
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from mixhead_plugin.errors import CheckpointError, option_name
from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.parts import PARTS, PartError, complete, sizes_of

logger = logging.getLogger(__name__)

# The record of an attention of fairseq, see `MixheadAttention.signature`.
FAIRSEQ: dict[str, Any] = {
    "synthesizer": "none",
    "attention_normalizer": "softmax",
    **dict.fromkeys(PARTS, "none"),
}


def check_checkpoint(model: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """Refuse a `state_dict` whose attentions are not those of `model`, with the flag that would
    fit.

    A checkpoint of the plugin has a record beside its tensors. One of fairseq, or an average of
    several, has none: then only tensors can contradict the model.
    """
    attentions = {name: m for name, m in model.named_modules() if isinstance(m, MultiheadAttention)}
    metadata = getattr(state_dict, "_metadata", {})
    records = {
        name: {k: v for k, v in metadata.get(name, {}).items() if k != "version"}
        for name in attentions
    }
    # then attentions without a record were out of --attention-scope
    recorded = any(records.values())
    if not recorded:
        _warn_of_other_scores(attentions)
    for name, attention in attentions.items():
        tensors = {
            key[len(name) + 1 :]: value
            for key, value in state_dict.items()
            if key.startswith(f"{name}.")
        }
        if tensors:  # fairseq reports missing layers
            wanted = _record_of(attention)
            if records[name]:
                found = {**FAIRSEQ, **records[name]}
            elif recorded:
                found = {**FAIRSEQ, **_told_by_sizes(tensors, attention, "none")}
            else:
                found = _told_by(tensors, attention, wanted)
            if (weight := tensors.get("q_proj.weight")) is not None:
                found = {"embed_dim": weight.shape[1], **found}
            in_scope = isinstance(attention, MixheadAttention) and not (
                recorded and not records[name]
            )
            _compare(model, name, found, wanted, in_scope)


def _record_of(attention: MultiheadAttention) -> dict[str, Any]:
    heads = {
        "attention_heads": attention.num_heads,
        "mixed_heads": attention.num_heads,
        "relative_gain": 0,
    }
    sizes = {"embed_dim": attention.embed_dim, "head_dim": attention.head_dim}
    own = attention.signature() if isinstance(attention, MixheadAttention) else {}
    return {**FAIRSEQ, **heads, **sizes, **own}


def _told_by(
    tensors: dict[str, Tensor], attention: MultiheadAttention, wanted: dict[str, Any]
) -> dict[str, Any]:
    """Return a record from the tensors of an attention; what they do not tell is as wanted."""
    found: dict[str, Any] = {}
    classes = (MixheadAttention, *MixheadAttention.__subclasses__())
    for option, table in {
        option: table for each in classes for option, table in each.tables.items()
    }.items():
        prefix = f"{option}."
        part = {
            name.removeprefix(prefix): value
            for name, value in tensors.items()
            if name.startswith(prefix)
        }
        found[option] = _value_of(option, table, part, attention, wanted[option])
    mixed = [name[0] for name in ("query", "key", "value") if f"feature_mixing.{name}" in tensors]
    if mixed and wanted.get("mixed_features") is not None:
        found["mixed_features"] = "".join(mixed)
    return {**found, **_told_by_sizes(tensors, attention, found["head_mixing"])}


def _value_of(
    option: str,
    table: dict[str, Any],
    part: dict[str, Tensor],
    attention: MultiheadAttention,
    wanted: str,
) -> str:
    """Return the value of an option whose part of the attention has these tensors; the wanted one
    if it may be.
    """
    if not part:
        own = getattr(attention, option, None)
        return wanted if own is not None and not own.state_dict() else "none"
    names = {name.split(".")[0] for name in part}
    values = [value for value, kind in table.items() if names <= set(kind.parameters)]
    if not values:
        return f"of {', '.join(sorted(names))}"
    shapes = {name: tensor.shape for name, tensor in part.items()}
    fitting = [
        value
        for value in values
        if option in PARTS and _shapes_of(option, value, attention) == shapes
    ]
    # None fits if the sizes of the attention are others: that is told by them.
    possible = fitting or values
    return wanted if wanted in possible else possible[0]


def _shapes_of(option: str, value: str, attention: MultiheadAttention) -> dict[str, torch.Size]:
    """Return the shapes of the tensors that a part would have in this attention; none if it could
    not be built.
    """
    variant = {"normalizer": "softmax", **dict.fromkeys(PARTS, "none"), option: value}
    try:
        sizes = sizes_of(
            complete(variant), attention.num_heads, attention.head_dim, attention.embed_dim
        )
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            built = PARTS[option][value].build(sizes)
    except PartError:
        return {}
    return {name: tensor.shape for name, tensor in built.state_dict().items()}


def _told_by_sizes(
    tensors: dict[str, Tensor], attention: MultiheadAttention, head_mixing: str
) -> dict[str, Any]:
    """Return the sizes that the tensors of an attention tell, if it has as many heads as the
    model's.
    """
    gain = tensors.get("relative_gain.weight")  # [H, 2 * clip + 1]
    found: dict[str, Any] = {"relative_gain": 0 if gain is None else gain.shape[1] // 2}
    query, value = tensors.get("q_proj.weight"), tensors.get("v_proj.weight")
    if query is None or value is None:
        return found
    rows, heads = query.shape[0], attention.num_heads
    if rows % heads:
        return {"head_dim": f"{rows}/{heads}", **found}
    found["head_dim"] = rows // heads
    kind = PARTS["head_mixing"].get(head_mixing)
    value_dim = found["head_dim"] * (1 if kind is None else kind.group)
    if value.shape[0] % value_dim == 0:
        found |= {"attention_heads": heads, "mixed_heads": value.shape[0] // value_dim}
    return found


def _warn_of_other_scores(attentions: dict[str, nn.Module]) -> None:
    """Warn of flags that change the weights of fairseq's attention, but leave no tensor in a
    checkpoint.
    """
    silent = set()
    for attention in attentions.values():
        if isinstance(attention, MixheadAttention):
            silent.add(("attention_normalizer", attention.normalizer))
            for option, kind in attention.parts().items():
                if not (kind.loads_without or kind.parameters):
                    silent.add((option, attention.kinds[option]))
    for option, value in sorted(silent - {("attention_normalizer", "softmax")}):
        known = f"the checkpoint does not say with which {option_name(option)} it was trained"
        logger.warning(f"{known}; from now on it is {value}")


def _compare(
    model: nn.Module, name: str, found: dict[str, Any], wanted: dict[str, Any], in_scope: bool
) -> None:
    """Refuse the first option of the attention `name` whose value in the checkpoint is not the
    wanted one.
    """
    side = "decoder" if name.startswith("decoder") else "encoder"
    flags = {
        "embed_dim": model.embed_flag,
        "attention_heads": model.heads_flag,
        "mixed_heads": model.heads_flag,
    }
    for option, value in found.items():
        flag = flags.get(option, option_name(option)).format(side=side)
        own = wanted.get(option)
        starts_off = (
            own is None
            or option == "relative_gain"
            or (option in PARTS and PARTS[option][own].loads_without)
        )
        if value == own or (value in (None, "none", 0) and starts_off):
            continue
        if option not in wanted:  # of a later version of the plugin
            remedy = "which this version does not know"
        elif option == "synthesizer":
            arch = "transformer_lm" if value == "none" else "synthesizer_lm with this flag"
            remedy = f"this model with {own}; use an architecture *_{arch}"
        elif option in ("attention_heads", "mixed_heads"):
            heads, others = (
                f"{r['attention_heads']}:{r.get('mixed_heads', '')}" for r in (found, wanted)
            )
            remedy = (
                f"and {heads} source:mixed heads, this model with {others}; use {flag} {value}, or "
            )
            remedy += "--heads-per-layer and --head-dim for a pruned model"
        else:
            scope = "" if in_scope else ", or another --attention-scope"
            remedy = f"this model with {own}; use {flag} {value}{scope}"
        raise CheckpointError(
            f"checkpoint of another family: its {name} was trained with {flag} {value}, {remedy}"
        )
