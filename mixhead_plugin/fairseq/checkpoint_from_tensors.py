"""Tell from the tensors of an attention with which flags it was trained.

A checkpoint of fairseq, or an average of several, has no records beside its tensors. Then the names
of tensors tell which parts there are, and their shapes tell the sizes.
"""

from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor

from mixhead_plugin.errors import CheckpointError, option_name
from mixhead_plugin.fairseq.record import OWN_FLAGS
from mixhead_plugin.parts import PARTS, PartError, Variant, build_part


def tensors_of(name: str, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the module `name`, by their names in it."""
    prefix = f"{name}."
    return {
        key.removeprefix(prefix): value
        for key, value in state_dict.items()
        if key.startswith(prefix)
    }


def record_from_tensors(
    name: str, tensors: dict[str, Tensor], attention: MultiheadAttention, wanted: dict[str, Any]
) -> dict[str, Any]:
    """Return a record from the tensors of an attention alone.

    For what they do not tell, the value of the model is taken, so that no difference is seen.

    Args:
        name: the attention's name in the model, such as decoder.layers.0.self_attn
        tensors: the attention's tensors in the checkpoint, by their names in it
        attention: the module of the model that will load them
        wanted: the record of this module

    Raises:
        CheckpointError: tensors of a part that this version does not have
    """
    record: dict[str, Any] = {}
    tables: dict[str, Any] = dict(PARTS)
    for option, own_flag in OWN_FLAGS.items():
        tables[option] = own_flag.table
    for option, table in tables.items():
        of_part = tensors_of(option, tensors)
        values = possible_values(name, option, table, of_part)
        record[option] = best_value(option, values, of_part, attention, wanted[option])

    heads = attention.num_heads
    factor = tensors.get("head_mixing.left_weight")  # [2 R H, R H]
    if factor is not None and "mixing_rank" in wanted and factor.shape[1] % heads == 0:
        record["mixing_rank"] = factor.shape[1] // heads
    if "mixed_features" in wanted:
        features = ("query", "key", "value")
        mixed = [each for each in features if f"feature_mixing.{each}" in tensors]
        if mixed:
            record["mixed_features"] = "".join(each[0] for each in mixed)  # letters of "qkv"
    return {**record, **sizes_from_tensors(tensors, attention, record["head_mixing"])}


def possible_values(
    name: str, option: str, table: dict[str, Any], tensors: dict[str, Tensor]
) -> list[str]:
    """Return the values of an option whose parts have tensors of these names; at least one.

    Args:
        name: the name in the model of the attention or unit
        option: the name of the part, such as head_mixing
        table: the rows of the option, by its values
        tensors: the part's tensors in the checkpoint, by their names in it

    Raises:
        CheckpointError: tensors of a part that this version does not have
    """
    values = values_with_these_names(table, tensors)
    if not values:
        raise CheckpointError(
            f"checkpoint does not fit: its {name}.{option} has the tensors "
            f"{', '.join(sorted(tensors))}, as no {option_name(option)} of this version; must be a "
            "checkpoint of this version"
        )
    return values


def values_with_these_names(table: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """Return the values of an option whose parts have parameters of these names.

    Args:
        table: the rows of the option, by its values
        tensors: the part's tensors in the checkpoint, by their names in it
    """
    if not tensors:
        # Rotary positions, for example, leave nothing in a checkpoint.
        unseen = [value for value, row in table.items() if not row.parameters]
        return list(dict.fromkeys(["none", *unseen]))  # the table of an own flag has no `none`
    # A part that contains modules has tensors such as `network.0.weight`.
    names = {name.split(".")[0] for name in tensors}
    return [value for value, row in table.items() if names <= set(row.parameters)]


def best_value(
    option: str,
    values: list[str],
    tensors: dict[str, Tensor],
    attention: MultiheadAttention,
    wanted: str,
) -> str:
    """Return that of several values of an option which the tensors of its part fit best.

    Args:
        option: the name of the part, such as head_mixing
        values: the values of the option whose parts have tensors of these names
        tensors: the part's tensors in the checkpoint, by their names in it
        attention: the module of the model that will load them
        wanted: the value that this module has, which is returned if it fits as well as others
    """
    fitting = values_with_these_shapes(option, values, tensors, attention)
    # None fits if the attention in the checkpoint has other sizes: `sizes_from_tensors` tells them.
    likely = fitting or values
    return wanted if wanted in likely else likely[0]


def values_with_these_shapes(
    option: str, values: list[str], tensors: dict[str, Tensor], attention: MultiheadAttention
) -> list[str]:
    """Return those of several values of an option whose part has tensors of these shapes.

    Args:
        option: the name of the part, such as head_mixing
        values: the values of the option to choose from
        tensors: the part's tensors in the checkpoint, by their names in it
        attention: the module of the model that will load them
    """
    if option not in PARTS or not tensors:
        return []
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return [value for value in values if _shapes_of_part(option, value, attention) == shapes]


def _shapes_of_part(
    option: str, value: str, attention: MultiheadAttention
) -> dict[str, torch.Size]:
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


def sizes_from_tensors(
    tensors: dict[str, Tensor], attention: MultiheadAttention, head_mixing: str
) -> dict[str, Any]:
    """Return the sizes that the tensors tell, if there are as many heads as in the model.

    Args:
        tensors: the attention's tensors in the checkpoint, by their names in it
        attention: the module of the model that will load them
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
        return sizes  # `check_checkpoint` refuses it, if nothing else differs

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
