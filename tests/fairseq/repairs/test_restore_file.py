"""A checkpoint to begin from that is not there is not forgotten."""

from unittest.mock import MagicMock

import pytest
from fairseq import checkpoint_utils

from mixhead_plugin.errors import OptionError
from tests.fairseq.repairs.trainings import config


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
