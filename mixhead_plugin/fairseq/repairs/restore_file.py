"""Refuse a missing --restore-file, --finetune-from-model or --continue-once.

fairseq trains from random weights if the file of --restore-file or --continue-once does not exist,
or if --finetune-from-model is a folder.
"""

import os
from typing import Any

from fairseq import checkpoint_utils

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq.replace import is_command, replaces


@replaces(checkpoint_utils, "load_checkpoint")
def _load(original, cfg, trainer, **kwargs):
    # Another program may name files that it does not have, and begin anew.
    if is_command():
        suffix = getattr(trainer, "checkpoint_suffix", None) or ""
        _refuse_missing_files(cfg, suffix)
    return original(cfg, trainer, **kwargs)


def _refuse_missing_files(cfg: Any, suffix: str) -> None:
    """Refuse to begin from random weights where a flag names a checkpoint.

    Args:
        cfg: the flags for checkpoints
        suffix: the suffix of the checkpoints of one shard, or ""
    """
    last = os.path.join(cfg.save_dir, f"checkpoint_last{suffix}.pt")
    _refuse_if_missing("restore_file", cfg.restore_file, last, suffix)
    # fairseq ignores the other flags where it can continue from this file
    if not os.path.isfile(last):
        for option in ("finetune_from_model", "continue_once"):
            _refuse_if_missing(option, getattr(cfg, option, None), last, suffix)
        if os.path.lexists(last):
            raise OptionError(
                f"{last}: is a folder or a link to nothing; must be a checkpoint, or must not exist"
            )


def _refuse_if_missing(option: str, path: str | None, last: str, suffix: str) -> None:
    """Refuse a file that a flag names, unless it exists.

    Args:
        option: the flag, with underscores
        path: the value of the flag; None if it was not given
        last: the path of this training's own checkpoint_last.pt
        suffix: the suffix of the checkpoints of one shard, or ""
    """
    if path is None:
        return
    # The default of --restore-file: the last checkpoint in --save-dir, if there is one.
    if path == "checkpoint_last.pt":
        return
    # An address, which fairseq opens by iopath.
    if "://" in path:
        return
    # A job that restarts itself names the last checkpoint, which its first start does not have.
    if os.path.abspath(path) == os.path.abspath(last):
        return
    of_this_shard = path.replace(".pt", f"{suffix}.pt")  # as fairseq names it
    if not os.path.isfile(path) and not os.path.isfile(of_this_shard):
        raise OptionError(f"{option_name(option)} {path}: no such file; must be a checkpoint")
