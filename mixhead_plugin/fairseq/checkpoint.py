"""Refuse a checkpoint that was trained with other attention flags, in one line.

Without this, torch would refuse it with a list of tensors.

A model's `load_state_dict` calls `check_checkpoint` first. Then fairseq calls the
`upgrade_state_dict_named` of every module, which completes what an accepted checkpoint lacks.

Beside it, `checkpoint_from_tensors.py` reads the flags of a checkpoint that has no records from its
tensors, and `checkpoint_messages.py` says what does not fit.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from fairseq.checkpoint_utils import prune_state_dict
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from mixhead_plugin.errors import CheckpointError, option_name
from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.checkpoint_from_tensors import (
    record_from_tensors,
    sizes_from_tensors,
    tensors_of,
)
from mixhead_plugin.fairseq.checkpoint_messages import (
    difference,
    flag_of,
    new_frozen_parts,
    warn_of_new_frozen_parts,
    warn_of_what_fits_several,
    warn_of_what_leaves_no_trace,
    without_trace,
)
from mixhead_plugin.fairseq.record import OWN_FLAGS
from mixhead_plugin.parts import PARTS


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
    attentions = _attentions(model)
    records = records_in_metadata(attentions, state_dict)
    # One record is enough to know who wrote the checkpoint.
    written_by_plugin = any(records.values())
    if not written_by_plugin:
        flags = set()
        for attention in attentions.values():
            if isinstance(attention, MixheadAttention):
                flags |= without_trace(attention.variant)
        warn_of_what_leaves_no_trace(flags)
        warn_of_what_fits_several(attentions, state_dict)

    frozen = set()
    for name, attention in attentions.items():
        tensors = tensors_of(name, state_dict)
        if not tensors:  # fairseq reports missing layers
            continue
        record = records[name]
        wanted = _record_of_module(attention)
        saved = _record_in_checkpoint(name, tensors, attention, wanted, record, written_by_plugin)

        was_in_scope = bool(record) or not written_by_plugin
        is_in_scope = isinstance(attention, MixheadAttention)
        compare(model, name, saved, wanted, was_in_scope and is_in_scope)
        _check_rows(model, name, tensors, attention)
        frozen |= new_frozen_parts(saved, wanted)
    warn_of_new_frozen_parts(frozen)


def pruned(state_dict: dict[str, Tensor], model_cfg: Any) -> dict[str, Tensor]:
    """Return a checkpoint with the layers that --encoder/decoder-layers-to-keep choose.

    fairseq leaves the others out and counts anew, but only after it has asked the modules what the
    checkpoint lacks. They know the new numbers alone, and so do the checks here.

    Args:
        state_dict: the tensors of the checkpoint, with `_metadata` where it has records
        model_cfg: the flags of the model, where fairseq then sets both flags to None; may be None
    """
    metadata = getattr(state_dict, "_metadata", None)
    flags = copy.copy(model_cfg)
    chosen = prune_state_dict(state_dict, model_cfg)
    if chosen is state_dict or metadata is None:
        return chosen
    with_records: Any = OrderedDict(chosen)
    with_records._metadata = prune_state_dict(metadata, flags)
    return with_records


def check_for_fairseq_model(model: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """Refuse a checkpoint of the plugin in a model that would compute something else with it.

    The tensors of l2, of a sink of 0 or of rotary positions are those of fairseq's softmax
    attention, so torch would load them without a word.

    Args:
        model: a model of fairseq, or of another plugin; those of this one have `check_checkpoint`
        state_dict: the tensors of the checkpoint, with `_metadata` where it has records

    Raises:
        CheckpointError: the first flag that the model does not have
    """
    attentions = _attentions(model)
    for name, record in records_in_metadata(attentions, state_dict).items():
        own = _record_of_module(attentions[name])
        for option in record_of_fairseq():
            value = record.get(option, own[option])
            if value != own[option]:
                raise CheckpointError(
                    f"checkpoint does not fit: its {name} was trained with "
                    f"{option_name(option)} {value}, which this model does not have; use an --arch "
                    "of the plugin, as its training did"
                )


def record_of_fairseq() -> dict[str, Any]:
    """Return the record of an attention of fairseq's own; see `MixheadAttention.record`."""
    return {
        **dict.fromkeys(OWN_FLAGS, "none"),
        "attention_normalizer": "softmax",
        **dict.fromkeys(PARTS, "none"),
    }


