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


@replaces(Trainer, "save_checkpoint")
def _save(original, trainer, filename: str, extra_state: dict):
    counted = {k: v for k, v in vars(_should_stop_early()).items() if k in ("best", "num_runs")}
    return original(
        trainer, filename, {**extra_state, "early_stop": counted} if counted else extra_state
    )


@replaces(checkpoint_utils, "load_checkpoint")
def _load(original, cfg, trainer, **kwargs):
    state, epochs = original(cfg, trainer, **kwargs)
    if (
        not isinstance(trainer, Trainer)
        or state is None
        or trainer.get_num_updates() == 0
        or cfg.reset_dataloader
    ):
        return state, epochs  # of a program with a trainer of its own, or of a new training
    epoch_ended = state["train_iterator"]["iterations_in_epoch"] == 0
    epoch = state["train_iterator"]["epoch"] - 1  # the one that ended
    if epoch_ended and epoch > 0 and not cfg.reset_lr_scheduler:
        trainer.lr_step(epoch)  # reduce_lr_on_plateau counts on from this number
        trainer.lr_step(epoch, state.get("val_loss"))
    if epoch_ended and "train_inner" in state.get("metrics", {}) and not cfg.reset_meters:
        metrics.load_state_dict({"train_inner": state["metrics"]["train_inner"]})
    if not cfg.reset_meters:
        vars(_should_stop_early()).update(state.get("early_stop", {}))
    reason = reason_to_end(cfg, trainer)
    if reason is not None:
        logger.info(f"nothing to train: {reason}")
        # fairseq reads it after it has loaded the checkpoint
        trainer.cfg.optimization.max_epoch = -1
    return state, epochs


def reason_to_end(cfg, trainer: Trainer) -> str | None:
    """Return why a training has ended, or None; `cfg` are its flags for checkpoints."""
    limits = trainer.cfg.optimization
    if 0 < limits.max_update <= trainer.get_num_updates():
        return f"--max-update {limits.max_update} is reached"
    if 0 < cfg.patience <= getattr(_should_stop_early(), "num_runs", 0):
        return f"--patience {cfg.patience} is used up"
    if 0 < limits.stop_time_hours < trainer.cumulative_training_time() / 3600:
        return f"--stop-time-hours {limits.stop_time_hours} are over"
    return None


def _should_stop_early():
    """Return the function of fairseq-train
    that counts bad epochs for --patience in its attributes.
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
def _load_plateau_state(original, schedule, state: dict) -> None:
    original(schedule, state)
    schedule.lr_scheduler.num_bad_epochs = state.get("bad", 0)
    schedule.lr_scheduler.cooldown_counter = state.get("cooldown", 0)
