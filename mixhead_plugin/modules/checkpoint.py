"""Refuse a checkpoint that was trained with other attention flags, in one line, before torch lists tensors.

A model's `load_state_dict` calls `check_checkpoint` first. Then fairseq calls the `upgrade_state_dict_named` of every
module, which completes what an accepted checkpoint lacks.
"""

import logging
from typing import Any, NoReturn

from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from mixhead_plugin.errors import CheckpointError, option_name
from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.parts import PARTS

logger = logging.getLogger(__name__)

# The record of an attention of fairseq, see `MixheadAttention.signature`.
FAIRSEQ: dict[str, Any] = {"attention_normalizer": "softmax", **dict.fromkeys(PARTS, "none")}


def check_checkpoint(model: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """Refuse a `state_dict` whose attentions are not those of `model`, with the flag that would fit.

    A checkpoint of the plugin has a record beside its tensors. One of fairseq, or an average of several, has none: then
    only tensors can contradict the model.
    """
    attentions = {name: m for name, m in model.named_modules() if isinstance(m, MultiheadAttention)}
    metadata = getattr(state_dict, "_metadata", {})
    records = {name: dict(metadata.get(name, {})) for name in attentions}
    for record in records.values():
        record.pop("version", None)  # torch's own
    if any(records.values()):  # attentions without a record were out of --attention-scope
        parts = dict.fromkeys(PARTS, "none")  # an older version of the plugin did not know all of them
        records = {name: {**parts, **record} if record else FAIRSEQ for name, record in records.items()}
    else:
        _warn_of_other_scores(attentions)
    known = set(FAIRSEQ).union(*(m.signature() for m in attentions.values() if isinstance(m, MixheadAttention)))
    for name, attention in attentions.items():
        tensors = {key[len(name) + 1 :]: value for key, value in state_dict.items() if key.startswith(f"{name}.")}
        if not tensors:  # fairseq reports missing layers
            continue
        _check_scores(name, tensors, attention)
        _check_embedding(model, name, tensors, attention)
        _check_record(model, name, records[name], attention, known)
        _check_parts(name, tensors, attention)
        _check_heads(name, tensors, attention)


def _refuse(name: str, problem: str) -> NoReturn:
    raise CheckpointError(f"checkpoint of another family: its {name} {problem}")


def _flag(model: nn.Module, name: str, option: str) -> str:
    """Return the flag that sets `option` of the attention `name`."""
    patterns = {"embed_dim": model.embed_flag, "attention_heads": model.heads_flag, "mixed_heads": model.heads_flag}
    return patterns.get(option, option_name(option)).format(side="decoder" if name.startswith("decoder") else "encoder")


def _children(tensors: dict[str, Tensor], module: str) -> set[str]:
    """Return the first names behind `module` in the names of tensors."""
    return {name.split(".")[1] for name in tensors if name.startswith(f"{module}.")}


def _tables() -> dict[str, Any]:
    """Return the tables of all attentions by option; each class has those that its checkpoints depend on."""
    classes = (MixheadAttention, *MixheadAttention.__subclasses__())
    return {option: table for attention in classes for option, table in attention.tables.items()}


def _flag_with_value(option: str, found: set[str]) -> str:
    """Return the flag whose value makes parameters of these names, or the names if there is none."""
    values = [value for value, kind in _tables()[option].items() if found == set(kind.parameters)]
    return f"{option_name(option)} {values[0]}" if values else f"{option}.{{{', '.join(sorted(found))}}}"


def _warn_of_other_scores(attentions: dict[str, nn.Module]) -> None:
    """Warn of flags that change the weights of fairseq's attention, but leave no tensor in a checkpoint."""
    others: dict[str, set[str]] = {}
    for attention in attentions.values():
        if isinstance(attention, MixheadAttention):
            others.setdefault("attention_normalizer", set()).update({attention.normalizer} - {"softmax"})
            for option, kind in attention.parts().items():
                if not (kind.loads_without or kind.parameters):
                    others.setdefault(option, set()).add(attention.kinds[option])
    for option, values in others.items():
        if values:
            logger.warning(
                f"the checkpoint does not say with which {option_name(option)} it was trained; from now on it is "
                + ", ".join(sorted(values))
            )


def _check_scores(name: str, tensors: dict[str, Tensor], attention: MultiheadAttention) -> None:
    """Refuse scores of queries and keys for a synthesizer, the reverse, and another synthesizer."""
    own = getattr(attention, "kinds", {}).get("synthesizer")
    found, table = _children(tensors, "synthesizer"), _tables().get("synthesizer", {})
    if found == (set() if own is None else set(table[own].parameters)):
        return
    has = "scores of queries and keys" if own is None else f"--synthesizer {own}"
    if not found:
        _refuse(name, f"has scores of queries and keys, this model {has}; use an architecture *_transformer_lm")
    flag = _flag_with_value("synthesizer", found)
    arch = "an architecture *_synthesizer_lm with " if own is None else ""
    _refuse(name, f"was trained with {flag}, this model has {has}; use {arch}{flag}")


def _check_embedding(model: nn.Module, name: str, tensors: dict[str, Tensor], attention: MultiheadAttention) -> None:
    weight = tensors.get("q_proj.weight")
    if weight is not None and weight.shape[1] != attention.embed_dim:
        flag = _flag(model, name, "embed_dim")
        _refuse(name, f"has {flag} {weight.shape[1]}, this model {attention.embed_dim}; use {flag} {weight.shape[1]}")


def _check_record(
    model: nn.Module, name: str, record: dict[str, Any], attention: MultiheadAttention, known: set[str]
) -> None:
    wanted = attention.signature() if isinstance(attention, MixheadAttention) else FAIRSEQ
    for option, value in record.items():
        if option not in known and value not in (None, "none", 0):  # of a later version of the plugin
            _refuse(name, f"was trained with {option_name(option)} {value}, which this version does not know")
    for option, value in record.items():
        if option not in wanted or value == wanted[option]:
            continue
        kind = PARTS.get(option, {}).get(wanted[option])
        if value in ("none", 0) and (option == "relative_gain" or (kind is not None and kind.loads_without)):
            continue
        flag = _flag(model, name, option)
        if option in ("attention_heads", "mixed_heads") and "mixed_heads" in record:
            found = f"{record['attention_heads']}:{record['mixed_heads']}"
            heads = f"{attention.num_heads}:{attention.num_mixed_heads}"
            remedy = f"use {flag} {value}, or --heads-per-layer and --head-dim for a pruned model"
            _refuse(name, f"has {found} source:mixed heads, this model {heads}; {remedy}")
        scope = "" if record is not FAIRSEQ and wanted is not FAIRSEQ else ", or another --attention-scope"
        _refuse(name, f"was trained with {flag} {value}, this model has {wanted[option]}; use {flag} {value}{scope}")


def _check_parts(name: str, tensors: dict[str, Tensor], attention: MultiheadAttention) -> None:
    """Refuse tensors of a part that this attention lacks, and a part that needs the tensors it does not find."""
    for option, table in PARTS.items():
        value = getattr(attention, "kinds", {}).get(option, "none")
        part, found = getattr(attention, option, None), _children(tensors, option)
        if found == set(() if part is None else part.state_dict()) or (not found and table[value].loads_without):
            continue
        if not found:
            has = f"has no {option_name(option)} {value}, which does not start as a part without effect"
            _refuse(name, f"{has}; use {option_name(option)} none, or train from the start")
        flag = _flag_with_value(option, found)
        if not isinstance(attention, MixheadAttention):
            _refuse(name, f"was trained with {flag}, which this model's --attention-scope leaves out")
        _refuse(name, f"was trained with {flag}, this model has {value}; use {flag}")


def _check_heads(name: str, tensors: dict[str, Tensor], attention: MultiheadAttention) -> None:
    weight = tensors.get("q_proj.weight")
    heads, size = attention.num_heads, attention.head_dim
    if weight is None or weight.shape[0] == heads * size:
        return
    hint = f"; use --head-dim {weight.shape[0] // heads}" if weight.shape[0] % heads == 0 else ""
    _refuse(name, f"has {weight.shape[0]} features, this model {heads} heads of --head-dim {size}{hint}")
