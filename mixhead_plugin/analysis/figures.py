"""Define the style of all pictures; matplotlib is imported only when one is drawn."""

import math
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


def logarithmic(axis: Any) -> None:
    """Make `axes.yaxis` logarithmic, with plain numbers also where it spans no power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.axes.set_yscale("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def heat_map(axes: Any, values: Any, low: float, high: float, colours: str = SEQUENTIAL, **labels: Any) -> Any:
    """Draw a matrix [rows, columns] as colours from `low` to `high`; NaN stays blank. `labels` are those of axes.set"""
    values = np.asarray(values, dtype=float)
    image = axes.imshow(values, vmin=low, vmax=high, cmap=colours, aspect="auto", interpolation="nearest")
    integer_axis(axes.xaxis)
    integer_axis(axes.yaxis)
    axes.grid(False)
    axes.set(**labels)
    return image


def colour_bar(figure: Any, image: Any, axes: np.ndarray, label: str, **settings: Any) -> None:
    """Draw the meaning of the colours of `image` beside `axes`."""
    figure.colorbar(image, ax=list(axes.flat), label=label, aspect=10 + 10 * axes.shape[0], pad=0.03, **settings)


def legend_below(figure: Any, axes: np.ndarray) -> None:
    """Draw one legend for all `axes`, in which each name stands once."""
    handles: dict[str, Any] = {}
    for panel in axes.flat:
        for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=axes.shape[1])


def shade(layer: int, layers: int) -> Any:
    """Return the colour of a layer's line; `layer_bar` shows which is which."""
    import matplotlib

    return matplotlib.colormaps[SEQUENTIAL](0.9 * layer / max(1, layers - 1))


def layer_bar(figure: Any, axes: np.ndarray, layers: int) -> None:
    """Draw the colours of `shade` beside `axes`."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    colours = ListedColormap([shade(layer, layers) for layer in range(layers)])
    scale = ScalarMappable(BoundaryNorm(np.arange(layers + 1) - 0.5, layers), colours)
    colour_bar(figure, scale, axes, "layer", ticks=range(0, layers, math.ceil(layers / 8)))


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
