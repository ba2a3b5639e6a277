"""Write the tables of README.md, docs/ and examples/ from the tables in the code and the results.

A table stands between `<!-- NAME -->`, where NAME is a key of TABLES, and `<!-- end -->`.
"""

import argparse
import inspect
import re
import statistics
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

# Python looks in the folder of the command alone
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import effect_tables, effects
from studies.comparisons import RESULTS, study_of
from studies.inference import Estimate
from studies.markdown import shown, signed, table
from studies.study import Row

from development import (
    cost_table,
    example_tables,
    gpu_tables,
    libraries_results,
    transformers_results,
)
from mixhead_plugin.errors import option_name
from mixhead_plugin.fairseq.criterions.penalties import PENALTIES
from mixhead_plugin.fairseq.models.gated_attention.model import GatedOptions
from mixhead_plugin.fairseq.options import (
    FAMILIES,
    FLAGS,
    SCOPES,
    TOKENS_PER_SAMPLE,
    AttentionOptions,
)
from mixhead_plugin.fairseq.repairs import GROUPS, REPAIRS
from mixhead_plugin.nn import MixedAttention
from mixhead_plugin.ops import IMPLEMENTATIONS, NORMALIZERS, attention
from mixhead_plugin.parts import PARTS, Variant

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def flags() -> str:
    """Return what each flag sets, its values and its default, as its help says them."""
    helps = {option.name: option.metadata.get("help", "") for option in fields(AttentionOptions)}
    rows = []
    for name in FLAGS:
        text, _, default = helps[name].removesuffix(")").rpartition(" (default: ")
        text, _, values = text.partition("; one of ")
        rows.append([f"`{option_name(name)}`", text, values, default])
    return table(["flag", "what it sets", "values", "default"], rows)


def unit_flags() -> str:
    """Return what the flags of gated attention units set, as their help says it."""
    rows = []
    for option in fields(GatedOptions):
        if option.name.startswith("_"):  # fairseq's own field of every dataclass
            continue
        text, _, default = option.metadata["help"].removesuffix(")").rpartition(" (default: ")
        rows.append([f"`{option_name(option.name)}`", text, default])
    return table(["flag", "what it sets", "default"], rows)


def families() -> str:
    rows = []
    for family, preset in FAMILIES.items():
        flags = [f"`{option_name(name)} {value}`" for name, value in preset.items()]
        words = ", ".join(flags).replace(TOKENS_PER_SAMPLE, "<--tokens-per-sample>")
        rows.append([f"`{family}_*`", words])
    return table(["architectures", "are fairseq's with"], rows)


def variants() -> str:
    rows = []
    for option, entries in {"attention_normalizer": NORMALIZERS, **PARTS}.items():
        for name, entry in entries.items():
            if getattr(entry, "build", True):  # not 'none', which builds nothing
                rows.append([f"`{option_name(option)} {name}`", f"`{entry.formula}`", entry.source])
    return table(["variant", "formula", "source"], rows)


def value_sizes() -> str:
    """Return what an attention of width 512 with 8 heads costs, by the sizes of its heads."""
    rows = []
    for size, value_size in ((64, 64), (16, 64), (64, 16), (16, 16), (16, 512)):
        sizes = dict(head_dim=size, value_head_dim=value_size)
        module = MixedAttention(512, 8, device="meta", **sizes)
        parameters = cost_table.parameters_of(module)
        products = 8 * size + 8 * value_size  # of the scores, and of the values
        rows.append([str(size), str(value_size), f"{parameters:,}", f"{products:,}"])
    head = ["`--head-dim`", "`--value-head-dim`", "parameters of one attention", "products / pair"]
    return table(head, rows)


def low_rank_products() -> str:
    """Return how many products a low-rank mixing needs for a query and a key, both ways."""
    rank = Variant().mixing_rank
    rows = [
        [str(heads), f"{(2 * rank + 1) * heads}", f"{heads * heads:,}"] for heads in (8, 32, 64)
    ]
    return table(["heads", f"by factors, R = {rank}", "by M"], rows)


def scopes() -> str:
    rows = [[f"`{name}`", ", ".join(places)] for name, places in SCOPES.items()]
    return table(["`--attention-scope`", "changes"], rows)


def implementations() -> str:
    rows = [["`auto`", "usually the fastest that serves"]]
    rows += [[f"`{name}`", entry.summary] for name, entry in IMPLEMENTATIONS.items()]
    return table(["`--attention-impl`", "computes"], rows)


