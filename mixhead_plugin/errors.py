"""The exceptions of the plugin, the names of flags in their messages, and the one line that a command ends with."""

import os
import sys
from types import TracebackType


class OptionError(ValueError):
    """A flag, a combination of flags, or a file named by a flag, that cannot be used. The message is one line."""


class CheckpointError(OptionError):
    """A checkpoint that does not fit the model."""


def option_name(option: str) -> str:
    """Return the flag of an option, `--head-dim` of `head_dim`."""
    return "--" + option.replace("_", "-")


def end_in_one_line() -> None:
    """Let an OptionError end this process with one line, as commands do; MIXHEAD_TRACEBACK=1 shows where."""
    former = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        message = _option_error(kind, error)
        if message is None or os.environ.get("MIXHEAD_TRACEBACK") == "1":
            former(kind, error, trace)
        else:
            print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr)

    if getattr(former, "__name__", "") != "mixhead_hook":
        hook.__name__ = "mixhead_hook"
        sys.excepthook = hook


def _option_error(kind: type[BaseException], error: BaseException) -> str | None:
    """Return the message of an OptionError, None for other errors.

    torch raises the errors of its workers again, with the worker's traceback before the message.
    """
    lines = str(error).strip().splitlines() or [""]
    if issubclass(kind, OptionError):
        return lines[-1].rpartition("Error: ")[2] if lines[0].startswith("Caught ") else "\n".join(lines)
    for name in ("OptionError", "CheckpointError"):
        if lines[-1].startswith(f"{__name__}.{name}: "):
            return lines[-1].partition(": ")[2]
    return None
