"""How results are written: one style for all figures, the same bytes for the same numbers, and JSON beside them."""

import json
import math
import os
import platform
import tempfile
from argparse import ArgumentParser, Namespace
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch

import mixhead_plugin
from mixhead_plugin.errors import OptionError

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
except ImportError as error:
    raise OptionError("figures need matplotlib: pip install matplotlib") from error

# Okabe and Ito's palette, which the colour-blind can tell apart, without its yellow; the line styles tell lines of a
# second round apart, and all of them without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")
SEQUENTIAL = "viridis"
DIVERGING = "RdBu_r"
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.grid": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "savefig.dpi": 150,
    "savefig.bbox": "tight",
    "savefig.pad_inches": 0.08,
    "svg.hashsalt": "mixhead_plugin",  # the names of SVG's elements would be random
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--output", default="analysis", metavar="DIR", help="folder for PNG, SVG and JSON (default: %(default)s)"
    )


def add_labels(parser: ArgumentParser) -> None:
    parser.add_argument("--labels", metavar="A,B,...", help="what the legend calls the inputs (default: their names)")


def labels(args: Namespace, number: int) -> List[Optional[str]]:
    """The labels of `number` inputs, None for those that were not named.

    Raises:
        OptionError: another number of labels was given, or equal ones
    """
    if args.labels is None:
        return [None] * number
    given = args.labels.split(",")
    if len(given) != number or not all(given):
        raise OptionError(f"--labels {args.labels}: must be {number} names, with commas between them")
    check_distinct(given)
    return list(given)


def check_distinct(names: Sequence[str]) -> None:
    """Raises:
    OptionError: two inputs have the same name, in the legend and in the JSON
    """
    for name in names:
        if list(names).count(name) > 1:
            raise OptionError(f"--labels: two inputs are called {name}; name each, with commas between: --labels A,B")


def style() -> AbstractContextManager:
    """The context to draw in."""
    return matplotlib.rc_context(STYLE)


def subplots(
    rows: int, columns: int, size: Tuple[float, float], square: bool = False, **settings: Any
) -> Tuple[Figure, np.ndarray]:
    """A figure and its axes [rows, columns]; `size` is the width and height of each in inches.

    `square` is for axes whose shape is fixed.
    """
    layout = "compressed" if square else "constrained"
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout=layout)
    return figure, figure.subplots(rows, columns, squeeze=False, **settings)


