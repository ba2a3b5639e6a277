"""Write the smaller checkpoint of a model without some of its heads.

`heads.assembly_attention` cuts the parameters; here are the config and the file.
"""

import copy
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from fairseq import checkpoint_utils
from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf, open_dict
from torch import nn

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq import rewriting
from mixhead_plugin.fairseq.analysis.loading import Loaded
from mixhead_plugin.fairseq.config import model_name
from mixhead_plugin.fairseq.options import FLAGS, AttentionOptions
from mixhead_plugin.heads.assembly_attention import AssemblyAttention
from mixhead_plugin.heads.choosing import KeptHeads
from mixhead_plugin.heads.cutting import whole_part
from mixhead_plugin.heads.sites import by_site


def refuse_what_cannot_be_cut(loaded: Loaded, attentions: Sequence[AssemblyAttention]) -> None:
    """Refuse a model that cannot be smaller, whichever heads go.

    It is called before the heads are weighed, because a refusal after that would cost hours.

    Args:
        loaded: the whole model
        attentions: the attentions that `prunable` returns for the model
    """
    config = loaded.cfg.model
    if getattr(config, "scale_heads", False):
        raise OptionError(
            f"{loaded.path}: was trained with --scale-heads, which layers of unequal heads do not "
            "have"
        )
    name = model_name(config)
    if _is_of_fairseq(config) and f"mixhead_{name}" not in ARCH_MODEL_REGISTRY:
        raise OptionError(
            f"--save: {name} has no counterpart in the plugin, which could be smaller"
        )
    for attention in attentions:
        _refuse_attention(attention)
    sizes = sorted({attention.module.head_dim for attention in attentions})
    if len(sizes) != 1:
        several = ", ".join(map(str, sizes))
        raise OptionError(
            f"heads of sizes {several}: cannot be cut, --head-dim names one size for all attentions"
        )


def _refuse_attention(attention: AssemblyAttention) -> None:
    """Refuse an attention whose heads need each other, or that has tensors of another class."""
    option, why = whole_part(attention.module.variant.part_kinds())
    if option:
        flag = f"{option_name(option)} {getattr(attention.module.variant, option)}"
        raise OptionError(
            f"{attention.name}: cannot be cut with {flag}, {why}; its heads can only be masked"
        )
    problem = attention.cut_problem([])  # of no head: what holds for any
    if problem:
        raise OptionError(f"{attention.name}: {problem}")


def pruned_flags(
    attentions: Sequence[AssemblyAttention], kept: Mapping[str, Sequence[KeptHeads]]
) -> dict[str, Any]:
    """Return the options that the pruned model needs beside those of the whole one.

    Args:
        attentions: the attentions of the whole model
        kept: the heads of each layer that stay, by site
    """
    sites = []  # as in 'encoder-self=8,6;cross=4:3,4'
    for site, layers in kept.items():
        numbers = [_number(layer) for layer in layers]
        sites.append(f"{site}={','.join(numbers)}")
    # `refuse_what_cannot_be_cut` has seen that all have this size.
    return {"heads_per_layer": ";".join(sites), "head_dim": attentions[0].module.head_dim}


def _number(layer: KeptHeads) -> str:
    """Return the numbers of source and mixed heads, as '8:6', or '8' for equal ones."""
    source = len(layer.source)
    mixed = len(layer.mixed)
    return str(source) if source == mixed else f"{source}:{mixed}"


def write_smaller(
    loaded: Loaded,
    attentions: Sequence[AssemblyAttention],
    kept: Mapping[str, KeptHeads],
    file: str,
) -> None:
    """Write a checkpoint with only some of the heads, without the state of the optimizer.

    Args:
        loaded: the whole model, which `refuse_what_cannot_be_cut` has let pass
        attentions: the attentions that `prunable` returns for the model
        kept: the heads of each attention that stay, by the attention's name
        file: the path of the new checkpoint
    """
    smaller = dict(loaded.model.state_dict())
    for attention in attentions:
        for entry, tensor in attention.smaller(kept[attention.name]).items():
            smaller[f"{attention.name}.{entry}"] = tensor
    kept_by_site = {}
    for site, names in by_site(attention.name for attention in attentions).items():
        kept_by_site[site] = [kept[name] for name in names]
    flags = pruned_flags(attentions, kept_by_site)
    config = _plugin_config(loaded.cfg.model, flags)
    model = loaded.task.build_model(config)
    # Not the model's own method, which would refuse other numbers of heads.
    nn.Module.load_state_dict(model, smaller)

    state = checkpoint_utils.load_checkpoint_to_cpu(loaded.path)
    tensors = model.state_dict()  # has the record of the smaller attentions
    for name, tensor in tensors.items():
        # In the dtype of the checkpoint; the model may compute in another one.
        written = state["model"].get(name, tensor)
        tensors[name] = tensor.to("cpu", written.dtype)
    cfg = rewriting.plain(state["cfg"])
    cfg["model"] = rewriting.plain(config)
    rewriting.write(state, cfg, tensors, file)


def training_flags(cut: Loaded, file: str, user_dir: str | None = None) -> str:
    """Return the flags to train a smaller model further, to follow those of the whole one.

    --save-dir is a new folder, because in the old one fairseq would load the whole model's
    checkpoint_last.pt.

    Args:
        cut: the smaller model
        file: the checkpoint of the smaller model
        user_dir: another plugin that the model needs; it registers this one, too, because fairseq
            takes one alone
    """
    model = cut.cfg.model
    flags = {
        "arch": model_name(model),
        "head-mixing": model.head_mixing,
        "heads-per-layer": model.heads_per_layer,
        "head-dim": str(model.head_dim),
        "finetune-from-model": file,
        "save-dir": f"{os.path.splitext(file)[0]}-finetuned",
    }
    if getattr(model, "value_head_dim", None) is not None:
        flags["value-head-dim"] = str(model.value_head_dim)
    folder = '"$(python -m mixhead_plugin)"' if user_dir is None else shlex.quote(user_dir)
    words = [f"--user-dir {folder}"]
    for flag, value in flags.items():
        words.append(f"--{flag} {shlex.quote(value)}")
    return " ".join(words)


def _is_of_fairseq(config: Any) -> bool:
    """Return whether a model's config is that of fairseq's own architecture."""
    return not hasattr(config, "attention_scope")


def _plugin_config(config: Any, flags: dict[str, Any]) -> Any:
    """Return a copy of a model's config with `flags`.

    fairseq's own architecture becomes that of the plugin, with the defaults of its flags.
    """
    changes: dict[str, Any] = {}
    if _is_of_fairseq(config):
        arch = f"mixhead_{model_name(config)}"
        defaults = AttentionOptions()
        for name in FLAGS:
            changes[name] = getattr(defaults, name)
        for name in ("arch", "_name"):
            if hasattr(config, name):
                changes[name] = arch
    changes |= flags

    config = copy.deepcopy(config)
    with open_dict(config) if OmegaConf.is_config(config) else nullcontext():
        for name, value in changes.items():
            setattr(config, name, value)
    return config
