"""Write the tables of README.md and docs/ from the tables in the code and from the results.

A table stands between `<!-- NAME -->`, where NAME is a key of TABLES, and `<!-- end -->`.
"""

import argparse
import inspect
import re
import statistics
import textwrap
from dataclasses import fields
from pathlib import Path

import effects

from mixhead_plugin.errors import option_name
from mixhead_plugin.modules.penalties import PENALTIES
from mixhead_plugin.ops import IMPLEMENTATIONS, NORMALIZERS, attention
from mixhead_plugin.options import FAMILIES, OPTION_NAMES, SCOPES, TOKENS_PER_SAMPLE, AttentionOptions
from mixhead_plugin.parts import PARTS
from mixhead_plugin.repairs import GROUPS, REPAIRS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def flags() -> str:
    """Return what each flag sets, its values and its default, as its help says them."""
    helps = {option.name: option.metadata.get("help", "") for option in fields(AttentionOptions)}
    rows = []
    for name in OPTION_NAMES:
        text, _, default = helps[name].removesuffix(")").rpartition(" (default: ")
        text, _, values = text.partition("; one of ")
        rows.append([f"`{option_name(name)}`", text, values, default])
    return table(["flag", "what it sets", "values", "default"], rows)


def families() -> str:
    rows = []
    for family, preset in FAMILIES.items():
        flags = [f"`{option_name(name)} {value}`" for name, value in preset.items()]
        rows.append([f"`{family}_*`", ", ".join(flags).replace(TOKENS_PER_SAMPLE, "<--tokens-per-sample>")])
    return table(["architectures", "are fairseq's with"], rows)


def variants() -> str:
    rows = []
    parts = {option: {name: kind for name, kind in table.items() if kind.build} for option, table in PARTS.items()}
    for option, entries in {"attention_normalizer": NORMALIZERS, **parts}.items():
        for name, entry in entries.items():
            rows.append([f"`{option_name(option)} {name}`", f"`{entry.formula}`", entry.source])
    return table(["variant", "formula", "source"], rows)


def scopes() -> str:
    rows = [[f"`{name}`", ", ".join(places)] for name, places in SCOPES.items()]
    return table(["`--attention-scope`", "changes"], rows)


def implementations() -> str:
    rows = [["`auto`", "the fastest that serves"]]
    rows += [[f"`{name}`", entry.summary] for name, entry in IMPLEMENTATIONS.items()]
    return table(["`--attention-impl`", "computes"], rows)


def arguments() -> str:
    """Return the arguments of `ops.attention`, as its signature and its docstring say them."""
    text, parameters = inspect.getdoc(attention) or "", inspect.signature(attention).parameters
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", text.split("Returns:")[0], re.M)
    defaults = {name: "" if p.default is p.empty else f"`{p.default!r}`" for name, p in parameters.items()}
    rows = [[f"`{name}`", defaults[name], " ".join(meaning.split())] for name, meaning in entries]
    return table(["argument", "default", "what it is"], rows)


def penalties() -> str:
    rows = []
    for name, entry in PENALTIES.items():
        on = "head and feature mixings that are free to turn" if entry.on_mixing else "every attention of the plugin"
        rows.append([f"`--{name}-weight`", entry.formula, entry.source, on, f"{entry.weight:g}", f"`{name}_loss`"])
    return table(["flag", "weight of the", "source", "acts on", "default", "in the logs"], rows)


def repairs() -> str:
    """Return a section for each group of repairs, with a table of its faults."""
    sections = []
    for group, meaning in GROUPS.items():
        rows = [[f"`{name}`", repair.fault, repair.remedy] for name, repair in REPAIRS.items() if repair.group == group]
        rows = [[" ".join(cell.split()) for cell in row] for row in rows]
        sections += [f"## {group}: {meaning}", table(["repair", "fault of fairseq", "what is done instead"], rows)]
    return "\n\n".join(sections)


# The comparisons of the front page: what it calls them, and their task, updates and heads in
# results/comparisons.csv. Texts by the size of the heads, then synthetic tasks.
MEASURED = {
    "translation, half as many updates": ("translation, self-attention mixed", 800, "64 of 2"),
    "translation": ("translation", 1600, "32 of 4"),
    "words, each at its best rate": ("words, tuned rate", 1000, "16 of 8"),
    "words, both at a lower rate": ("words, rate 0.003", 1000, "16 of 8"),
    "bytes": ("bytes", 2500, "12 of 8"),
    "translation, larger heads": ("translation", 1600, "4 of 32"),
    "recall of 128 tokens (synthetic)": ("recall, 128 tokens", 300, "16 of 4"),
    "the same, larger heads": ("recall, 128 tokens", 300, "2 of 32"),
    "nearest neighbour (synthetic)": ("nearest neighbour, width 64", 500, "16 of 4"),
    "nearest neighbour, larger heads": ("nearest neighbour, width 64", 500, "4 of 16"),
}


