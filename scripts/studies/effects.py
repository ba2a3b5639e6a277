"""How much Mixhead B gains over softmax.

results/comparisons.csv lists the comparisons, results/*.json have the runs.

scripts/report.py prints these tables, and scripts/development/readme_tables.py writes them into the
pages.
"""

import csv
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from studies.faults import fail
from studies.inference import Estimate, Summary, holm, paired, random_effects, ratio
from studies.markdown import table
from studies.provenance import ROOT
from studies.study import Row, Study, from_results

RESULTS = ROOT / "results"
# Nats an answer; a run of recall has learned it below the first, and nearly below the second.
# Guessing has ln 64 = 4.16. Both were chosen after the results.
LEARNED = 0.1
NEARLY = 0.5


# ---- the comparisons ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One line of comparisons.csv: B, softmax with the same heads, and the best softmax.

    All three have the same task and the same number of updates.
    """

    task: str
    corpus: str  # empty for the tasks that are no text
    updates: int
    heads: str  # '4 of 32': four heads of size 32
    study: str  # the JSON file
    mixed: Row
    softmax: Row
    best: Row
    heads_of_best: str
    loss: str  # the metric
    is_ratio: bool  # compare by the ratio of the losses, where their difference is bimodal

    @property
    def head_size(self) -> int:
        return int(self.heads.split(" of ")[1])


COLUMNS = "task corpus updates heads study mixed softmax best heads-of-best loss scale".split()


def read_comparisons(path: Path) -> list[Comparison]:
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file)
        if lines.fieldnames != COLUMNS:
            fail(f"{path}: its first line must be {','.join(COLUMNS)}")
        try:
            return [comparison(line) for line in lines]
        except (AttributeError, ValueError) as error:  # too few columns; a number that is none
            fail(f"{path}, line {lines.line_num}: {error}")


def comparison(line: Mapping[str, str]) -> Comparison:
    return Comparison(
        task=line["task"],
        corpus=line["corpus"],
        updates=int(line["updates"]),
        heads=line["heads"],
        study=line["study"],
        mixed=tuple(line["mixed"].split("/")),
        softmax=tuple(line["softmax"].split("/")),
        best=tuple(line["best"].split("/")),
        heads_of_best=line["heads-of-best"],
        loss=line["loss"],
        is_ratio=line["scale"] == "ratio",
    )


def losses(study: Study, row: Row, metric: str) -> dict[int, float]:
    """Return the loss by seed: nats a token, a byte or an answer, or the mean squared error."""
    values = study.values(row, metric)
    measure = study.measure(metric)
    if measure == "perplexity":
        return {seed: math.log(value) for seed, value in values.items()}
    if measure.startswith("bits"):
        return {seed: value * math.log(2) for seed, value in values.items()}
    return values


def paired_losses(study: Study, row: Row, base: Row, metric: str) -> list[tuple[float, float]]:
    """Return the loss of the row and that of the base, for each seed that both have."""
    ours = losses(study, row, metric)
    theirs = losses(study, base, metric)
    return [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]


def gains(study: Study, row: Row, base: Row, metric: str, is_ratio: bool = False) -> list[float]:
    """Return how much lower the loss of the row is by seed, or the logarithm of the ratio."""
    pairs = paired_losses(study, row, base, metric)
    if is_ratio:
        return [math.log(theirs / ours) for ours, theirs in pairs]
    return [theirs - ours for ours, theirs in pairs]


# ---- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effect:
    """What the runs say about one comparison."""

    of: Comparison
    gain: Estimate  # the difference of the losses, or of their logarithms
    percent: Estimate  # of the loss of softmax
    error: float  # standard error of `percent`; NaN for ratios
    # over the best softmax, in the unit of `gain`; None where it has the same heads
    over_best: Estimate | None


def effect(study: Study, of: Comparison) -> Effect:
    by_seed = gains(study, of.mixed, of.softmax, of.loss, of.is_ratio)
    gain = paired(by_seed)
    error = math.nan
    if of.is_ratio:
        ends = (percent_of(gain.mean), percent_of(gain.low), percent_of(gain.high))
        percent = Estimate(*ends, gain.p, gain.count)
    else:
        pairs = paired_losses(study, of.mixed, of.softmax, of.loss)
        factor = 100 / statistics.fmean(theirs for _, theirs in pairs)
        percent = gain.scaled(factor)
        error = factor * statistics.stdev(by_seed) / math.sqrt(len(by_seed))
    over_best = None
    if of.best != of.softmax:
        over_best = paired(gains(study, of.mixed, of.best, of.loss, of.is_ratio))
    return Effect(of, gain, percent, error, over_best)


def percent(study: Study, row: Row, base: Row, metric: str) -> Estimate:
    """Return by how many percent of the base's loss the loss of the row is lower."""
    mean = statistics.fmean(theirs for _, theirs in paired_losses(study, row, base, metric))
    return paired(gains(study, row, base, metric)).scaled(100 / mean)


