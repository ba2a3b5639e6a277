"""Test the repairs of trainings: checkpoints, data and workers."""

import functools
import logging
import multiprocessing
import os
import signal
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from fairseq import checkpoint_utils, distributed_utils
from fairseq.data import FairseqDataset, iterators
from fairseq.dataclass.configs import DistributedTrainingConfig
from fairseq.file_io import PathManager
from fairseq.modules import DynamicCRF
from fairseq.nan_detector import NanDetector
from fairseq.trainer import Trainer
from fairseq_cli import train
from omegaconf import OmegaConf

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.repairs import REPAIRS, atomic_checkpoints, signals
from mixhead_plugin.fairseq.repairs.checkpoint_files import check_finite
from tests.fairseq.criterions.cases import CASES, criterion, model
from tests.helpers import build
from tests.own_process import in_own_process

INF = float("inf")
NAN = float("nan")


@pytest.fixture(autouse=True)
def no_validation_is_remembered():
    """Let no test see the best loss and the bad epochs of another.

    fairseq keeps them in attributes of these functions.
    """
    forget_validations()
    yield
    forget_validations()


def forget_validations():
    for function in (checkpoint_utils.save_checkpoint, train.should_stop_early):
        vars(function).pop("best", None)
        vars(function).pop("num_runs", None)


# ---- --save-dir, and whole files in it ----------------------------------------------------------


def test_checking_a_folder_leaves_it_as_it_was(tmp_path):
    (tmp_path / "dummy").write_text("the user's")
    checkpoint_utils.verify_checkpoint_directory(str(tmp_path))
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert left == {"dummy": "the user's"}


def test_a_folder_that_is_not_there_is_made(tmp_path):
    checkpoint_utils.verify_checkpoint_directory(str(tmp_path / "new" / "folder"))
    assert (tmp_path / "new" / "folder").is_dir()


@pytest.mark.parametrize("folder", ["/proc/save", "file", "file/save"])
def test_a_folder_that_cannot_be_written_to_is_refused(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"^--save-dir \S+: cannot be written to: "):
        checkpoint_utils.verify_checkpoint_directory(str(tmp_path / folder))


def failing(times, error, monkeypatch):
    """Let torch.save fail `times` times in the middle of its file."""
    original = torch.save
    attempts = []

    def save(content, file):
        attempts.append(file)
        if len(attempts) <= times:
            file.write(b"half of it")
            raise error
        original(content, file)

    monkeypatch.setattr(torch, "save", save)


def test_a_passing_error_is_tried_again_from_the_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_checkpoints, "PAUSE", 0)
    failing(2, OSError(5, "Input/output error"), monkeypatch)
    checkpoint_utils.torch_persistent_save({"a": 1}, str(tmp_path / "a.pt"))
    assert torch.load(tmp_path / "a.pt", weights_only=True) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize(
    "error, expected, message",
    [
        (
            OSError(28, "No space left on device"),
            OptionError,
            "checkpoint {path}: cannot be written: No space left on device",
        ),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
        (RuntimeError("mine"), RuntimeError, "mine"),
    ],
    ids=["full disk", "Ctrl-C", "error of torch"],
)
def test_the_file_before_an_error_stays(error, expected, message, tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    path.write_bytes(b"before")
    failing(9, error, monkeypatch)
    with pytest.raises(expected) as raised:
        checkpoint_utils.torch_persistent_save({}, str(path))
    assert str(raised.value) == message.format(path=path)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.pt", b"before")]


def test_a_copy_is_whole_before_it_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "a.pt").write_bytes(b"new")
    (tmp_path / "b.pt").write_bytes(b"old")
    replaced = []
    synced = []
    monkeypatch.setattr("os.fsync", lambda file: synced.append(len(replaced)))
    monkeypatch.setattr(
        "os.replace", lambda part, path: replaced.append((Path(part).read_bytes(), path))
    )
    PathManager.copy(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), overwrite=True)
    assert synced == [0, 1]  # the file is on the disk before it has its name; then its folder is
    assert (
        replaced == [(b"new", str(tmp_path / "b.pt"))]
        and (tmp_path / "b.pt").read_bytes() == b"old"
    )


def test_a_folder_that_cannot_be_synced_is_closed(tmp_path, monkeypatch):
    def sync(number):
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("os.fsync", sync)
    before = os.listdir("/proc/self/fd")
    atomic_checkpoints.write_whole(str(tmp_path / "a.pt"), lambda file: None)
    assert os.listdir("/proc/self/fd") == before


def test_a_copy_into_a_folder_that_is_gone_is_one_line(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"new")
    with pytest.raises(
        OptionError, match=r"checkpoint \S+/gone/b.pt: cannot be written: No such file or directory"
    ):
        PathManager.copy(str(tmp_path / "a.pt"), str(tmp_path / "gone" / "b.pt"))


