"""The results on the front page, and the advice of docs/does-it-help.md, with its numbers."""

import statistics
from dataclasses import dataclass

from studies import effects
from studies.comparisons import RESULTS, gains, study_of
from studies.inference import Estimate, paired
from studies.markdown import shown, signed, table
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
B_CROSS = ("4", "B cross", "1600")
SOFTMAX_LARGE = ("4", "softmax", "1600")
LONGER = ("4", "softmax in the time of B", "1600")
B_SMALL = ("32", "B", "1600")
SOFTMAX_SMALL = ("32", "softmax", "1600")


def measured() -> str:
    """Return what the front page shows of the results: perplexity, BLEU and the time."""
    found = _effects()
    rows = []
    for name, key in MEASURED.items():
        effect = found[key]
        study = study_of(effect.of.study, RESULTS)
        metric = effects.bleu_metric(study)
        bleu = ""
        if metric is not None:
            gain = effects.bleu_gain(study, effect.of.mixed, effect.of.softmax, metric)
            bleu = shown(gain, 2)
        perplexity = shown(effects.lower_by(effect.gain), 1)
        ratios = effects.time_ratios(study, effect.of.mixed, effect.of.softmax)
        time = f"{statistics.median(ratios):.2f}" if ratios else ""
        count, size = effect.of.heads.split(" of ")
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


@dataclass(frozen=True)
class Answer:
    """A row of the advice. README has the same answers, in fewer words and without numbers."""

    models: str
    answer: str
    seen: str


def advice() -> str:
    """Return whether to use mixing, by the size of the heads, and what was seen there."""
    rows = [[row.models, row.answer, " ".join(row.seen.split())] for row in answers()]
    return table(["your model", "should I mix?", "what was seen"], rows)


def answers() -> list[Answer]:
    """Return the rows of the advice. The intervals of most of its numbers stand in `measured`."""
    found = _effects()

    def less_perplexity(task: str) -> str:
        gain = effects.lower_by(found[MEASURED[task]].gain)
        return f"{gain.mean:.1f} % less perplexity"

    return [
        Answer(
            "already trained, of any kind (BERT, GPT-2, Llama, your own)",
            "no reason yet",
            """A [short fine-tuning](../examples/README.md#with-and-without-mixing) of MiniLM showed
            no gain. A long one was not tried.""",
        ),
        Answer(
            "trained from the start, heads of about 4",
            "if they must stay so small, yes, try B",
            f"""In translation, 32 heads of 4 had {less_perplexity("translation")} with B, and
            {_bleu(B_SMALL, SOFTMAX_SMALL).mean:.2f} BLEU more. So they reached 4 heads of 32
            without mixing in loss, but stayed {_bleu(SOFTMAX_LARGE, B_SMALL).mean:.2f} BLEU behind
            them. A short training of a nanoGPT showed no gain.""",
        ),
        Answer(
            "the same, heads of 8 or 16",
            "perhaps",
            f"""A word model with heads of 8 had
            {less_perplexity("words, each at its best rate")} with B, where each side had its best
            learning rate. There, larger heads without mixing were no better than small ones. At one
            lower rate for both, the gain was not clear. A byte model and a
            nanoGPT of letters showed no gain. But a word has about five bytes, so as much per word
            is only about 1 % per byte, and that could hide in their noise. A small Vision
            Transformer was too noisy to tell. The Mixhead paper has
            [3.6 BLEU more](quickstart.md#how-many-heads) with heads of 8, and a little less with
            heads of 16, though its code probably forgot to mix when it translated.""",
        ),
        Answer(
            "the same, heads of 32",
            "perhaps, for a short training",
            f"""In translation, B in all attentions had
            {less_perplexity("translation, `--mixing-lr-scale 0.1`")}, and no clear gain in BLEU.
            It was far ahead early, and the lead shrank.
            Training without mixing for 4.7 % longer, which takes about the CPU time of B, gained
            {_perplexity(LONGER, SOFTMAX_LARGE).mean:.1f} % of perplexity and
            {_bleu(LONGER, SOFTMAX_LARGE).mean:.2f} BLEU. B in cross-attention alone gained
            {with_unit(_bleu(B_CROSS, SOFTMAX_LARGE), 2, "BLEU")}, but it is the best of several
            rows, so perhaps that is luck.""",
        ),
        Answer(
            "the same, heads of 64 (WMT's recipes, BERT, GPT-2, most Vision Transformers)",
            "unknown; train without mixing first",
            """We trained none with mixing. The Mixhead paper has thirteen rows of language models
            with heads of 64. With B, twelve have less perplexity, by up to 4.3 %, and one has 0.3 %
            more. It does not say over how many runs. In five of them A is better than B.""",
        ),
        Answer(
            "the same, heads of 128 (fairseq's recipe for IWSLT14)",
            "unknown; train without mixing first",
            """We trained none. In the paper's five rows of language models, B has 0.3 to 8.7 % less
            perplexity. In translation it has half a BLEU *less*, but probably its code [forgot to
            mix](#translation) when it translated.""",
        ),
    ]


def _effects() -> dict[tuple[str, int, str], effects.Effect]:
    return {(each.of.task, each.of.updates, each.of.heads): each for each in effects.effects()}


def _bleu(row: Row, base: Row) -> Estimate:
    return effects.bleu_gain(study_of("translation", RESULTS), row, base, "BLEU")


def _perplexity(row: Row, base: Row) -> Estimate:
    """Return by how many percent the perplexity of `row` is lower than that of `base`."""
    return effects.lower_by(paired(gains(study_of("translation", RESULTS), row, base, "test")))


def with_unit(found: Estimate, decimals: int, unit: str) -> str:
    """Return '0.35 BLEU (0.02 to 0.68)'."""
    mean = signed(found.mean, decimals)
    low = signed(found.low, decimals)
    high = signed(found.high, decimals)
    return f"{mean} {unit} ({low} to {high})"
