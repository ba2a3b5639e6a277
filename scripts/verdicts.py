"""Apply the rules of docs/does-it-help.md to the runs of a grid whose file has [rules], seed by seed."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grids import ROLES
from matplotlib import pyplot as plt
from studies import Gain, Row, Study, gain

from mixhead_plugin.analysis.figures import colours


def row_of(name: str) -> Row:
    return tuple(name.split(","))


def seeds_of_all(study: Study, rules: Mapping[str, Any]) -> int:
    """Return how many seeds every row of the rules has."""
    names = [*rules["mixed"], *(rules[role] for role in ROLES if role != "mixed" and role in rules)]
    return min(len(study.values(row_of(name), study.metric)) for name in names)


def waits(study: Study) -> bool:
    """Return True while a regime of the grid lacks a seed. Until then nobody looks at its numbers."""
    return any(seeds_of_all(study, rules) < rules["seeds"] for rules in study.grid.rules.values())


def at_level(study: Study, name: str, base: str, alpha: float) -> Gain | None:
    """Return the gain of a row over another with its interval at 1 - alpha; None with fewer than three pairs."""
    found = gain(study, row_of(name), row_of(base), level=1 - alpha)
    return None if found is None or math.isnan(found.p) else found


def holm(study: Study, names: Sequence[str], base: str, alpha: float) -> dict[str, Gain]:
    """Return the gain of each row with its Holm-corrected interval: it excludes 0 if and only if Holm rejects.

    The k-th smallest p of m is tested at alpha / (m - k + 1). After the first that is not rejected, all keep its level.
    """
    found = {name: pair for name in names if (pair := at_level(study, name, base, alpha))}
    divisor, corrected = len(found), {}
    for name in sorted(found, key=lambda name: found[name].p):
        corrected[name] = at_level(study, name, base, alpha / divisor)
        if found[name].p <= alpha / divisor and divisor > 1:
            divisor -= 1
    return corrected


def shown(study: Study, found: Gain) -> str:
    mean, low, high = (f"{v:+.4f}" for v in (statistics.fmean(found.values), found.low, found.high))
    return f"{mean} ({low} to {high}) {study.unit(study.metric)}, {len(found.values)} seeds, p {found.p:.2g}"


def verdict(study: Study, rules: Mapping[str, Any]) -> tuple[list[str], dict[str, Gain]]:
    """Return the words of the rules that hold, of the first mixed arm, and the gains that decide, by name."""
    first, best, alpha = rules["mixed"][0], rules["best"], rules["alpha"]
    worth, plain = at_level(study, best, rules["average"], alpha), at_level(study, first, best, alpha)
    against_best = holm(study, rules["mixed"], best, alpha)
    others = {role: at_level(study, first, rules[role], alpha) for role in ("gate", "time") if role in rules}
    gains = {f"{best} over {rules['average']}": worth}
    gains |= {f"{name} over {best}, Holm": found for name, found in against_best.items()}
    gains |= {f"{first} over {rules[role]}": found for role, found in others.items()}
    if margin := rules.get("margin"):
        close = gains[f"{first} over {best}, at 90.0%"] = at_level(study, first, best, 0.1)
    words = ["valid", "undecided"]
    if not (worth.low > 0 and plain.high - plain.low < statistics.fmean(worth.values)):
        words = ["not valid"]  # the whole width against the gap is half of one against half of the other
    elif against_best[first].low > 0:
        more = {"mixing, not dynamics": "gate", "useful": "time"}
        words = ["valid", "helps", *(word for word, role in more.items() if role in others and others[role].low > 0)]
    elif margin and -margin < close.low and close.high < margin:
        words = ["valid", "equivalent"]
    return words, gains


def verdicts(study: Study) -> list[str]:
    """Return a list in Markdown for each regime of the grid."""
    texts = []
    for regime, rules in study.grid.rules.items():
        if (seeds := seeds_of_all(study, rules)) < rules["seeds"]:
            texts.append(f"**{regime}: not ended.** {seeds} of {rules['seeds']} seeds have every row.\n")
            continue
        words, gains = verdict(study, rules)
        level = f"Intervals are at {1 - rules['alpha']:.1%}; those of Holm's first steps are wider."
        listed = "\n".join(f"- {name}: {shown(study, found)}" for name, found in gains.items())
        texts.append(f"**{regime}: {', '.join(words)}.** {level}\n\n{listed}")
    return texts


def draw_regimes(studies: Sequence[Study], path: Path) -> None:
    """Draw the gain over the softmax of the rules with its interval: a panel a unit, a line for each arm, by size."""
    panels: dict[str, list[tuple[float, str, Gain, str]]] = {}
    for study in (study for study in studies if not waits(study)):
        for regime, rules in study.grid.rules.items():
            lines = panels.setdefault(study.unit(study.metric), [])
            invalid = ", not valid" if verdict(study, rules)[0] == ["not valid"] else ""
            best, mixed = row_of(rules["best"]), holm(study, rules["mixed"], rules["best"], rules["alpha"])
            differ = [i for i, labels in enumerate(zip(best, *map(row_of, mixed))) if len({*labels}) > 1]
            title = f"{regime}{invalid}:" + f" {[*study.grid.axes][differ[0]]}" * (len(differ) > 1)
            for row, pair in zip(map(row_of, mixed), mixed.values()):
                own, base = (", ".join(labels[i] for i in differ) for labels in (row, best))
                lines.append((rules["size"], f"{title} {own} over {base}", pair, study.variant(row)))
    panels = {unit: sorted(lines, key=lambda line: -line[0]) for unit, lines in panels.items() if lines}
    if not panels:
        return
    of = colours([line[3] for lines in panels.values() for line in lines])
    heights = [len(lines) + 1 for lines in panels.values()]
    figure, axes = plt.subplots(
        len(panels), figsize=(9, 0.3 * sum(heights) + 1), layout="constrained", squeeze=False, height_ratios=heights
    )
    for panel, (unit, lines) in zip(axes[:, 0], panels.items()):
        for at, (_, _, pair, variant) in enumerate(lines):
            mean = statistics.fmean(pair.values)
            error = [[mean - pair.low], [pair.high - mean]]
            panel.errorbar(mean, at, xerr=error, fmt="o", color=of[variant], capsize=3)
        panel.axvline(0, color="grey", lw=0.8)
        panel.set_yticks(range(len(lines)), [line[1] for line in lines])
        panel.set_xlabel(f"gain, {unit}, with Holm's intervals")
    with plt.rc_context({"svg.hashsalt": "mixhead"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