def test_a_checkpoint_has_the_counts_of_patience(tmp_path, monkeypatch):
    for name, value in {"best": 2.5, "num_runs": 2}.items():
        monkeypatch.setattr(train.should_stop_early, name, value, raising=False)
    trainer = MagicMock(should_save_checkpoint_on_current_rank=True)
    trainer.state_dict.return_value = {"extra_state": {}}
    trainer.cfg.checkpoint.write_checkpoints_asynchronously = False
    Trainer.save_checkpoint(trainer, str(tmp_path / "checkpoint.pt"), {"epoch": 3})
    saved = torch.load(tmp_path / "checkpoint.pt")["extra_state"]
    assert saved == {"epoch": 3, "early_stop": {"best": 2.5, "num_runs": 2}}


# ---- models of NaN -----------------------------------------------------------------------------


def test_a_frozen_mixing_that_is_nan_is_neither_loaded_nor_saved(tmp_path):
    """`random` mixing is a buffer that the attention computes with."""
    made = build("mixhead_transformer", head_mixing="random")
    name = next(name for name, _ in made.named_buffers() if name.endswith("head_mixing.weight"))
    made.get_buffer(name).view(-1)[0] = NAN
    with pytest.raises(OptionError, match=f"first is {name}"):
        check_finite("new.pt", made.state_dict())
    trainer = SimpleNamespace(is_fsdp=False, model=made, get_num_updates=lambda: 3)
    with pytest.raises(
        OptionError, match=f"NaN or infinite parameters after update 3, the first is {name}"
    ):
        checkpoint_utils.save_checkpoint(
            SimpleNamespace(no_save=False, save_dir=str(tmp_path)), trainer, None, None
        )


def trainer_that_saves(saved):
    """Return a trainer that appends the names of its checkpoints to `saved`."""
    trainer = MagicMock(
        is_fsdp=False, model=torch.nn.Linear(1, 1), checkpoint_suffix="", data_parallel_rank=0
    )
    trainer.save_checkpoint.side_effect = lambda path, _: saved.append(Path(path).name)
    trainer.load_checkpoint.return_value = None
    return trainer


# What fairseq reads when it saves: here checkpoint_best.pt, and its copy checkpoint_last.pt.
SAVES_EACH_EPOCH = {
    "best_checkpoint_metric": "loss",
    "maximize_best_checkpoint_metric": False,
    "no_save": False,
    "no_epoch_checkpoints": True,
    "no_last_checkpoints": False,
    "write_checkpoints_asynchronously": False,
    "save_interval_updates": 0,
    "keep_best_checkpoints": 0,
    "keep_interval_updates": -1,
    "keep_last_epochs": -1,
}


@pytest.mark.parametrize("suffix", ["", "-shard1"])
@pytest.mark.parametrize("last", [b"", b"an earlier one"], ids=["none", "earlier"])
def test_a_full_disk_at_the_first_save_leaves_a_last_checkpoint(
    last, suffix, tmp_path, monkeypatch
):
    """checkpoint_best.pt is written, and its copy checkpoint_last.pt finds the disk full."""

    def full(*_):
        raise OSError(28, "No space left on device")

    def write(path, _):
        Path(path).write_bytes(b"new")

    monkeypatch.setattr("shutil.copyfileobj", full)
    if last:
        (tmp_path / f"checkpoint_last{suffix}.pt").write_bytes(last)
    trainer = trainer_that_saves([])
    trainer.checkpoint_suffix = suffix
    trainer.save_checkpoint.side_effect = write
    with pytest.raises(
        OptionError,
        match=rf"checkpoint \S+/checkpoint_last{suffix}.pt: cannot be written: No space",
    ) as refused:
        checkpoint_utils.save_checkpoint(
            config(tmp_path, **SAVES_EACH_EPOCH), trainer, MagicMock(epoch=1), val_loss=1.0
        )
    assert type(refused.value) is OptionError  # which ends a worker, too, with its line alone
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert files == {
        f"checkpoint_best{suffix}.pt": b"new",
        f"checkpoint_last{suffix}.pt": last or b"new",
    }


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


def test_the_search_for_nan_ends_where_an_encoder_returns_a_dict(caplog):
    """fairseq computes the batch again with these hooks when it sees a NaN or infinite gradient."""
    name = "label_smoothed_cross_entropy"
    made = model(name)
    sample = CASES[name].batch()
    layer = next(name for name, module in made.named_modules() if name.endswith("layers.1.fc2"))
    made.get_submodule(layer).bias.data[0] = INF
    with caplog.at_level(logging.WARNING), NanDetector(made):
        criterion(f"orthogonal_{name}", rank_weight=0.01)(made, sample)[0].sum().backward()
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(f"Inf detected in output of {layer}, shape")


