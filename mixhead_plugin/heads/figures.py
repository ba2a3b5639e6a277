"""Draw all pictures in one style. matplotlib is imported only when a picture is drawn."""

import io
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

# Okabe and Ito's palette for the colour-blind, without yellow. After the last colour, the style of
# the line changes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")
# What the colours on white paper become on dark paper. Those of paper and ink are the page's.
DARK = {
    "#ffffff": "#181d23",
    "#000000": "#e6eaef",
    "#0072b2": "#4aa8e0",
    "#d55e00": "#f0883e",
    "#009e73": "#2fc49a",
    "#cc79a7": "#d58fbd",
}
SEQUENTIAL = "viridis"
STYLE: Any = {  # matplotlib's types name each key
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
    """Return a context in which matplotlib draws in STYLE."""
    import matplotlib

    return matplotlib.rc_context(STYLE)


def subplots(
    rows: int, columns: int, size: tuple[float, float], square: bool = False
) -> tuple[Any, np.ndarray]:
    """Return a figure and its axes [rows, columns].

    Args:
        rows: the number of rows of axes
        columns: the number of columns of axes
        size: width and height of the room for each axes, in inches
        square: whether the axes have a shape of their own, as a picture of a matrix has
    """
    from matplotlib.figure import Figure

    inches = size[0] * columns, size[1] * rows
    figure = Figure(figsize=inches, layout="compressed" if square else "constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def colours(names: Iterable[str], fixed: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a colour for each name, as different from one another as COLOURS allows.

    Args:
        names: the names
        fixed: the colours of some names, which no other name takes; None for no such colours
    """
    names = list(dict.fromkeys(names))
    fixed = fixed or {}
    taken = {fixed[name] for name in names if name in fixed}
    left = itertools.cycle([colour for colour in COLOURS if colour not in taken] or COLOURS)
    return {name: fixed.get(name) or next(left) for name in names}


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the colour and the style of each line; no two have the same of both."""
    look_of: dict[str, dict[str, Any]] = {}
    used: Counter[str] = Counter()  # how many lines have a colour
    for name, colour in colours(names).items():
        look_of[name] = {"color": colour, "linestyle": LINES[used[colour] % len(LINES)]}
        used[colour] += 1
    return look_of


def integer_axis(axis: Any, ticks: int = 8) -> None:
    """Show whole numbers, such as layers or heads, on an axis.

    Args:
        axis: `axes.xaxis` or `axes.yaxis`
        ticks: how many numbers there may be
    """
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=ticks, integer=True, min_n_ticks=1))


def heat_maps(
    panels: Sequence[Sequence[tuple[str, Any] | None]],
    size: tuple[float, float],
    label: str,
    colour_map: str = SEQUENTIAL,
    square: bool = False,
    xlabel: str = "",
    ylabel: str = "",
) -> Any:
    """Draw matrices in one scale of colours.

    Args:
        panels: rows of titles and matrices; None is an empty panel. The rows of a matrix may have
            different lengths
        size: width and height of the room for each panel, in inches
        label: what the scale of colours is of
        colour_map: a name of matplotlib's; in all but SEQUENTIAL, 0 is in the middle
        square: whether the cells of the matrices are squares; else they fill the room
        xlabel: below the last row of panels
        ylabel: beside the first column of panels
    """
    figure, axes = subplots(len(panels), max(map(len, panels)), size, square)
    drawn = [ragged(panel[1]) for panel in itertools.chain(*panels) if panel is not None]
    low = min(np.nanmin(matrix) for matrix in drawn)
    high = max(np.nanmax(matrix) for matrix in drawn)
    if colour_map != SEQUENTIAL:
        high = max(-low, high, 1e-9)
        low = -high
    look = {
        "vmin": low,
        "vmax": high,
        "aspect": "equal" if square else "auto",
        "interpolation": "nearest",
    }
    for axes_row, row in zip(axes, panels, strict=True):
        for axis, panel in itertools.zip_longest(axes_row, row):
            if panel is None:
                axis.axis("off")
                continue
            title, matrix = panel
            image = axis.imshow(ragged(matrix), colour_map, **look)
            integer_axis(axis.xaxis, ticks=4 if square else 8)
            integer_axis(axis.yaxis)
            axis.grid(False)
            axis.set(title=title, xlabel=xlabel if axis in axes[-1] else "")
            axis.set_ylabel(ylabel if axis is axes_row[0] else "")
    figure.colorbar(image, ax=list(axes.flat), label=label, aspect=10 + 10 * len(panels), pad=0.03)
    return figure


def legend_below(figure: Any, axes: np.ndarray) -> None:
    """Draw one legend for all `axes`, with each name once."""
    handles: dict[str, Any] = {}
    for panel in axes.flat:
        for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=axes.shape[1]
    )


def ragged(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Return rows of different lengths as a matrix [rows, longest row].

    NaN follows the end of a row.
    """
    return np.array([*itertools.zip_longest(*rows, fillvalue=np.nan)]).T


def save_svg(figure: Any, path: Path) -> None:
    """Write an SVG file that follows the reader's light or dark theme."""
    text = io.StringIO()
    # without a date, the same figure gives the same bytes
    figure.savefig(text, format="svg", metadata={"Date": None})

    # matplotlib writes each colour into a `style`, so only an `!important` rule can replace it.
    # Text has no colour of its own, and takes that of the root.
    rules = [f"svg {{ fill: {DARK['#000000']} }}"]
    for light, dark in DARK.items():
        for part in ("fill", "stroke"):
            rules.append(f'[style*="{part}: {light}"] {{ {part}: {dark} !important }}')
    style = f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"
    path.write_text(text.getvalue().replace("</defs>", f"{style}</defs>", 1), encoding="utf-8")


def save(figure: Any, folder: str | PathLike[str], name: str) -> list[Path]:
    """Write `<folder>/<name>.png` and `.svg`; the same figure gives the same bytes."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    files = [Path(folder) / f"{name}.png", Path(folder) / f"{name}.svg"]
    with style():
        figure.savefig(files[0])
        save_svg(figure, files[1])
    return files
