"""--save-dir is tried before the training, and keeps a user's files."""

import pytest
from fairseq import checkpoint_utils

from mixhead_plugin.errors import OptionError


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
