"""Refuse a checkpoint that was trained with other attention flags, in one line.

Otherwise torch would list tensors.

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
from mixhead_plugin.parts import PARTS, PartError, Variant, build_part

logger = logging.getLogger(__name__)

# The record of an attention of fairseq's own; see `MixheadAttention.signature`.
FAIRSEQ: dict[str, Any] = {
    "synthesizer": "none",
    "attention_normalizer": "softmax",
    **dict.fromkeys(PARTS, "none"),
}


def check_checkpoint(model: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """Refuse a checkpoint whose attentions are not those of a model, with the flag that would fit.

    A checkpoint of the plugin has a record of each attention beside its tensors. One of fairseq,
    or an average of several, has none: then only tensors can contradict the model.

    Args:
        model: a model of the plugin
        state_dict: the tensors of the checkpoint, with `_metadata` where it has records

    Raises:
        CheckpointError: the first flag that differs
    """
    attentions = {name: m for name, m in model.named_modules() if isinstance(m, MultiheadAttention)}
    records = _records(attentions, state_dict)
    # One record is enough to know who wrote the checkpoint. Attentions without one were then
    # outside --attention-scope.
    written_by_plugin = any(records.values())
    if not written_by_plugin:
        _warn_of_other_scores(attentions)

    for name, attention in attentions.items():
        tensors = tensors_of(name, state_dict)
        if not tensors:  # fairseq reports missing layers
            continue
        wanted = _record_of(attention)
        if records[name]:
            found = {**FAIRSEQ, **_completed(records[name])}
        elif written_by_plugin:
            found = {**FAIRSEQ, **_told_by_sizes(tensors, attention, "none")}
        else:
            found = _told_by_tensors(tensors, attention, wanted)
        weight = tensors.get("q_proj.weight")
        if weight is not None:
            found = {"embed_dim": weight.shape[1], **found}

        in_scope = isinstance(attention, MixheadAttention)
        if written_by_plugin and not records[name]:
            in_scope = False
        _compare(model, name, found, wanted, in_scope)


def check_for_fairseqs(model: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """Refuse a checkpoint of the plugin in a model that would compute something else with it.

    The tensors of l2, of a sink of 0 or of rotary positions are those of fairseq's softmax
    attention, so torch would load them without a word.

    Args:
        model: not one of the plugin's, which have `check_checkpoint`
        state_dict: the tensors of the checkpoint, with `_metadata` where it has records

    Raises:
        CheckpointError: the first flag that the model does not have
    """
    attentions = {name: m for name, m in model.named_modules() if isinstance(m, MultiheadAttention)}
    for name, record in _records(attentions, state_dict).items():
        own = _record_of(attentions[name])
        for option in FAIRSEQ:
            value = record.get(option, own[option])
            if value != own[option]:
                raise CheckpointError(
                    f"checkpoint of another family: its {name} was trained with "
                    f"{option_name(option)} {value}, which this model does not have; use an --arch "
                    "of the plugin, such as mixhead_transformer"
                )


def _records(
    attentions: dict[str, nn.Module], state_dict: dict[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """Return what the checkpoint says of each attention beside its tensors, by its name."""
    metadata = getattr(state_dict, "_metadata", {})
    records = {}
    for name in attentions:
        record = dict(metadata.get(name, {}))
        record.pop("version", None)  # torch's, for every module
        records[name] = record
    return records


def _completed(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the entries that those of older versions lack."""
    completed = dict(record)
    if record.get("head_mixing") == "low-rank":
        completed.setdefault("mixing_rank", 2)
    if "head_dim" in record:  # not so in a gated attention unit
        # Values had the size of queries.
        completed.setdefault("value_head_dim", record["head_dim"])
    return completed


