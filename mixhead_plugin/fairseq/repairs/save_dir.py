"""Test --save-dir by a temporary file with an unused name.

fairseq tests --save-dir by writing and removing a file `dummy`, so it destroys a user's file of
that name. Its file is empty, and even a full disk has room for that.
"""

import os
import tempfile

from fairseq import checkpoint_utils

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.replace import replaces


@replaces(checkpoint_utils, "verify_checkpoint_directory")
def _verify(original, save_dir: str) -> None:
    try:
        os.makedirs(save_dir, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=save_dir) as file:
            file.write(b"A full disk has room for empty files.")  # so this one must not be empty
    except OSError as error:
        raise OptionError(
            f"--save-dir {save_dir}: cannot be written to: {error.strerror}"
        ) from error
