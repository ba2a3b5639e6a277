"""Which tables of the papers there are, at which scales, and what their numbers mean.

A table is a grid of examples/grids: `mixhead_table_7.toml` is `table7`, the low-rank paper's have their own names. Its
scales: `full` is that file, the paper's rows; `small` the file of the same name in examples/grids/small, with the same
labels or some of them; `tiny` the small one with a few updates, to try the tool.
"""

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

import sweep
from sweep import Grid, Point

from reproduction.errors import fail

SCALES = ("full", "small", "tiny")
TINY = "--max-update 6 --warmup-updates 2 --log-interval 1"  # behind the small grid's
SEEDS = 3
NUMERIC = {"tokens", "heads", "head-size"}  # axes whose labels are numbers


class Measure(NamedTuple):
    name: str
    sign: int  # 1 where more is better, -1 where less is

    def gain(self, value: float, base: float) -> float:
        """By how much `value` is better than `base`."""
        return self.sign * (value - base)


PERPLEXITY = Measure("perplexity", -1)
MEASURES = {  # by recipe
    "wikitext2": PERPLEXITY,
    "wikitext103": PERPLEXITY,
    "lm1b": PERPLEXITY,
    "multi30k_de_en": Measure("BLEU", 1),
    "iwslt14_de_en": Measure("BLEU", 1),
    "bert/glue": Measure("score", 1),
    "bert/squad": Measure("F1", 1),
}

# Mixhead table 5, of the test sets: softmax, B. MNLI's are matched/mismatched.
GLUE = {
    "MNLI": ("83.4/82.9", "83.6/82.8"),
    "QQP": ("70.1", "70.2"),
    "QNLI": ("90.7", "90.9"),
    "SST-2": ("93.5", "93.7"),
    "CoLA": ("52.6", "55.4"),
    "STS-B": ("84.7", "85.2"),
    "MRPC": ("87.4", "87.7"),
    "RTE": ("68.0", "68.4"),
}


# What the published cells are, where it is not what the grid's metrics are called.
PUBLISHED_METRICS = {
    "table5": ("test",),  # of the evaluation server; MNLI's two sets have a cell
    "table6": ("EM", "F1"),
    "low_rank_tables_squad": ("F1", "EM"),
}

# Prepared texts, by the checksum that their runs have.
TEXTS = {
    "b1597121f3f1": "WikiText-2 with its articles in another order than in the published archive",
    "564446fb2682": "Multi30k De-En",
}

# Beside the rows: what a table begins with, and what its paper says without numbers.
NOTES = {
    "table5": "Begins with the published bert-base-uncased, which examples/bert/glue/prepare.sh fetches and converts. "
    "MNLI's cells are of its matched/mismatched sets.",
    "table6": "Begins with the published bert-base-uncased, which examples/bert/squad/prepare.sh fetches and converts.",
    "low_rank_figure_1": "What the figures say: Fixhead at d 256 beats the baseline at d 512, and is better with every "
    "head more; the baseline is worse beyond 16 heads (figure 4).",
    **dict.fromkeys(
        ("low_rank_tables_mnli", "low_rank_tables_squad"),
        "Fine-tunes models that have to be pre-trained first, for many times these hours: see the end of this list. "
        "prepare.sh --from takes them.",
    ),
}

# Why a table has no small grid.
LM1B = "LM1B's 800 million words have no small counterpart here"
BERT = "it fine-tunes a BERT of the paper's size, and a pre-trained one has no small counterpart here"
FULL_ALONE = {
    "table3": f"{LM1B}; the nearest is table2, whose small grid has the vanilla Transformer and Transformer-XL",
    "table5": BERT,
    "table6": BERT,
    "low_rank_figure_1": LM1B,
    "low_rank_tables_mnli": BERT,
    "low_rank_tables_squad": BERT,
}


class Table(NamedTuple):
    name: str
    file: str  # of its grids

    def path(self, scale: str) -> Path:
        folder = sweep.EXAMPLES / "grids"
        return (folder if scale == "full" else folder / "small") / self.file

    def scales(self) -> list[str]:
        return [scale for scale in SCALES if self.path(scale).exists()]

    def grid(self, scale: str) -> Grid:
        """The runs of a scale, without seeds; ends where there is no such scale."""
        if scale not in self.scales():
            fail(f"--scale {scale}: {self.name} has full alone: {FULL_ALONE.get(self.name, 'it has no small grid')}")
        grid = sweep.read_grid(self.path(scale))
        if grid.example not in MEASURES:
            fail(
                f"{self.path(scale)}: {grid.example}: must be one of {', '.join(MEASURES)}, whose metric is known here"
            )
        if scale != "full" and (unknown := [row for row in rows(grid) if row not in rows(self.grid("full"))]):
            fail(f"{self.path(scale)}: {'/'.join(unknown[0])}: is no row of {self.path('full').name}")
        if self.file == "glue.toml" and scale == "full":
            grid = of_all_tasks(grid)
        if scale == "tiny":
            grid = grid._replace(axes=with_flags(grid.axes, TINY))
        axes = {axis: points for axis, points in grid.axes.items() if axis != "seed"}
        return grid._replace(axes=axes)

    def published(self) -> Mapping[str, str]:
        return self.grid("full").published

    def published_metrics(self) -> tuple[str, ...]:
        """What the numbers of a published cell are, in their order."""
        return PUBLISHED_METRICS.get(self.name) or tuple(self.grid("full").metrics)


