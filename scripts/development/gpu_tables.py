"""Tables of what scripts/gpu_report.sh measured, from results/gpu, for the pages.

scripts/development/readme_tables.py writes them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from studies.markdown import table

REPORTS = Path(__file__).resolve().parents[2] / "results" / "gpu"
# Older reports have other kernels that mix. These two are of two machines with the same kind of
# GPU.
WITH_THESE_KERNELS = ("nvidia-h200-3.json", "nvidia-h200-4.json")
MIXHEADS = ("Mixhead A", "Mixhead B")

# batch x heads x tokens x size of a head, dtype, dropout, and what the page calls them
SIZES = {
    "8x8x2048x64 bfloat16 0.0": "8 heads of 64, 2,048 tokens",
    "8x16x2048x64 bfloat16 0.0": "16 heads of 64",
    "8x32x2048x8 bfloat16 0.0": "32 heads of 8",
    "32x8x512x64 bfloat16 0.0": "8 of 64, 512 tokens",
    "4x8x4096x64 bfloat16 0.0": "8 of 64, 4,096 tokens",
    "8x8x2048x64 bfloat16 0.1": "8 of 64, 2,048, dropout 0.1",
    "2x8x2048x64 float32 0.0": "8 of 64, 2,048, float32",
}
# What the report calls the contenders, and what the page does.
TORCH = ("flash: softmax", "is_causal: softmax")
PLUGIN = {
    "triton: Mixhead A": "**Mixhead A**",
    "triton: Mixhead B": "**Mixhead B**",
    "triton: softmax": "the plugin's softmax",
    "triton: l2": "l2",
    "triton: sigsoftmax": "sigsoftmax",
}
OTHERS = {
    "flex: softmax": "FlexAttention, softmax",
    "loop 256, compiled: Mixhead A": "A by a loop, compiled",
    "loop 256, compiled: Mixhead B": "B by a loop, compiled",
    "loop 256: Mixhead A": "A by a loop",
    "loop 256: Mixhead B": "B by a loop",
    "formula, compiled: Mixhead A": "A by the formula, compiled",
    "formula, compiled: Mixhead B": "B by the formula, compiled",
    "formula: Mixhead A": "A by the formula",
    "formula: Mixhead B": "B by the formula",
    "blockwise: Mixhead A": "A by `blockwise`",
    "blockwise: Mixhead B": "B by `blockwise`",
}


def rows_of(part: str) -> list[dict[str, Any]]:
    """Return the rows of a part of the reports with these kernels, the later report last."""
    rows = []
    for report in WITH_THESE_KERNELS:
        parts = json.loads((REPORTS / report).read_text())["parts"]
        if part in parts:
            rows += parts[part]["rows"]
    return rows


def shown(value: float) -> str:
    """Return about three digits: 0.53, 5.30, 53.0, 5,300."""
    if value < 10:
        return f"{value:.2f}"
    if value < 100:
        return f"{value:.1f}"
    return f"{value:,.0f}"


def attention_table(passes: str, column: str, names: dict[str, str]) -> str:
    """Return a column of the part `core`: a line for each contender, a column for each size.

    Where both reports have a number, the later one counts.
    """
    row_of = {(row["name"], row["size"]): row for row in rows_of("core") if row["passes"] == passes}

    def line(title: str, keys: tuple[str, ...], field: str, unit: str = "") -> list[str]:
        """Return a line of the first of the contenders that has a number, for each size."""
        cells = [title]
        for size in SIZES:
            row = next((row_of[key, size] for key in keys if (key, size) in row_of), None)
            cells.append("" if row is None else shown(row[field]) + unit)
        return cells

    if column == "by_upstream":
        lines = [line("torch's softmax = 1.00", TORCH, "ms", " ms")]
    else:
        lines = [line("torch's softmax", TORCH, column)]
    lines += [line(title, (name,), column) for name, title in names.items()]
    measured = [cells for cells in lines if any(cells[1:])]
    return table(["", *SIZES.values()], measured)


def both_passes() -> str:
    return attention_table("both", "by_upstream", PLUGIN | OTHERS)


def forward_pass() -> str:
    return attention_table("forward", "by_upstream", PLUGIN | OTHERS)


def memory() -> str:
    return attention_table("both", "peak_mib", PLUGIN | OTHERS)


def host() -> str:
    return attention_table("both", "host_ms", PLUGIN)


class Compared(NamedTuple):
    """Times beside one of them."""

    unit: float  # the milliseconds of that one
    ratios: dict[str, float]  # of all times to it, by what was timed


def training(report: str) -> Compared:
    """Return the times of a training step in a report beside that by fairseq."""
    rows = json.loads((REPORTS / report).read_text())["parts"]["training"]["rows"]
    times = {row["name"]: row["ms"] for row in rows}
    unit = times["fairseq"]
    return Compared(unit, {name: time / unit for name, time in times.items()})


def ratios_of_training(name: str) -> list[float]:
    """Return how many times as long as with fairseq's attention a step took in each report."""
    return [training(report).ratios[name] for report in WITH_THESE_KERNELS]


def beside_upstream(rows: Sequence[dict[str, Any]]) -> Compared:
    """Return the times of all contenders beside that of the first one."""
    return Compared(rows[0]["ms"], {row["name"]: row["by_upstream"] for row in rows})


def steps() -> str:
    """Return the times of whole modules and steps, beside fairseq's and torch's."""
    first, second = (training(report) for report in WITH_THESE_KERNELS)
    del first.ratios["softmax"]  # its gradients were wrong
    gpt = beside_upstream([row for row in rows_of("gpt") if "ms" in row])
    modules = {}
    for upstream in ("fairseq", "torch"):
        rows = [row for row in rows_of("module") if row["module"] == upstream]
        modules[upstream] = beside_upstream(rows[-4:])  # those of the later report
    decoding = {row["name"]: row["microseconds"] for row in rows_of("decoding")}
    ratios_of_one_query = {name: time / decoding["torch"] for name, time in decoding.items()}
    one_query = Compared(decoding["torch"] / 1e3, ratios_of_one_query)

    def line(title: str, compared: Compared, digits: int = 1) -> list[str]:
        cells = [title, f"{compared.unit:.{digits}f} ms"]
        for name in ("softmax", *MIXHEADS):
            cells.append(f"{compared.ratios[name]:.2f}" if name in compared.ratios else "")
        return cells

    small = "training step of a small model; fairseq's attention = 1.00"
    projected = "an attention with its projections behind a causal mask; fairseq's = 1.00"
    lines = [
        line(f"{small}, first machine", first),
        line(f"{small}, second machine", second),
        line("training step of GPT-2; torch's attention = 1.00", gpt),
        line(projected, modules["fairseq"]),
        line("the same; that of `nn.MultiheadAttention` = 1.00", modules["torch"]),
        line(
            "attention of one query to 1,024 keys; torch's = 1.00",
            one_query,
            digits=3,
        ),
    ]
    return table(["", "1.00 is", "the plugin's softmax", *MIXHEADS], lines)


TABLES = {
    "both passes on a GPU": both_passes,
    "forward pass on a GPU": forward_pass,
    "memory on a GPU": memory,
    "host of a GPU": host,
    "steps on a GPU": steps,
}
