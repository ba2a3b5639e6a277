"""Write the smaller checkpoint of a model without some of its heads.

`heads.assembly` cuts the parameters; here are the config and the file.
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
from torch import Tensor, nn

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq.analysis.adapter import prunable
from mixhead_plugin.fairseq.analysis.loading import Loaded
from mixhead_plugin.fairseq.options import OPTION_NAMES, AttentionOptions, model_name
from mixhead_plugin.heads.assembly import AssemblyAttention
from mixhead_plugin.heads.attention import HeadsError
from mixhead_plugin.heads.choosing import KeptHeads
from mixhead_plugin.heads.cutting import whole_part
from mixhead_plugin.heads.sites import by_site


def refuse_uncut(attention: AssemblyAttention) -> None:
    """Refuse an attention with a part for which every head needs all heads."""
    option, why = whole_part(attention.module.variant.parts())
    if option:
        flag = f"{option_name(option)} {getattr(attention.module.variant, option)}"
        raise OptionError(
            f"{attention.name}: cannot be cut with {flag}, {why}; its heads can only be masked"
        )


def cut_parameters(attention: AssemblyAttention, kept: KeptHeads) -> dict[str, Tensor]:
    """Return the parameters and buffers of an attention with only the heads of `kept`; refuse what
    cannot be cut.
    """
    refuse_uncut(attention)
    try:
        return attention.smaller(kept)
    except HeadsError as error:
        raise OptionError(str(error)) from error


def pruned_flags(
    attentions: Sequence[AssemblyAttention], kept: Mapping[str, Sequence[KeptHeads]]
) -> dict[str, Any]:
    """Return the options that the pruned model needs beside those of the whole one; `kept` is by
    site.
    """

    def number(layer: KeptHeads) -> str:
        source, mixed = len(layer.source), len(layer.mixed)
        return str(source) if source == mixed else f"{source}:{mixed}"

    sizes = sorted({attention.module.head_dim for attention in attentions})
    if len(sizes) != 1:
        found = ", ".join(map(str, sizes))
        raise OptionError(
            f"heads of sizes {found}: cannot be cut, --head-dim names one size for all attentions"
        )
    per_layer = ";".join(f"{site}={','.join(map(number, layers))}" for site, layers in kept.items())
    return {"heads_per_layer": per_layer, "head_dim": sizes[0]}


def write(loaded: Loaded, kept: Mapping[str, KeptHeads], file: str) -> None:
    """Save the model with only the heads `kept` of each attention of `prunable`, without the
    optimizer's state.
    """
    found = prunable(loaded)
    smaller = dict(loaded.model.state_dict())
    for attention in found:
        for entry, tensor in cut_parameters(attention, kept[attention.name]).items():
            smaller[f"{attention.name}.{entry}"] = tensor
    kept_by_site = {}
    for site, names in by_site(attention.name for attention in found).items():
        kept_by_site[site] = [kept[name] for name in names]
    flags = pruned_flags(found, kept_by_site)
    config = _plugin_config(loaded.cfg.model, flags)
    if getattr(config, "scale_heads", False):
        raise OptionError(
            f"{loaded.path}: was trained with --scale-heads, which layers of unequal heads do not "
            "have"
        )
    model = loaded.task.build_model(config)
    # the model's own method would refuse other numbers of heads
    nn.Module.load_state_dict(model, smaller)

    state = checkpoint_utils.load_checkpoint_to_cpu(loaded.path)
    tensors = model.state_dict()  # has the record of the smaller attentions
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(
            "cpu", state["model"][name].dtype if name in state["model"] else tensor.dtype
        )
    state["cfg"] = _plain(state["cfg"])
    state["cfg"]["model"] = _plain(config)
    state["args"] = None  # of an old checkpoint; `cfg` has them all
    state["model"] = tensors
    for of_the_whole_model in ("last_optimizer_state", "ema", "ema_fp32_params"):
        state.pop(of_the_whole_model, None)
        state["extra_state"].pop(of_the_whole_model, None)
    checkpoint_utils.torch_persistent_save(state, file)


def training_flags(cut: Loaded, file: str, user_dir: str | None = None) -> str:
    """Return the flags to train `cut`, the model in `file`, further; they follow those of the whole
    model's training.

    `user_dir` is another plugin that the model needs; it registers this one, too, because fairseq
    takes one alone. --save-dir is a new folder, because in the old one fairseq would load the whole
    model's checkpoint_last.pt.
    """
    model, save_dir = cut.cfg.model, f"{os.path.splitext(file)[0]}-finetuned"
    flags = {
        "arch": model_name(model),
        "head-mixing": model.head_mixing,
        "heads-per-layer": model.heads_per_layer,
    }
    flags |= {"head-dim": str(model.head_dim), "finetune-from-model": file, "save-dir": save_dir}
    if getattr(model, "value_head_dim", None) is not None:
        flags["value-head-dim"] = str(model.value_head_dim)
    words = [f"--{flag} {shlex.quote(value)}" for flag, value in flags.items()]
    folder = '"$(python -m mixhead_plugin)"' if user_dir is None else shlex.quote(user_dir)
    return " ".join([f"--user-dir {folder}", *words])


def _plugin_config(config: Any, flags: dict[str, Any]) -> Any:
    """Return a copy of a model's config with `flags`, for the plugin's architecture instead of
    fairseq's own.
    """
    if not hasattr(config, "attention_scope"):  # fairseq's own architecture
        defaults, arch = AttentionOptions(), f"mixhead_{model_name(config)}"
        if arch not in ARCH_MODEL_REGISTRY:
            raise OptionError(
                f"--save: {model_name(config)} has no counterpart in the plugin, which could be "
                "smaller"
            )
        names = {name: arch for name in ("arch", "_name") if hasattr(config, name)}
        flags = {**{name: getattr(defaults, name) for name in OPTION_NAMES}, **names, **flags}
    config = copy.deepcopy(config)
    with open_dict(config) if OmegaConf.is_config(config) else nullcontext():
        for name, value in flags.items():
            setattr(config, name, value)
    return config


def _plain(config: Any) -> Any:
    """Return a config as fairseq-train writes it."""
    return (
        OmegaConf.to_container(config, resolve=True, enum_to_str=True)
        if OmegaConf.is_config(config)
        else config
    )
