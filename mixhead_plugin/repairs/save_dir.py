"""Try --save-dir with a temporary file of an unused name.

fairseq tries --save-dir with a file `dummy`, so it overwrites and removes a user's file of that name. It writes nothing
into the file, and a full disk has room for empty files.
"""

import os
import tempfile

from fairseq import checkpoint_utils

from mixhead_plugin.errors import OptionError
from mixhead_plugin.repairs.replace import replaces


@replaces(checkpoint_utils, "verify_checkpoint_directory")
def _verify(original, save_dir: str) -> None:
    try:
        os.makedirs(save_dir, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=save_dir) as file:
            file.write(b"A full disk has room for empty files.")
    except OSError as error:
        raise OptionError(f"--save-dir {save_dir}: cannot be written to: {error.strerror}") from error