# ---- data --------------------------------------------------------------------------------------


class SaysTheEpoch(FairseqDataset):
    """Data that depend on the epoch, like the masks of masked_lm."""

    can_reuse_epoch_itr_across_epochs = True
    epoch = 1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return self.epoch

    def __len__(self):
        return 3

    def collater(self, items):
        return items


def batches(number=2, workers=0, **settings):
    data = SaysTheEpoch()
    chosen = [[i % 3] for i in range(number - 1)] + [[1, 2]]
    return iterators.EpochBatchIterator(
        data, data.collater, chosen, num_workers=workers, **settings
    )


@in_own_process
def test_data_workers_know_the_epoch():
    for workers in (0, 1):
        epochs = batches(workers=workers, reuse_dataloader=True, persistent_workers=True)
        found = [sorted(epochs.next_epoch_itr(), key=len) for _ in range(3)]
        assert found == [[[epoch], [epoch, epoch]] for epoch in (1, 2, 3)]


def trainer_of(epochs=None, **dataset):
    """Return what Trainer's methods use of a trainer.

    Return also the epochs that it loads data and makes batches for.
    """
    loaded = []
    made = []

    def get_batch_iterator(**settings):
        made.append(settings["epoch"])
        return epochs or batches()

    trainer = MagicMock()
    trainer.task = SimpleNamespace(
        cfg=SimpleNamespace(),
        max_positions=lambda: None,
        dataset=lambda split: None,
        load_dataset=lambda *_, epoch, **__: loaded.append(epoch),
        get_batch_iterator=get_batch_iterator,
    )
    trainer.model.max_positions = lambda: None
    settings = {
        "train_subset": "train",
        "max_tokens": None,
        "batch_size": 1,
        "required_batch_size_multiple": 1,
        "update_ordered_indices_seed": False,
        "update_epoch_batch_itr": False,
        "num_workers": 0,
        "data_buffer_size": 1,
        "grouped_shuffling": False,
        "max_tokens_valid": None,
        "batch_size_valid": 1,
        "skip_invalid_size_inputs_valid_test": False,
    }
    trainer.cfg.dataset = SimpleNamespace(**{**settings, **dataset})
    return trainer, loaded, made


@pytest.mark.parametrize(
    "dataset, kwargs, expected",
    [
        ({}, {}, [1, 3]),
        ({"update_epoch_batch_itr": True}, {}, [3]),
        ({}, {"disable_iterator_cache": True}, [3]),
        ({}, {"load_dataset": False}, [3]),
    ],
    ids=["resumed", "batches of each epoch", "shards", "going on"],
)
def test_a_resumed_epoch_has_the_batches_of_the_first(dataset, kwargs, expected):
    trainer, loaded, made = trainer_of(**dataset)
    Trainer.get_train_iterator(trainer, 3, **kwargs)
    assert made == expected
    assert loaded == ([] if kwargs.get("load_dataset") is False else expected[:1])


def test_a_validation_that_stops_early_leaves_no_thread():
    epochs = batches(number=50, buffer_size=1)
    trainer, *_ = trainer_of(epochs, max_valid_steps=1)
    before = threading.active_count()
    for _ in range(3):
        next(
            Trainer.get_valid_iterator(trainer, "valid").next_epoch_itr(
                shuffle=False, set_dataset_epoch=False
            )
        )
    assert threading.active_count() == before


# ---- checkpoints to begin from -----------------------------------------------------------------


def config(folder, **flags):
    resets = {
        f"reset_{name}": False for name in ("dataloader", "meters", "optimizer", "lr_scheduler")
    }
    cfg = {
        "save_dir": str(folder),
        "restore_file": "checkpoint_last.pt",
        "finetune_from_model": None,
        **flags,
    }
    return OmegaConf.create({**cfg, "optimizer_overrides": "{}", **resets})


@pytest.mark.parametrize("flag", ["restore_file", "finetune_from_model", "continue_once"])
@pytest.mark.parametrize("path", ["none.pt", "."])
def test_a_checkpoint_that_is_not_there_is_not_forgotten(flag, path, tmp_path, monkeypatch):
    # in a command; another program may name no file
    monkeypatch.setattr("__main__.cli_main", None, raising=False)
    trainer = MagicMock(checkpoint_suffix="")
    with pytest.raises(
        OptionError, match=f"^--{flag.replace('_', '-')} .*: no such file; must be a checkpoint"
    ):
        checkpoint_utils.load_checkpoint(config(tmp_path, **{flag: str(tmp_path / path)}), trainer)
    assert not trainer.load_checkpoint.called


