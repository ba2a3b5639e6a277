"""Examples from GLUE's tables: tabs between columns, no quoting, and here and there a row that is broken."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from common.archives import fail, read_lines
from glue.tasks import HIGHEST, Task


class Example(NamedTuple):
    index: str  # what the evaluation server knows it by
    texts: tuple[str, ...]
    label: Optional[str]


class LeftOut(NamedTuple):
    """A row that no example could be made of."""

    line: int
    reason: str
    row: str


class Table(NamedTuple):
    examples: list[Example]
    left_out: list[LeftOut]
    joined: int  # rows that a line break in a text had cut in two or more
    patched: int  # rows without labels whose number of columns is wrong, kept as far as they can be read


class Row(NamedTuple):
    line: int  # its first, from 1
    fields: list[str]
    joined: bool = False


def everything(row: Mapping[str, str]) -> bool:
    return True


def read_table(
    path: Path, task: Task, labelled: bool, wanted: Callable[[Mapping[str, str]], bool] = everything
) -> Table:
    """The examples of a file.

    A row with too few columns is joined with the lines after it if that makes exactly one row. What is left with a
    wrong number of columns, or a label that the task does not have, is left out and listed. From a set without labels
    nothing can be left out, since the server asks for every row: there, missing texts are empty, and what is too much
    belongs to the last text.

    Args:
        path: UTF-8, with or without a byte-order mark
        labelled: whether the labels are read; the program ends if their column is missing
        wanted: told a row by its columns, says whether it belongs to the set; rows of which that cannot be known are
            listed for each set
    """
    lines = enumerate(read_lines(path), 1)
    names = list(task.header) if task.header and labelled else _fields(next(lines, (1, ""))[1].removeprefix("\ufeff"))
    if names == [""]:
        fail(f"{path}: is empty")
    needed = [*task.texts, task.label] if labelled else task.texts
    if missing := [name for name in needed if name not in names]:
        fail(f"{path}: has no column {', '.join(missing)}, but {', '.join(names)}")
    table = Table([], [], 0, 0)
    joined = patched = number = 0
    for row in _rows(lines, len(names), names[-1] in task.texts):
        fields = row.fields
        joined += row.joined
        if len(fields) != len(names):
            if labelled:
                table.left_out.append(LeftOut(row.line, f"{len(fields)} columns, not {len(names)}", "\t".join(fields)))
                continue
            patched += 1
            fields = _patched(fields, len(names))
        named = dict(zip(names, fields))
        if not wanted(named):
            continue
        texts = tuple(named[name].strip() for name in task.texts)
        label = named[task.label].strip() if labelled else None
        if labelled and not is_label(label, task):
            table.left_out.append(LeftOut(row.line, f"{task.label} is {label!r}", "\t".join(fields)))
            continue
        # the server numbers MRPC's rows, whose file does not
        index = named[names[0]].strip() if names[0] in ("index", "id") else str(number)
        if not labelled and not index.isdecimal():
            fail(f"{path}: line {row.line}: {names[0]} {index!r} is not a number")
        table.examples.append(Example(index, texts, label))
        number += 1
    return table._replace(joined=joined, patched=patched)


def is_label(label: str, task: Task) -> bool:
    if task.labels:
        return label in task.labels
    return bool(re.fullmatch(r"\d+(\.\d*)?", label)) and 0 <= float(label) <= HIGHEST


def _fields(line: str) -> list[str]:
    return line.rstrip("\r\n").split("\t")


def _patched(fields: Sequence[str], width: int) -> list[str]:
    """The text is last in every file without labels."""
    return [*fields[: width - 1], " ".join(fields[width - 1 :]), *[""] * (width - len(fields) - 1)]


def _rows(lines: Iterable[tuple[int, str]], width: int, open_end: bool) -> Iterator[Row]:
    """Rows, as far as possible of `width` columns; empty lines are none.

    Args:
        open_end: whether a text is last, so that a line without a tab goes on with it
    """
    complete: Optional[Row] = None  # it may go on
    begun: list[Row] = []  # lines that may be parts of one row
    for number, line in lines:
        row = Row(number, _fields(line))
        if row.fields == [""] and not begun:
            continue
        if complete and open_end and len(row.fields) == 1:
            complete = _join([complete, row])
            continue
        if complete:
            yield complete
            complete = None
        if len(row.fields) >= width:
            yield from begun
            complete, begun = row, []
            continue
        begun.append(row)
        columns = _columns(begun)
        if columns == width:
            complete, begun = _join(begun), []
        elif columns > width:  # the last line is no part of what comes before it
            yield from begun[:-1]
            begun = begun[-1:]
    if complete:
        yield complete
    yield from begun


def _columns(rows: Sequence[Row]) -> int:
    """Of the row that they make: a line break stands within a column."""
    return sum(len(row.fields) - 1 for row in rows) + 1


def _join(rows: Sequence[Row]) -> Row:
    fields = list(rows[0].fields)
    for row in rows[1:]:
        fields[-1] = f"{fields[-1]} {row.fields[0]}"
        fields += row.fields[1:]
    return Row(rows[0].line, fields, joined=True)
