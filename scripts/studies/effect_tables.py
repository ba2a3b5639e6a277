"""The tables of what Mixhead B gains over softmax.

scripts/report.py prints them, and scripts/development/readme_tables.py writes them into the pages.
"""

import statistics
from itertools import chain
from pathlib import Path

from studies import planned
from studies.comparisons import (
    RESULTS,
    Comparison,
    gains,
    losses,
    read_comparisons,
    study_of,
)
from studies.effects import (
    along,
    bleu_gain,
    bleu_metric,
    effects,
    of_text,
    percent,
    summarised,
    time_ratios,
    validations,
    worth_in_updates,
)
from studies.inference import Estimate, holm, paired
from studies.markdown import fold, shown, signed, table

# Nats an answer; a run of recall has learned it below the first, and nearly below the second.
# Guessing has ln 64 = 4.16. Both were chosen after the results.
LEARNED = 0.1
NEARLY = 0.5


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


def summary_table(folder: Path = RESULTS) -> str:
    """Return the gain over all rows of text by two estimators, and over the means of the tasks.

    Words and bytes are two tasks, but one text.
    """
    by_corpus = of_text(effects(folder))
    text = list(chain.from_iterable(by_corpus.values()))
    means = []
    for effects_of_corpus in by_corpus.values():
        means.append(statistics.fmean(each.percent.mean for each in effects_of_corpus))
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


def along_table(folder: Path = RESULTS) -> str:
    """Return the gain in validation loss at three updates, and its changes.

    The first is the end of the first epoch, the second the end of the constant rate.
    """
    study = study_of("translation", folder)
    updates = sorted({update for update, _ in validations(study, ALONG["B, 4 heads of 32"])})
    first = updates[0]
    middle = END_OF_CONSTANT_RATE
    last = updates[-1]
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


def time_table(folder: Path = RESULTS) -> str:
    """Return the CPU time of the updates with B divided by that of softmax with the same heads.

    Seeds whose two runs come from different machines do not count.
    """
    rows = []
    for of in read_comparisons(folder / "comparisons.csv"):
        study = study_of(of.study, folder)
        ratios = time_ratios(study, of.mixed, of.softmax)
        if ratios and not study.waits:
            middle = statistics.median(ratios)
            ratio_and_range = f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            rows.append([of.task, f"{of.updates:,}", of.heads, str(len(ratios)), ratio_and_range])
    head = ["task", "updates", "heads", "seeds", "time of B, softmax with the same heads has 1"]
    return table(head, rows)


def recall_steps_table(folder: Path = RESULTS) -> str:
    """Return how many seeds learned recall within 1,200 steps, and after how many."""
    return planned.own_table(study_of("recall_steps", folder))


def nearest_neighbour_steps_table(folder: Path = RESULTS) -> str:
    """Return how many times smaller the error gets with A and B, after 500 and 2,000 steps."""
    return planned.own_table(study_of("nearest_neighbour_steps", folder))


TABLES = {
    "effects": effects_table,
    "BLEU": bleu_table,
    "translation": translation_table,
    "along the training": along_table,
    "recall": recall_table,
    "steps of recall": recall_steps_table,
    "steps of nearest neighbour": nearest_neighbour_steps_table,
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
    "steps of recall": """\
Runs of 128 tokens that end when they have learned, or after 1,200 steps. 'Learned' has Clopper
and Pearson's interval at 95 %; the signs compare each seed with softmax with heads of the same
size.""",
    "steps of nearest neighbour": """\
Runs of 500 and of 2,000 steps, each with its own schedule. The mean squared error of softmax with
heads of the same size, divided by that of A or B: paired t of its logarithm over six seeds,
intervals at 95 %. The last column compares the two lengths: below 1, the gain shrank.""",
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
