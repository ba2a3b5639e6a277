"""The pictures of the experiments that docs/protocol.md registered; planned.py has their tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mixhead_plugin.heads import figures
from studies import planned
from studies.colours import VARIANTS
from studies.effects import along, validations
from studies.inference import bars_of, paired
from studies.planned import LONG, SHORT
from studies.study import Row, Study

Curve = Mapping[int, float]  # a value by update

# ---- recall: the share that learned ------------------------------------------------------------


def draw_steps(study: Study) -> Any:
    """Draw the share of seeds that have learned against the steps, a panel for each head size."""
    groups = list(dict.fromkeys(row[:-1] for row in study.rows))
    colour_of = figures.colours([row[-1] for row in study.rows], fixed=VARIANTS)
    last = planned.latest_update(study)
    figure, axes = figures.subplots(1, len(groups), (4, 3.4))
    for panel, group in zip(axes[0], groups):
        for row in study.rows:
            if row[:-1] == group:
                taken = list(planned.steps(study, row).values())
                at, shares = share_curve(taken, last)
                panel.step(at, shares, where="post", color=colour_of[row[-1]], label=row[-1])
        named = ", ".join(f"{axis} {label}" for axis, label in zip(study.grid.axes, group))
        panel.set(title=named, xlabel="steps", xlim=(0, last), ylim=(0, 1.03))
    axes[0][0].set_ylabel("share of the seeds that have learned")
    axes[0][-1].legend(frameon=False)
    return figure


def share_curve(taken: Sequence[float], last: int) -> tuple[list[float], list[float]]:
    """Return steps and the share that has learned by then, from step 0 to the last one."""
    learned = sorted(step for step in taken if step != planned.NEVER)
    shares = [(number + 1) / len(taken) for number in range(len(learned))]
    end = shares[-1] if shares else 0.0
    return [0.0, *learned, last], [0.0, *shares, end]


# ---- translation: what becomes of the gain -----------------------------------------------------

LASTING = {"4": ("B, 4 heads of 32", "-", "o"), "32": ("B, 32 heads of 4", "--", "s")}


def draw_lasting(study: Study) -> Any:
    """Draw the gain of B in validation loss against the update, with its interval.

    A line is the trunk and its longer branch. The mark is the end of the shorter branch, whose rate
    has decayed by then.
    """
    figure, axes = figures.subplots(1, 1, (6.4, 3.8))
    panel = axes[0, 0]
    colour = VARIANTS["B"]
    end_of_short = int(SHORT)
    for heads, (label, line, marker) in LASTING.items():
        gains = {update: paired(gain) for update, gain in along(study, (heads, "B", LONG)).items()}
        means = [gain.mean for gain in gains.values()]
        low = [gain.low for gain in gains.values()]
        high = [gain.high for gain in gains.values()]
        panel.plot(list(gains), means, line, color=colour, label=label)
        panel.fill_between(list(gains), low, high, color=colour, alpha=0.15, lw=0)

        end = paired(along(study, (heads, "B", SHORT))[end_of_short])
        look = {"color": colour, "marker": marker, "ms": 5, "mfc": "white"}
        panel.errorbar(end_of_short, end.mean, bars_of([end]), **look)

    panel.axhline(0, color=VARIANTS["softmax"], lw=1)
    panel.set(xlabel="update", ylabel="gain in validation loss, nats a token\n(higher is better)")
    panel.set_title(
        "Translation: B over softmax with the same heads. "
        f"Marks: a training of {end_of_short:,} updates"
    )
    figure.legend(loc="outside lower center", ncols=2)
    return figure


# ---- gated attention units: losses -------------------------------------------------------------

TASKS = {"words": "language model", "masked": "masked language model"}
MODELS = {"block": "--", "units": "-"}
NAMES = {"l2 half": "l2 at scale 0.5"}  # of attentions, where the grid's label says less


def draw_units(study: Study) -> Any:
    """Draw the mean validation loss of each row against the update, a panel for each task."""
    figure, axes = figures.subplots(1, len(TASKS), (4.6, 3.8))
    colour_of = figures.colours([row[-1] for row in study.rows], fixed=VARIANTS)
    for panel, (task, title) in zip(axes[0], TASKS.items()):
        for model, line in MODELS.items():
            for row in study.rows:
                if row[0] == f"{task}-{model}":
                    losses = mean_losses(study, row)
                    label = f"{model}, {NAMES.get(row[1], row[1])}"
                    look = {"ls": line, "color": colour_of[row[1]], "label": label}
                    panel.plot(list(losses), list(losses.values()), **look)
        panel.set(title=title, xlabel="update", ylabel="validation loss, nats a token")
    figures.legend_below(figure, axes)
    return figure


def mean_losses(study: Study, row: Row) -> Curve:
    """Return the mean validation loss over the seeds, in nats, by update."""
    by_update: dict[int, list[float]] = {}
    for (update, _), loss in sorted(validations(study, row).items()):
        by_update.setdefault(update, []).append(loss)
    return {update: sum(losses) / len(losses) for update, losses in by_update.items()}


# ---- what report.py calls ----------------------------------------------------------------------

# by the `table` of the grid
PICTURES = {
    "steps": draw_steps,
    "lasting": draw_lasting,
    "units": draw_units,
}


def draw_own(study: Study, path: Path) -> bool:
    """Draw the picture that was registered for a study; return False if none was."""
    draw = PICTURES.get(study.grid.table)
    if draw is None:
        return False
    with figures.style():
        figures.save_svg(draw(planned.with_whole_seeds(study)), path)
    return True
