"""Write the tables of README.md and docs/ from the tables in the code and from the results.

A table stands between `<!-- NAME -->`, where NAME is a key of TABLES, and `<!-- end -->`.
"""

import argparse
import inspect
import re
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


# The comparisons that README.md shows: what it calls them, and their task, updates and heads in
# results/comparisons.csv.
MEASURED = {
    "translation, Multi30k": ("translation", 1600, "32 of 4"),
    "translation, larger heads": ("translation", 1600, "4 of 32"),
    "words of WikiText-2, tuned rate": ("words, tuned rate", 1000, "16 of 8"),
    "the same, a lower rate": ("words, rate 0.003", 1000, "16 of 8"),
    "bytes of WikiText-2": ("bytes", 2500, "12 of 8"),
    "recall, a synthetic task": ("recall, 128 tokens", 300, "16 of 4"),
    "nearest neighbour, a synthetic task": ("nearest neighbour, width 64", 500, "16 of 4"),
    "nearest neighbour, larger heads": ("nearest neighbour, width 64", 500, "4 of 16"),
}


def measured() -> str:
    """Return what README.md shows of the results: the gain in loss in percent, and that in BLEU."""
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
        rows.append([name, effect.of.heads, str(effect.gain.count), loss, bleu])
    head = ["task", "heads", "seeds", "loss lower by, %", "BLEU higher by"]
    return table(head, rows)


NAMED = (flags, families, variants, scopes, implementations, arguments, penalties, repairs, measured)
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
