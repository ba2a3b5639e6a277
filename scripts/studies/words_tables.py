"""The tables of results/words.json, and of the pilots that chose its learning rates."""

import statistics
from pathlib import Path

from studies.comparisons import RESULTS, study_of
from studies.effects import percent
from studies.markdown import shown, table

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


PILOTS = {
    "softmax, 16 heads of 8": ("16", "softmax"),
    "B, 16 heads of 8": ("16", "B"),
    "B with `--mixing-lr-scale 0.1`": ("16", "B slow"),
    "`average`, 16 heads of 8": ("16", "average"),
    "softmax, 4 heads of 32": ("4", "softmax"),
}
RATES = ("0.003", "0.004", "0.005", "0.006", "0.008")


def pilots_table(folder: Path = RESULTS) -> str:
    """Return the validation perplexity of the pilots of words by rate, each seed by itself."""
    study = study_of("pilots/words", folder)
    rows = []
    for name, row in PILOTS.items():
        cells = []
        for rate in RATES:
            values = study.values((*row, rate), "valid")  # empty for a rate that was not tried
            cells.append(", ".join(f"{values[seed]:.1f}" for seed in sorted(values)))
        rows.append([name, *cells])
    return table(["rate", *RATES], rows)
