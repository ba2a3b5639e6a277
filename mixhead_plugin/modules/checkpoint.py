"""Refuses a checkpoint that was trained with other attention flags, in words, before torch lists tensors."""

import logging
from typing import Any, Callable, Dict, Set

from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from mixhead_plugin.errors import CheckpointError, option_name
from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.modules.synthesizer import SYNTHESIZERS, Sizes, SynthesizerKind

logger = logging.getLogger(__name__)

Record = Dict[str, Any]  # by option, see MixheadAttention.signature

# What a checkpoint without it does not contradict, since it changes nothing before it is trained.
STARTS_AS_NOTHING: Dict[str, Callable[[Any], bool]] = {
    "head_mixing": lambda kind: True,
    "relative_position": lambda kind: kind == "t5",
    "relative_gain": lambda clip: True,
}

STOCK: Record = {"attention_normalizer": "softmax", "head_mixing": "none"}


def check_checkpoint(model: nn.Module, state_dict: Dict[str, Tensor]) -> None:
    """Compare the attentions of `model` with what `state_dict` says of its own.

    A stock checkpoint says nothing and passes: mixing that it lacks starts as the identity.

    Raises:
        OptionError: one line that names the attention, and the flag that would fit
    """
    attentions = {name: m for name, m in model.named_modules() if isinstance(m, MultiheadAttention)}
    entries = {name: _entries(state_dict, name) for name in attentions}
    metadata = getattr(state_dict, "_metadata", {})
    records = {name: {k: v for k, v in metadata.get(name, {}).items() if k != "version"} for name in attentions}
    if any(records.values()):
        # written by the plugin: what has no record was out of the scope of its flags
        records = {name: record or STOCK for name, record in records.items()}
    else:
        _warn_of_other_normalizer(attentions)
    known = set(STOCK).union(*(m.signature() for m in attentions.values() if isinstance(m, MixheadAttention)))
    for name, module in attentions.items():
        if entries[name]:  # fairseq reports a layer that is missing as a whole
            _compare_scores(name, entries[name], module)
            _compare_embedding(model, name, state_dict, module)
            _refuse_later_options(name, records[name], known)
            _compare_record(model, name, records[name], module)
            _compare_entries(name, entries[name], module)
            _compare_heads(name, state_dict, module)


def _entries(state_dict: Dict[str, Tensor], name: str) -> Set[str]:
    return {key[len(name) + 1 :] for key in state_dict if key.startswith(f"{name}.")}


def _refuse(name: str, what: str) -> None:
    raise CheckpointError(f"checkpoint of another family: its {name} {what}")


def _flag(model: nn.Module, name: str, option: str) -> str:
    """The flag that sets an option of the attention `name`"""
    patterns = {"embed_dim": model.embed_flag, "attention_heads": model.heads_flag, "mixed_heads": model.heads_flag}
    return patterns.get(option, option_name(option)).format(side="decoder" if name.startswith("decoder") else "encoder")


def _warn_of_other_normalizer(attentions: Dict[str, nn.Module]) -> None:
    others = {m.normalizer for m in attentions.values() if isinstance(m, MixheadAttention)} - {"softmax"}
    if others:
        logger.warning(
            "the checkpoint does not say with which --attention-normalizer it was trained; from now on it is "
            + ", ".join(sorted(others))
        )


def _compare_scores(name: str, entries: Set[str], module: MultiheadAttention) -> None:
    """Scores come from queries and keys, or from a synthesizer; the tensors tell, whoever has written them."""
    own = getattr(module, "synthesizer", None)
    found = {entry.partition(".")[2] for entry in entries if entry.startswith("synthesizer.")}
    if found == (set() if own is None else set(own.state_dict())):
        return
    has = "scores of queries and keys" if own is None else f"--synthesizer {module.synthesizer_kind}"
    if not found:
        _refuse(name, f"has scores of queries and keys, this model {has}; use an architecture *_transformer_lm")
    kinds = [n for n, kind in SYNTHESIZERS.items() if found == set(_example(kind).state_dict())]
    flag = f"--synthesizer {kinds[0]}" if kinds else f"synthesizer.{{{', '.join(sorted(found))}}}"
    arch = "an architecture *_synthesizer_lm with " if own is None else ""
    _refuse(name, f"was trained with {flag}, this model has {has}; use {arch}{flag}")


