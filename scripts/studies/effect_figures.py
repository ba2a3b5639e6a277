"""Draw the pictures of the results: the gain by length, along the training, and by head size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mixhead_plugin.heads import figures
from studies.colours import VARIANTS
from studies.comparisons import gains, study_of
from studies.effects import Effect, along, bleu_gain, effects, lower_by
from studies.inference import Estimate, bars_of, paired
from studies.planned import LONG, SHORT
from studies.study import Row
from studies.translation_tables import ALONG

ZERO = VARIANTS["softmax"]  # the line of softmax with the same heads
BARS = {"ms": 4, "capsize": 2, "elinewidth": 0.8}


# ---- the gain after a short and a long training --------------------------------------------------

LENGTHS = {SHORT: "1,600 updates\n(4 epochs)", LONG: "6,400 updates\n(17 epochs)"}
HEADS = {"4": ("4 heads of 32", "-", "o"), "32": ("32 heads of 4", "--", "s")}


def draw_by_length(folder: Path) -> Any:
    """Draw what B gains in perplexity and in BLEU after the two lengths of 'Does it last?'."""
    study = study_of("translation_long", folder)

    def lower_perplexity(row: Row, base: Row) -> Estimate:
        return lower_by(paired(gains(study, row, base, "test")))

    def more_bleu(row: Row, base: Row) -> Estimate:
        return bleu_gain(study, row, base, "BLEU")

    figure, axes = figures.subplots(1, 2, (3.3, 3.2))
    for panel, gain in zip(axes[0], (lower_perplexity, more_bleu)):
        for number, (heads, (label, line, marker)) in enumerate(HEADS.items()):
            found = []
            for length in LENGTHS:
                found.append(gain((heads, "B", length), (heads, "softmax", length)))
            at = [place + 0.06 * (2 * number - 1) for place in range(len(LENGTHS))]
            means = [estimate.mean for estimate in found]
            look = {"color": VARIANTS["B"], "ls": line, "marker": marker, **BARS}
            panel.errorbar(at, means, bars_of(found), label=label, **look)
        panel.axhline(0, color=ZERO, lw=1)
        panel.set_xticks(range(len(LENGTHS)), LENGTHS.values())
        panel.set_xlim(-0.4, len(LENGTHS) - 0.6)
    axes[0][0].set(title="Perplexity", ylabel="lower by, %")
    axes[0][1].set(title="BLEU", ylabel="higher by")
    figures.legend_below(figure, axes)
    return figure


# ---- the gain along the training -----------------------------------------------------------------

# The rows of ALONG that are drawn: their words, colour, line and marker.
CURVES = {
    "B, 32 heads of 4": ("Mixhead B, 32 heads of 4", VARIANTS["B"], "--", "s"),
    "B, 4 heads of 32": ("Mixhead B, 4 heads of 32", VARIANTS["B"], "-", "o"),
    "A, 4 heads of 32": ("Mixhead A, 4 heads of 32", VARIANTS["A"], "-", "^"),
    "`average`, 4 heads of 32": ("average of 4 heads of 32", VARIANTS["average"], "-", "D"),
}


def draw_along(folder: Path) -> Any:
    """Draw the gain in validation loss over softmax with the same heads against the update."""
    study = study_of("translation", folder)
    figure, axes = figures.subplots(1, 1, (6.4, 3.8))
    panel = axes[0, 0]

    middle = (len(CURVES) - 1) / 2
    for number, (name, (label, colour, line, marker)) in enumerate(CURVES.items()):
        by_update = along(study, ALONG[name])
        estimates = [paired(by_seed) for by_seed in by_update.values()]
        # The bars of one update stand beside each other, as if 12 updates lay between them.
        at = [update + 12 * (number - middle) for update in by_update]
        means = [estimate.mean for estimate in estimates]
        look = {"color": colour, "ls": line, "marker": marker, **BARS}
        panel.errorbar(at, means, bars_of(estimates), label=label, **look)

    panel.axhline(0, color=ZERO, lw=1)
    words = "softmax with the same heads"
    panel.annotate(words, (370, 0), (0, -11), textcoords="offset points", fontsize=8)
    panel.set(xlabel="update", ylabel="gain in validation loss, nats a token\n(higher is better)")
    panel.set_title("Translation, the first 1,600 updates")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


# ---- the gain by head size -----------------------------------------------------------------------

MARKERS = "osD^vPX*<"


def series_of(effect: Effect) -> str:
    """Return the words of the legend: the other tasks by name, text by task, sites and updates.

    Words of several lengths and rates look alike, and both translations of 1,600 updates.
    """
    if not effect.comparison.corpus:
        return effect.comparison.task
    task, *rest = effect.comparison.task.split(", ")
    sites = [word.removesuffix(" mixed") for word in rest if word.endswith(" mixed")]
    return ", ".join([task, *sites, f"{effect.comparison.updates:,} updates"])


def places(drawn: Sequence[Effect]) -> list[float]:
    """Return where each effect stands on the axis of head sizes, which is one of logarithms.

    Those of one head size stand side by side around it.
    """
    sizes = [effect.comparison.head_size for effect in drawn]
    at = []
    for number, size in enumerate(sizes):
        before = sizes[:number].count(size)
        middle = (sizes.count(size) - 1) / 2
        at.append(size * 1.06 ** (before - middle))
    return at


def draw_series(panel: Any, drawn: Sequence[Effect]) -> None:
    """Draw effects in percent of the loss; those of one entry of the legend look alike."""
    at: dict[str, list[float]] = {}  # by entry, as `percents`
    percents: dict[str, list[Estimate]] = {}
    for effect, place in zip(drawn, places(drawn), strict=True):
        entry = series_of(effect)
        at.setdefault(entry, []).append(place)
        percents.setdefault(entry, []).append(effect.percent)

    assert len(at) <= len(MARKERS)
    for (entry, colour), marker in zip(figures.colours(at, fixed=VARIANTS).items(), MARKERS):
        means = [percent.mean for percent in percents[entry]]
        look = {"color": colour, "marker": marker, "ls": "", **BARS}
        panel.errorbar(at[entry], means, bars_of(percents[entry]), label=entry, **look)


def draw_by_head_size(folder: Path) -> Any:
    """Draw the gain in percent of the loss against the head size.

    Text is on the left, the synthetic tasks are on the right.
    """
    drawn = effects(folder)
    sizes = sorted({effect.comparison.head_size for effect in drawn})
    figure, axes = figures.subplots(1, 2, (4.6, 4.2))
    text, synthetic = axes[0]
    draw_series(text, [effect for effect in drawn if effect.comparison.corpus])
    draw_series(synthetic, [effect for effect in drawn if not effect.comparison.corpus])

    for panel in (text, synthetic):
        panel.axhline(0, color=ZERO, lw=1)
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.minorticks_off()
        panel.set_xlim(sizes[0] / 1.35, sizes[-1] * 1.35)
        panel.set_xlabel("size of a head")
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)

    text.set_title("Text")
    text.set_ylabel("gain of Mixhead B over softmax\nwith the same heads, % of the loss")
    # one interval of recall goes down to -209 %
    synthetic.set(title="Synthetic tasks", ylim=(-110, 110))
    return figure


# ---- all of them ---------------------------------------------------------------------------------

PICTURES = {
    "gain_by_length": draw_by_length,
    "gain_by_update": draw_along,
    "gain_by_head_size": draw_by_head_size,
}


def draw(folder: Path) -> None:
    """Write the pictures into the folder of the results."""
    for name, make in PICTURES.items():
        with figures.style():
            figures.save_svg(make(folder), folder / f"{name}.svg")
