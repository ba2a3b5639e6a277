"""Tables of what scripts/gpu_report.sh measured, from results/gpu, for the pages.

scripts/development/readme_tables.py writes them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from studies.markdown import table

REPORTS = Path(__file__).resolve().parents[2] / "results" / "gpu"
# Older reports of H200s have other kernels that mix. These two are of two machines.
H200 = ("nvidia-h200-3.json", "nvidia-h200-4.json")
H100 = ("nvidia-h100-1.json", "nvidia-h100-2.json")  # of one machine
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


def rows_of(part: str, reports: Sequence[str] = H200) -> list[dict[str, Any]]:
    """Return the rows of a part of the reports of a kind of GPU, the later report last."""
    rows = []
    for report in reports:
        parts = json.loads((REPORTS / report).read_text())["parts"]
        if part in parts:
            rows += parts[part]["rows"]
    return rows


def timings(passes: str, reports: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of the part `core` with such passes: "forward" alone, or "both".

    A contender that was left out has a row with the reason, and without passes.
    """
    return [row for row in rows_of("core", reports) if row.get("passes") == passes]


def numbers_of(rows: Sequence[dict[str, Any]], field: str) -> dict[tuple[str, str], float]:
    """Return a column of rows by contender and size, the number of the later report.

    A row lacks a ratio to what was left out.
    """
    return {(row["name"], row["size"]): row[field] for row in rows if field in row}


def shown(value: float) -> str:
    """Return about three digits: 0.53, 5.30, 53.0, 5,300."""
    if value < 10:
        return f"{value:.2f}"
    if value < 100:
        return f"{value:.1f}"
    return f"{value:,.0f}"


def attention_table(
    passes: str, column: str, names: dict[str, str], reports: Sequence[str] = H200
) -> str:
    """Return a column of the part `core`: a line for each contender, a column for each size.

    Where both reports have a number, the later one counts. Sizes that no report has are left out.
    """
    rows = timings(passes, reports)
    measured_sizes = {row["size"] for row in rows}
    sizes = [size for size in SIZES if size in measured_sizes]

    def line(title: str, keys: tuple[str, ...], field: str, unit: str = "") -> list[str]:
        """Return a line of the first of the contenders that has a number, for each size."""
        measured = numbers_of(rows, field)
        cells = [title]
        for size in sizes:
            found = [measured[key, size] for key in keys if (key, size) in measured]
            cells.append(shown(found[0]) + unit if found else "")
        return cells

    if column == "by_upstream":
        lines = [line("torch's softmax = 1.00", TORCH, "ms", " ms")]
    else:
        lines = [line("torch's softmax", TORCH, column)]
    lines += [line(title, (name,), column) for name, title in names.items()]
    filled = [cells for cells in lines if any(cells[1:])]
    return table(["", *(SIZES[size] for size in sizes)], filled)


def both_passes() -> str:
    return attention_table("both", "by_upstream", PLUGIN | OTHERS)


def both_passes_on_an_h100() -> str:
    return attention_table("both", "by_upstream", PLUGIN | OTHERS, H100)


def ratios_of_both_passes(name: str, shape: str) -> list[float]:
    """Return how many times as long as torch's flash attention a mixing takes on each GPU.

    Args:
        name: "Mixhead A" or "Mixhead B"
        shape: batch, heads, tokens and size of a head, as "8x8x2048x64"
    """
    key = (f"triton: {name}", f"{shape} bfloat16 0.0")
    ratios = []
    for reports in (H200, H100):
        measured = numbers_of(timings("both", reports), "by_upstream")
        ratios.append(measured[key])
    return ratios


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
    """Return how many times as long as with fairseq's attention a step took on each machine."""
    return [training(report).ratios[name] for report in (*H200, H100[0])]


def beside_upstream(rows: Sequence[dict[str, Any]]) -> Compared:
    """Return the times of all contenders beside that of the first one."""
    return Compared(rows[0]["ms"], {row["name"]: row["by_upstream"] for row in rows})


def gpt(reports: Sequence[str]) -> Compared:
    """Return the times of a training step of GPT-2 beside that with torch's attention."""
    return beside_upstream([row for row in rows_of("gpt", reports) if "ms" in row])


def module(upstream: str, reports: Sequence[str]) -> Compared:
    """Return the times of an attention with its projections beside that of "fairseq" or "torch"."""
    rows = [row for row in rows_of("module", reports) if row["module"] == upstream]
    return beside_upstream(rows[-4:])  # those of the later report


def one_query() -> Compared:
    """Return the times of a step of decoding on an H200 beside that of torch's attention."""
    microseconds = {row["name"]: row["microseconds"] for row in rows_of("decoding")}
    unit = microseconds["torch"]
    return Compared(unit / 1e3, {name: time / unit for name, time in microseconds.items()})


def steps() -> str:
    """Return the times of whole modules and steps, beside fairseq's and torch's."""
    first, second, third = (training(report) for report in (*H200, H100[0]))
    del first.ratios["softmax"]  # its gradients were wrong
    # On the H200 the plugin's softmax still took torch's memory-efficient kernel.
    of_fairseq, of_torch = (module(upstream, H200) for upstream in ("fairseq", "torch"))
    del of_fairseq.ratios["softmax"], of_torch.ratios["softmax"]

    def line(title: str, compared: Compared, digits: int = 1) -> list[str]:
        cells = [title, f"{compared.unit:.{digits}f} ms"]
        for name in ("softmax", *MIXHEADS):
            cells.append(f"{compared.ratios[name]:.2f}" if name in compared.ratios else "")
        return cells

    small = "training step of a small model; fairseq's attention = 1.00"
    large = "training step of GPT-2; torch's attention = 1.00"
    projected = "an attention with its projections behind a causal mask; fairseq's = 1.00"
    same = "the same; that of `nn.MultiheadAttention` = 1.00"
    lines = [
        line(f"{small}, H200, first machine", first),
        line(f"{small}, H200, second machine", second),
        line(f"{small}, H100", third),
        line(f"{large}, H200, second machine", gpt(H200)),
        line(f"{large}, H100", gpt(H100)),
        line(f"{projected}, H200, second machine", of_fairseq),
        line(f"{projected}, H100", module("fairseq", H100)),
        line(f"{same}, H200, second machine", of_torch),
        line(f"{same}, H100", module("torch", H100)),
        line(
            "attention of one query to 1,024 keys; torch's = 1.00, H200, first machine",
            one_query(),
            digits=3,
        ),
    ]
    return table(["", "1.00 is", "the plugin's softmax", *MIXHEADS], lines)


TABLES = {
    "both passes on a GPU": both_passes,
    "both passes on an H100": both_passes_on_an_h100,
    "forward pass on a GPU": forward_pass,
    "memory on a GPU": memory,
    "host of a GPU": host,
    "steps on a GPU": steps,
}
