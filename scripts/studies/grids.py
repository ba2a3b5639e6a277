"""Read the grids of examples/grids/. examples/README.md describes the files."""

import itertools
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from studies.faults import STRICT, fail, fault_of

# ---- the fields of a file ----------------------------------------------------------------------


def words_of(value: Any) -> tuple[str, ...]:
    """Return the words of flags, as a shell splits them."""
    if isinstance(value, tuple):
        return value
    if not isinstance(value, str):
        raise ValueError(f"must be flags in a text, not {value!r}")
    return tuple(shlex.split(value))


Flags = Annotated[tuple[str, ...], BeforeValidator(words_of)]
NotEmpty = Field(min_length=1)


class TableOrFlags(BaseModel):
    """A table of a file, for which flags in a text are short: they are those of its first field."""

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def from_text(cls, value: Any) -> Any:
        fields = list(cls.model_fields)
        if isinstance(value, str):
            return {fields[0]: value}
        if not isinstance(value, dict | cls):
            raise ValueError(f"must be flags, or a table of {' and '.join(fields)}, not {value!r}")
        return value


class Point(TableOrFlags):
    """What one value of an axis adds to both commands; words like MODEL=vanilla set variables.

    In a file, `B = "--mixing B"` is short for `B = { train = "--mixing B" }`.
    """

    train: Flags = ()
    evaluate: Flags = ()


class Metric(TableOrFlags):
    """The flags of evaluate.sh for one metric.

    In a file, `test = "--beam 5"` is short for `test = { evaluate = "--beam 5" }`.
    """

    evaluate: Flags
    only: str = ""  # the label of the points that have the metric; empty: every point has it


Axis = Annotated[dict[str, Point], NotEmpty]  # label -> what it adds
Row = tuple[str, ...]  # the labels of a point, in the order of the axes


class Grid(BaseModel):
    """All runs of a sweep."""

    model_config = STRICT

    example: Annotated[str, NotEmpty]  # a folder of examples/
    title: str = ""
    train: Flags = ()  # of every run
    evaluate: Flags = ()
    metrics: Annotated[dict[str, Metric], NotEmpty] = {"result": Metric(evaluate=())}
    axes: Annotated[dict[str, Axis], NotEmpty]
    # "label,label" -> what such points add to train.sh; no others are run
    cells: dict[str, Flags] = {}
    baseline: str = "softmax"  # its axis' others are compared with it; the grid may lack it
    published: dict[str, str] = {}  # "label/label" -> the paper's numbers, one for each metric
    starts: dict[str, str] = {}  # label -> the label of the same axis whose run it starts from
    # the table that was registered for the grid, in planned.TABLES; empty: that of every grid
    table: Literal["", "steps", "errors", "lasting", "units"] = ""
    # report.py shows no result before every point has as many; 0: it shows what there is
    seeds: Annotated[int, Field(ge=0)] = 0

    # the grid whose file has the paper's numbers, if another one has
    _paper: "Grid | None" = PrivateAttr(None)

    @property
    def labels(self) -> set[str]:
        """Return the labels of all axes."""
        return set(itertools.chain.from_iterable(self.axes.values()))

    @property
    def rows(self) -> Iterator[Row]:
        """Return the labels of every point of the axes, the last one moving fastest."""
        return itertools.product(*self.axes.values())

    @property
    def points(self) -> list[Row]:
        """Return the rows that are run: all of them, or those that lie in a cell."""
        return [row for row in self.rows if not self.cells or self.cells_of(row)]

    def cells_of(self, row: Row) -> list[str]:
        """Return the cells that a point lies in."""
        return [cell for cell in self.cells if labels_of(cell) <= set(row)]

    def start_of(self, row: Row) -> Row | None:
        """Return the point whose run the run of this one starts from; None for a fresh start."""
        start = tuple(self.starts.get(label, label) for label in row)
        return None if start == row else start

    @property
    def published_metrics(self) -> list[str]:
        """Return the metrics that the paper's numbers of a cell are of."""
        return list((self._paper or self).metrics)

    def measures(self, labels: Iterable[str], metric: str) -> bool:
        """Return True if the point with these labels has the metric."""
        only = self.metrics[metric].only if metric in self.metrics else ""
        return not only or only in labels

    # ---- checks of several fields

    @model_validator(mode="after")
    def metrics_are_of_known_points(self) -> "Grid":
        for name, metric in self.metrics.items():
            if metric.only and metric.only not in self.labels:
                raise ValueError(f"metrics.{name}.only: {metric.only!r} is no label of the grid")
        return self

    @model_validator(mode="after")
    def cells_are_points(self) -> "Grid":
        for cell in self.cells:
            if not any(labels_of(cell) <= set(row) for row in self.rows):
                raise ValueError(f"cells.{cell!r}: is no point of the grid")
        return self

    @model_validator(mode="after")
    def published_cells_are_points(self) -> "Grid":
        points = {"/".join(row) for row in self.rows}
        for cell in self.published:
            if cell not in points:
                raise ValueError(f"published.{cell!r}: is no point of the grid")
        return self

    @model_validator(mode="after")
    def starts_are_earlier_labels(self) -> "Grid":
        for label, start in self.starts.items():
            if start not in self.labels_before(label):
                raise ValueError(
                    f"starts.{label!r} = {start!r}: must be an earlier label of the same axis"
                )
        return self

    @model_validator(mode="after")
    def starts_are_run(self) -> "Grid":
        points = set(self.points)
        for row in self.points:
            start = self.start_of(row)
            if start is not None and start not in points:
                raise ValueError(
                    f"cells: must have {','.join(start)!r}, because {','.join(row)!r} starts from "
                    "its run"
                )
        return self

    def labels_before(self, label: str) -> list[str]:
        """Return the labels of the same axis that stand before this one."""
        for axis in self.axes.values():
            labels = list(axis)
            if label in labels:
                return labels[: labels.index(label)]
        return []


def labels_of(words: str) -> set[str]:
    """Return the labels of a cell, or of --only, which have commas between them."""
    return set(words.split(","))


# ---- reading -----------------------------------------------------------------------------------


def read_grid(path: Path) -> Grid:
    """Read a TOML file; a wrong one ends the command."""
    try:
        return grid_from(tomllib.loads(path.read_text(encoding="utf-8")), path)
    except ValidationError as error:
        fail(f"{path}: {fault_of(error)}")
    except (OSError, ValueError, RecursionError) as error:
        fail(f"{path}: {error}")


def grid_from(content: Mapping[str, Any], path: Path) -> Grid:
    """Return the grid of a file's content. Raises ValidationError for a wrong one."""
    content = {"title": path.stem, **content}
    paper_file = content.get("published")
    if not isinstance(paper_file, str):
        return Grid.model_validate(content)

    # a small grid names the file that has the paper's numbers, instead of repeating them
    del content["published"]
    grid = Grid.model_validate(content)
    paper = read_grid(path.parent / paper_file)
    grid = grid.model_copy(update={"published": paper.published})
    grid._paper = paper
    return grid