def percent_of(log_ratio: float) -> float:
    """Return by how many percent the loss is lower, from a log ratio."""
    return 100 * (1 - math.exp(-log_ratio))


@functools.cache
def study_of(name: str, folder: Path) -> Study:
    return from_results(folder / f"{name}.json")


def effects(folder: Path = RESULTS) -> list[Effect]:
    """Return the effects of all comparisons whose experiment has ended."""
    found = []
    for of in read_comparisons(folder / "comparisons.csv"):
        study = study_of(of.study, folder)
        for row in (of.mixed, of.softmax, of.best):
            if row not in study.rows:
                fail(f"comparisons.csv: {of.study}.json has no run of {'/'.join(row)}")
        if not study.waits:
            found.append(effect(study, of))
    return found


# ---- tables ------------------------------------------------------------------------------------


def shown(found: Estimate, decimals: int) -> str:
    """Return '0.0284 (0.0182 to 0.0385)'."""
    mean, low, high = (signed(value, decimals) for value in (found.mean, found.low, found.high))
    return mean if math.isnan(found.low) else f"{mean} ({low} to {high})"


def signed(value: float, decimals: int) -> str:
    """Return a number without the sign of a rounded 0."""
    return f"{value:.{decimals}f}".replace(f"-{0:.{decimals}f}", f"{0:.{decimals}f}")


def fold(found: Estimate) -> str:
    """Return how many times smaller a loss is, from a log ratio: '277 times (233 to 330)'."""
    mean, low, high = (f"{math.exp(value):.3g}" for value in (found.mean, found.low, found.high))
    return f"{mean} times ({low} to {high})"


def shown_gain(found: Estimate, of: Comparison) -> str:
    return fold(found) if of.is_ratio else shown(found, 4)


def effects_table(folder: Path = RESULTS) -> str:
    """Return what B gains over softmax with the same heads, and over the best softmax."""
    found = effects(folder)
    rows = []
    for each, p in zip(found, holm([each.gain.p for each in found])):
        best = "the same"
        if each.over_best is not None:
            best = f"{shown_gain(each.over_best, each.of)}, {each.of.heads_of_best}"
        rows.append(
            [
                each.of.task,
                f"{each.of.updates:,}",
                each.of.heads,
                str(each.gain.count),
                shown_gain(each.gain, each.of),
                shown(each.percent, 2 if each.of.corpus else 1),
                f"{p:.2g}",
                best,
            ]
        )
    head = ["task", "updates", "heads", "seeds", "gain over softmax with the same heads"]
    head += ["of the loss, %", "p, Holm", "gain over the best softmax, its heads"]
    return table(head, rows)


