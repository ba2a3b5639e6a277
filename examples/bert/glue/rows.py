"""Read examples from GLUE's tables.

Tabs separate the columns, nothing is quoted, and a few rows are broken.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Optional

from bert.glue.tasks import HIGHEST, Task
from common.archives import stream_lines
from common.messages import fail


class Example(NamedTuple):
    index: str  # its name for the evaluation server
    texts: tuple[str, ...]
    label: Optional[str]


class Table(NamedTuple):
    examples: list[Example]
    left_out: list[str]  # line and reason of each broken row


def read_table(
    path: Path,
    task: Task,
    labelled: bool,
    wanted: Optional[Callable[[Mapping[str, str]], bool]] = None,
) -> Table:
    """Read the examples of a file.

    A labelled row is left out if its number of columns is wrong, or if the task has no such label.
    Rows without labels all stay, because the evaluation server asks for every one. In them a
    missing text is empty, and columns after the last one belong to the last text.

    Args:
        path: the file, in UTF-8 with or without a byte-order mark
        task: the names of its columns and its labels
        labelled: whether to read the labels; the program ends if their column is missing
        wanted: a function that returns True for a row of the set; None if every row belongs to it
    """
    lines = enumerate(stream_lines(path), 1)
    names = _column_names(path, task, labelled, lines)
    table = Table([], [])
    for number, line in lines:
        fields = _fields(line)
        if fields == [""]:
            continue
        if labelled and len(fields) != len(names):
            table.left_out.append(f"line {number}: {len(fields)} columns, not {len(names)}")
            continue
        row = _row(fields, names)
        if wanted is not None and not wanted(row):
            continue

        label = None
        if labelled:
            label = row[task.label].strip()
            if not is_label(label, task):
                table.left_out.append(f"line {number}: {task.label} is {label!r}")
                continue

        # The server numbers the rows of MRPC; its file does not.
        index = row[names[0]].strip() if names[0] in ("index", "id") else str(len(table.examples))
        if not labelled and not index.isdecimal():
            fail(f"{path}: line {number}: {names[0]} {index!r} is not a number")
        texts = tuple(row[name].strip() for name in task.texts)
        table.examples.append(Example(index, texts, label))
    return table


def _column_names(
    path: Path, task: Task, labelled: bool, lines: Iterator[tuple[int, str]]
) -> list[str]:
    """Return the names of the columns; end the program if one that is needed is missing.

    They are in the first line, which is taken from `lines`, unless the task has a header of its own
    because its labelled files have none.
    """
    if task.header and labelled:
        names = list(task.header)
    else:
        _, first = next(lines, (1, ""))
        names = _fields(first.removeprefix("\ufeff"))
    if names == [""]:
        fail(f"{path}: is empty")

    needed = [*task.texts, task.label] if labelled else task.texts
    missing = [name for name in needed if name not in names]
    if missing:
        fail(f"{path}: has no column {', '.join(missing)}, but {', '.join(names)}")
    return names


def _row(fields: list[str], names: list[str]) -> dict[str, str]:
    """Return the fields by column: missing ones are empty, the last has all that are left."""
    before = len(names) - 1  # columns before the last
    missing = before - len(fields)
    fields = fields + [""] * missing
    return dict(zip(names, [*fields[:before], " ".join(fields[before:])]))


def is_label(label: str, task: Task) -> bool:
    if task.labels:
        return label in task.labels
    return bool(re.fullmatch(r"\d+(\.\d*)?", label)) and 0 <= float(label) <= HIGHEST


def _fields(line: str) -> list[str]:
    return line.rstrip("\r\n").split("\t")
