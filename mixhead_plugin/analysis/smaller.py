"""Writes the checkpoint of a model without some of its heads, its projections really smaller."""

import copy
import inspect
import os
import shlex
from typing import Any, Dict, Mapping

from fairseq import checkpoint_utils
from omegaconf import OmegaConf, open_dict
from torch import nn

from mixhead_plugin.analysis.attentions import attentions, by_place, where
from mixhead_plugin.analysis.loading import Loaded
from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.pruning import KeptHeads, cut_state, pruned_flags
from mixhead_plugin.options import SCOPES


def prunable(loaded: Loaded) -> Dict[str, MixheadAttention]:
    """The attentions whose heads the model's flags can number: those in --attention-scope, by name."""
    scope = SCOPES[loaded.cfg.model.attention_scope]
    return {name: attention for name, attention in attentions(loaded.model).items() if where(name).site in scope}


def write(loaded: Loaded, kept: Mapping[str, KeptHeads], file: str) -> None:
    """Save the model of `loaded` without the heads that `kept` leaves out; its optimizer's state is left out too.

    Args:
        loaded: the whole model
        kept: what stays of each attention of `prunable`, by name
        file: a checkpoint that fairseq's commands load, in the dtype of the whole one

    Raises:
        OptionError: the model's config cannot describe the smaller model
    """
    found = prunable(loaded)
    sites = {
        site: [kept[name] for _, name in sorted(layers.items())]
        for site, layers in by_place(loaded.model).items()
        if any(name in found for name in layers.values())
    }
    smaller = cut_state(loaded.model.state_dict(), found, kept)
    config = _with_flags(loaded.cfg.model, pruned_flags(found, sites))
    model = _build(loaded, config)
    # past fairseq's and the plugin's checks: the state has no record of flags that they could compare
    nn.Module.load_state_dict(model, smaller)

    state = checkpoint_utils.load_checkpoint_to_cpu(loaded.path)
    tensors = model.state_dict()  # with the record of the smaller attentions
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


def _plain(config: Any) -> Any:
    """A config as fairseq-train writes it"""
    return OmegaConf.to_container(config, resolve=True, enum_to_str=True) if OmegaConf.is_config(config) else config


def _with_flags(config: Any, flags: Dict[str, Any]) -> Any:
    """A copy of a model's config with these flags, whatever kind of config it is."""
    config = copy.deepcopy(config)
    if OmegaConf.is_config(config):
        with open_dict(config):
            for name, value in flags.items():
                config[name] = value
    else:
        vars(config).update(flags)
    return config


def _build(loaded: Loaded, config: Any) -> nn.Module:
    if getattr(config, "scale_heads", False):
        raise OptionError(f"{loaded.path}: was trained with --scale-heads, which layers of unequal heads do not have")
    further = (
        {"from_checkpoint": True} if "from_checkpoint" in inspect.signature(loaded.task.build_model).parameters else {}
    )
    try:
        return loaded.task.build_model(config, **further)
    except OptionError as error:
        raise OptionError(f"{loaded.path}: cannot be made smaller: {error}") from error


def training_flags(cut: Loaded, file: str) -> str:
    """What fairseq-train needs, behind the flags of the whole model's training, to go on from the smaller one.

    --save-dir is new: from that of the training fairseq would go on with the whole model's checkpoint_last.pt.

    Args:
        cut: the smaller model
        file: its checkpoint
    """
    model = cut.cfg.model
    flags = {
        "arch": getattr(model, "arch", None) or getattr(model, "_name", None),
        "head-mixing": model.head_mixing,
        "heads-per-layer": model.heads_per_layer,
        "head-dim": str(model.head_dim),
        "finetune-from-model": file,
        "save-dir": f"{os.path.splitext(file)[0]}-finetuned",
    }
    words = [f"--{flag} {shlex.quote(value)}" for flag, value in flags.items()]
    return " ".join(['--user-dir "$(python -m mixhead_plugin)"', *words])