def recall_table(folder: Path = RESULTS) -> str:
    """Return how many runs have learned recall, and their mean loss."""
    study = study_of("recall", folder)
    rows = []
    for of in read_comparisons(folder / "comparisons.csv"):
        if of.study != "recall":
            continue
        cells = [of.task.removeprefix("recall, "), of.heads]
        for row in (of.softmax, of.mixed, (*of.softmax[:-1], "average")):
            values = losses(study, row, of.loss).values()
            learned = sum(value < LEARNED for value in values)
            nearly = sum(value < NEARLY for value in values)
            mean = statistics.fmean(values)
            cells.append(f"{learned} and {nearly} of {len(values)}; {mean:.4f}")
        rows.append(cells)
    return table(["length", "heads", "softmax", "B", "`average`"], rows)


# ---- over the rows of text ---------------------------------------------------------------------


def of_text(found: Sequence[Effect]) -> dict[str, list[Effect]]:
    """Return the effects on text by corpus."""
    by_corpus: dict[str, list[Effect]] = {}
    for each in found:
        if each.of.corpus:
            by_corpus.setdefault(each.of.corpus, []).append(each)
    return by_corpus


def summarised(found: Sequence[Effect], method: str = "iterated") -> Summary:
    means = [each.percent.mean for each in found]
    errors = [each.error for each in found]
    return random_effects(means, errors, method)


def summary_table(folder: Path = RESULTS) -> str:
    """Return the gain over all rows of text by two estimators, and over the means of the tasks.

    Words and bytes are two tasks, but one text.
    """
    by_corpus = of_text(effects(folder))
    text = [each for corpus in by_corpus.values() for each in corpus]
    means = [statistics.fmean(each.percent.mean for each in mine) for mine in by_corpus.values()]
    rows = []
    for name, method in {"Paule and Mandel": "iterated", "DerSimonian and Laird": "chi2"}.items():
        found = summarised(text, method)
        mean = Estimate(found.mean, found.low, found.high)
        new = f"{signed(found.new_low, 1)} to {signed(found.new_high, 1)}"
        rows.append([f"{len(text)} rows of text, {name}", shown(mean, 1), f"{found.tau:.1f}", new])
    spread = f"{statistics.stdev(means):.1f}"
    rows.append([f"the means of {len(means)} tasks, t", shown(paired(means), 1), spread, ""])
    head = ["over", "gain, % of the loss", "spread of the settings (tau)", "one more setting"]
    return table(head, rows)


# ---- along the training ------------------------------------------------------------------------

# The rows of the picture and the table; the zero line is softmax with the same heads.
ALONG = {
    "B, 32 heads of 4": ("32", "B", "1600"),
    "B, 4 heads of 32": ("4", "B", "1600"),
    "A, 4 heads of 32": ("4", "A", "1600"),
    "`average`, 4 heads of 32": ("4", "average", "1600"),
    "B in self-attention alone, 4 heads of 32": ("4", "B self", "1600"),
    "B in cross-attention alone, 4 heads of 32": ("4", "B cross", "1600"),
    "`--attention-gate head`, 4 heads of 32": ("4", "gate", "1600"),
}


END_OF_CONSTANT_RATE = 1280  # of translation.toml; then it decays to 0


def along(study: Study, row: Row) -> dict[int, dict[int, float]]:
    """Return the gain in validation loss over softmax with the same heads, by update and seed."""
    ours = validations(study, row)
    theirs = validations(study, (row[0], "softmax", row[2]))
    found: dict[int, dict[int, float]] = {}
    for (update, seed), loss in sorted(ours.items()):
        found.setdefault(update, {})[seed] = theirs[update, seed] - loss
    return found


def validations(study: Study, row: Row) -> dict[tuple[int, int], float]:
    """Return the validation loss in nats by update and seed. fairseq logs bits."""
    found = {}
    for run in study.of(row):
        for point in run["points"]:
            if "valid_loss" in point:
                found[int(point["update"]), run["seed"]] = point["valid_loss"] * math.log(2)
    return found


