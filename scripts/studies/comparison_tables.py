"""The tables over the lines of results/comparisons.csv."""

import statistics
from itertools import chain
from pathlib import Path

from studies.comparisons import RESULTS, Comparison, losses, read_comparisons, study_of
from studies.effects import (
    Effect,
    bleu_gain,
    bleu_metric,
    effects,
    of_text,
    summarised,
    time_ratios,
)
from studies.inference import Estimate, growth, holm, paired
from studies.markdown import shown, shown_p, signed, table, times_smaller

# Nats an answer; a run of recall has learned it below the first, and nearly below the second.
# Guessing has ln 64 = 4.16. Both were chosen after the results.
LEARNED = 0.1
NEARLY = 0.5


def shown_gain(gain: Estimate, comparison: Comparison) -> str:
    return times_smaller(gain) if comparison.is_ratio else shown(gain, 4)


OVER_THE_SAME = ["task", "updates", "heads", "seeds", "gain over softmax with the same heads"]
OVER_THE_BEST = "gain over the best softmax, its heads"


def over_the_same(effect: Effect) -> list[str]:
    """Return the cells of OVER_THE_SAME."""
    comparison = effect.comparison
    return [
        comparison.task,
        f"{comparison.updates:,}",
        comparison.heads,
        str(effect.gain.count),
        shown_gain(effect.gain, comparison),
    ]


def over_the_best(effect: Effect) -> str:
    """Return the cell of OVER_THE_BEST."""
    comparison = effect.comparison
    if effect.over_best is None:
        return "the same"
    return f"{shown_gain(effect.over_best, comparison)}, {comparison.heads_of_best}"


def effects_table(folder: Path = RESULTS) -> str:
    """Return what B gains over softmax with the same heads, and over the best softmax."""
    rows = [[*over_the_same(effect), over_the_best(effect)] for effect in effects(folder)]
    return table([*OVER_THE_SAME, OVER_THE_BEST], rows)


def effects_with_p_table(folder: Path = RESULTS) -> str:
    """Return the same with the gain in percent of the loss, and with Holm's p over all lines."""
    all_effects = effects(folder)
    adjusted = holm([effect.gain.p for effect in all_effects])
    rows = []
    for effect, p in zip(all_effects, adjusted):
        of_loss = shown(effect.percent, 2 if effect.comparison.corpus else 1)
        rows.append([*over_the_same(effect), of_loss, shown_p(p), over_the_best(effect)])
    return table([*OVER_THE_SAME, "of the loss, %", "p, Holm", OVER_THE_BEST], rows)


# The names of the estimators of tau, with what statsmodels calls them.
ESTIMATORS = {"Paule and Mandel": "iterated", "DerSimonian and Laird": "chi2"}


def summary_table(folder: Path = RESULTS) -> str:
    """Return the gain over all rows of text by two estimators, and over the means of the tasks.

    Words and bytes are two tasks, but one text.
    """
    by_corpus = of_text(effects(folder))
    text = list(chain.from_iterable(by_corpus.values()))
    means = []
    for effects_of_corpus in by_corpus.values():
        means.append(statistics.fmean(effect.percent.mean for effect in effects_of_corpus))
    rows = []
    for name, method in ESTIMATORS.items():
        summary = summarised(text, method)
        mean = shown(Estimate(summary.mean, summary.low, summary.high), 1)
        new = f"{signed(summary.new_low, 1)} to {signed(summary.new_high, 1)}"
        rows.append([f"{len(text)} rows of text, {name}", mean, f"{summary.tau:.1f}", new])
    spread = f"{statistics.stdev(means):.1f}"
    rows.append([f"the means of {len(means)} tasks, t", shown(paired(means), 1), spread, ""])
    head = ["over", "gain, % of the loss", "spread of the settings (tau)", "one more setting"]
    return table(head, rows)


def recall_table(folder: Path = RESULTS) -> str:
    """Return how many runs have learned recall, and their mean loss."""
    study = study_of("recall", folder)
    rows = []
    for comparison in read_comparisons(folder / "comparisons.csv"):
        if comparison.study != "recall":
            continue
        length = comparison.task.removeprefix("recall, ")
        attentions = {
            "softmax": comparison.softmax,
            "B": comparison.mixed,
            "`average`": (*comparison.softmax[:-1], "average"),
        }
        for name, row in attentions.items():
            values = losses(study, row, comparison.loss).values()
            learned = sum(value < LEARNED for value in values)
            nearly = sum(value < NEARLY for value in values)
            mean = f"{statistics.fmean(values):.4f}"
            cells = [length, comparison.heads, name, str(len(values))]
            rows.append([*cells, str(learned), str(nearly), mean])
    head = ["length", "heads", "attention", "runs"]
    head += [f"below {LEARNED}", f"below {NEARLY}", "mean loss"]
    return table(head, rows)


def bleu_table(folder: Path = RESULTS) -> str:
    """Return the BLEU of softmax and of B, and the gain."""
    rows = []
    for comparison in read_comparisons(folder / "comparisons.csv"):
        study = study_of(comparison.study, folder)
        metric = bleu_metric(study)
        if metric is None or study.waits:
            continue
        gain = bleu_gain(study, comparison.mixed, comparison.softmax, metric)
        cells = [comparison.task, f"{comparison.updates:,}", comparison.heads, str(gain.count)]
        for row in (comparison.softmax, comparison.mixed):
            cells.append(f"{statistics.fmean(study.values(row, metric).values()):.2f}")
        rows.append([*cells, shown(gain, 2)])
    return table(["task", "updates", "heads", "seeds", "softmax", "B", "gain in BLEU"], rows)


def time_table(folder: Path = RESULTS) -> str:
    """Return the CPU time of the updates with B divided by that of softmax with the same heads.

    Seeds whose two runs come from different machines do not count.
    """
    rows = []
    for comparison in read_comparisons(folder / "comparisons.csv"):
        study = study_of(comparison.study, folder)
        ratios = time_ratios(study, comparison.mixed, comparison.softmax)
        if ratios and not study.waits:
            middle = statistics.median(ratios)
            ratio_and_range = f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            cells = [comparison.task, f"{comparison.updates:,}", comparison.heads]
            rows.append([*cells, str(len(ratios)), ratio_and_range])
    head = ["task", "updates", "heads", "seeds", "time of B, softmax with the same heads has 1"]
    return table(head, rows)


# The study whose runs were also decoded without the mixing. Those of table4_fresh, which repeat
# one of its rows with other seeds, were not.
UNMIXED = "table4"
REPEATED = "table4_fresh"


def unmixed_table(folder: Path = RESULTS) -> str:
    """Return how much BLEU a model with B loses if beam search leaves out the mixing."""
    study = study_of(UNMIXED, folder)
    rows = []
    for comparison in read_comparisons(folder / "comparisons.csv"):
        if comparison.study not in (UNMIXED, REPEATED):
            continue
        mixed = study.values(comparison.mixed, "test")
        unmixed = study.values(comparison.mixed, "test unmixed")
        lost = growth(unmixed, mixed)
        rows.append([comparison.heads, str(lost.count), shown(lost, 1)])
    return table(["heads", "seeds", "BLEU lost"], rows)
