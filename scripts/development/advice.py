"""The advice by the size of the heads, and the results behind it."""

import statistics
from dataclasses import dataclass

from studies import effects
from studies.comparisons import RESULTS, study_of
from studies.inference import Estimate
from studies.markdown import shown, table

from development import example_tables

# Task, updates and heads in results/comparisons.csv
Key = tuple[str, int, str]
LONG_SMALL: Key = ("translation, registered", 6400, "32 of 4")
LONG_LARGE: Key = ("translation, registered", 6400, "4 of 32")
WORDS: Key = ("words, tuned rate", 1000, "16 of 8")
# The comparisons of the front page and what it calls them, by the size of the heads.
MEASURED: list[tuple[str, Key]] = [
    ("translation, 6,400 updates", LONG_SMALL),
    ("translation, 1,600 updates", ("translation", 1600, "32 of 4")),
    ("words, each at the best rate tried", WORDS),
    ("words, both at a lower rate", ("words, rate 0.003", 1000, "16 of 8")),
    ("bytes, perplexity of a byte", ("bytes", 2500, "12 of 8")),
    ("translation, 6,400 updates", LONG_LARGE),
    (
        "translation, 1,600 updates, `--mixing-lr-scale 0.1`",
        ("translation", 1600, "4 of 32"),
    ),
]


def measured() -> str:
    """Return what the front page shows of the results: perplexity, BLEU and the time."""
    found = _effects()
    rows = []
    for name, key in MEASURED:
        effect = found[key]
        comparison = effect.comparison
        study = study_of(comparison.study, RESULTS)
        bleu = ""
        if effects.bleu_metric(study) is not None:
            bleu = shown(_bleu(effect), 2)
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
        "CPU time of B (softmax: 1)",
    ]
    return table(head, rows)


UNKNOWN = "unknown, so test it yourself"


@dataclass(frozen=True)
class Answer:
    """A row of the advice. README.md shows what is ours, docs/does-it-help.md all but the cost."""

    heads: str
    answer: str
    by_us: str  # what we measured
    cost: str  # how much longer a training step took
    by_paper: str  # what the Mixhead paper reports


HEAD = ["size of a head", "should I mix?", "what B gained, as we measured it"]


def advice() -> str:
    """Return whether to use mixing, by the size of the heads, what we know there, and the cost."""
    rows = []
    for answer in answers():
        rows.append(as_cells(answer.heads, answer.answer, answer.by_us, answer.cost))
    return table([*HEAD, "how much longer a training step took"], rows)


def advice_and_paper() -> str:
    """Return the same with what the Mixhead paper reports in place of the cost."""
    rows = []
    for answer in answers():
        rows.append(as_cells(answer.heads, answer.answer, answer.by_us, answer.by_paper))
    return table([*HEAD, "B, as the Mixhead paper reports it"], rows)


def as_cells(*texts: str) -> list[str]:
    """Return texts without the line breaks of their source."""
    return [" ".join(text.split()) for text in texts]


def answers() -> list[Answer]:
    """Return the rows of the advice."""
    found = _effects()

    def less_perplexity(key: Key) -> str:
        return f"{_percent(effects.lower_by(found[key].gain))} less perplexity"

    def more_bleu(key: Key) -> str:
        return f"{shown(_bleu(found[key]), 2)} BLEU more"

    return [
        Answer(
            "about 4",
            "larger heads without mixing are better; perhaps, if yours must stay so small",
            f"""Translation, 32 heads: {less_perplexity(LONG_SMALL)}, {more_bleu(LONG_SMALL)}. A
            short nanoGPT: no gain seen.""",
            "CPU: 16 to 33 % (translation; 61 % before a fix), 41 % (nanoGPT)",
            "none",
        ),
        Answer(
            "8 or 16",
            "perhaps",
            f"""Words, 16 heads of 8: {less_perplexity(WORDS)}, each model at the best of the
            rates that we tried (plain 0.004, B 0.005); at 0.003 for both, not clear. Bytes, and a
            short nanoGPT: no gain seen. A small Vision Transformer: accuracy
            {_points_lower(_trained("vit"))}.""",
            "CPU: 38 % (words, 8), 51 % (bytes, 8), 26 % (nanoGPT, 16)",
            """Translation, BLEU: heads of 8, 31.4 with B and 27.9 without; heads of 16, 32.4 and
            32.6. But plain heads of 128 have 34.8 (see the note below).""",
        ),
        Answer(
            "32",
            "perhaps, for a lower loss; in BLEU we saw no gain",
            f"""Translation, 4 heads: {less_perplexity(LONG_LARGE)}, {more_bleu(LONG_LARGE)}.""",
            "CPU: 4 to 11 % (translation)",
            """One language model of width 1,024 with 8 heads of 32, a quarter of what is usual for
            its width: 1.4 % less perplexity.""",
        ),
        Answer(
            "64 (as in WMT's recipes, BERT, GPT-2, most Vision Transformers)",
            UNKNOWN,
            "No result.",
            "CPU: 0 to 6 %. GPU: 27 to 159 % (language models)",
            """Two language models of width 512 with 8 heads of 64: 1.2 and 3.7 % less perplexity.
            One of width 1,024, but with only 2 to 10 heads of 64 (16 are usual), in eleven rows:
            from 0.3 % more to 4.3 % less.""",
        ),
        Answer(
            "128 (as in Llama, fairseq's recipe for IWSLT14)",
            UNKNOWN,
            "No result.",
            "not timed",
            """Four language models: 4.3 to 8.7 % less perplexity; one of them, in another table,
            0.3 %. Translation: 0.5 BLEU less (see the note below).""",
        ),
        Answer(
            "any, in a model that is already trained",
            "no reason yet",
            f"""MiniLM, fine-tuned for 24 updates to find the translation of a sentence: the share
            that it finds is {_points_lower(_trained("minilm"))}. We did not try a long one.""",
            "too noisy to tell",
            """BERT, fine-tuned for more steps than usual: GLUE from 0.1 points less to 2.8 more,
            SQuAD 0.4 F1 more.""",
        ),
    ]


def _percent(estimate: Estimate) -> str:
    """Return '7.0 % (6.3 to 7.7)'."""
    return f"{estimate.mean:.1f} % ({estimate.low:.1f} to {estimate.high:.1f})"


def _points_lower(estimate: Estimate) -> str:
    """Return '2.5 points lower (6.6 lower to 1.7 higher)'.

    It takes a mean below 0 whose interval includes 0.
    """
    interval = f"{-estimate.low:.1f} lower to {estimate.high:.1f} higher"
    return f"{-estimate.mean:.1f} points lower ({interval})"


def _trained(name: str) -> Estimate:
    """Return how much higher the number of a file of results/examples is with B."""
    return example_tables.difference(example_tables.read(name))


def _effects() -> dict[Key, effects.Effect]:
    found = {}
    for effect in effects.effects():
        comparison = effect.comparison
        found[comparison.task, comparison.updates, comparison.heads] = effect
    return found


def _bleu(effect: effects.Effect) -> Estimate:
    """Return the gain in BLEU of a comparison in translation."""
    comparison = effect.comparison
    study = study_of(comparison.study, RESULTS)
    return effects.bleu_gain(study, comparison.mixed, comparison.softmax, "BLEU")