def arguments() -> str:
    """Return the arguments of `ops.attention`, as its signature and its docstring say them."""
    text = inspect.getdoc(attention) or ""
    # 'name: meaning', whose further lines are indented more
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", text.split("Returns:")[0], re.M)
    parameters = inspect.signature(attention).parameters
    rows = []
    for name, meaning in entries:
        default = parameters[name].default
        shown = "" if default is inspect.Parameter.empty else f"`{default!r}`"
        rows.append([f"`{name}`", shown, " ".join(meaning.split())])
    return table(["argument", "default", "what it is"], rows)


def penalties() -> str:
    rows = []
    for name, entry in PENALTIES.items():
        on = "every attention of the plugin"
        if entry.on_mixing:
            on = "head and feature mixings that are free to turn"
        weight = f"`--{name}-weight`"
        logged = f"`{name}_loss`"
        rows.append([weight, entry.formula, entry.source, on, f"{entry.weight:g}", logged])
    return table(["flag", "weight of the", "source", "acts on", "default", "in the logs"], rows)


def repairs() -> str:
    """Return a section for each group of repairs, with a table of its faults."""
    sections = []
    head = ["repair", "fault of fairseq", "what is done instead"]
    for group, meaning in GROUPS.items():
        rows = []
        for name, repair in REPAIRS.items():
            if repair.group == group:
                fault = " ".join(repair.fault.split())
                remedy = " ".join(repair.remedy.split())
                rows.append([f"`{name}`", fault, remedy])
        sections += [f"### {group}: {meaning}", table(head, rows)]
    return "\n\n".join(sections)


# The comparisons of the front page: what it calls them, and their task, updates and heads in
# results/comparisons.csv, by the size of the heads.
MEASURED_ON_TEXT = {
    "translation, self-attention alone mixed, 800 updates": (
        "translation, self-attention mixed",
        800,
        "64 of 2",
    ),
    "translation": ("translation", 1600, "32 of 4"),
    "words, each at its best rate": ("words, tuned rate", 1000, "16 of 8"),
    "words, both at a lower rate": ("words, rate 0.003", 1000, "16 of 8"),
    "bytes": ("bytes", 2500, "12 of 8"),
    "translation, `--mixing-lr-scale 0.1`": ("translation", 1600, "4 of 32"),
}
# The same of tasks that are made up; these stand in docs/does-it-help.md alone.
MEASURED_ON_SYNTHETIC_TASKS = {
    "recall of 128 tokens": ("recall, 128 tokens", 300, "16 of 4"),
    "the same, larger heads": ("recall, 128 tokens", 300, "2 of 32"),
    "nearest neighbour": ("nearest neighbour, width 64", 500, "16 of 4"),
    "nearest neighbour, larger heads": ("nearest neighbour, width 64", 500, "4 of 16"),
}


def measured() -> str:
    """Return what the front page shows of the results: gains in loss and BLEU, and the time."""
    head = [
        "size of a head",
        "heads",
        "task",
        "seeds",
        "loss lower by, %",
        "BLEU higher by",
        "time",
    ]
    return table(head, gains(MEASURED_ON_TEXT))


def measured_on_synthetic_tasks() -> str:
    """Return the same of tasks that are made up; these have neither BLEU nor times."""
    head = ["size of a head", "heads", "task", "seeds", "loss lower by, %"]
    rows = [row[: len(head)] for row in gains(MEASURED_ON_SYNTHETIC_TASKS)]
    return table(head, rows)


def gains(comparisons: dict[str, tuple[str, int, str]]) -> list[list[str]]:
    """Return a row for each comparison: heads, task, seeds, gains in loss and BLEU, the time."""
    found = {(each.of.task, each.of.updates, each.of.heads): each for each in effects.effects()}
    rows = []
    for name, key in comparisons.items():
        effect = found[key]
        study = study_of(effect.of.study, RESULTS)
        metric = effects.bleu_metric(study)
        bleu = ""
        if metric is not None:
            gain = effects.bleu_gain(study, effect.of.mixed, effect.of.softmax, metric)
            bleu = shown(gain, 2)
        loss = shown(effect.percent, 2 if effect.of.corpus else 1)
        ratios = []
        if effect.of.study != "words":  # softmax took a slow path in the version of its runs
            ratios = study.time_ratios(effect.of.mixed, effect.of.softmax)
        time = f"{statistics.median(ratios):.2f}" if ratios else ""
        count, size = effect.of.heads.split(" of ")
        rows.append([size, count, name, str(effect.gain.count), loss, bleu, time])
    return rows


