"""The exceptions of the plugin, and the names of flags in their messages."""

import os
import sys
import traceback
from typing import Any


class OptionError(SystemExit, ValueError):
    """A flag, a combination of flags, or a file named by a flag, that cannot be used. The message is one line.

    A program need not catch it: Python ends the program with this line and status 1, as after any SystemExit.
    `except ValueError` catches it too. MIXHEAD_TRACEBACK=1 shows where it was raised.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        # torch's DataLoader raises the error of a worker again, with the worker's traceback before the message.
        message = str(self)
        if message.startswith("Caught "):
            message = message.strip().rpartition("Error: ")[2]
        self.code = f"{os.path.basename(sys.argv[0])}: error: {message}"
        if os.environ.get("MIXHEAD_TRACEBACK") == "1":
            traceback.print_stack()


class CheckpointError(OptionError):
    """A checkpoint that does not fit the model."""


def option_name(option: str) -> str:
    """Return the flag of an option, `--head-dim` of `head_dim`."""
    return "--" + option.replace("_", "-")
