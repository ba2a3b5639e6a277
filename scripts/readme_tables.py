"""Write the README's tables of flags' values from the tables in the code."""

import re
from pathlib import Path

from mixhead_plugin.errors import option_name
from mixhead_plugin.modules.parts import PARTS
from mixhead_plugin.modules.penalties import PENALTIES
from mixhead_plugin.ops import IMPLEMENTATIONS, NORMALIZERS
from mixhead_plugin.options import FAMILIES, SCOPES, TOKENS_PER_SAMPLE

ROOT = Path(__file__).resolve().parents[1]

# Every row of the table of variants is tested for these, in these files.
COLUMNS = {
    "causal, padding, additive masks": "tests/ops/test_attention.py",
    "dropout": "tests/ops/test_attention.py",
    "step-by-step decoding": "tests/models/test_decoding.py",
    "fp16, bf16": "tests/modules/test_attention.py",
    "TorchScript": "tests/modules/test_attention.py",
}


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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
            rows.append(
                [f"`{option_name(option)} {name}`", f"`{entry.formula}`", entry.source, *["yes"] * len(COLUMNS)]
            )
    return table(["variant", "formula", "source", *COLUMNS], rows)


def scopes() -> str:
    return table(
        ["`--attention-scope`", "changes"], [[f"`{name}`", ", ".join(places)] for name, places in SCOPES.items()]
    )


def implementations() -> str:
    rows = [["`auto`", "the fastest that serves"]]
    for name, entry in IMPLEMENTATIONS.items():
        rows.append([f"`{name}`", entry.summary])
    return table(["`--attention-impl`", "computes"], rows)


def penalties() -> str:
    rows = []
    for name, entry in PENALTIES.items():
        acts_on = "head mixing that is free to turn" if entry.on_mixing else "every attention of the plugin"
        rows.append([f"`--{name}-weight`", entry.formula, entry.source, acts_on, f"{entry.weight:g}", f"`{name}_loss`"])
    return table(["flag", "weight of the", "source", "acts on", "default", "in the logs"], rows)


TABLES = {
    "families": families,
    "variants": variants,
    "scopes": scopes,
    "implementations": implementations,
    "penalties": penalties,
}


def place() -> str:
    """Return the pattern of the marks that a table stands between."""
    return rf"(<!-- (?P<name>{'|'.join(TABLES)}) -->\n).*?(\n<!-- end -->)"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    text = re.sub(place(), lambda found: found[1] + TABLES[found["name"]]() + found[3], text, flags=re.S)
    readme.write_text(text, encoding="utf-8")
