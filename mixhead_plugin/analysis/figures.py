"""Define the style of all pictures; matplotlib is imported only when one is drawn."""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

# Okabe and Ito's palette for the colour-blind, without its yellow. When it is used up, the line style changes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")
SEQUENTIAL = "viridis"
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "savefig.dpi": 150,
    "savefig.bbox": "tight",
    "savefig.pad_inches": 0.08,
    "svg.hashsalt": "mixhead_plugin",  # without it, the names of SVG's elements are random
}


def style() -> AbstractContextManager[None]:
    """Return the context to draw in."""
    import matplotlib

    return matplotlib.rc_context(STYLE)


def subplots(rows: int, columns: int, size: tuple[float, float], square: bool = False) -> tuple[Any, np.ndarray]:
    """Return a figure and its axes [rows, columns] of `size` inches each; `square` is for axes of a fixed shape."""
    from matplotlib.figure import Figure

    layout = "compressed" if square else "constrained"
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout=layout)
    return figure, figure.subplots(rows, columns, squeeze=False)


def line(i: int) -> dict[str, Any]:
    """Return the colour and the style of the i-th series."""
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[i // len(COLOURS) % len(LINES)]}


def integer_axis(axis: Any, ticks: int = 8) -> None:
    """Show whole numbers, such as layers or heads, on `axes.xaxis` or `axes.yaxis`."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=ticks, integer=True, min_n_ticks=1))


def heat_maps(
    panels: Sequence[Sequence[tuple[str, Any] | None]],
    size: tuple[float, float],
    label: str,
    colours: str = SEQUENTIAL,
    square: bool = False,
    **labels: str,
) -> Any:
    """Draw matrices in one scale of colours; other colours than SEQUENTIAL have 0 in their middle.

    `panels` are rows of titles and matrices. The rows of a matrix may have different lengths. None is an empty panel.
    """
    figure, axes = subplots(len(panels), max(map(len, panels)), size, square)
    matrices = [[found and (found[0], ragged(found[1])) for found in row] for row in panels]
    entries = np.concatenate([found[1].ravel() for row in matrices for found in row if found])
    low, high = np.nanmin(entries), np.nanmax(entries)
    if colours != SEQUENTIAL:
        high = max(-low, high, 1e-9)
        low = -high
    for panel_row, row in zip(axes, matrices, strict=True):
        for panel, found in itertools.zip_longest(panel_row, row):
            if found is None:
                panel.axis("off")
                continue
            aspect = "equal" if square else "auto"
            image = panel.imshow(found[1], colours, vmin=low, vmax=high, aspect=aspect, interpolation="nearest")
            integer_axis(panel.xaxis, ticks=4 if square else 8)
            integer_axis(panel.yaxis)
            panel.grid(False)
            panel.set(title=found[0], **labels)
    figure.colorbar(image, ax=list(axes.flat), label=label, aspect=10 + 10 * len(panels), pad=0.03)
    return figure


def legend_below(figure: Any, axes: np.ndarray) -> None:
    """Draw one legend for all `axes`, in which each name stands once."""
    handles: dict[str, Any] = {}
    for panel in axes.flat:
        for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=axes.shape[1])


def ragged(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Return rows of different lengths as a matrix [rows, longest], filled up with NaN."""
    matrix = np.full((len(rows), max(map(len, rows))), np.nan)
    for i, row in enumerate(rows):
        matrix[i, : len(row)] = row
    return matrix


def save(figure: Any, folder: str, name: str) -> list[Path]:
    """Write `<folder>/<name>.png` and `.svg`; the same figure gives the same bytes."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    files = [Path(folder) / f"{name}.png", Path(folder) / f"{name}.svg"]
    with style():
        figure.savefig(files[0])
        figure.savefig(files[1], metadata={"Date": None})
    return files