def first_validation(study: Study, row: Row) -> int:
    """Return the update at which fairseq validated first: the end of the first epoch."""
    return min(update for update, _ in validations(study, row))


def along_table(folder: Path = RESULTS) -> str:
    """Return the gain in validation loss at three updates, and its changes.

    The first is the end of the first epoch, the second the end of the constant rate.
    """
    study = study_of("translation", folder)
    updates = sorted({update for update, _ in validations(study, ALONG["B, 4 heads of 32"])})
    first, middle, last = updates[0], END_OF_CONSTANT_RATE, updates[-1]
    rows = []
    for name, row in ALONG.items():
        by_update = along(study, row)
        cells = [paired(list(by_update[update].values())) for update in (first, middle, last)]
        for since in (first, middle):
            changes = [by_update[last][seed] - gain for seed, gain in by_update[since].items()]
            cells.append(paired(changes))
        rows.append([name, *(shown(cell, 3) for cell in cells)])
    head = ["over softmax with the same heads", f"at update {first:,}", f"at {middle:,}"]
    head += [f"at {last:,}", f"change since {first:,}", f"change since {middle:,}"]
    return table(head, rows)


# ---- the pilots of words -----------------------------------------------------------------------

PILOT_ROWS = {
    "softmax, 16 heads of 8": ("16", "softmax"),
    "B, 16 heads of 8": ("16", "B"),
    "B with `--mixing-lr-scale 0.1`": ("16", "B slow"),
    "`average`, 16 heads of 8": ("16", "average"),
    "softmax, 4 heads of 32": ("4", "softmax"),
}
PILOT_RATES = ("0.003", "0.004", "0.005", "0.006", "0.008")


def pilots_table(folder: Path = RESULTS) -> str:
    """Return the validation perplexity of the pilots of words by rate, each seed by itself."""
    study = study_of("pilots/words", folder)
    rows = []
    for name, row in PILOT_ROWS.items():
        cells = []
        for rate in PILOT_RATES:
            values = study.values((*row, rate), "valid") if (*row, rate) in study.rows else {}
            cells.append(", ".join(f"{values[seed]:.1f}" for seed in sorted(values)))
        rows.append([name, *cells])
    return table(["rate", *PILOT_RATES], rows)


# ---- BLEU, time, and what else stands beside the loss ------------------------------------------


def bleu_metric(study: Study) -> str | None:
    """Return the metric that is the BLEU of the test set, because older files also have that of
    the validation set; None without any.
    """
    names = [name for name in study.metrics if study.measure(name) == "BLEU"]
    return "test" if "test" in names else next(iter(names), None)


def bleu_gain(study: Study, row: Row, base: Row, metric: str) -> Estimate:
    ours = study.values(row, metric)
    theirs = study.values(base, metric)
    return paired([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])


def bleu_table(folder: Path = RESULTS) -> str:
    """Return the BLEU of softmax and of B, and the gain."""
    rows = []
    for of in read_comparisons(folder / "comparisons.csv"):
        study = study_of(of.study, folder)
        metric = bleu_metric(study)
        if metric is None or study.waits:
            continue
        gain = bleu_gain(study, of.mixed, of.softmax, metric)
        cells = [of.task, f"{of.updates:,}", of.heads, str(gain.count)]
        for row in (of.softmax, of.mixed):
            cells.append(f"{statistics.fmean(study.values(row, metric).values()):.2f}")
        rows.append([*cells, shown(gain, 2)])
    return table(["task", "updates", "heads", "seeds", "softmax", "B", "gain in BLEU"], rows)


# The words for the attentions of translation.toml.
ATTENTIONS = {
    "softmax": "softmax",
    "B": "B",
    "B self": "B in self-attention alone",
    "B cross": "B in cross-attention alone",
    "A": "A",
    "average": "`average`",
    "gate": "`--attention-gate head`",
    "softmax in the time of B": "softmax with 4.7 % more updates",
}


