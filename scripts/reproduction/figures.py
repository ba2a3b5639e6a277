"""For each table a figure of our means and of our gains beside the paper's, and one of spectra where there are some."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np

from reproduction import gains
from reproduction.results import UNMIXED, Study, mark
from reproduction.samples import FEWEST, sample
from reproduction.tables import NUMERIC

DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))  # so that curves on one another are all seen
Series = tuple[str, list[float], list[Optional[tuple[str, ...]]]]  # its name, its places, and the row at each


def draw(studies: Sequence[Study], folder: Path) -> list[Path]:
    """Of one table, at all its scales; the files made."""
    from mixhead_plugin.analysis import figures  # takes seconds

    made = []
    with figures.style():
        shown = [study for study in studies if study.part["runs"]]
        if shown:
            figure, axes = figures.subplots(len(shown), 2, (4.8, 3.6))
            for (left, right), study in zip(axes, shown):
                means(figures, left, study)
                gained(figures, right, study)
                left.set_title(f"{study.part['title']}\nmean and standard deviation over the seeds")
                unmixed = "\nx: ours decoded unmixed, as the paper's code does" if study.unmixed else ""
                right.set_title(f"gain over softmax, same seed: mean and 95% interval; hollow: the paper's{unmixed}")
            if axes[0][0].get_legend_handles_labels()[0]:
                figures.legend_below(figure, axes)
            made += figures.save(figure, str(folder), studies[0].table)
        spectra = [study for study in studies if any("spectrum" in run for run in study.part["runs"])]
        if spectra:
            made += figures.save(spectrum(figures, spectra), str(folder), f"{studies[0].table}_spectrum")
    for path in map(Path, made):
        if path.suffix == ".svg":
            drawn, end, after = path.read_text(encoding="utf-8").rpartition("</svg>")
            path.write_text(f"{drawn}<!-- {mark(studies)} -->\n{end}{after}", encoding="utf-8")
    return made


def what(study: Study) -> str:
    return f"{study.measure.name} ({study.metric}), {study.part['better']} is better"


def series(study: Study) -> tuple[Optional[str], list[Series]]:
    """The axis of numbers, and a line over it for each attention; without such an axis one place for each row."""
    across = next((axis for axis in NUMERIC if axis in study.axes), None)
    if across is None:
        return None, [("", [float(i) for i, _ in enumerate(study.rows)], list(study.rows))]
    at = list(study.axes).index(across)
    others = list(dict.fromkeys(row[:at] + row[at + 1 :] for row in study.rows))
    labels = study.axes[across]
    found = []
    for i, other in enumerate(others):
        beside = 2.0 ** (0.06 * (i - (len(others) - 1) / 2))  # bars of several lines do not cover one another
        rows = [(*other[:at], label, *other[at:]) for label in labels]
        found.append(("/".join(other), [float(label) * beside for label in labels], rows))
    return across, found


def lay_out(panel: Any, study: Study, across: Optional[str]) -> None:
    if across is None:
        names = ["/".join(row) for row in study.rows]
        turned = sum(map(len, names)) > 40
        panel.set_xticks(range(len(names)), names, rotation=90 if turned else 0)
        panel.set_xlim(-0.5, len(names) - 0.5)
    else:
        panel.set_xscale("log", base=2)
        panel.set_xticks([float(label) for label in study.axes[across]], study.axes[across])
        panel.minorticks_off()
        panel.set_xlabel(across)
    panel.grid(True, axis="y")


def points(figures: Any, study: Study) -> Iterator[tuple[dict[str, Any], Series, bool]]:
    """How each series is drawn, and whether it is a line."""
    across, found = series(study)
    for i, one in enumerate(found):
        style = figures.line(i) if across else {"color": figures.COLOURS[0], "linestyle": "none"}
        yield {**style, "marker": "o", "markersize": 4, "capsize": 3}, one, across is not None


def means(figures: Any, panel: Any, study: Study) -> None:
    for style, (name, xs, rows), is_line in points(figures, study):
        found = [list(study.values(row, study.metric).values()) for row in rows]
        centres = [sample(values).mean if values else np.nan for values in found]
        bars = [sample(values).deviation if values else np.nan for values in found]
        panel.errorbar(xs, centres, bars, **style, **({"label": name} if is_line else {}))
    lay_out(panel, study, series(study)[0])
    panel.set_ylabel(what(study))


def centres_and_margins(found: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """nan where there are no values, or too few for an interval."""
    centres = [sample(values).mean if values else np.nan for values in found]
    margins = [sample(values).margin if len(values) >= FEWEST else np.nan for values in found]
    return centres, margins


def gained(figures: Any, panel: Any, study: Study) -> None:
    """Over softmax; the intervals are of the seeds' differences."""
    shown = [0.0]  # what must be within the panel; what is decoded unmixed has intervals too wide for it
    for style, (_, xs, rows), across in points(figures, study):
        bases = [study.other(row, "softmax") for row in rows]
        own = [(x, row, base) for x, row, base in zip(xs, rows, bases) if base is not None and row != base]
        if not own:
            continue
        places = [x for x, _, _ in own]
        found = [list(gains.by_seed(study, row, base).values()) for _, row, base in own]
        theirs = [gains.published(study, row, base) for _, row, base in own]
        centres, margins = centres_and_margins(found)
        panel.errorbar(places, centres, margins, **style)
        shown += [value for value in theirs if value is not None]
        shown += [c + sign * m for c, m in zip(centres, margins) for sign in (-1, 0, 1)]
        if study.unmixed:
            found = [list(gains.by_seed(study, row, base, UNMIXED).values()) for _, row, base in own]
            crosses = {**style, "linestyle": "none", "marker": "x", "markersize": 5, "elinewidth": 0.6}
            beside = [x * 1.04 if across else x + 0.04 for x in places]
            centres, margins = centres_and_margins(found)
            panel.errorbar(beside, centres, margins, **crosses)
            shown += centres
        panel.plot(
            places,
            [np.nan if value is None else value for value in theirs],
            color=style["color"],
            linestyle="none" if style["linestyle"] == "none" else ":",
            marker="s",
            markersize=5,
            fillstyle="none",
        )
    panel.axhline(0, color="black", linewidth=0.8)
    if study.unmixed:
        room = 0.06 * (np.nanmax(shown) - np.nanmin(shown))
        panel.set_ylim(np.nanmin(shown) - room, np.nanmax(shown) + room)
    lay_out(panel, study, series(study)[0])
    panel.set_ylabel(f"gain, {gains.unit(study)} ({study.metric})")


