"""A checkpoint that has its name is whole, whatever fails while it is written."""

import os
import stat
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.repairs import atomic_checkpoints
from tests.fairseq.repairs.trainings import SAVES_EACH_EPOCH, config, trainer_that_saves


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