def test_a_link_to_nothing_is_not_a_new_start(tmp_path, monkeypatch):
    (tmp_path / "checkpoint_last.pt").symlink_to("nowhere.pt")
    trainer = MagicMock(checkpoint_suffix="")
    trainer.load_checkpoint.return_value = None
    checkpoint_utils.load_checkpoint(config(tmp_path), trainer)  # of another program
    monkeypatch.setattr("__main__.cli_main", None, raising=False)
    with pytest.raises(OptionError, match=r"checkpoint_last.pt: is a folder or a link to nothing"):
        checkpoint_utils.load_checkpoint(config(tmp_path), trainer)


@pytest.mark.parametrize(
    "flags", [{}, {"restore_file": "checkpoint_last.pt"}, {"restore_file": "x.pt"}]
)
def test_a_new_training_and_one_of_another_program_are_left_alone(flags, tmp_path):
    """fairseq's own unit tests also load checkpoints, with configs that lack most values."""
    trainer = MagicMock(checkpoint_suffix="")
    state = trainer.load_checkpoint.return_value = {
        "train_iterator": {"epoch": 2, "iterations_in_epoch": 0}
    }
    # a first start: --save-dir has none yet
    flags = {name: str(tmp_path / file) for name, file in flags.items()}
    expected = state, trainer.get_train_iterator.return_value
    assert checkpoint_utils.load_checkpoint(config(tmp_path, **flags), trainer) == expected


def test_another_program_keeps_its_signals():
    before = signal.getsignal(signal.SIGUSR1)
    trainer = MagicMock(checkpoint_suffix="", __class__=Trainer)
    signals._load(
        lambda *_: None, SimpleNamespace(no_save=False, no_last_checkpoints=False), trainer
    )
    assert signal.getsignal(signal.SIGUSR1) is before


# ---- workers -----------------------------------------------------------------------------------

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def started(monkeypatch, variables, **flags):
    """Return how many times fairseq calls `main`, and the config that it does it with."""
    for name in (*TORCHRUN, "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(
        distributed_utils, "distributed_init", lambda cfg: cfg.distributed_training.distributed_rank
    )
    cfg = SimpleNamespace(
        common=SimpleNamespace(tpu=False, cpu=True), common_eval=SimpleNamespace(path=None)
    )
    cfg.distributed_training = DistributedTrainingConfig(tpu=False, **flags)
    cfg.checkpoint = SimpleNamespace(save_dir="save")
    calls = []
    distributed_utils.call_main(cfg, calls.append)
    return len(calls), cfg.distributed_training


@pytest.mark.parametrize(
    "flags, variables",
    [
        ({}, {}),
        ({"distributed_init_method": "tcp://localhost:1"}, {}),
        ({"distributed_init_method": "tcp://localhost:1"}, TORCHRUN),
        ({"distributed_no_spawn": True}, {}),
        ({}, {"RANK": "0"}),
    ],
)
def test_workers_without_gpus_are_refused_not_forgotten(flags, variables, monkeypatch):
    with pytest.raises(
        OptionError, match=r"^--distributed-world-size 2: no GPU to start a worker for"
    ):
        started(monkeypatch, variables, distributed_world_size=2, **flags)


def test_workers_of_torchrun_train_together_without_gpus(monkeypatch):
    with pytest.raises(OptionError, match=r"^--ddp-backend pytorch_ddp: needs GPUs"):
        started(monkeypatch, TORCHRUN, distributed_world_size=2)
    number, workers = started(
        monkeypatch, TORCHRUN, distributed_world_size=2, ddp_backend="legacy_ddp"
    )
    assert (number, workers.distributed_rank, workers.distributed_world_size) == (1, 1, 2)


@pytest.mark.parametrize(
    "variables", [TORCHRUN, {"SLURM_STEP_NUM_TASKS": "2"}], ids=["torchrun", "srun"]
)
def test_workers_of_torchrun_or_srun_do_not_train_apart(variables, monkeypatch):
    with pytest.raises(
        OptionError, match=r"^--distributed-world-size 1: \w+ says that 2 workers were started"
    ):
        started(monkeypatch, variables, distributed_world_size=1)


@pytest.mark.parametrize(
    "variables", [{}, {**TORCHRUN, "WORLD_SIZE": "1"}], ids=["no launcher", "torchrun"]
)
def test_one_worker_trains_alone(variables, monkeypatch):
    calls, _ = started(monkeypatch, variables, distributed_world_size=1)
    assert calls == 1


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


def test_a_model_with_a_crf_layer_computes_its_loss():
    layer = DynamicCRF(num_embedding=7, low_rank=2, beam_size=3)
    words = torch.tensor([[1, 4, 6]])
    loss = layer(torch.randn(1, 3, 7), words, torch.ones(1, 3, dtype=torch.bool))
    assert loss.shape == (1,) and loss.isfinite()