def line(i: int) -> Dict[str, Any]:
    """Colour and style of the i-th series."""
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[i // len(COLOURS) % len(LINES)]}


def integer_axis(axis: Any, ticks: int = 8) -> None:
    """`axes.xaxis` or `axes.yaxis` of whole numbers, layers or heads, with so many ticks at most."""
    axis.set_major_locator(MaxNLocator(nbins=ticks, integer=True, min_n_ticks=1))


def from_zero(axes: Axes, values: Sequence[float]) -> None:
    """A vertical axis from 0 to a little above the largest of `values`, whose mark is then whole."""
    largest = float(np.nanmax(values, initial=0.0))
    axes.set_ylim(0, 1.08 * largest if largest > 0 else 1)


def logarithmic(axis: Any) -> None:
    """`axes.yaxis` on a logarithmic scale, with plain numbers also where it spans no power of ten."""
    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def heat_map(
    axes: Axes,
    values: Any,
    *,
    low: Optional[float] = None,
    high: Optional[float] = None,
    diverging: bool = False,
    **labels: Any,
) -> AxesImage:
    """A matrix as colours, one row and one column for each whole number from 0; NaN (nothing there) stays blank.

    Args:
        axes: what to draw in
        values: [rows, columns]
        low, high: the ends of the colours; by default those of the values, for `diverging` as far on both sides of 0
        diverging: white is 0
        labels: `axes.set`'s
    """
    values = np.asarray(values, dtype=float)
    if diverging and low is None and high is None:
        high = float(np.nanmax(np.abs(values), initial=1e-9))
        low = -high
    image = axes.imshow(
        values, vmin=low, vmax=high, cmap=DIVERGING if diverging else SEQUENTIAL, aspect="auto", interpolation="nearest"
    )
    integer_axis(axes.xaxis)
    integer_axis(axes.yaxis)
    axes.set(**labels)
    return image


def colour_bar(figure: Figure, image: Any, axes: np.ndarray, label: str, **settings: Any) -> None:
    """What the colours of `image` mean, beside `axes`."""
    figure.colorbar(image, ax=list(axes.flat), label=label, aspect=10 + 10 * axes.shape[0], pad=0.03, **settings)


def legend_below(figure: Figure, axes: np.ndarray) -> None:
    """One legend for all `axes`, in which the same name stands once."""
    handles: Dict[str, Any] = {}
    for panel in axes.flat:
        for handle, name in zip(*panel.get_legend_handles_labels()):
            handles.setdefault(name, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=axes.shape[1])


def shade(layer: int, layers: int) -> Any:
    """The colour of a layer's line where there is one for each; `layer_bar` explains them."""
    return matplotlib.colormaps[SEQUENTIAL](0.9 * layer / max(1, layers - 1))


def layer_bar(figure: Figure, axes: np.ndarray, layers: int) -> None:
    """The colours of `shade` beside `axes`."""
    colours = ListedColormap([shade(layer, layers) for layer in range(layers)])
    scale = ScalarMappable(BoundaryNorm(np.arange(layers + 1) - 0.5, layers), colours)
    ticks = range(0, layers, max(1, math.ceil(layers / 8)))
    colour_bar(figure, scale, axes, "layer", ticks=list(ticks))


def ragged(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Rows of different lengths as a matrix [rows, longest], NaN where a row has ended."""
    matrix = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for i, row in enumerate(rows):
        matrix[i, : len(row)] = row
    return matrix


def save(figure: Figure, folder: str, name: str) -> List[Path]:
    """`<folder>/<name>.png` and `.svg`, which depend on nothing but the figure."""
    made = _folder(folder)
    files = [made / f"{name}.png", made / f"{name}.svg"]
    with style():
        figure.savefig(files[0])
        figure.savefig(files[1], metadata={"Date": None})
    return files


def save_json(folder: str, name: str, args: Namespace, results: Dict[str, Any]) -> Path:
    """`<folder>/<name>.json`: versions, the command's flags, and the numbers; what is not finite is null."""
    file = _folder(folder) / f"{name}.json"
    flags = {key: value for key, value in vars(args).items() if isinstance(value, (str, int, float, list, dict))}
    content = {"command": name, "versions": versions(), "flags": flags, **results}
    file.write_text(json.dumps(_plain(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    return file


def versions() -> Dict[str, str]:
    found = {"mixhead_plugin": mixhead_plugin.__version__, "python": platform.python_version()}
    for package, names in {"torch": ["torch"], "fairseq": ["fairseq", "fairseq-fixed"]}.items():
        for name in names:
            try:
                found[package] = version(name)
            except PackageNotFoundError:
                continue
    return found


def report(files: Sequence[Path]) -> None:
    """Say what was written."""
    for file in files:
        print(f"wrote {file}")


def check_folder(flag: str, value: str, folder: str) -> None:
    """Whether a file can be written in `folder`, which need not be there yet: it is not made before it is needed.

    Args:
        flag: that names it
        value: the flag's
        folder: where files are to be written

    Raises:
        OptionError: none can be written
    """
    there = Path(folder).absolute()
    while not os.path.lexists(there):
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise OptionError(f"{flag} {value}: cannot be written: {there}: {error.strerror}") from error


def _folder(folder: str) -> Path:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--output {folder}: {error.strerror}") from error
    return Path(folder)


def _plain(value: Any) -> Any:
    """Tensors, arrays and tuples as lists, NaN and infinities as None."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