def _example(kind: SynthesizerKind) -> nn.Module:
    return kind.build(Sizes(1, 1, 1, 1), nn.Linear)


def _compare_embedding(model: nn.Module, name: str, state_dict: Dict[str, Tensor], module: MultiheadAttention) -> None:
    weight = state_dict.get(f"{name}.q_proj.weight")
    if weight is not None and weight.shape[1] != module.embed_dim:
        flag = _flag(model, name, "embed_dim")
        _refuse(name, f"has {flag} {weight.shape[1]}, this model {module.embed_dim}; use {flag} {weight.shape[1]}")


def _refuse_later_options(name: str, record: Record, known: Set[str]) -> None:
    """What a later version of the plugin may have, and this one would silently leave out."""
    for option in sorted(set(record) - known):
        if record[option] not in (None, "none", 0):
            _refuse(name, f"was trained with {option_name(option)} {record[option]}, which this mixhead_plugin has not")


def _compare_record(model: nn.Module, name: str, record: Record, module: MultiheadAttention) -> None:
    wanted = module.signature() if isinstance(module, MixheadAttention) else STOCK
    for option, value in record.items():
        if option not in wanted or value == wanted[option]:
            continue
        if value in ("none", 0) and STARTS_AS_NOTHING.get(option, lambda wanted: False)(wanted[option]):
            continue
        flag = _flag(model, name, option)
        if option in ("attention_heads", "mixed_heads") and "mixed_heads" in record:
            found = f"{record['attention_heads']}:{record['mixed_heads']}"
            heads = f"{module.num_heads}:{module.num_mixed_heads}"
            _refuse(
                name,
                f"has {found} source:mixed heads, this model {heads}; use {flag} {value}, or for a model whose heads "
                "were pruned its --heads-per-layer and --head-dim",
            )
        scope = "" if record is not STOCK and wanted is not STOCK else ", or another --attention-scope"
        _refuse(name, f"was trained with {flag} {value}, this model has {wanted[option]}; use {flag} {value}{scope}")


def _compare_entries(name: str, entries: Set[str], module: MultiheadAttention) -> None:
    """For a checkpoint without a record, an average of several for instance, the tensors must fit at least."""
    found = {entry.partition(".")[2] for entry in entries if entry.startswith("head_mixing.")}
    mixing = getattr(module, "head_mixing", None)
    if not found or (mixing is not None and found == set(mixing.state_dict())):
        return
    kinds = [n for n, kind in HEAD_MIXINGS.items() if kind.trained and found == set(kind.build(1, 1, 1).state_dict())]
    flag = f"--head-mixing {kinds[0]}" if kinds else f"head_mixing.{{{', '.join(sorted(found))}}}"
    if mixing is None and not isinstance(module, MixheadAttention):
        _refuse(name, f"was trained with {flag}, which this model's --attention-scope leaves out")
    has = module.signature()["head_mixing"]
    _refuse(name, f"was trained with {flag}, this model has {has}; use {flag}")


def _compare_heads(name: str, state_dict: Dict[str, Tensor], module: MultiheadAttention) -> None:
    weight = state_dict.get(f"{name}.q_proj.weight")
    heads, size = module.num_heads, module.head_dim
    if weight is None or weight.shape[0] == heads * size:
        return
    hint = f"; use --head-dim {weight.shape[0] // heads}" if weight.shape[0] % heads == 0 else ""
    _refuse(name, f"has {weight.shape[0]} features, this model {heads} heads of --head-dim {size}{hint}")
