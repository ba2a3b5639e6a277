"""Tables of what scripts/gpu_report.sh measured, from results/gpu, for the pages.

scripts/development/readme_tables.py writes them.
"""

import json
from pathlib import Path
from typing import Any

from studies.markdown import table

REPORTS = Path(__file__).resolve().parents[2] / "results" / "gpu"

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
# As above, of the kernels that mix.
SIZES_OF_MIXING = {
    "8x8x2048x64 bfloat16 0.0": "8 heads of 64, 2,048 tokens",
    "8x16x2048x64 bfloat16 0.0": "16 heads of 64",
    "8x32x2048x64 bfloat16 0.0": "32 heads of 64",
    "32x8x512x64 bfloat16 0.0": "8 of 64, 512 tokens",
    "4x8x4096x64 bfloat16 0.0": "8 of 64, 4,096 tokens",
}
# What the report calls the contenders, and what the page does.
TORCH = ("flash: softmax", "is_causal: softmax")
PLUGIN = {
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
    """Return the rows of a part of all reports, the later reports last."""
    rows = []
    for path in sorted(REPORTS.glob("nvidia-h200-*.json")):
        parts = json.loads(path.read_text())["parts"]
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


def mixing() -> str:
    """Return the times of the kernels that mix, beside those of the kernels before them."""
    content = json.loads((REPORTS / "mixing-h200.json").read_text())
    passes = {(row["kernels"], row["name"], row["size"]): row for row in content["passes"]}

    def line(title: str, kernels: str, name: str, field: str) -> list[str]:
        rows = [passes[kernels, name, size] for size in SIZES_OF_MIXING]
        return [title, *(shown(row[field]) if field in row else "" for row in rows)]

    now, before = "through memory", "in registers"
    lines = [
        line("**Mixhead A**, both passes", now, "Mixhead A", "both"),
        line("with the kernels before", before, "Mixhead A", "both"),
        line("**Mixhead B**, both passes", now, "Mixhead B", "both"),
        line("with the kernels before", before, "Mixhead B", "both"),
        line("Mixhead A, forward pass", now, "Mixhead A", "forward"),
        line("Mixhead B, forward pass", now, "Mixhead B", "forward"),
        line("A: memory of both passes, MiB", now, "Mixhead A", "peak_mib"),
        line("A: time of the host, both passes, ms", now, "Mixhead A", "host_ms"),
        line("B: time of the host, both passes, ms", now, "Mixhead B", "host_ms"),
    ]
    return table(["", *SIZES_OF_MIXING.values()], lines)


def both_passes() -> str:
    return attention_table("both", "by_upstream", PLUGIN | OTHERS)


def forward_pass() -> str:
    return attention_table("forward", "by_upstream", PLUGIN | OTHERS)


def memory() -> str:
    return attention_table("both", "peak_mib", PLUGIN | OTHERS)


def host() -> str:
    return attention_table("both", "host_ms", PLUGIN)


def steps() -> str:
    """Return the times of a step of training and of decoding, beside fairseq's and torch's."""
    training = {row["name"]: row["ms"] for row in rows_of("training")}
    decoding = {row["name"]: row["microseconds"] / 1e3 for row in rows_of("decoding")}
    lines = []
    for what, times, unit, digits in (
        (
            "a training step with older kernels, fairseq's own attention",
            training,
            "fairseq",
            1,
        ),
        ("attention of one query to 1,024 keys, torch's", decoding, "torch", 3),
    ):
        ratios = [
            f"{times[name] / times[unit]:.2f}" for name in ("softmax", "Mixhead A", "Mixhead B")
        ]
        lines.append([f"{what} = 1.00", f"{times[unit]:.{digits}f} ms", *ratios])
    return table(["", "1.00 is", "the plugin's softmax", "Mixhead A", "Mixhead B"], lines)


TABLES = {
    "mixing on a GPU": mixing,
    "both passes on a GPU": both_passes,
    "forward pass on a GPU": forward_pass,
    "memory on a GPU": memory,
    "host of a GPU": host,
    "steps on a GPU": steps,
}
