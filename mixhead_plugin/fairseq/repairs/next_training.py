"""Forget the best validation loss and the bad epochs of --patience when another training begins.

Hydra's multirun trains one job after the other in a process, where fairseq keeps the best loss of
all jobs. A job whose losses are worse gets no checkpoint_best.pt, and ends with status 0.
--patience counts on from the job before.
"""

from typing import Any

from fairseq import checkpoint_utils

from mixhead_plugin.fairseq.replace import replaces, train_command


# Only a training calls this, at its beginning.
@replaces(checkpoint_utils, "load_checkpoint")
def _load(original, cfg, trainer, **kwargs):
    _forget(checkpoint_utils.save_checkpoint)
    _forget(getattr(train_command(), "should_stop_early", None))
    return original(cfg, trainer, **kwargs)  # which remembers them again if the training is resumed


def _forget(function: Any) -> None:
    """Remove what fairseq keeps of earlier validations in attributes of one of its functions."""
    for name in ("best", "num_runs"):
        if hasattr(function, name):
            delattr(function, name)