def translation_table(folder: Path = RESULTS) -> str:
    """Return loss and BLEU of every row of translation, beside softmax with 4 heads, the best."""
    study = study_of("translation", folder)
    best = ("4", "softmax", "1600")
    rows = []
    for row in sorted(study.rows, key=lambda row: (int(row[0]), list(ATTENTIONS).index(row[1]))):
        heads, attention, _ = row
        loss = statistics.fmean(losses(study, row, "test").values())
        bleu = statistics.fmean(study.values(row, "BLEU").values())
        gain = more_bleu = ""
        if row != best:
            gain = shown(paired(gains(study, row, best, "test")), 4)
            more_bleu = shown(bleu_gain(study, row, best, "BLEU"), 2)
        name = f"{ATTENTIONS[attention]}, {heads} heads"
        rows.append([name, f"{loss:.4f}", gain, f"{bleu:.2f}", more_bleu])
    head = ["attention", "test loss, nats", "gain over softmax, 4 heads", "BLEU", "gain"]
    return table(head, rows)


def more_updates_table(folder: Path = RESULTS) -> str:
    """Return what B gains beside softmax that trains for 4.7 % more updates, with 4 heads."""
    study = study_of("translation", folder)
    softmax = ("4", "softmax", "1600")
    b = ("4", "B", "1600")
    more = ("4", "softmax in the time of B", "1600")
    rows = []
    for name, row, base in (
        ("softmax with 4.7 % more updates, over softmax", more, softmax),
        ("B, over softmax", b, softmax),
        ("B, over softmax with 4.7 % more updates", b, more),
    ):
        loss = shown(paired(gains(study, row, base, "test")), 4)
        rows.append([name, loss, shown(bleu_gain(study, row, base, "BLEU"), 2)])
    return table(["4 heads of 32", "gain in test loss, nats", "gain in BLEU"], rows)


WORDS = {
    "softmax, 16 heads of 8": ("16", "softmax"),
    "B, 16 heads of 8": ("16", "B"),
    "`average`, 16 heads of 8": ("16", "average"),
    "softmax, 4 heads of 32": ("4", "softmax"),
}


def words_table(folder: Path = RESULTS) -> str:
    """Return the perplexity of every row of words, and the gain over softmax with 16 heads."""
    study = study_of("words", folder)
    base = WORDS["softmax, 16 heads of 8"]
    rows = []
    for name, row in WORDS.items():
        perplexity = statistics.fmean(study.values(row, "test").values())
        gain = "" if row == base else shown(percent(study, row, base, "test"), 2)
        rows.append([name, f"{perplexity:.1f}", gain])
    return table(
        ["attention", "test perplexity", "gain over softmax, 16 heads, % of the loss"], rows
    )


def unmixed_table(folder: Path = RESULTS) -> str:
    """Return how much BLEU a model with B loses if beam search leaves out the mixing."""
    study = study_of("table4", folder)
    rows = []
    for of in read_comparisons(folder / "comparisons.csv"):
        if of.study != "table4" and of.study != "table4_fresh":
            continue
        mixed = study.values(of.mixed, "test")
        unmixed = study.values(of.mixed, "test unmixed")
        lost = paired([mixed[seed] - unmixed[seed] for seed in sorted(unmixed)])
        rows.append([of.heads, str(lost.count), shown(lost, 1)])
    return table(["heads", "seeds", "BLEU lost"], rows)


def worth_in_updates(folder: Path = RESULTS) -> Estimate:
    """Return how many percent more updates would give softmax, 4 heads, the gain of B.

    This is a straight line through one point: what the 75 updates beyond 1,600 gain.
    """
    study = study_of("translation", folder)
    base = ("4", "softmax", "1600")
    of_b = gains(study, ("4", "B", "1600"), base, "test")
    of_more = gains(study, ("4", "softmax in the time of B", "1600"), base, "test")
    return ratio(of_b, of_more).scaled(100 * 75 / 1600)


