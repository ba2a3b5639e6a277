"""The figure: time and memory over the length."""

from pathlib import Path
from typing import Dict, List, Tuple

from benchmarks.cases import Row

COLOURS = {"softmax": "C0", "sigsoftmax": "C1", "l2": "C2", "Mixhead A": "C4", "Mixhead B": "C3"}
STYLES = {
    "torch": "--",
    "torch, is_causal": "-.",
    "eager": ":",
    "mixhead_plugin": "-",
    "flash, is_causal": (0, (1, 1)),
    "compiled": (0, (3, 1, 1, 1)),
    "flex": (0, (5, 1)),
    "blockwise": (0, (3, 1, 1, 1, 1, 1)),
    "triton": (0, (9, 1)),
}
FIGURES = {"p50_ms": "forward + backward, ms", "peak_mib": "peak memory beyond the inputs, MiB"}


def draw(path: Path, rows: List[Row], about: Dict[str, str]) -> None:
    """Time and memory over the length: a colour for each variant, a style for each provider."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    panels: Dict[str, Dict[Tuple[str, str], List[Tuple[int, float]]]] = {}
    for row in rows:
        if row["level"] not in ("core", "core memory", "grid") or row.get("passes") != "full":
            continue
        provider, variant = row["name"].split(": ")
        variant, dropout, _ = variant.partition(", dropout")
        variant, flag, _ = variant.partition(", is_causal")
        size = f"batch {row['batch']}, head size {row['head_dim']}\n" if row["level"] == "grid" else ""
        for column, what in FIGURES.items():
            if column in row and not (dropout and column == "peak_mib"):  # a panel for a line or two
                lines = panels.setdefault(f"{size}{what}{', with dropout' if dropout else ''}", {})
                lines.setdefault((variant, provider + flag), []).append((row["length"], row[column]))
    if not panels:
        return
    across = len(panels) if len(panels) < 5 else 3
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(down, across, figsize=(4.2 * across, 4.4 * down), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (title, lines) in zip(axes.flat, panels.items()):
        for (variant, provider), points in lines.items():
            axis.plot(
                *zip(*sorted(points)), linestyle=STYLES[provider], color=COLOURS[variant], marker="o", markersize=3
            )
        axis.set(title=title, xlabel="length", xscale="log", yscale="log")
        axis.title.set_size(9)
        axis.set_xticks(sorted({n for points in lines.values() for n, _ in points}))
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.minorticks_off()
    used = {variant for lines in panels.values() for variant, _ in lines}
    handles = [Line2D([], [], color=colour, label=name) for name, colour in COLOURS.items() if name in used]
    drawn = {provider for lines in panels.values() for _, provider in lines}
    handles += [
        Line2D([], [], color="grey", linestyle=style, label=name) for name, style in STYLES.items() if name in drawn
    ]
    figure.legend(handles=handles, loc="lower center", ncols=min(len(handles), 4 * across), fontsize=8, frameon=False)
    figure.suptitle(f"{about['device']}, {about['dtype']}, torch {about['torch']}", fontsize=9)
    figure.tight_layout(rect=(0, 0.06 if down == 1 else 0.05, 1, 1))
    figure.savefig(path)
    plt.close(figure)
