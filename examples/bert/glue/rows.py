"""Read examples from GLUE's tables.

Tabs separate the columns, nothing is quoted, and a few rows are broken.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Optional

from bert.glue.tasks import HIGHEST, Task
from common.archives import fail, read_lines


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
        path: UTF-8, with or without a byte-order mark
        labelled: read the labels; the program ends if their column is missing
        wanted: returns True if a row belongs to the set; by default every row does
    """
    lines = enumerate(read_lines(path), 1)
    names = (
        list(task.header)
        if task.header and labelled
        else _fields(next(lines, (1, ""))[1].removeprefix("\ufeff"))
    )
    if names == [""]:
        fail(f"{path}: is empty")
    needed = [*task.texts, task.label] if labelled else task.texts
    if missing := [name for name in needed if name not in names]:
        fail(f"{path}: has no column {', '.join(missing)}, but {', '.join(names)}")
    table = Table([], [])
    for number, line in lines:
        fields = _fields(line)
        if fields == [""]:
            continue
        if labelled and len(fields) != len(names):
            table.left_out.append(f"line {number}: {len(fields)} columns, not {len(names)}")
            continue
        before = len(names) - 1  # columns before the last
        fields += [""] * (before - len(fields))
        row = dict(zip(names, [*fields[:before], " ".join(fields[before:])]))
        if wanted and not wanted(row):
            continue
        label = row[task.label].strip() if labelled else None
        if labelled and not is_label(label, task):
            table.left_out.append(f"line {number}: {task.label} is {label!r}")
            continue
        # The server numbers the rows of MRPC; its file does not.
        index = row[names[0]].strip() if names[0] in ("index", "id") else str(len(table.examples))
        if not labelled and not index.isdecimal():
            fail(f"{path}: line {number}: {names[0]} {index!r} is not a number")
        table.examples.append(
            Example(index, tuple(row[name].strip() for name in task.texts), label)
        )
    return table


def is_label(label: str, task: Task) -> bool:
    if task.labels:
        return label in task.labels
    return bool(re.fullmatch(r"\d+(\.\d*)?", label)) and 0 <= float(label) <= HIGHEST


def _fields(line: str) -> list[str]:
    return line.rstrip("\r\n").split("\t")
