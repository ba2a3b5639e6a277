"""Resume at the end of an epoch, or of the training, as if nothing had been interrupted.

fairseq saves the checkpoint before the learning-rate schedule gets the validation loss. It does not
save the bad epochs of reduce_lr_on_plateau and --patience, nor the mean losses since the last
--log-interval. A finished training that is started again makes one more update or epoch.
"""

import logging
from types import SimpleNamespace

from fairseq import checkpoint_utils
from fairseq.logging import metrics
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule
from fairseq.trainer import Trainer

from mixhead_plugin.fairseq.replace import replaces, train_command

_FAIRSEQ = "https://github.com/facebookresearch/fairseq"
ISSUE = f"{_FAIRSEQ}/issues/3531 (--patience), {_FAIRSEQ}/pull/4071 (reduce_lr_on_plateau)"

logger = logging.getLogger(__name__)


# Our entry in a checkpoint: what --patience has counted.
EARLY_STOP = "early_stop"


@replaces(Trainer, "save_checkpoint")
def _save(original, trainer, filename: str, extra_state: dict):
    counted = {}
    for name, value in vars(_should_stop_early()).items():
        if name in ("best", "num_runs"):
            counted[name] = value
    if counted:
        extra_state = {**extra_state, EARLY_STOP: counted}
    return original(trainer, filename, extra_state)


@replaces(checkpoint_utils, "load_checkpoint")
def _load(original, cfg, trainer, **kwargs):
    state, epochs = original(cfg, trainer, **kwargs)
    if not isinstance(trainer, Trainer):  # a program with a trainer of its own
        return state, epochs
    if state is None or trainer.get_num_updates() == 0 or cfg.reset_dataloader:  # a new training
        return state, epochs

    _end_epoch(cfg, trainer, state)
    if not cfg.reset_meters:
        vars(_should_stop_early()).update(state.get(EARLY_STOP, {}))
    reason = reason_to_end(cfg, trainer)
    if reason is not None:
        logger.info(f"nothing to train: {reason}")
        # fairseq reads it after it has loaded the checkpoint
        trainer.cfg.optimization.max_epoch = -1
    return state, epochs


def _end_epoch(cfg, trainer: Trainer, state: dict) -> None:
    """Do what fairseq-train did after it had saved a checkpoint at the end of an epoch.

    Args:
        cfg: the flags for checkpoints
        trainer: the trainer, which has loaded the checkpoint
        state: the `extra_state` of the checkpoint
    """
    if state["train_iterator"]["iterations_in_epoch"] != 0:  # saved within an epoch
        return
    epoch = state["train_iterator"]["epoch"] - 1  # fairseq stores the number of the next one
    if epoch > 0 and not cfg.reset_lr_scheduler:
        trainer.lr_step(epoch)  # reduce_lr_on_plateau counts on from this number
        trainer.lr_step(epoch, state.get("val_loss"))
    inner = state.get("metrics", {}).get("train_inner")  # the means since the last --log-interval
    if inner is not None and not cfg.reset_meters:
        metrics.load_state_dict({"train_inner": inner})


def reason_to_end(cfg, trainer: Trainer) -> str | None:
    """Return why a training has ended, or None; `cfg` holds its flags for checkpoints."""
    limits = trainer.cfg.optimization
    if 0 < limits.max_update <= trainer.get_num_updates():
        return f"--max-update {limits.max_update} is reached"
    if 0 < cfg.patience <= getattr(_should_stop_early(), "num_runs", 0):
        return f"--patience {cfg.patience} is used up"
    if 0 < limits.stop_time_hours < trainer.cumulative_training_time() / 3600:
        return f"--stop-time-hours {limits.stop_time_hours} are over"
    return None


def _should_stop_early():
    """Return fairseq-train's function that counts the bad epochs of --patience in its attributes.

    In a program without fairseq-train, an object without attributes takes its place.
    """
    return getattr(train_command(), "should_stop_early", SimpleNamespace())


@replaces(ReduceLROnPlateauLRSchedule, "state_dict")
def _plateau_state(original, schedule) -> dict:
    counted = schedule.lr_scheduler
    return {
        **original(schedule),
        "bad": counted.num_bad_epochs,
        "cooldown": counted.cooldown_counter,
    }


@replaces(ReduceLROnPlateauLRSchedule, "load_state_dict")
def _load_plateau_state(original, schedule, state_dict: dict) -> None:
    original(schedule, state_dict)
    schedule.lr_scheduler.num_bad_epochs = state_dict.get("bad", 0)
    schedule.lr_scheduler.cooldown_counter = state_dict.get("cooldown", 0)
