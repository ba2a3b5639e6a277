"""The tables of what Mixhead B gains over softmax, with their captions.

scripts/report.py writes them into results/tables.md. Some stand on a page, too: those that
scripts/development/readme_tables.py names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from studies import (
    comparison_tables,
    planned,
    translation_tables,
    units_tables,
    words_tables,
)
from studies.comparison_tables import LEARNED, NEARLY
from studies.comparisons import RESULTS, study_of
from studies.effects import worth_in_updates
from studies.markdown import shown


def recall_steps_table(folder: Path = RESULTS) -> str:
    """Return how many seeds learned recall within 1,200 steps, and after how many."""
    return planned.own_table(study_of("recall_steps", folder))


def nearest_neighbour_steps_table(folder: Path = RESULTS) -> str:
    """Return how many times smaller the error gets with A and B, after 500 and 2,000 steps."""
    return planned.own_table(study_of("nearest_neighbour_steps", folder))


def translation_long_table(folder: Path = RESULTS) -> str:
    """Return what becomes of B's gain in translation from 1,600 to 6,400 updates."""
    return planned.own_table(study_of("translation_long", folder))


def units_table(folder: Path = RESULTS) -> str:
    """Return what l2 and relu2 gain over softmax, in gated attention units and in the block."""
    return planned.own_table(study_of("units", folder))


@dataclass(frozen=True)
class Section:
    """A table of results/tables.md."""

    make: Callable[..., str]  # takes the folder of the results, RESULTS by default
    caption: str


# By their headings.
SECTIONS = {
    "effects": Section(
        comparison_tables.effects_with_p_table,
        """\
What B gains over softmax, a line for each of [comparisons.csv](comparisons.csv): paired t,
intervals at 95 %. Gains on text are in nats, those of nearest neighbour in mean squared error.
'n times' (recall) is the loss of softmax divided by that of B, by a t-test of the logarithm.
Holm's adjusted p is over all lines. It only describes them, because the list was made after the
results. The best softmax has the lowest loss among the numbers of heads that were run.""",
    ),
    "BLEU": Section(
        comparison_tables.bleu_table,
        "Test set, beam 5; intervals at 95 %.",
    ),
    "translation": Section(
        translation_tables.translation_table,
        "Test set after 1,600 updates, eight seeds; intervals at 95 %.",
    ),
    "along the training": Section(
        translation_tables.along_table,
        "Translation: gain in validation loss, nats a token, eight seeds, intervals at 95 %.",
    ),
    "lasting": Section(
        translation_long_table,
        """\
Translation, a training of 1,600 updates and one of 6,400 from the same trunk. The gain of B over
softmax with the same heads in test loss, its change, and the gain in BLEU: paired t, intervals at
95 %.""",
    ),
    "rows of the long translation": Section(
        translation_tables.long_rows_table,
        """\
The same runs: means over the seeds, and the gain over softmax with 4 heads of 32 after as many
updates. Intervals at 95 %.""",
    ),
    "recall": Section(
        comparison_tables.recall_table,
        f"Runs that end below {LEARNED} and below {NEARLY} nats an answer, and the mean loss.",
    ),
    "steps of recall": Section(
        recall_steps_table,
        """\
Runs of 128 tokens that end when they have learned, or after 1,200 steps. 'Learned' has Clopper
and Pearson's interval at 95 %; the signs compare each seed with softmax with heads of the same
size.""",
    ),
    "steps of nearest neighbour": Section(
        nearest_neighbour_steps_table,
        """\
Runs of 500 and of 2,000 steps, each with its own schedule. The mean squared error of softmax with
heads of the same size, divided by that of A or B: paired t of its logarithm over six seeds,
intervals at 95 %. The last column compares the two lengths: below 1, the gain shrank.""",
    ),
    "gated attention units": Section(
        units_table,
        """\
WikiText-2, masked and causal language models after 1,000 updates: what an attention gains over
softmax in the same model, in percent of test perplexity, where 0.01 nats count as 1 %. Paired t
over four seeds, intervals at 95 %; Holm's p is over the four primary comparisons. -66 stands for
a perplexity of 1.94 times that of softmax; 'l2 half' is l2 with `--value-init-scale 0.5`.""",
    ),
    "l2 in units and in the block": Section(
        units_tables.units_page_table,
        """\
The same runs: the mean test perplexity of softmax, and that of the others divided by it (geometric
mean over the seeds, intervals at 95 %). Above 1 is worse.""",
    ),
    "over all texts": Section(
        comparison_tables.summary_table,
        """\
The lines on text as settings that each have a true gain (random effects); the intervals of the
mean are Hartung and Knapp's. The lines share corpora, some share their runs of softmax, and most
have three seeds. So these intervals are too narrow, and other estimators differ.""",
    ),
    "training time": Section(
        comparison_tables.time_table,
        """\
CPU time of the updates, median over the seeds and its range, on busy machines. Only seeds count
whose two runs come from the same kind of machine.""",
    ),
    "words": Section(
        words_tables.words_table,
        "Test set after 1,000 updates, six seeds; intervals at 95 %.",
    ),
    "pilots of words": Section(
        words_tables.pilots_table,
        "Validation perplexity, seed 101, then 102 where it was run.",
    ),
    "more updates": Section(
        translation_tables.more_updates_table,
        "Translation, test set, eight seeds; intervals at 95 %.",
    ),
    "decoded without the mixing": Section(
        comparison_tables.unmixed_table,
        """\
Translation, B in the self-attentions, 800 updates: the BLEU of the test set with the mixing less
that without it in beam search. Intervals at 95 %.""",
    ),
}


def sections(folder: Path = RESULTS) -> str:
    """Return all tables with their headings."""
    parts = []
    for name, section in SECTIONS.items():
        heading = name[0].upper() + name[1:]
        parts.append(f"## {heading}\n\n{section.caption}\n\n{section.make(folder)}\n")
    worth = shown(worth_in_updates(folder), 0)
    parts.append(
        "Softmax with 75 more updates gains, too. By a straight line through that point, the gain\n"
        f"of B in translation with 4 heads is worth {worth} % more updates (95 %, Fieller).\n"
    )
    return "\n".join(parts)
