"""The table of results/units.json: gated attention units beside the standard block."""

import statistics
from pathlib import Path

from studies.comparisons import RESULTS, study_of
from studies.inference import paired
from studies.markdown import shown, table
from studies.planned import gains_by_seed, with_whole_seeds
from studies.study import Row, Study

MODELS = {
    "masked-units": "masked model, units",
    "masked-block": "masked model, block",
    "words-units": "language model, units",
    "words-block": "language model, block",
}
# The attentions beside softmax, and the heads of their columns.
ATTENTIONS = {"l2": "l2", "l2 half": "l2, `--value-init-scale 0.5`", "relu2": "relu2"}


def units_page_table(folder: Path = RESULTS) -> str:
    """Return the perplexity of softmax in each model, and what the other attentions gain over it.

    A gain is in percent of test perplexity, with its interval at 95 %. A cell is empty where the
    model was not trained with the attention.
    """
    study = with_whole_seeds(study_of("units", folder))
    lines = []
    for model, name in MODELS.items():
        perplexity = statistics.fmean(study.values((model, "softmax"), "test").values())
        cells = [name, f"{perplexity:.1f}"]
        for attention in ATTENTIONS:
            cells.append(gain_cell(study, (model, attention)))
        lines.append(cells)
    return table(["model", "perplexity with softmax", *ATTENTIONS.values()], lines)


def gain_cell(study: Study, row: Row) -> str:
    if row not in study.rows:
        return ""
    return shown(paired(gains_by_seed(study, row, "test")), 2)
