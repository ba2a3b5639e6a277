"""The tables of results/translation.json and translation_long.json."""

import statistics
from pathlib import Path

from studies.comparisons import RESULTS, gains, losses, study_of
from studies.effects import MORE_UPDATES, UPDATES, along, bleu_gain, validations
from studies.inference import growth, paired
from studies.markdown import shown, table
from studies.planned import LONG, SHORT, WIDTH, with_whole_seeds
from studies.study import Row, Study

# ---- every row ---------------------------------------------------------------------------------

LONGER = f"softmax with {100 * MORE_UPDATES / UPDATES:.1f} % more updates"
# The words for the attentions of translation.toml.
ATTENTIONS = {
    "softmax": "softmax",
    "B": "B",
    "B self": "B in self-attention alone",
    "B cross": "B in cross-attention alone",
    "A": "A",
    "average": "`average`",
    "gate": "`--attention-gate head`",
    "softmax in the time of B": LONGER,
}


def translation_table(folder: Path = RESULTS) -> str:
    """Return loss and BLEU of every row of translation, beside softmax with 4 heads, the best."""
    study = study_of("translation", folder)
    best = ("4", "softmax", "1600")
    rows = []
    for row in sorted(study.rows, key=lambda row: (int(row[0]), list(ATTENTIONS).index(row[1]))):
        heads, attention, _ = row
        name = f"{ATTENTIONS[attention]}, {heads} heads of {WIDTH // int(heads)}"
        rows.append([name, *_beside(study, row, best)])
    head = ["attention", "test loss, nats", "gain over softmax, 4 heads of 32", "BLEU", "gain"]
    return table(head, rows)


def long_rows_table(folder: Path = RESULTS) -> str:
    """Return loss and BLEU of every training of 'Does it last?', beside the best softmax."""
    study = with_whole_seeds(study_of("translation_long", folder))
    rows = []
    for length in (SHORT, LONG):
        best = ("4", "softmax", length)
        for heads in study.grid.axes["heads"]:
            for attention in study.grid.axes["attention"]:
                row = (heads, attention, length)
                name = f"{attention}, {heads} heads of {WIDTH // int(heads)}"
                rows.append([f"{int(length):,}", name, *_beside(study, row, best)])
    head = ["updates", "attention", "test loss, nats", "gain over softmax, 4 heads of 32"]
    return table([*head, "BLEU", "gain"], rows)


def _beside(study: Study, row: Row, best: Row) -> list[str]:
    """Return the cells of a row: test loss and its gain over the best, BLEU and its gain."""
    loss = statistics.fmean(losses(study, row, "test").values())
    bleu = statistics.fmean(study.values(row, "BLEU").values())
    lower_loss = higher_bleu = ""
    if row != best:
        lower_loss = shown(paired(gains(study, row, best, "test")), 4)
        higher_bleu = shown(bleu_gain(study, row, best, "BLEU"), 2)
    return [f"{loss:.4f}", lower_loss, f"{bleu:.2f}", higher_bleu]


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
        cells = [paired(by_update[update]) for update in (first, middle, last)]
        for since in (first, middle):
            cells.append(growth(by_update[since], by_update[last]))
        rows.append([name, *(shown(cell, 3) for cell in cells)])
    head = ["over softmax with the same heads", f"at update {first:,}", f"at {middle:,}"]
    head += [f"at {last:,}", f"change since {first:,}", f"change since {middle:,}"]
    return table(head, rows)


# ---- the time of B -----------------------------------------------------------------------------


def more_updates_table(folder: Path = RESULTS) -> str:
    """Return what B gains beside softmax that trains for the same CPU time, with 4 heads."""
    study = study_of("translation", folder)
    softmax = ("4", "softmax", "1600")
    b = ("4", "B", "1600")
    longer = ("4", "softmax in the time of B", "1600")
    rows = []
    for name, row, base in (
        (f"{LONGER}, over softmax", longer, softmax),
        ("B, over softmax", b, softmax),
        (f"B, over {LONGER}", b, longer),
    ):
        loss = shown(paired(gains(study, row, base, "test")), 4)
        rows.append([name, loss, shown(bleu_gain(study, row, base, "BLEU"), 2)])
    return table(["4 heads of 32", "gain in test loss, nats", "gain in BLEU"], rows)
