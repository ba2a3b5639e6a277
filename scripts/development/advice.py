"""The advice by the size of the heads, and the results behind it."""

import statistics
from dataclasses import dataclass

from studies import effects
from studies.comparisons import RESULTS, gains, study_of
from studies.inference import Estimate, paired
from studies.markdown import shown, table
from studies.study import Row

# The comparisons of the front page: what it calls them, and their task, updates and heads in
# results/comparisons.csv, by the size of the heads.
MEASURED = {
    "translation": ("translation", 1600, "32 of 4"),
    "words, each at its best rate": ("words, tuned rate", 1000, "16 of 8"),
    "words, both at a lower rate": ("words, rate 0.003", 1000, "16 of 8"),
    "bytes, perplexity of a byte": ("bytes", 2500, "12 of 8"),
    "translation, `--mixing-lr-scale 0.1`": ("translation", 1600, "4 of 32"),
}

# Rows of translation.json and words.json.
SOFTMAX_LARGE = ("4", "softmax", "1600")
B_LARGE = ("4", "B", "1600")
LONGER = ("4", "softmax in the time of B", "1600")
B_SMALL = ("32", "B", "1600")
SOFTMAX_SMALL = ("32", "softmax", "1600")


def measured() -> str:
    """Return what the front page shows of the results: perplexity, BLEU and the time."""
    found = _effects()
    rows = []
    for name, key in MEASURED.items():
        effect = found[key]
        comparison = effect.comparison
        study = study_of(comparison.study, RESULTS)
        metric = effects.bleu_metric(study)
        bleu = ""
        if metric is not None:
            gain = effects.bleu_gain(study, comparison.mixed, comparison.softmax, metric)
            bleu = shown(gain, 2)
        perplexity = shown(effects.lower_by(effect.gain), 1)
        ratios = effects.time_ratios(study, comparison.mixed, comparison.softmax)
        time = f"{statistics.median(ratios):.2f}" if ratios else ""
        count, size = comparison.heads.split(" of ")
        rows.append([size, count, name, str(effect.gain.count), perplexity, bleu, time])
    head = [
        "size of a head",
        "heads",
        "task",
        "seeds",
        "perplexity lower by, %",
        "BLEU higher by",
        "CPU time",
    ]
    return table(head, rows)


UNKNOWN = "unknown, so not without a test of your own"


@dataclass(frozen=True)
class Answer:
    """A row of the advice. docs/does-it-help.md shows all of it, README.md what is ours."""

    heads: str
    answer: str
    by_us: str  # what we measured
    by_paper: str  # what the Mixhead paper reports


HEAD = ["size of your heads", "should I mix?", "B, as we measured it"]


def advice() -> str:
    """Return whether to use mixing, by the size of the heads, and what we know there."""
    return table(HEAD, [cells_of(row)[:3] for row in answers()])


def advice_and_paper() -> str:
    """Return the same, and what the Mixhead paper reports."""
    rows = [cells_of(row) for row in answers()]
    return table([*HEAD, "B, as the Mixhead paper reports it"], rows)


def cells_of(row: Answer) -> list[str]:
    """Return the texts of a row, without the line breaks of their source."""
    cells = [row.heads, row.answer, row.by_us, row.by_paper]
    return [" ".join(cell.split()) for cell in cells]


def answers() -> list[Answer]:
    """Return the rows of the advice. The intervals of most of its numbers stand in `measured`."""
    found = _effects()

    def less_perplexity(task: str) -> str:
        return f"{effects.lower_by(found[MEASURED[task]].gain).mean:.1f} %"

    return [
        Answer(
            "about 4",
            "if they must stay so small, yes",
            f"""Translation, 32 heads: {less_perplexity("translation")} less perplexity and
            {_bleu(B_SMALL, SOFTMAX_SMALL).mean:.2f} BLEU more. Its test loss is then equal to that
            of 4 heads of 32 without mixing; its BLEU is still
            {_bleu(SOFTMAX_LARGE, B_SMALL).mean:.2f} below theirs. A short nanoGPT: no gain
            seen.""",
            "none",
        ),
        Answer(
            "8 or 16",
            "perhaps",
            f"""Words, 16 heads of 8: {less_perplexity("words, each at its best rate")} less
            perplexity when B and the plain model each have their best learning rate; with one
            lower rate for both, the gain was not clear. Bytes, a nanoGPT of letters and a small
            Vision Transformer: no gain seen, but these were noisy.""",
            """Translation: 3.6 BLEU more with heads of 8, 0.3 less with heads of 16. Only the
            self-attention was mixed, and beam search probably left the mixing out.""",
        ),
        Answer(
            "32",
            "perhaps, for a lower loss in a short training. In BLEU we saw no gain",
            f"""Translation, 4 heads, a tenth of the learning rate for M:
            {less_perplexity("translation, `--mixing-lr-scale 0.1`")} less perplexity and
            {shown(_bleu(B_LARGE, SOFTMAX_LARGE), 2)} BLEU more. A longer training in
            place of mixing, of about the same CPU time (4.7 % more updates), gained
            {_perplexity(LONGER, SOFTMAX_LARGE).mean:.1f} % and
            {shown(_bleu(LONGER, SOFTMAX_LARGE), 2)} BLEU.""",
            """One language model of width 1,024 with 8 heads of 32, a quarter of what is usual for
            its width: 1.4 % less perplexity.""",
        ),
        Answer(
            "64 (WMT's recipes, BERT, GPT-2, most Vision Transformers)",
            UNKNOWN,
            "We trained none with mixing.",
            """Two language models of width 512 with 8 heads of 64: 1.2 and 3.7 % less perplexity.
            One of width 1,024, but with only 2 to 10 heads of 64 (16 are usual), in eleven rows:
            from 0.3 % more to 4.3 % less.""",
        ),
        Answer(
            "128 (Llama, fairseq's recipe for IWSLT14)",
            UNKNOWN,
            "We trained none with mixing.",
            """Four language models: 4.3 to 8.7 % less perplexity; one of them, in another table,
            0.3 %. Translation: 0.5 BLEU less. Only the self-attention was mixed, and beam search
            probably left the mixing out.""",
        ),
        Answer(
            "any, already trained (BERT, GPT-2, Llama, your own)",
            "no reason yet",
            "MiniLM, a short fine-tuning: no gain. We did not try a long one.",
            """BERT, fine-tuned for more steps than usual: GLUE from 0.1 points less to 2.8 more,
            SQuAD 0.4 F1 more.""",
        ),
    ]


def _effects() -> dict[tuple[str, int, str], effects.Effect]:
    found = {}
    for effect in effects.effects():
        comparison = effect.comparison
        found[comparison.task, comparison.updates, comparison.heads] = effect
    return found


def _bleu(row: Row, base: Row) -> Estimate:
    return effects.bleu_gain(study_of("translation", RESULTS), row, base, "BLEU")


def _perplexity(row: Row, base: Row) -> Estimate:
    """Return by how many percent the perplexity of `row` is lower than that of `base`."""
    return effects.lower_by(paired(gains(study_of("translation", RESULTS), row, base, "test")))
