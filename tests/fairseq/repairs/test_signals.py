"""What a signal does; tests/robustness/test_preemption.py sends them to trainings."""

import functools
import multiprocessing
import signal
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from mixhead_plugin.fairseq.repairs import REPAIRS, signals


def test_another_program_keeps_its_signals():
    before = signal.getsignal(signal.SIGUSR1)
    trainer = MagicMock(checkpoint_suffix="", __class__=Trainer)
    signals._load(
        lambda *_: None, SimpleNamespace(no_save=False, no_last_checkpoints=False), trainer
    )
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize(
    "update, hours, validates", [(7, 0, True), (8, 0, False), (8, 2, True), (8, 3, False)]
)
def test_a_signal_skips_the_validation_but_not_the_last_one(
    update, hours, validates, saves, monkeypatch
):
    """The last update is that of --max-update, or the one after which --stop-time-hours are over.

    fairseq does not save after each validation; after a signal there is one checkpoint all the
    same.
    """
    cfg = OmegaConf.create({"checkpoint": {"patience": 0, "save_interval_updates": 0}})
    cfg.dataset = {"validate_interval_updates": 0}
    cfg.optimization = {"max_update": 7 if update == 7 else 9, "stop_time_hours": hours}
    trainer = SimpleNamespace(cfg=cfg, data_parallel_world_size=1, get_num_updates=lambda: update)
    trainer.cumulative_training_time = lambda: 2.5 * 3600
    done = []
    monkeypatch.setattr(signals, "_got", [signal.SIGTERM])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    save = functools.partial(signals._save, lambda *_: done.append("saved"))
    monkeypatch.setattr(checkpoint_utils, "save_checkpoint", save)

    def original(*_):
        done.append("validated")
        if saves:
            save(cfg.checkpoint, trainer, None, 2.5)
        return [2.5], True

    with pytest.raises(SystemExit) as end:
        signals._validate_and_save(original, cfg, trainer, None, None, [], False)
    assert (end.value.code, done) == (75, ["validated", "saved"] if validates else ["saved"])


@pytest.mark.parametrize("is_worker", [True, False])
def test_sigint_ends_a_worker_that_ignores_it(is_worker, monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: is_worker or None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: is_worker)
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        REPAIRS["orphaned_workers"].apply()
        assert signal.getsignal(signal.SIGINT) == (signal.SIG_DFL if is_worker else signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGINT, previous)
