"""The table of results/units.json: gated attention units beside the standard block."""

import math
import statistics
from pathlib import Path

from studies.comparisons import RESULTS, study_of
from studies.inference import paired
from studies.markdown import table
from studies.planned import gains_by_seed, with_whole_seeds
from studies.study import Row, Study

MODELS = {
    "masked-units": "masked model, units",
    "masked-block": "masked model, block",
    "words-units": "language model, units",
    "words-block": "language model, block",
}
# The attentions beside softmax, and the heads of their columns.
ATTENTIONS = {
    "l2": "l2 / softmax",
    "l2 half": "l2, `--value-init-scale 0.5` / softmax",
    "relu2": "relu2 / softmax",
}


def units_page_table(folder: Path = RESULTS) -> str:
    """Return the perplexity of softmax in each model, and that of the others divided by it.

    Each quotient has its interval at 95 %, by a paired t-test of the logarithm. A cell is empty
    where the model was not trained with the attention.
    """
    study = with_whole_seeds(study_of("units", folder))
    lines = []
    for model, name in MODELS.items():
        perplexity = statistics.fmean(study.values((model, "softmax"), "test").values())
        cells = [name, f"{perplexity:.1f}"]
        for attention in ATTENTIONS:
            cells.append(quotient_cell(study, (model, attention)))
        lines.append(cells)
    return table(["model", "softmax, perplexity", *ATTENTIONS.values()], lines)


def quotient_cell(study: Study, row: Row) -> str:
    """Return '1.69 (1.41 to 2.02)'; above 1 the row is worse than softmax."""
    if row not in study.rows:
        return ""
    gain = paired(gains_by_seed(study, row, "test"))
    # Gains are 100 times the logarithm of what softmax has divided by what the row has.
    mean, best, worst = (math.exp(-end / 100) for end in (gain.mean, gain.high, gain.low))
    return f"{mean:.2f} ({best:.2f} to {worst:.2f})"
