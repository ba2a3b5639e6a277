"""Refuse a checkpoint that was trained with other attention flags, in one line.

Without this, torch would refuse it with a list of tensors.

A model's `load_state_dict` calls `check_checkpoint` first. Then fairseq calls the
`upgrade_state_dict_named` of every module, which completes what an accepted checkpoint lacks.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from mixhead_plugin.errors import CheckpointError, option_name
from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.sites import side_of_attention
from mixhead_plugin.parts import PARTS, PartError, Variant, build_part

logger = logging.getLogger(__name__)

# The record of an attention of fairseq's own; see `MixheadAttention.signature`.
RECORD_OF_FAIRSEQ: dict[str, Any] = {
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
    attentions = _attentions(model)
    records = _records(attentions, state_dict)
    # One record is enough to know who wrote the checkpoint.
    written_by_plugin = any(records.values())
    if not written_by_plugin:
        _warn_of_what_leaves_no_trace(attentions)
        _warn_of_what_fits_several(attentions, state_dict)

    for name, attention in attentions.items():
        tensors = tensors_of(name, state_dict)
        if not tensors:  # fairseq reports missing layers
            continue
        record = records[name]
        wanted = _record_of(attention)
        saved = _record_in_checkpoint(name, tensors, attention, wanted, record, written_by_plugin)

        was_in_scope = bool(record) or not written_by_plugin
        is_in_scope = isinstance(attention, MixheadAttention)
        _compare(model, name, saved, wanted, was_in_scope and is_in_scope)
        _check_rows(model, name, tensors, attention)


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
    attentions = _attentions(model)
    for name, record in _records(attentions, state_dict).items():
        own = _record_of(attentions[name])
        for option in RECORD_OF_FAIRSEQ:
            value = record.get(option, own[option])
            if value != own[option]:
                raise CheckpointError(
                    f"checkpoint does not fit: its {name} was trained with "
                    f"{option_name(option)} {value}, which this model does not have; use an --arch "
                    "of the plugin, such as mixhead_transformer"
                )


def _attentions(model: nn.Module) -> dict[str, MultiheadAttention]:
    """Return the attentions of a model by name, fairseq's own and the plugin's."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MultiheadAttention)
    }