def advice() -> str:
    """Return whether to use mixing, by the size of the heads, with the numbers behind it."""
    translation = study_of("translation", RESULTS)
    words = study_of("words", RESULTS)
    b = ("4", "B", "1600")
    softmax = ("4", "softmax", "1600")
    longer = ("4", "softmax in the time of B", "1600")
    small_b = ("32", "B", "1600")
    small = ("32", "softmax", "1600")

    def bleu(row: Row, base: Row) -> str:
        return with_unit(effects.bleu_gain(translation, row, base, "BLEU"), 2, "BLEU")

    share = effects.share_of_bleu(small_b, small, softmax).scaled(100)
    epochs = 1600 / effects.first_validation(translation, softmax)  # fairseq validates after each
    worth = effects.worth_in_updates()
    over_large = effects.percent(words, ("16", "B"), ("4", "softmax"), "test")
    answers = [
        f"""1. **Are your heads smaller than 32, and can you take fewer, larger ones?** Try that first,
        without mixing. In translation, heads of 32 had the loss of heads of 4 with B, and {bleu(softmax, small_b)} more. But in our
        word model small heads cost nothing, and heads of 8 with B had
        {with_unit(over_large, 2, "%")} less loss than heads of 32 without mixing.""",
        """2. **Look at the size that stays:**""",
        f"""- **About 4: if they must stay so small, yes, try B.** In translation (one corpus, 1,600
        updates, {epochs:.1f} epochs) heads of 4 are worse than heads of 32. With B the loss is the
        same again, and {with_unit(share, 0, "%")} of the lost BLEU is back.""",
        f"""- **8 to 32: perhaps, for a short training.** In translation with heads of 32 and
        `--mixing-lr-scale 0.1`, the lead of B in loss shrinks; at the end it was worth
        {with_unit(worth, 0, "%")} more updates. B gained {bleu(b, softmax)}. Without mixing,
        4.7 % more updates, which take the time of B, gained {bleu(longer, softmax)}. The two do
        not differ clearly. A word model with heads of 8 improved when each side had its best
        learning rate; a byte model did not. A nanoGPT with heads of 16, on letters, did not either.""",
        """- **64: unknown; train without mixing first.** BERT and GPT-2 have such heads. We trained none.
        The Mixhead paper has 1.3 to 3.7 % less perplexity, and gives no seeds.""",
        """- **128: probably not.** fairseq's recipe for IWSLT14 has such heads. With them the paper has
        half a BLEU *less*, perhaps because it was decoded without the mixing.""",
    ]
    items = []
    for answer in answers:
        indent = "   " if answer.startswith("- ") else ""
        more = "   " if not indent else f"{indent}  "
        text = " ".join(answer.split())
        items.append(textwrap.fill(text, 120, initial_indent=indent, subsequent_indent=more))
    lines = [
        "First find the size of your heads: the width of the model divided by its number of heads.",
        "",
        *items,
        "",
        "Unknown, too: sizes between these, large models, training until nothing changes, and long "
        "fine-tuning of",
        "a model that was trained without mixing. A short fine-tuning of MiniLM, and a small Vision "
        "Transformer,",
        "showed [no gain](../examples/README.md#with-and-without-mixing). If you try, give both sides "
        "the same time,",
        "and take several seeds.",
        "'Without mixing' is softmax. In brackets are intervals at 95 %, over pairs of equal "
        "seeds.",
    ]
    return "\n".join(lines)


def with_unit(found: Estimate, decimals: int, unit: str) -> str:
    """Return '0.35 BLEU (0.02 to 0.68)'."""
    mean = signed(found.mean, decimals)
    low = signed(found.low, decimals)
    high = signed(found.high, decimals)
    return f"{mean} {unit} ({low} to {high})"


NAMED = (
    flags,
    unit_flags,
    families,
    variants,
    value_sizes,
    low_rank_products,
    scopes,
    implementations,
    arguments,
    penalties,
    repairs,
    measured,
    measured_on_synthetic_tasks,
    advice,
    cost_table.costs,
)
TABLES = {
    **{each.__name__: each for each in NAMED},
    **effect_tables.TABLES,  # of the results
    **example_tables.TABLES,
    **gpu_tables.TABLES,
    **libraries_results.TABLES,
    **transformers_results.TABLES,
}


def with_tables(text: str) -> str:
    """Return the text of a document with its tables as the code has them."""
    marks = rf"(<!-- ({'|'.join(TABLES)}) -->\n).*?(<!-- end -->)"
    return re.sub(
        marks, lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text, flags=re.S
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for document in DOCUMENTS:
        document.write_text(with_tables(document.read_text(encoding="utf-8")), encoding="utf-8")