def tensors_of(name: str, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the module `name`, by their names in it."""
    prefix = f"{name}."
    return {
        key.removeprefix(prefix): value
        for key, value in state_dict.items()
        if key.startswith(prefix)
    }


def _record_of(attention: MultiheadAttention) -> dict[str, Any]:
    """Return the record that a checkpoint of this attention would have, with its sizes."""
    record = {
        **FAIRSEQ,
        "attention_heads": attention.num_heads,
        "mixed_heads": attention.num_heads,
        "relative_gain": 0,
        "embed_dim": attention.embed_dim,
        "head_dim": attention.head_dim,
        "value_head_dim": attention.head_dim,
    }
    if isinstance(attention, MixheadAttention):
        record |= attention.signature()
    return record


def _told_by_tensors(
    tensors: dict[str, Tensor], attention: MultiheadAttention, wanted: dict[str, Any]
) -> dict[str, Any]:
    """Return a record from the tensors of an attention; what they do not tell is as wanted."""
    # Also the tables of other classes, as that of the Synthesizer.
    tables: dict[str, Any] = {}
    for each in (MixheadAttention, *MixheadAttention.__subclasses__()):
        tables |= each.tables

    found: dict[str, Any] = {}
    for option, table in tables.items():
        part = tensors_of(option, tensors)
        found[option] = _value_of(option, table, part, attention, wanted[option])

    factor = tensors.get("head_mixing.left_weight")  # [2 R H, R H]
    heads = attention.num_heads
    if factor is not None and factor.shape[1] % heads == 0 and "mixing_rank" in wanted:
        found["mixing_rank"] = factor.shape[1] // heads
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
    """Return the value of an option by the tensors of its part; the wanted one if it may be.

    Args:
        option: the name of the part
        table: its row for each value of the option
        part: the tensors that the checkpoint has of it
        attention: the attention of the model
        wanted: its value of the option
    """
    if not part:
        # A part without tensors, as rotary positions, leaves nothing in a checkpoint.
        own = getattr(attention, option, None)
        return wanted if own is not None and not own.state_dict() else "none"

    # A part that contains modules has tensors such as `network.0.weight`.
    names = {name.split(".")[0] for name in part}
    values = [value for value, kind in table.items() if names <= set(kind.parameters)]
    if not values:
        return f"of {', '.join(sorted(names))}"

    shapes = {name: tensor.shape for name, tensor in part.items()}
    fitting = []
    if option in PARTS:
        fitting = [value for value in values if _shapes_of(option, value, attention) == shapes]
    # None fits if the attention in the checkpoint has other sizes, which `_told_by_sizes` tells.
    possible = fitting or values
    return wanted if wanted in possible else possible[0]


def _shapes_of(option: str, value: str, attention: MultiheadAttention) -> dict[str, torch.Size]:
    """Return the shapes of the tensors that a part would have in this attention.

    There are none if it could not be built.
    """
    try:
        head_dim = attention.head_dim
        value_head_dim = getattr(attention, "value_head_dim", head_dim)
        variant = Variant.of(
            {option: value, "head_dim": head_dim, "value_head_dim": value_head_dim}
        )
        sizes = variant.sizes(attention.num_heads, attention.embed_dim)
        with torch.device("meta"):
            part = build_part(variant.parts()[option], variant, sizes)
    except PartError:
        return {}
    assert part is not None  # the value is not `none`
    return {name: tensor.shape for name, tensor in part.state_dict().items()}


def _told_by_sizes(
    tensors: dict[str, Tensor], attention: MultiheadAttention, head_mixing: str
) -> dict[str, Any]:
    """Return the sizes that the tensors tell, if there are as many heads as in the model."""
    gain = tensors.get("relative_gain.weight")  # [H, 2 * clip + 1]
    found: dict[str, Any] = {"relative_gain": 0 if gain is None else gain.shape[1] // 2}
    query = tensors.get("q_proj.weight")
    value = tensors.get("v_proj.weight")
    if query is None or value is None:
        return found

    rows = query.shape[0]
    heads = attention.num_heads
    if rows % heads != 0:
        return {"head_dim": f"{rows}/{heads}", **found}
    found["head_dim"] = rows // heads

    # Only a matrix M [H, H'] can have another number of mixed heads than of source heads, but for
    # a mixing in groups.
    kind = PARTS["head_mixing"].get(head_mixing)
    per_mixed = 1 if kind is None else kind.heads_per_mixed
    mixed_heads = heads // per_mixed
    for name in ("head_mixing.bias", "head_mixing.weight"):
        if name in tensors and per_mixed == 1:
            mixed_heads = tensors[name].shape[1]
            break

    found["attention_heads"] = heads
    found["mixed_heads"] = mixed_heads
    if value.shape[0] % (mixed_heads * per_mixed) == 0:
        found["value_head_dim"] = value.shape[0] // (mixed_heads * per_mixed)
    return found


def _warn_of_other_scores(attentions: dict[str, nn.Module]) -> None:
    """Warn of flags that change the weights of fairseq's attention, but leave no tensor."""
    silent = set()
    for attention in attentions.values():
        if not isinstance(attention, MixheadAttention):
            continue
        variant = attention.variant
        if variant.normalizer != "softmax":
            silent.add(("attention_normalizer", variant.normalizer))
        for option, kind in variant.parts().items():
            if not kind.loads_without and not kind.parameters:
                silent.add((option, getattr(variant, option)))
    for option, value in sorted(silent):
        logger.warning(
            f"the checkpoint does not say with which {option_name(option)} it was trained; "
            f"from now on it is {value}"
        )


def _compare(
    model: nn.Module, name: str, found: dict[str, Any], wanted: dict[str, Any], in_scope: bool
) -> None:
    """Refuse the first option of an attention whose value in the checkpoint is not the wanted one.

    Args:
        model: which knows the flags of its sizes
        name: of the attention
        found: its record in the checkpoint
        wanted: its record in the model
        in_scope: whether both are in --attention-scope
    """
    for option, value in found.items():
        own = wanted.get(option)
        if value == own:
            continue
        # The checkpoint has nothing of it, and the model's part starts as if it had nothing.
        if value in (None, "none", 0) and _starts_off(option, own):
            continue
        flag = _flag_of(model, name, option)
        remedy = _remedy(option, flag, found, wanted, in_scope)
        raise CheckpointError(
            f"checkpoint of another family: its {name} was trained with {flag} {value}, {remedy}"
        )


def _starts_off(option: str, own: Any) -> bool:
    """Return whether an option of the model starts like an attention without it."""
    if own is None or option == "relative_gain":
        return True
    return option in PARTS and PARTS[option][own].loads_without


def _flag_of(model: Any, name: str, option: str) -> str:
    """Return the flag that sets an entry of a record, for the attention `name`."""
    side = "decoder" if name.startswith("decoder") else "encoder"
    if option == "embed_dim":
        return model.embed_flag.format(side=side)
    if option in ("attention_heads", "mixed_heads"):
        return model.heads_flag.format(side=side)
    return option_name(option)


def _remedy(
    option: str, flag: str, found: dict[str, Any], wanted: dict[str, Any], in_scope: bool
) -> str:
    """Return what the model has instead, and how it would fit the checkpoint."""
    value = found[option]
    own = wanted.get(option)
    if option not in wanted:  # of a later version of the plugin
        return "which this version does not know"
    if option == "synthesizer":
        arch = "transformer_lm" if value == "none" else "synthesizer_lm with this flag"
        return f"this model with {own}; use an architecture *_{arch}"
    if option in ("attention_heads", "mixed_heads"):
        theirs = f"{found['attention_heads']}:{found.get('mixed_heads', '')}"
        ours = f"{wanted['attention_heads']}:{wanted.get('mixed_heads', '')}"
        return (
            f"and {theirs} source:mixed heads, this model with {ours}; use {flag} {value}, or "
            "--heads-per-layer and --head-dim for a pruned model"
        )
    scope = "" if in_scope else ", or another --attention-scope"
    return f"this model with {own}; use {flag} {value}{scope}"
