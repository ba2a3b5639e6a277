"""Write the checkpoint of a changed model from that of the former one."""

import os
from collections.abc import Mapping
from typing import Any

from fairseq import checkpoint_utils
from omegaconf import OmegaConf
from torch import Tensor

from mixhead_plugin.errors import OptionError

# What belongs to the parameters of the former model: the state of the optimizer, whose parameters
# have another order, and moving averages.
_OF_PARAMETERS = ("last_optimizer_state", "ema", "ema_fp32_params")


def read(file: str, out: str) -> dict[str, Any]:
    """Return the content of a checkpoint that will be written as another file.

    Args:
        file: the checkpoint to read
        out: the file that will be written

    Raises:
        OptionError: no `file`, an `out` that exists or that cannot be written, or a checkpoint
            without its config
    """
    if not os.path.isfile(file):
        raise OptionError(f"{file}: no such file; must be a checkpoint")
    if os.path.exists(out):
        raise OptionError(f"{out}: exists; must be the name of a new file")
    folder = os.path.dirname(os.path.abspath(out))
    if not os.path.isdir(folder):
        raise OptionError(f"{out}: {folder} is no folder; must be a new file in one that exists")
    if not os.access(folder, os.W_OK):
        raise OptionError(f"{out}: {folder} cannot be written to; must be a new file elsewhere")
    state = checkpoint_utils.load_checkpoint_to_cpu(file)
    if state.get("cfg") is None:
        raise OptionError(
            f"{file}: has no config; must be a checkpoint that fairseq-train wrote, not its "
            "tensors alone"
        )
    return state


def plain(config: Any) -> Any:
    """Return a config, or a part of one, as fairseq-train writes it: dicts, lists and values."""
    if OmegaConf.is_config(config):
        return OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    return config


def write(
    state: dict[str, Any], cfg: dict[str, Any], tensors: Mapping[str, Tensor], out: str
) -> None:
    """Write a checkpoint of another model, from which a new training can begin.

    Args:
        state: the content of the former model's checkpoint; it is changed
        cfg: the plain config of the new model
        tensors: the tensors of the new model, by name
        out: the file to write
    """
    state["cfg"] = cfg
    state["args"] = None  # of an old checkpoint; `cfg` has them all
    state["model"] = tensors
    for name in _OF_PARAMETERS:
        state.pop(name, None)
        state.get("extra_state", {}).pop(name, None)
    checkpoint_utils.torch_persistent_save(state, out)