def _attentions(model: nn.Module) -> dict[str, MultiheadAttention]:
    """Return the attentions of a model by name, fairseq's own and the plugin's."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MultiheadAttention)
    }


def records_in_metadata(
    names: Iterable[str], state_dict: dict[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """Return what the checkpoint says of each attention or unit beside its tensors, by its name.

    Args:
        names: their names in the model
        state_dict: the tensors of the checkpoint, with `_metadata` where it has records
    """
    metadata = getattr(state_dict, "_metadata", {})
    records = {}
    for name in names:
        record = dict(metadata.get(name, {}))
        record.pop("version", None)  # torch's, for every module
        records[name] = record
    return records


def _record_of_module(attention: MultiheadAttention) -> dict[str, Any]:
    """Return the record that a checkpoint of this attention would have, with its sizes."""
    record = {
        **record_of_fairseq(),
        "attention_heads": attention.num_heads,
        "mixed_heads": attention.num_heads,
        "relative_gain": 0,
        "embed_dim": attention.embed_dim,
        "head_dim": attention.head_dim,
        "value_head_dim": attention.head_dim,
    }
    if isinstance(attention, MixheadAttention):
        record |= attention.record()
    return record


def _record_in_checkpoint(
    name: str,
    tensors: dict[str, Tensor],
    attention: MultiheadAttention,
    wanted: dict[str, Any],
    record: dict[str, Any],
    written_by_plugin: bool,
) -> dict[str, Any]:
    """Return the record of an attention in a checkpoint, from the best source that there is.

    Args:
        name: the attention's name in the model, such as decoder.layers.0.self_attn
        tensors: the attention's tensors in the checkpoint, by their names in it
        attention: the module of the model that will load them
        wanted: the record of this module
        record: what the checkpoint has beside the tensors; may be empty
        written_by_plugin: whether the checkpoint has a record of any attention
    """
    if record:
        saved = {**record_of_fairseq(), **_with_defaults_of_old_versions(record)}
    elif written_by_plugin:
        # The attention was outside --attention-scope, so it was fairseq's own.
        saved = {**record_of_fairseq(), **sizes_from_tensors(tensors, attention, "none")}
    else:
        saved = record_from_tensors(name, tensors, attention, wanted)

    weight = tensors.get("q_proj.weight")
    if weight is None:  # some synthesizers have no queries
        return saved
    # In front, because the first difference is reported, and other sizes follow from this one.
    return {"embed_dim": weight.shape[1], **saved}


def _with_defaults_of_old_versions(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the entries that those of older versions lack."""
    completed = dict(record)
    if record.get("head_mixing") == "low-rank":
        # Before --mixing-rank, R was always 2.
        completed.setdefault("mixing_rank", 2)
    if "head_dim" in record:  # not so in a gated attention unit
        # Before --value-head-dim, values had the size of queries.
        completed.setdefault("value_head_dim", record["head_dim"])
    return completed


def compare(
    model: nn.Module, name: str, saved: dict[str, Any], wanted: dict[str, Any], in_scope: bool
) -> None:
    """Refuse the first entry of a record that is not the wanted one.

    Args:
        model: a `FamilyModel`, whose `embed_flag` and `heads_flag` the message names
        name: the name in the model of an attention, such as decoder.layers.0.self_attn, or of a
            gated attention unit
        saved: its record in the checkpoint
        wanted: its record in the model
        in_scope: whether --attention-scope covers it, in the model and in the checkpoint

    Raises:
        CheckpointError: with the flag that would fit
    """
    for option, value in saved.items():
        own = wanted.get(option)
        if value == own:
            continue
        absent = value in (None, "none", 0)
        if absent and _loads_without(option, own):
            continue
        flag = flag_of(model, name, option)
        problem = difference(option, flag, saved, wanted, in_scope)
        raise CheckpointError(f"checkpoint does not fit: its {name} was trained with {problem}")


def _loads_without(option: str, own: Any) -> bool:
    """Return whether a checkpoint without a part loads into an attention with it.

    Args:
        option: the part, as an entry of a record
        own: its value in the model
    """
    if own is None:  # the model has no such option
        return True
    if option == "relative_gain":  # all gains start at 1
        return True
    return option in PARTS and PARTS[option][own].loads_without


def _check_rows(
    model: Any, name: str, tensors: dict[str, Tensor], attention: MultiheadAttention
) -> None:
    """Refuse rows of projections that the model's heads cannot share, whatever their size is."""
    weight = tensors.get("q_proj.weight")
    if weight is None or weight.shape[0] % attention.num_heads == 0:
        return
    flag = flag_of(model, name, "attention_heads")
    raise CheckpointError(
        f"checkpoint does not fit: its {name}.q_proj has {weight.shape[0]} rows, no multiple of "
        f"{flag} {attention.num_heads}; use {flag} or --heads-per-layer with numbers that divide "
        "them"
    )