def share_of_bleu(mixed: Row, small: Row, large: Row, folder: Path = RESULTS) -> Estimate:
    """Return how much of the BLEU that small heads cost in translation the mixing wins back."""
    bleu = {
        row: study_of("translation", folder).values(row, "BLEU") for row in (mixed, small, large)
    }
    seeds = sorted(bleu[mixed].keys() & bleu[small].keys() & bleu[large].keys())
    won = [bleu[mixed][seed] - bleu[small][seed] for seed in seeds]
    cost = [bleu[large][seed] - bleu[small][seed] for seed in seeds]
    return ratio(won, cost)


def time_table(folder: Path = RESULTS) -> str:
    """Return the CPU time of the updates with B divided by that of softmax with the same heads.

    Seeds whose two runs come from different machines do not count.
    """
    rows = []
    for of in read_comparisons(folder / "comparisons.csv"):
        study = study_of(of.study, folder)
        ratios = study.time_ratios(of.mixed, of.softmax)
        if ratios and not study.waits:
            middle = statistics.median(ratios)
            ratio_and_range = f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            rows.append([of.task, f"{of.updates:,}", of.heads, str(len(ratios)), ratio_and_range])
    head = ["task", "updates", "heads", "seeds", "time of B, softmax with the same heads has 1"]
    return table(head, rows)


TABLES = {
    "effects": effects_table,
    "BLEU": bleu_table,
    "translation": translation_table,
    "along the training": along_table,
    "recall": recall_table,
    "over all texts": summary_table,
    "training time": time_table,
    "words": words_table,
    "pilots of words": pilots_table,
    "more updates": more_updates_table,
    "decoded without the mixing": unmixed_table,
}
MEANINGS = {
    "effects": """\
What B gains over softmax, a line for each of [comparisons.csv](comparisons.csv): paired t,
intervals at 95 %. Gains on text are in nats, those of nearest neighbour in mean squared error.
'n times' (recall) is the loss of softmax divided by that of B, by a t-test of the logarithm.
Holm's adjusted p is over all lines; those below 0.05 hold together. The best softmax has the
lowest loss among the numbers of heads that were run.""",
    "BLEU": "Test set, beam 5; intervals at 95 %.",
    "translation": "Test set after 1,600 updates, eight seeds; intervals at 95 %.",
    "along the training": """\
Translation: gain in validation loss, nats a token, eight seeds, intervals at 95 %.""",
    "recall": (
        f"Runs that end below {LEARNED} and below {NEARLY} nats an answer, and the mean loss."
    ),
    "over all texts": """\
The lines on text as settings that each have a true gain (random effects); the intervals of the
mean are Hartung and Knapp's. The lines share corpora, and most have three seeds, so other
estimators differ.""",
    "training time": """\
CPU time of the updates, median over the seeds and its range, on busy machines. Only seeds count
whose two runs come from the same kind of machine.""",
    "words": "Test set after 1,000 updates, six seeds; intervals at 95 %.",
    "more updates": "Translation, test set, eight seeds; intervals at 95 %.",
    "decoded without the mixing": """\
Translation, B in the self-attentions, 800 updates: the BLEU of the test set with the mixing less
that without it in beam search. Intervals at 95 %.""",
    "pilots of words": "Validation perplexity, seed 101, then 102 where it was run.",
}


def sections(folder: Path = RESULTS) -> str:
    """Return all tables with their headings."""
    parts = []
    for name, make in TABLES.items():
        heading = name[0].upper() + name[1:]
        parts.append(f"## {heading}\n\n{MEANINGS[name]}\n\n{make(folder)}\n")
    worth = shown(worth_in_updates(folder), 0)
    parts.append(
        "Softmax with 75 more updates gains, too. By a straight line through that point, the gain\n"
        f"of B in translation with 4 heads is worth {worth} % more updates (95 %, Fieller).\n"
    )
    return "\n".join(parts)
