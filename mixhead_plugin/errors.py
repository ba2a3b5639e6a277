"""The exceptions of the plugin, the names of flags in their messages, and the one line that a
command ends with.
"""

import difflib
import os
import re
import select
import sys
from collections.abc import Iterable
from types import TracebackType


class OptionError(ValueError):
    """A flag, a combination of flags, or a file named by a flag, that cannot be used. The message
    is one line.
    """


class CheckpointError(OptionError):
    """A checkpoint that does not fit the model."""


def option_name(option: str) -> str:
    """Return the flag of an option, `--head-dim` of `head_dim`."""
    return "--" + option.replace("_", "-")


def unknown_field(part: str, name: str, known: Iterable[str]) -> str:
    """Return the refusal of a field of a YAML file that its part of the config, such as `model`,
    does not have.
    """
    near = difflib.get_close_matches(name, known, 2)
    remedy = f"did you mean {' or '.join(near)}?" if near else "must be left out"
    return f"{part}.{name}: unknown; {remedy}"


def end_in_one_line() -> None:
    """Let an OptionError, or a missing file, end this process with one line; MIXHEAD_TRACEBACK=1
    shows where.
    """
    if os.environ.get("MIXHEAD_TRACEBACK") != "1":
        sys.excepthook = _print_one_line
        # Hydra prints a shorter traceback itself, and calls no hook, unless it is asked for the
        # full one.
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")


def _print_one_line(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, BrokenPipeError):
        output = select.poll()
        output.register(1, 0)
        if output.poll(0):  # nobody reads it any more, as in `fairseq-generate | head`
            os._exit(141)  # silently, as SIGPIPE ends other programs
    lines = str(error).strip().splitlines() or [""]
    # torch raises the errors of its workers again, with their traceback before the message.
    found = re.match(rf"(?:{__name__}[.]\w+|FileNotFoundError): (.*)", lines[-1])
    if found is None and not issubclass(kind, (OptionError, FileNotFoundError)):
        sys.__excepthook__(kind, error, trace)
    else:
        message = lines[0] if found is None else found[1]
        print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr)