def rows(grid: Grid) -> list[tuple[str, ...]]:
    """The labels of every point, of one seed."""
    axes = [points for axis, points in grid.axes.items() if axis != "seed"]
    return list(itertools.product(*axes))


def with_label(axes: Mapping[str, Collection[str]], row: Sequence[str], label: str) -> Optional[tuple[str, ...]]:
    """The row that has `label` of the same axis as softmax, and is like `row` otherwise; None without one."""
    for i, labels in enumerate(axes.values()):
        if "softmax" in labels:
            return (*row[:i], label, *row[i + 1 :]) if label in labels else None
    return None


def with_flags(axes: Mapping[str, Mapping[str, Point]], flags: str) -> dict[str, dict[str, Point]]:
    """The axes with `flags` after those of every point of the last one, so that they are the ones that count."""
    last = list(axes)[-1]
    return {
        axis: {
            label: Point(f"{point.train} {flags}", point.evaluate) if axis == last else point
            for label, point in points.items()
        }
        for axis, points in axes.items()
    }


def of_all_tasks(grid: Grid) -> Grid:
    """glue.toml is a grid of one task, which VARIANT names."""
    tasks = {task: Point(f"VARIANT={task}") for task in GLUE}
    published = {
        f"{task}/{label}": cell for task, cells in GLUE.items() for label, cell in zip(("softmax", "B"), cells)
    }
    return grid._replace(title="GLUE (Mixhead table 5)", axes={"task": tasks, **grid.axes}, published=published)


def cell(published: Mapping[str, str], labels: Sequence[str]) -> str:
    """The paper's number for a row; that of a shorter label is of all rows that begin with it (the best, in GLUE)."""
    for length in range(len(labels), 0, -1):
        if (found := published.get("/".join(labels[:length]))) is not None:
            return found
    return ""


def seeded(grid: Grid, seeds: int) -> Grid:
    """Every row with seeds 1, 2, ...; all rows of a seed before the next, so that what is done can be compared."""
    axis = {str(seed): Point(f"--seed {seed}") for seed in range(1, seeds + 1)}
    return grid._replace(axes={"seed": axis, **grid.axes})


def comment(path: Path) -> str:
    """What a grid's file says of itself: the comment at its top, as one line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), lines))


def tables() -> dict[str, Table]:
    found = {}
    for path in (sweep.EXAMPLES / "grids").glob("*.toml"):
        if match := re.fullmatch(r"mixhead_table_(\d+)\.toml", path.name):
            found[f"table{match[1]}"] = Table(f"table{match[1]}", path.name)
        elif path.name == "glue.toml":
            found["table5"] = Table("table5", path.name)
        elif path.name.startswith("low_rank_"):
            found[path.stem] = Table(path.stem, path.name)

    def order(name: str) -> tuple[bool, int, str]:
        number = re.fullmatch(r"table(\d+)", name)
        return number is None, int(number[1]) if number else 0, name

    return {name: found[name] for name in sorted(found, key=order)}


def table(name: str) -> Table:
    known = tables()
    if name not in known:
        fail(f"{name}: must be one of {', '.join(known)}")
    return known[name]


def chosen(grid: Grid, only: Sequence[str]) -> list[tuple[str, ...]]:
    """The rows of any of `only`; all where it is empty."""
    found = [set(named(grid, given)) for given in only]
    return [row for row in rows(grid) if not only or any(row in of_one for of_one in found)]


def named(grid: Grid, given: str) -> list[tuple[str, ...]]:
    """The rows that have, of every axis that labels are given of, one of these labels."""
    axes = {axis: points for axis, points in grid.axes.items() if axis != "seed"}
    labels = [label for points in axes.values() for label in points]
    wanted = [given] if given in labels else parts(given, set(labels))  # a label may have commas
    if (unknown := next((label for label in wanted if label not in labels), None)) is not None:
        fail(f"--only {given}: {unknown!r} is no label; labels are {'; '.join(labels)}")
    of_axis = {axis: found for axis, points in axes.items() if (found := points.keys() & set(wanted))}
    return [row for row in rows(grid) if all(row[list(axes).index(axis)] in found for axis, found in of_axis.items())]


def parts(text: str, labels: set[str]) -> list[str]:
    """`text` cut at its commas, but within labels."""
    found, words = [], text.split(",")
    while words:
        length = next((n for n in range(len(words), 0, -1) if ",".join(words[:n]) in labels), 1)
        found.append(",".join(words[:length]))
        words = words[length:]
    return found
