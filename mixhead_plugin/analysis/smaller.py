"""Write a checkpoint without some of the model's heads."""

import copy
import inspect
import os
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from fairseq import checkpoint_utils
from omegaconf import OmegaConf, open_dict
from torch import nn

from mixhead_plugin.analysis.attentions import attentions, by_site, where
from mixhead_plugin.analysis.loading import Loaded
from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.pruning import KeptHeads, cut_state, pruned_flags
from mixhead_plugin.options import OPTION_NAMES, SCOPES, AttentionOptions, model_name


def prunable(loaded: Loaded) -> dict[str, MixheadAttention]:
    """Return the attentions in --attention-scope by name: the model's flags describe only their heads."""
    scope = SCOPES[getattr(loaded.cfg.model, "attention_scope", "all")]
    return {name: attention for name, attention in attentions(loaded.model).items() if where(name).site in scope}


def write(loaded: Loaded, kept: Mapping[str, KeptHeads], file: str) -> None:
    """Save the model with only the heads `kept` of each attention of `prunable`, without the optimizer's state."""
    found = prunable(loaded)
    smaller = cut_state(loaded.model.state_dict(), found, kept)
    flags = pruned_flags(found, {site: [kept[name] for name in names] for site, names in by_site(found).items()})
    config = _plugin_config(loaded.cfg.model, flags)
    if getattr(config, "scale_heads", False):
        raise OptionError(f"{loaded.path}: was trained with --scale-heads, which layers of unequal heads do not have")
    # A task of another plugin may not know the argument.
    known = inspect.signature(loaded.task.build_model).parameters
    model = loaded.task.build_model(config, **({"from_checkpoint": True} if "from_checkpoint" in known else {}))
    nn.Module.load_state_dict(model, smaller)  # the model's own method would refuse other numbers of heads

    state = checkpoint_utils.load_checkpoint_to_cpu(loaded.path)
    tensors = model.state_dict()  # has the record of the smaller attentions
    for name, tensor in tensors.items():
        tensors[name] = tensor.to("cpu", state["model"][name].dtype if name in state["model"] else tensor.dtype)
    state["cfg"] = _plain(state["cfg"])
    state["cfg"]["model"] = _plain(config)
    state["args"] = None  # of an old checkpoint; `cfg` has them all
    state["model"] = tensors
    for of_the_whole_model in ("last_optimizer_state", "ema", "ema_fp32_params"):
        state.pop(of_the_whole_model, None)
        state["extra_state"].pop(of_the_whole_model, None)
    checkpoint_utils.torch_persistent_save(state, file)


def training_flags(cut: Loaded, file: str) -> str:
    """Return the flags to train `cut`, the model in `file`, further; they follow those of the whole model's training.

    --save-dir is a new folder, because in the old one fairseq would load the whole model's checkpoint_last.pt.
    """
    model, folder = cut.cfg.model, f"{os.path.splitext(file)[0]}-finetuned"
    flags = {"arch": model_name(model), "head-mixing": model.head_mixing, "heads-per-layer": model.heads_per_layer}
    flags |= {"head-dim": str(model.head_dim), "finetune-from-model": file, "save-dir": folder}
    words = [f"--{flag} {shlex.quote(value)}" for flag, value in flags.items()]
    return " ".join(['--user-dir "$(python -m mixhead_plugin)"', *words])


def _plugin_config(config: Any, flags: dict[str, Any]) -> Any:
    """Return a copy of a model's config with `flags`, for the plugin's architecture instead of fairseq's own."""
    if not hasattr(config, "attention_scope"):  # fairseq's own architecture
        defaults, arch = AttentionOptions(), f"mixhead_{model_name(config)}"
        names = {name: arch for name in ("arch", "_name") if hasattr(config, name)}
        flags = {**{name: getattr(defaults, name) for name in OPTION_NAMES}, **names, **flags}
    config = copy.deepcopy(config)
    with open_dict(config) if OmegaConf.is_config(config) else nullcontext():
        for name, value in flags.items():
            setattr(config, name, value)
    return config


def _plain(config: Any) -> Any:
    """Return a config as fairseq-train writes it."""
    return OmegaConf.to_container(config, resolve=True, enum_to_str=True) if OmegaConf.is_config(config) else config
