"""Say what is wrong with a file or a flag, in one line."""

import sys
from pathlib import Path
from typing import NoReturn

from pydantic import ConfigDict, ValidationError
from pydantic_core import ErrorDetails

# No value is turned into another type: the text "8" is no number, and True is not 1.
STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)


def fail(message: str) -> NoReturn:
    """End the command with status 2 and one line, which begins with its name."""
    print(f"{Path(sys.argv[0]).stem}: error: {message}", file=sys.stderr)
    sys.exit(2)


def fault_of(error: ValidationError) -> str:
    """Return the first fault of a file: 'seeds: must be a valid integer, not True'."""
    fault = error.errors(include_url=False)[0]
    site = ".".join(map(str, fault["loc"]))
    text = message_of(fault)
    return f"{site}: {text}" if site else text


def message_of(fault: ErrorDetails) -> str:
    if fault["type"] == "extra_forbidden":
        return "no field has this name"
    if fault["type"] == "missing":
        return "is missing"
    if fault["type"] in ("too_short", "string_too_short"):
        return "must not be empty"
    if fault["type"] == "value_error":  # one of our own, which names the value where that helps
        return fault["msg"].removeprefix("Value error, ")
    expected = fault["msg"].removeprefix("Input should be ")
    return f"must be {expected}, not {shortened(fault['input'])}"


def shortened(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print an int of more than 4,300 digits
        return "a number of too many digits"
    return text if len(text) <= 60 else f"{text[:60]}..."