def measured() -> str:
    """Return what the front page shows of the results: gains in loss and BLEU, and the time."""
    found = {(each.of.task, each.of.updates, each.of.heads): each for each in effects.effects()}
    rows = []
    for name, key in MEASURED.items():
        effect = found[key]
        study = effects.study_of(effect.of.study, effects.RESULTS)
        metric = effects.bleu_metric(study)
        bleu = ""
        if metric is not None:
            gain = effects.bleu_gain(study, effect.of.mixed, effect.of.softmax, metric)
            bleu = effects.shown(gain, 2)
        loss = effects.shown(effect.percent, 2 if effect.of.corpus else 1)
        ratios = []
        if effect.of.study != "words":  # softmax took a slow path in the version of its runs
            ratios = study.time_ratios(effect.of.mixed, effect.of.softmax)
        time = f"{statistics.median(ratios):.2f}" if ratios else ""
        count, size = effect.of.heads.split(" of ")
        rows.append([size, count, name, str(effect.gain.count), loss, bleu, time])
    head = ["size of a head", "heads", "task", "seeds", "loss lower by, %", "BLEU higher by", "time"]
    return table(head, rows)


def advice() -> str:
    """Return whether to use mixing, by the size of the heads: the same words on every page."""
    translation = effects.study_of("translation", effects.RESULTS)
    words = effects.study_of("words", effects.RESULTS)
    b = ("4", "B", "1600")
    softmax = ("4", "softmax", "1600")
    longer = ("4", "softmax in the time of B", "1600")
    small_b = ("32", "B", "1600")
    small = ("32", "softmax", "1600")

    def bleu(row: effects.Row, base: effects.Row) -> str:
        return with_unit(effects.bleu_gain(translation, row, base, "BLEU"), 2, "BLEU")

    def early(heads: str) -> str:
        share = effects.share_of_loss("translation, self-attention mixed", 800, heads)
        return f"{100 * share:.0f} %"

    share = effects.share_of_bleu(small_b, small, softmax).scaled(100)
    epochs = 1600 / effects.first_validation(translation, softmax)  # fairseq validates after each
    worth = effects.worth_in_updates()
    over_large = effects.percent(words, ("16", "B"), ("4", "softmax"), "test")
    answers = [
        f"""**Yes, if your heads have a size of about 4** and must stay so small. In translation
        (one corpus) after 1,600 updates ({epochs:.1f} epochs), B had won back all the loss that such heads had
        cost, and {with_unit(share, 0, "%")} of the BLEU. In a shorter training, of 800 updates,
        it had won back {early("32 of 4")} of the loss, and {early("64 of 2")} with heads of 2.""",
        f"""**Perhaps, if their size is 8 to 32 and you train for a short time.** In translation
        with heads of 32, B gives a head start that shrinks. After 1,600 updates its lead in loss
        was worth {with_unit(worth, 0, "%")} more updates. In BLEU no difference was seen then:
        {bleu(b, softmax)}. B takes 4.7 % more time; softmax with so many more updates gained
        {bleu(longer, softmax)}. With heads of 8, words gained at a tuned rate, and bytes did not.
        Heads of 16 were not tried on text.""",
        f"""**No, if you train anew and can take fewer, larger heads.** Try that first. In
        translation, heads of 32 without mixing had the loss of heads of 4 with B, and
        {bleu(softmax, small_b)} more. By words it was the other way: heads of 8 with B had
        {with_unit(over_large, 2, "%")} less loss than heads of 32 without.""",
        """**Unknown, if their size is 64 or more**, as in BERT, GPT-2 and most recipes of fairseq;
        if your model is large; if you train until nothing changes; or if you fine-tune a model
        that was trained without mixing. We ran none of these. The Mixhead paper has 1.3 to 3.5 %
        less perplexity with heads of 64, and half a BLEU *less* with heads of 128; it gives no
        seeds. If you try, give softmax the same time, and take several seeds.""",
    ]
    lines = [
        "First find the size of your heads: the width of the model divided by its number of heads.",
        "",
        *(textwrap.fill(f"- {' '.join(answer.split())}", 120, subsequent_indent="  ") for answer in answers),
        "",
        "In brackets are intervals at 95 %, over pairs of equal seeds.",
    ]
    return "\n".join(lines)


def with_unit(found: effects.Estimate, decimals: int, unit: str) -> str:
    """Return '0.35 BLEU (0.02 to 0.68)'."""
    mean, low, high = (effects.signed(end, decimals) for end in (found.mean, found.low, found.high))
    return f"{mean} {unit} ({low} to {high})"


NAMED = (flags, families, variants, scopes, implementations, arguments, penalties, repairs, measured, advice)
TABLES = {
    **{each.__name__: each for each in NAMED},
    **effects.TABLES,  # of the results
}


def with_tables(text: str) -> str:
    """Return the text of a document with its tables as the code has them."""
    marks = rf"(<!-- ({'|'.join(TABLES)}) -->\n).*?(<!-- end -->)"
    return re.sub(marks, lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text, flags=re.S)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for document in DOCUMENTS:
        document.write_text(with_tables(document.read_text(encoding="utf-8")), encoding="utf-8")