def _records(names: Iterable[str], state_dict: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return what the checkpoint says of each attention beside its tensors, by its name."""
    metadata = getattr(state_dict, "_metadata", {})
    records = {}
    for name in names:
        record = dict(metadata.get(name, {}))
        record.pop("version", None)  # torch's, for every module
        records[name] = record
    return records


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
        name: of the attention
        tensors: those of the checkpoint
        attention: that of the model
        wanted: its record
        record: what the checkpoint has beside the tensors; may be empty
        written_by_plugin: whether it has a record of another attention at least
    """
    if record:
        saved = {**RECORD_OF_FAIRSEQ, **_completed(record)}
    elif written_by_plugin:
        # The attention was outside --attention-scope, so it was fairseq's own.
        saved = {**RECORD_OF_FAIRSEQ, **_told_by_sizes(tensors, attention, "none")}
    else:
        saved = _told_by_tensors(name, tensors, attention, wanted)

    weight = tensors.get("q_proj.weight")
    if weight is None:  # some synthesizers have no queries
        return saved
    # In front, because the first difference is reported, and other sizes follow from this one.
    return {"embed_dim": weight.shape[1], **saved}


def _completed(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the entries that those of older versions lack."""
    completed = dict(record)
    if record.get("head_mixing") == "low-rank":
        # Before --mixing-rank, R was always 2.
        completed.setdefault("mixing_rank", 2)
    if "head_dim" in record:  # not so in a gated attention unit
        # Before --value-head-dim, values had the size of queries.
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
        **RECORD_OF_FAIRSEQ,
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
    name: str, tensors: dict[str, Tensor], attention: MultiheadAttention, wanted: dict[str, Any]
) -> dict[str, Any]:
    """Return a record from the tensors of an attention alone.

    For what they do not tell, the value of the model is taken, so that no difference is seen.

    Args:
        name: of the attention
        tensors: those of the checkpoint
        attention: that of the model
        wanted: its record

    Raises:
        CheckpointError: tensors of a part that this version does not have
    """
    # The Synthesizer alone adds a table. Its module is imported with all architectures.
    tables: dict[str, Any] = {}
    for each in (MixheadAttention, *MixheadAttention.__subclasses__()):
        tables |= each.tables

    record: dict[str, Any] = {}
    for option, table in tables.items():
        of_part = tensors_of(option, tensors)
        values = _values_with(table, of_part)
        if not values:
            raise CheckpointError(
                f"checkpoint does not fit: its {name}.{option} has the tensors "
                f"{', '.join(sorted(of_part))}, as no {option_name(option)} of this version; must "
                "be a checkpoint of this version"
            )
        record[option] = _most_likely(option, values, of_part, attention, wanted[option])

    heads = attention.num_heads
    factor = tensors.get("head_mixing.left_weight")  # [2 R H, R H]
    if factor is not None and "mixing_rank" in wanted and factor.shape[1] % heads == 0:
        record["mixing_rank"] = factor.shape[1] // heads
    if "mixed_features" in wanted:
        features = ("query", "key", "value")
        mixed = [each for each in features if f"feature_mixing.{each}" in tensors]
        if mixed:
            record["mixed_features"] = "".join(each[0] for each in mixed)  # letters of "qkv"
    return {**record, **_told_by_sizes(tensors, attention, record["head_mixing"])}


def _values_with(table: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """Return the values of an option whose parts have parameters of these names."""
    if not tensors:
        # Rotary positions, for example, leave nothing in a checkpoint.
        unseen = [value for value, row in table.items() if not row.parameters]
        return list(dict.fromkeys(["none", *unseen]))  # the Synthesizer's table has no `none`
    # A part that contains modules has tensors such as `network.0.weight`.
    names = {name.split(".")[0] for name in tensors}
    return [value for value, row in table.items() if names <= set(row.parameters)]


def _most_likely(
    option: str,
    values: list[str],
    tensors: dict[str, Tensor],
    attention: MultiheadAttention,
    wanted: str,
) -> str:
    """Return that of several values of an option which the tensors of its part fit best.

    Args:
        option: the name of the part
        values: those whose parts have tensors of these names
        tensors: those of the part in the checkpoint
        attention: that of the model
        wanted: its value of the option, which is returned if it fits as well as others
    """
    fitting = _with_shapes(option, values, tensors, attention)
    # None fits if the attention in the checkpoint has other sizes, which `_told_by_sizes` tells.
    likely = fitting or values
    return wanted if wanted in likely else likely[0]


def _with_shapes(
    option: str, values: list[str], tensors: dict[str, Tensor], attention: MultiheadAttention
) -> list[str]:
    """Return those of several values of an option whose part has tensors of these shapes."""
    if option not in PARTS or not tensors:
        return []
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return [value for value in values if _shapes_of(option, value, attention) == shapes]


def _shapes_of(option: str, value: str, attention: MultiheadAttention) -> dict[str, torch.Size]:
    """Return the shapes of the tensors that a part would have in this attention.

    There are none if it could not be built.
    """
    head_dim = attention.head_dim
    value_head_dim = getattr(attention, "value_head_dim", head_dim)
    try:
        variant = Variant.of(
            {option: value, "head_dim": head_dim, "value_head_dim": value_head_dim}
        )
        sizes = variant.sizes(attention.num_heads, attention.embed_dim)
        with torch.device("meta"):
            part = build_part(variant.part_kinds()[option], variant, sizes)
    except PartError:
        return {}
    assert part is not None  # the value is not `none`
    return {name: tensor.shape for name, tensor in part.state_dict().items()}


def _told_by_sizes(
    tensors: dict[str, Tensor], attention: MultiheadAttention, head_mixing: str
) -> dict[str, Any]:
    """Return the sizes that the tensors tell, if there are as many heads as in the model.

    Args:
        tensors: those of the attention in the checkpoint
        attention: that of the model
        head_mixing: the value of --head-mixing in the checkpoint
    """
    gain = tensors.get("relative_gain.weight")  # [H, 2 * clip + 1]
    sizes: dict[str, Any] = {"relative_gain": 0 if gain is None else gain.shape[1] // 2}
    query = tensors.get("q_proj.weight")  # [H * D, C]
    value = tensors.get("v_proj.weight")  # [H' * Dv, C]
    if query is None or value is None:
        return sizes
    heads = attention.num_heads
    if query.shape[0] % heads != 0:
        return sizes  # `_check_rows` refuses it, if nothing else differs

    # With differential mixing, H' is H / 2. Else it differs from H only where pruning has cut
    # columns of M [H, H']: the `bias` of Mixhead B, else the `weight`.
    heads_per_mixed = PARTS["head_mixing"][head_mixing].heads_per_mixed
    mixed_heads = heads // heads_per_mixed
    if heads_per_mixed == 1:
        for name in ("head_mixing.bias", "head_mixing.weight"):
            if name in tensors:
                mixed_heads = tensors[name].shape[1]
                break

    sizes["head_dim"] = query.shape[0] // heads
    sizes["attention_heads"] = heads
    sizes["mixed_heads"] = mixed_heads
    values = mixed_heads * heads_per_mixed  # heads of values of size value_head_dim
    if value.shape[0] % values == 0:
        sizes["value_head_dim"] = value.shape[0] // values
    return sizes


def _check_rows(
    model: Any, name: str, tensors: dict[str, Tensor], attention: MultiheadAttention
) -> None:
    """Refuse rows of projections that the model's heads cannot share, whatever their size is."""
    weight = tensors.get("q_proj.weight")
    if weight is None or weight.shape[0] % attention.num_heads == 0:
        return
    flag = _flag_of(model, name, "attention_heads")
    raise CheckpointError(
        f"checkpoint does not fit: its {name}.q_proj has {weight.shape[0]} rows, no multiple of "
        f"{flag} {attention.num_heads}; use {flag} or --heads-per-layer with numbers that divide "
        "them"
    )


def _warn_of_what_leaves_no_trace(attentions: dict[str, MultiheadAttention]) -> None:
    """Warn of flags that change what attentions compute, but leave no tensor in a checkpoint."""
    unseen = set()
    for attention in attentions.values():
        if not isinstance(attention, MixheadAttention):
            continue
        variant = attention.variant
        if variant.normalizer != "softmax":
            unseen.add(("attention_normalizer", variant.normalizer))
        for option, row in variant.part_kinds().items():
            if row.leaves_no_trace:
                unseen.add((option, getattr(variant, option)))
    for option, value in sorted(unseen):
        logger.warning(
            f"the checkpoint does not say with which {option_name(option)} it was trained; "
            f"from now on it is {value}"
        )


def _warn_of_what_fits_several(
    attentions: dict[str, MultiheadAttention], state_dict: dict[str, Tensor]
) -> None:
    """Warn of flags with several values that have the tensors of a checkpoint.

    With as many heads as a head has features, feature mixing by `heads` and `shared` is such a
    pair.
    """
    unclear = set()
    for name, attention in attentions.items():
        if not isinstance(attention, MixheadAttention):
            continue
        tensors = tensors_of(name, state_dict)
        for option, table in PARTS.items():
            of_part = tensors_of(option, tensors)
            values = _with_shapes(option, _values_with(table, of_part), of_part, attention)
            chosen = getattr(attention.variant, option)
            if len(values) > 1 and chosen in values:
                unclear.add((option, " or ".join(values), chosen))
    for option, either, chosen in sorted(unclear):
        logger.warning(
            f"the checkpoint does not say whether its {option_name(option)} is {either}; "
            f"from now on it is {chosen}"
        )


def _compare(
    model: nn.Module, name: str, saved: dict[str, Any], wanted: dict[str, Any], in_scope: bool
) -> None:
    """Refuse the first entry of a record that is not the wanted one.

    Args:
        model: has `embed_flag` and `heads_flag`, see `FamilyModel`
        name: of the attention
        saved: its record in the checkpoint
        wanted: its record in the model
        in_scope: whether both are in --attention-scope
    """
    for option, value in saved.items():
        own = wanted.get(option)
        if value == own:
            continue
        absent = value in (None, "none", 0)
        if absent and _starts_as_if_absent(option, own):
            continue
        flag = _flag_of(model, name, option)
        difference = _difference(option, flag, saved, wanted, in_scope)
        raise CheckpointError(f"checkpoint does not fit: its {name} was trained with {difference}")


def _starts_as_if_absent(option: str, own: Any) -> bool:
    """Return whether an attention with this value starts as one without it."""
    if own is None or option == "relative_gain":
        return True
    return option in PARTS and PARTS[option][own].loads_without


def _flag_of(model: Any, name: str, option: str) -> str:
    """Return the flag of the model that sets an entry of the record of the attention `name`."""
    side = side_of_attention(name)
    if option == "embed_dim":
        return model.embed_flag.format(side=side)
    if option in ("attention_heads", "mixed_heads"):
        return model.heads_flag.format(side=side)
    return option_name(option)


def _difference(
    option: str, flag: str, saved: dict[str, Any], wanted: dict[str, Any], in_scope: bool
) -> str:
    """Return with what an attention was trained, what the model has instead, and what would fit.

    Args:
        option: the entry of the records that differs
        flag: the flag that sets it
        saved: the record in the checkpoint
        wanted: the record in the model
        in_scope: whether both are in --attention-scope
    """
    trained = saved[option]
    if option not in wanted:
        return (
            f"{flag} {trained}, which this version of the plugin does not know; use the version "
            "that wrote it"
        )
    own = wanted[option]
    if option == "synthesizer" and trained == "none":
        return f"{flag} none, this model with {own}; use an architecture *_transformer_lm"
    if option == "synthesizer" and own == "none":
        return (
            f"{flag} {trained}, this model with none; use an architecture *_synthesizer_lm with "
            "this flag"
        )
    if option == "mixed_heads":
        heads = saved.get("attention_heads", wanted["attention_heads"])
        return (
            f"{trained} mixed heads, this model with {own}; use --heads-per-layer with "
            f"{heads}:{trained} for this layer, and --head-dim"
        )
    if option == "attention_heads":
        return (
            f"{flag} {trained}, this model with {own}; use {flag} {trained}, or --heads-per-layer "
            "and --head-dim for a pruned model"
        )
    other_scope = "" if in_scope else ", or another --attention-scope"
    return f"{flag} {trained}, this model with {own}; use {flag} {trained}{other_scope}"
