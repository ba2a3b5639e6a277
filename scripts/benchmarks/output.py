"""The table and the CSV."""

import csv
import importlib.metadata
import os
import platform
from argparse import Namespace
from pathlib import Path
from typing import Dict, List

import torch

from benchmarks.cases import HAS_FAIRSEQ, Row


def machine(options: Namespace) -> Dict[str, str]:
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    fairseq = "none"
    if HAS_FAIRSEQ:
        import fairseq as package

        fairseq = package.__version__
    return dict(
        dtype=options.dtype,
        busy=str(options.busy).lower(),
        device=device,
        python=platform.python_version(),
        torch=torch.__version__,
        fairseq=fairseq,
        cuda=torch.version.cuda or "none",
        triton=_version("triton"),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


# Those of rows, of the machine, and of rows again: columns stay where scripts that read them expect them.
COLUMNS = (
    "level name batch heads length head_dim passes p20_ms p50_ms p80_ms peak_mib ratio measured_by "
    "dtype busy device python torch fairseq "
    "provider memory_ratio memory_ratio_statistics tokens_per_second reason cuda triton speedup_over_eager"
).split()


def _milliseconds(ms: float) -> str:
    return f"{ms:.3g} ms" if ms < 100 else f"{ms:.0f} ms"


# What a table shows of a row that has it, and how.
SHOWN = {
    "p20_ms": ("p20", _milliseconds),
    "p50_ms": ("p50", _milliseconds),
    "p80_ms": ("p80", _milliseconds),
    "tokens_per_second": ("tokens/s", "{:.0f}".format),
    "ratio": ("ratio", "{:.2f}".format),
    "speedup_over_eager": ("by eager", "{:.2f}x".format),
    "peak_mib": ("peak", "{:.1f} MiB".format),
    "memory_ratio": ("ratio", "{:.2f}".format),
    "memory_ratio_statistics": ("with M's", "{:.2f}".format),
}


def print_table(rows: List[Row]) -> None:
    first = rows[0]
    sizes = f"batch {first['batch']}, heads {first['heads']}, length {first['length']}, head size {first['head_dim']}"
    measured = [row for row in rows if "reason" not in row]
    columns = [column for column in SHOWN if any(column in row for row in measured)]
    if "p50_ms" not in columns and "peak_mib" in columns:  # a table of memory alone
        columns = ["peak_mib", "ratio"]
    dtype = f", {first['dtype']}" if "dtype" in first else ""
    print(f"\n{first['level']}: {sizes}{dtype}\n{'':60s}" + "".join(f"{SHOWN[c][0]:>11s}" for c in columns))
    for row in measured:
        label = f"{row['name']}{'' if row['passes'] == 'full' else ', forward alone'}"
        figures = [SHOWN[column][1](row[column]) if column in row else "" for column in columns]
        print(f"  {label:58s}" + "".join(f"{figure:>11s}" for figure in figures))
    by_reason: Dict[str, List[str]] = {}
    for row in rows:
        if "reason" in row:
            by_reason.setdefault(row["reason"], []).append(row["name"])
    for reason, names in by_reason.items():
        print(f"  not measured ({reason}): {'; '.join(names)}")


def write_csv(path: Path, rows: List[Row], about: Dict[str, str]) -> None:
    """Whole or not at all: what was there before stays until all is written."""
    unfinished = path.with_name(f"{path.name}.new")
    with unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in rows:
            rounded = {key: f"{value:.3f}" if isinstance(value, float) else value for key, value in row.items()}
            writer.writerow({**about, "provider": row["name"].partition(":")[0], **rounded})
    os.replace(unfinished, path)
