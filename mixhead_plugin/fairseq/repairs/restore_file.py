"""Refuse a missing --restore-file, --finetune-from-model or --continue-once.

fairseq trains from random weights if the file of --restore-file or --continue-once does not exist,
or if --finetune-from-model is a folder.
"""

import os

from fairseq import checkpoint_utils

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq.replace import is_command, replaces


@replaces(checkpoint_utils, "load_checkpoint")
def _load(original, cfg, trainer, **kwargs):
    suffix = getattr(trainer, "checkpoint_suffix", None) or ""
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
    return original(cfg, trainer, **kwargs)


def _refuse_if_missing(option: str, path: str | None, last: str, suffix: str) -> None:
    """Refuse a file that a flag names, unless it exists.

    Args:
        option: the flag, with underscores
        path: its value; None, the default and addresses are not checked
        last: the path of this training's own checkpoint_last.pt
        suffix: of the checkpoints of one shard, or ""
    """
    if path is None or path == "checkpoint_last.pt" or "://" in path or not is_command():
        return
    # A job that restarts itself names the last checkpoint, which its first start does not have.
    if os.path.abspath(path) == os.path.abspath(last):
        return
    of_this_shard = path.replace(".pt", f"{suffix}.pt")  # as fairseq names it
    if not os.path.isfile(path) and not os.path.isfile(of_this_shard):
        raise OptionError(f"{option_name(option)} {path}: no such file; must be a checkpoint")
