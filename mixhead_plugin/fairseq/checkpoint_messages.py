"""Messages about a checkpoint: a flag that differs, and flags that the checkpoint does not tell."""

import logging
from collections.abc import Iterable
from typing import Any

from fairseq.modules import MultiheadAttention
from torch import Tensor

from mixhead_plugin.errors import option_name
from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.checkpoint_from_tensors import (
    tensors_of,
    values_with_these_names,
    values_with_these_shapes,
)
from mixhead_plugin.fairseq.record import OWN_FLAGS
from mixhead_plugin.fairseq.sites import side_of_attention
from mixhead_plugin.parts import PARTS, Variant

logger = logging.getLogger(__name__)


def flag_of(model: Any, name: str, option: str) -> str:
    """Return the flag of the model that sets an entry of the record of the attention `name`."""
    side = side_of_attention(name)
    if option == "embed_dim":
        return model.embed_flag.format(side=side)
    if option in ("attention_heads", "mixed_heads"):
        return model.heads_flag.format(side=side)
    return option_name(option)


def difference(
    option: str, flag: str, saved: dict[str, Any], wanted: dict[str, Any], in_scope: bool
) -> str:
    """Return with what an attention was trained, what the model has instead, and what would fit.

    Args:
        option: the entry of the records that differs
        flag: the flag that sets this entry
        saved: the attention's record in the checkpoint
        wanted: the attention's record in the model
        in_scope: whether --attention-scope covers the attention, in the model and in the checkpoint
    """
    trained = saved[option]
    if option not in wanted:
        return (
            f"{flag} {trained}, which this version of the plugin does not know; use the version "
            "that wrote it"
        )
    own = wanted[option]
    if option in OWN_FLAGS and trained == "none":
        return f"{flag} none, this model with {own}; use {OWN_FLAGS[option].to_be_without}"
    if option in OWN_FLAGS and own == "none":
        return f"{flag} {trained}, this model with none; use {OWN_FLAGS[option].to_be_with}"
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


def without_trace(variant: Variant) -> set[tuple[str, str]]:
    """Return the flags that change what is computed, but leave no tensor, each with its value."""
    found = set()
    if variant.normalizer != "softmax":
        found.add(("attention_normalizer", variant.normalizer))
    for option, row in variant.part_kinds().items():
        if row.leaves_no_trace:
            found.add((option, getattr(variant, option)))
    return found


def warn_of_what_leaves_no_trace(flags: Iterable[tuple[str, str]]) -> None:
    """Warn that a checkpoint without records does not tell these flags; see `without_trace`."""
    for option, value in sorted(flags):
        logger.warning(
            f"the checkpoint does not say with which {option_name(option)} it was trained; "
            f"from now on it is {value}"
        )


def new_frozen_parts(saved: dict[str, Any], wanted: dict[str, Any]) -> set[tuple[str, str]]:
    """Return the frozen parts that a model has and its checkpoint has not, each with its value.

    The checkpoint loads, because the part keeps its numbers. But unlike a trained part, it cannot
    begin by doing nothing, so the outputs change.

    Args:
        saved: the record of an attention in the checkpoint
        wanted: the record of the attention in the model
    """
    found = set()
    for option, table in PARTS.items():
        own = wanted[option]
        if saved[option] == "none" and table[own].frozen:
            found.add((option, own))
    return found


def warn_of_new_frozen_parts(flags: Iterable[tuple[str, str]]) -> None:
    """Warn that a model computes something else than its checkpoint; see `new_frozen_parts`."""
    for option, value in sorted(flags):
        logger.warning(
            f"the checkpoint has no {option_name(option)}; from now on it is {value}, which "
            "changes the outputs"
        )


def warn_of_what_fits_several(
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
            same_names = values_with_these_names(table, of_part)
            values = values_with_these_shapes(option, same_names, of_part, attention)
            chosen = getattr(attention.variant, option)
            if len(values) > 1 and chosen in values:
                unclear.add((option, " or ".join(values), chosen))
    for option, either, chosen in sorted(unclear):
        logger.warning(
            f"the checkpoint does not say whether its {option_name(option)} is {either}; "
            f"from now on it is {chosen}"
        )
