"""Refuse a file that is damaged, or is no checkpoint of fairseq, in one line with its name.

torch and fairseq raise many kinds of errors about such files, which rarely name the file.
"""

import errno
import pickle
import re
from argparse import Namespace
from typing import Any

import torch
from fairseq import checkpoint_utils
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.repairs.checkpoint_files.code_in_config import refuse_code
from mixhead_plugin.fairseq.repairs.checkpoint_files.finite_weights import check_finite
from mixhead_plugin.fairseq.replace import replaces


@replaces(checkpoint_utils, "load_checkpoint_to_cpu")
def refuse_unreadable(
    original, path: str, arg_overrides: dict | None = None, load_on_all_ranks: bool = False
) -> dict:
    try:
        state = original(path, arg_overrides, load_on_all_ranks)
    except (OptionError, MemoryError):
        raise
    except pickle.UnpicklingError as error:
        message = (
            f"{path}: holds other than tensors and plain values, or is not a checkpoint that "
            "fairseq-train wrote; not loaded, as weights_only forbids it"
        )
        match = re.search(r"GLOBAL (\S+)", str(error))
        if match:  # torch's refusal of a class
            message += f" ({match[1]})"
        raise OptionError(message) from error
    except Exception as error:  # damaged files fail in many ways
        # The system's own errors, such as a missing file, speak for themselves. EINVAL is none:
        # torch seeks beyond the end of a file that was cut.
        by_system = getattr(error, "errno", None) not in (None, errno.EINVAL)
        by_overrides = arg_overrides and isinstance(error, (OmegaConfBaseException, TypeError))
        if by_system or by_overrides:
            raise
        raise OptionError(
            f"{path}: is damaged, or not a checkpoint that fairseq-train wrote"
        ) from error
    check_state(str(path), state)
    return state


def check_state(path: str, state: Any) -> None:
    """Refuse a checkpoint that fairseq would load, but cannot use or must not run.

    Args:
        path: the path of the file, for the message
        state: the content of the file

    Raises:
        OptionError: no tensors, no config, code in its config, or weights that are not finite
    """
    foreign = f"{path}: not a checkpoint that fairseq-train wrote"
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict) or not _has_tensors(model):
        raise OptionError(f"{foreign}: no tensors of a model")
    cfg = state.get("cfg")
    if not isinstance(cfg, (dict, DictConfig, type(None))):
        raise OptionError(f"{foreign}: no config of a model")
    for part in ("cfg", "args"):  # the second is that of an old checkpoint
        refuse_code(path, state.get(part))
    if cfg is not None and not isinstance(cfg.get("model"), (dict, DictConfig, Namespace)):
        raise OptionError(f"{foreign}: no config of a model")
    check_finite(path, model)


def _has_tensors(model: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in model.values())