def spectrum(figures: Any, studies: Sequence[Study]) -> Any:
    """Share of the largest singular values, mean over layers, heads and seeds; a panel for each place and length."""
    panels: dict[tuple[str, int], dict[str, list[Any]]] = {}
    for study in studies:
        for run in study.part["runs"]:
            for place, values in run.get("spectrum", {"places": {}})["places"].items():
                length = run["spectrum"]["length"]
                own = study.attention(run["labels"])
                others = [f"{axis} {label}" for axis, label in zip(study.axes, run["labels"]) if label != own]
                title = ", ".join([f"`{study.scale}`"] * (len(studies) > 1) + others + [place])
                curves = panels.setdefault((title, length), {})
                curves.setdefault(own or "/".join(run["labels"]), []).append(values)
    across = min(3, len(panels))
    figure, axes = figures.subplots(-(-len(panels) // across), across, (3.8, 3.4))
    for panel in axes.flat[len(panels) :]:
        panel.axis("off")
    figure.suptitle("; ".join(study.part["title"] for study in studies))
    for panel, ((title, length), curves) in zip(axes.flat, panels.items()):
        names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
        for name, values in curves.items():
            i = names.index(name)
            style = {**figures.line(i), "linestyle": DASHES[i % len(DASHES)]}
            curve = np.mean([v["mean_cumulative"] for v in values], 0)
            rank = np.mean([v["mean_effective_rank"] for v in values])
            # the colours are the same in all panels, so the rank stands at the curve's own legend
            panel.plot(range(1, len(curve) + 1), curve, **style, label=f"{name}: {rank:.1f}")
        panel.set(title=title, xlabel=f"largest singular values (of {length})", ylim=(0, 1.02))
        figures.integer_axis(panel.xaxis)
        panel.legend(title="effective rank", loc="lower right")
        panel.grid(True)
    for row in axes:
        row[0].set_ylabel("share of their sum")
    return figure
