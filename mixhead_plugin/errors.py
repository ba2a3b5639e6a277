"""The exceptions of the plugin, the one line with which they end a command, and its warnings."""

import difflib
import os
import re
import select
import sys
import warnings
from collections.abc import Iterable
from types import TracebackType

_PACKAGE = os.path.join(os.path.dirname(__file__), "")
# Files of Python and of torch that call functions of ours which are context managers, or run in
# one, as those under `torch.no_grad`.
_BETWEEN = ("contextlib.py", "_contextlib.py")


class OptionError(ValueError):
    """A flag, a combination of flags, or a file named by a flag, that cannot be used.

    The message is one line. It names the flag, its value and what would be valid.
    """


class CheckpointError(OptionError):
    """A checkpoint that does not fit the model."""


def option_name(option: str) -> str:
    """Return the flag of an option, `--head-dim` of `head_dim`."""
    return "--" + option.replace("_", "-")


def unknown_field(part: str, name: str, known: Iterable[str]) -> str:
    """Return the message about a field of a YAML file that nothing reads.

    Args:
        part: of the config, such as `model`
        name: of the field
        known: the fields that this part has
    """
    near = difflib.get_close_matches(name, known, 2)
    remedy = f"did you mean {' or '.join(near)}?" if near else "must be left out"
    return f"{part}.{name}: unknown; {remedy}"


def wrong_argument(name: str, value: object, wanted: str) -> str:
    """Return the message about an argument of a function in Python that is of another kind.

    Args:
        name: of the argument
        value: what was given
        wanted: what would be valid, such as "a module of torch"
    """
    if isinstance(value, type):
        given = f"{name} is the class {value.__name__}"
    elif value is None or isinstance(value, (str, int, float, os.PathLike)):
        given = f"{name} {value!r}"
    else:
        # A model or a tensor would not fit into the line.
        given = f"{name} is a {type(value).__name__}"
    return f"{given}: must be {wanted}"


def warn_caller(message: str) -> None:
    """Warn at the line of the program that has called into this package.

    The number of frames up to it depends on the door by which it came.
    """
    frame = sys._getframe()
    level = 1  # of `warnings.warn`: the line of the call below
    while frame.f_back is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)


def _is_ours(file: str) -> bool:
    """Return whether code of a file runs between a program and the place that warns."""
    return file.startswith(_PACKAGE) or os.path.basename(file) in _BETWEEN


def end_in_one_line() -> None:
    """Let an OptionError, or a missing file, end this process with one line.

    With MIXHEAD_TRACEBACK=1 in the environment, Python's traceback stays.
    """
    if os.environ.get("MIXHEAD_TRACEBACK") != "1":
        sys.excepthook = _print_one_line
        # Hydra prints a shorter traceback itself, and calls no hook, unless it is asked for the
        # full one.
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")


def _print_one_line(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """End like an excepthook of Python: show an error that nothing has caught."""
    if issubclass(kind, BrokenPipeError) and _nobody_reads():
        os._exit(141)  # silently, as SIGPIPE ends other programs
    lines = str(error).strip().splitlines() or [""]
    # torch raises the errors of its workers again, as other exceptions whose message ends with the
    # traceback of the worker.
    of_worker = re.match(rf"(?:{__name__}[.]\w+|FileNotFoundError): (.*)", lines[-1])
    if of_worker is not None:
        message = of_worker[1]
    elif issubclass(kind, (OptionError, FileNotFoundError)):
        message = lines[0]
    else:
        sys.__excepthook__(kind, error, trace)
        return
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr)


def _nobody_reads() -> bool:
    """Return True if the reader of our output has ended, as in `fairseq-generate | head`."""
    output = select.poll()
    output.register(1, 0)  # the standard output
    return bool(output.poll(0))
