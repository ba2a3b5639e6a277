"""What a training remembers of its validations: the best loss, and epochs without progress."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer
from fairseq_cli import train

from tests.fairseq.repairs.trainings import SAVES_EACH_EPOCH, config, trainer_that_saves

NAN = float("nan")


def test_a_checkpoint_has_the_counts_of_patience(tmp_path, monkeypatch):
    for name, value in {"best": 2.5, "num_runs": 2}.items():
        monkeypatch.setattr(train.should_stop_early, name, value, raising=False)
    trainer = MagicMock(should_save_checkpoint_on_current_rank=True)
    trainer.state_dict.return_value = {"extra_state": {}}
    trainer.cfg.checkpoint.write_checkpoints_asynchronously = False
    Trainer.save_checkpoint(trainer, str(tmp_path / "checkpoint.pt"), {"epoch": 3})
    saved = torch.load(tmp_path / "checkpoint.pt")["extra_state"]
    assert saved == {"epoch": 3, "early_stop": {"best": 2.5, "num_runs": 2}}


def test_a_worse_training_in_the_same_process_has_its_own_best_checkpoint(tmp_path, monkeypatch):
    """Hydra's multirun trains one job after the other; each loads its checkpoint first."""
    monkeypatch.setattr(PathManager, "copy", lambda *_, **__: True)
    train.should_stop_early.num_runs = 3
    for job, loss in (("first", 1.0), ("second", 2.0)):
        saved = []
        trainer = trainer_that_saves(saved)
        epochs = MagicMock(epoch=1)
        epochs.end_of_epoch.return_value = True
        cfg = config(tmp_path / job, **SAVES_EACH_EPOCH)
        checkpoint_utils.load_checkpoint(cfg, trainer)
        assert not hasattr(train.should_stop_early, "num_runs")
        checkpoint_utils.save_checkpoint(cfg, trainer, epochs, loss)
        assert saved == ["checkpoint_best.pt"], job  # the others are copies of the first


@pytest.mark.parametrize(
    "maximize, losses",
    [(False, [NAN, 3.0, NAN, 4.0]), (True, [NAN, 3.0, NAN, 2.0])],
    ids=["the least is best", "the largest is best"],
)
def test_a_validation_that_is_nan_is_not_the_best(maximize, losses, tmp_path):
    epochs = SimpleNamespace(epoch=1, end_of_epoch=dict, state_dict=dict)
    trainer = trainer_that_saves([])
    trainer.should_save_checkpoint_on_current_rank = False
    cfg = SimpleNamespace(
        save_dir=str(tmp_path),
        no_save=False,
        best_checkpoint_metric="loss",
        maximize_best_checkpoint_metric=maximize,
    )
    for loss in losses:
        checkpoint_utils.save_checkpoint(cfg, trainer, epochs, loss)
    assert checkpoint_utils.save_checkpoint.best == 3.0
