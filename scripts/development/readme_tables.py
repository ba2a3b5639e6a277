"""Write the tables of README.md, docs/ and examples/ from the tables in the code and the results.

A table stands between `<!-- NAME -->`, where NAME is a key of TABLES, and `<!-- end -->`.
"""

import argparse
import inspect
import re
import sys
from argparse import Namespace
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

# Python looks in the folder of the command alone
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import comparison_tables, translation_tables, words_tables
from studies.effect_tables import translation_long_table
from studies.markdown import table

from development import (
    advice,
    cost_table,
    example_tables,
    gpu_tables,
    libraries_results,
    transformers_results,
)
from mixhead_plugin.errors import option_name
from mixhead_plugin.fairseq.config import fill_in
from mixhead_plugin.fairseq.criterions.penalties import PENALTIES
from mixhead_plugin.fairseq.models.architectures import ARCHITECTURES, Architecture
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


def text_and_default(shown: str) -> tuple[str, str]:
    """Return the two parts of an option's help: 'size of a head (default: 64)'."""
    text, _, default = shown.removesuffix(")").rpartition(" (default: ")
    return text, default


def flags() -> str:
    """Return what each flag sets, its values and its default, as its help says them."""
    helps = {option.name: option.metadata.get("help", "") for option in fields(AttentionOptions)}
    rows = []
    for name in FLAGS:
        text, default = text_and_default(helps[name])
        text, _, values = text.partition("; one of ")
        rows.append([f"`{option_name(name)}`", text, values, default])
    return table(["flag", "what it sets", "values", "default"], rows)


def unit_flags() -> str:
    """Return what the flags of gated attention units set, as their help says it."""
    rows = []
    for option in fields(GatedOptions):
        if option.name.startswith("_"):  # fairseq's own field of every dataclass
            continue
        text, default = text_and_default(option.metadata["help"])
        rows.append([f"`{option_name(option.name)}`", text, default])
    return table(["flag", "what it sets", "default"], rows)


def families() -> str:
    rows = []
    for family, preset in FAMILIES.items():
        settings = []
        for name, value in preset.items():
            if value == TOKENS_PER_SAMPLE:
                settings.append(f"`{option_name(name)}`, set to the value of `--tokens-per-sample`")
            else:
                settings.append(f"`{option_name(name)} {value}`")
        rows.append([f"`{family}_*`", ", ".join(settings)])
    return table(["architectures", "are fairseq's with"], rows)


def sizes_of(architecture: Architecture) -> tuple[int, int]:
    """Return how many heads an attention of the family mixhead has, and the size of one."""
    args = Namespace()
    architecture(args)
    fill_in(args, "mixhead")

    sizes = set()
    for site in architecture.model.attention_sites(args).values():
        head_dim = args.head_dim or site.embed_dim // site.num_heads
        sizes.add((site.num_heads, head_dim))
    (size,) = sizes  # all attentions of these models are alike
    return size


def head_sizes() -> str:
    """Return the architectures of fairseq by the size of their heads."""
    names = defaultdict(list)
    for name, architecture in ARCHITECTURES.items():
        if architecture.source == "fairseq":
            heads, size = sizes_of(architecture)
            names[size, heads].append(f"`{name}`")
    rows = [[str(size), str(heads), ", ".join(names[size, heads])] for size, heads in sorted(names)]
    return table(["size of a head", "heads", "architectures"], rows)


def papers() -> str:
    """Return the architectures that have the sizes of a paper's models."""
    rows = []
    for name, architecture in ARCHITECTURES.items():
        if architecture.defaults:  # not fairseq's sizes
            heads, size = sizes_of(architecture)
            rows.append([f"`{name}`", str(heads), str(size), architecture.source])
    return table(["name", "heads", "size of a head", "where it stands"], rows)


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
        on = "every attention of the plugin with several heads"
        if entry.on_mixing:
            on = ", ".join(orthogonal_mixings())
        weight = f"`--{name}-weight`"
        logged = f"`{name}_loss`"
        rows.append([weight, entry.formula, entry.source, on, f"{entry.weight:g}", logged])
    head = ["flag", "what it multiplies", "source", "acts on", "default", "in the logs"]
    return table(head, rows)


def orthogonal_mixings() -> list[str]:
    """Return the flags of the mixings whose matrices can have a penalty."""
    found = []
    for option, kinds in PARTS.items():
        for name, kind in kinds.items():
            if kind.orthogonal:
                found.append(f"`{option_name(option)} {name}`")
    return found


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


NAMED = (
    flags,
    unit_flags,
    families,
    head_sizes,
    papers,
    variants,
    value_sizes,
    low_rank_products,
    scopes,
    implementations,
    arguments,
    penalties,
    repairs,
    advice.measured,
    advice.advice,
    advice.advice_and_paper,
    cost_table.costs,
)
# Of the results. results/tables.md has more.
OF_RESULTS = {
    "effects": comparison_tables.effects_table,
    "translation": translation_tables.translation_table,
    "lasting": translation_long_table,
    "words": words_tables.words_table,
    "pilots of words": words_tables.pilots_table,
}
TABLES = {
    **{each.__name__: each for each in NAMED},
    **OF_RESULTS,
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
