#!/usr/bin/env python
"""How fast attention is, and how much memory it takes, side by side in one run.

    scripts/benchmark.py                          everything that suits a CPU, a quarter of an hour on two cores
    scripts/benchmark.py core memory --tokens 4096
    scripts/benchmark.py core --busy              with another process busy on the same cores
    scripts/benchmark.py gpu                      what fused kernels are for: grid, module and wiki103 in bfloat16
    scripts/benchmark.py grid --device cuda --dtype bfloat16 --grid-lengths 1024 --providers triton

Levels: `core` is the attention alone, from queries, keys and values; `module` the multi-head attention around it;
`step` a training step of a language model; `decoding` a beam search; `memory` what core, module and step need beyond
what was there; `grid` the attention alone, time and memory beside FlashAttention's, for one --batch at every
--grid-lengths and --grid-head-dims; `wiki103` the training step of mixhead_transformer_lm_wiki103 beside that of
transformer_lm_wiki103, by fairseq's trainer. `gpu` stands for grid, module and wiki103, and for other defaults:
--device cuda --dtype bfloat16 --rounds 31 --tokens 16384.
In the grid `speedup_over_eager` says how many times as fast as the formula in PyTorch, `memory_ratio_statistics` the
peak of Mixhead B by that of FlashAttention and [batch, length, heads, heads] numbers, which its mixing's gradient has.
Every contender first has to give the right values and gradients; where one does not, it is not timed. Contenders take
turns, so that a change in the machine's speed meets all of them; percentiles are over the rounds. Results go to
`benchmark.csv` and `benchmark.svg` in --out and, as a table, to the terminal; what cannot run here is there too, with
the reason. `module`, `step`, `decoding` and `wiki103` need fairseq.

The CSV is written after each table, and in the grid after each check, so that a command that is stopped keeps what it
had. A grid that is too long for one command is split by --providers and --grid-lengths, each part with its own --out,
or it would write over the others':

    scripts/benchmark.py grid --device cuda --dtype bfloat16 --grid-lengths 1024 --providers triton eager --out runs/a
    scripts/benchmark.py grid --device cuda --dtype bfloat16 --grid-lengths 4096 --providers triton --out runs/b

torch's own are measured in each part, so every part has its ratios; `speedup_over_eager` needs eager in the same part.
The files have the same columns: all but the first without its first line, one after the other, are the CSV of all.
"""

import argparse
import json
import logging
import multiprocessing
import sys
from argparse import Namespace
from pathlib import Path
from typing import Iterator, List, Optional

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from benchmarks import cases, core, grid, memory, models, modules, wiki103
from benchmarks.cases import Row, Shape, Unfinished
from benchmarks.output import machine, print_table, write_csv
from benchmarks.plot import draw

LEVELS = {
    "grid": grid.tables,
    "core": core.tables,
    "module": modules.tables,
    "step": models.step_table,
    "decoding": models.decoding_table,
    "wiki103": wiki103.tables,
    "memory": memory.tables,
}
ON_A_CPU = ("core", "module", "step", "decoding", "memory")  # all, if none is named
ON_A_GPU = ("grid", "module", "wiki103")  # `gpu`
NEED_FAIRSEQ = ("module", "step", "decoding", "wiki103")
IN_FLOAT32 = ("step", "decoding")
DEFAULTS = {"device": "cpu", "dtype": "float32", "rounds": 11, "tokens": 2048}
GPU_DEFAULTS = {"device": "cuda", "dtype": "bfloat16", "rounds": 31, "tokens": 16384}
DTYPES = ("float32", "float64", "bfloat16", "float16")


def parse(arguments: Optional[List[str]]) -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "levels", nargs="*", metavar="LEVEL", help=f"{', '.join(LEVELS)}, gpu; if none {', '.join(ON_A_CPU)}"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048], help="of the core")
    parser.add_argument("--tokens", type=int, help=f"batch x length, not of grid and wiki103 ({DEFAULTS['tokens']})")
    parser.add_argument("--memory-lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="at batch 1")
    parser.add_argument("--eager-up-to", type=int, default=2048, help="length beyond which the formula is left out")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, help=f"({DEFAULTS['rounds']})")
    parser.add_argument("--device", choices=["cpu", "cuda"], help=f"({DEFAULTS['device']})")
    parser.add_argument("--dtype", choices=DTYPES, help=f"({DEFAULTS['dtype']})")
    parser.add_argument("--busy", action="store_true", help="another process computes on all cores meanwhile")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"))
    of_grid = parser.add_argument_group("grid")
    of_grid.add_argument("--batch", type=int, default=16, help="(%(default)s)")
    of_grid.add_argument("--grid-lengths", type=int, nargs="+", default=[1024, 4096], help="(1024 4096)")
    of_grid.add_argument("--grid-head-dims", type=int, nargs="+", default=[64, 128], help="(64 128)")
    of_grid.add_argument(
        "--providers",
        nargs="+",
        choices=grid.PROVIDERS,
        default=grid.PROVIDERS,
        help="beside torch's own; all if not given",
    )
    of_step = parser.add_argument_group("wiki103")
    of_step.add_argument("--step-batch", type=int, default=8, help="sentences of a training step (%(default)s)")
    of_step.add_argument("--step-tokens", type=int, default=512, help="of a sentence (%(default)s)")
    of_step.add_argument("--step-dtypes", nargs="+", choices=DTYPES, default=["bfloat16", "float16"])
    of_step.add_argument("--step-flags", default="", help="of fairseq-train, for all, as '--decoder-layers 4'")
    of_step.add_argument("--vocabulary", type=int, default=267744, help="(%(default)s, WikiText-103's)")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)

    for_gpu = "gpu" in options.levels
    if for_gpu and len(options.levels) > 1:
        parser.error(f"{' '.join(options.levels)}: gpu stands for {', '.join(ON_A_GPU)}, and alone")
    unknown = set(options.levels) - {*LEVELS, "gpu"}
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: levels are {', '.join(LEVELS)}, gpu")
    for name, value in (GPU_DEFAULTS if for_gpu else DEFAULTS).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.device == "cuda" and not torch.cuda.is_available():
        hint = "; with --device cpu, what needs one is named, and the rest timed" if for_gpu else ""
        parser.error(f"--device cuda: no CUDA device is visible{hint}")
    if "memory" in options.levels and options.device == "cpu" and not Path("/proc/self/clear_refs").exists():
        parser.error("memory: on a CPU it needs Linux's /proc/self/clear_refs")
    at_least_one = (
        "tokens heads head_dim lengths memory_lengths batch grid_lengths grid_head_dims step_batch step_tokens"
    )
    for flag in at_least_one.split():
        given = getattr(options, flag)
        if min(given if isinstance(given, list) else [given]) < 1:
            parser.error(f"--{flag.replace('_', '-')} {given}: must be at least 1")
    if not 0 < options.dropout < 1:
        parser.error(f"--dropout {options.dropout}: must be between 0 and 1")
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: percentiles need at least 2")
    if options.vocabulary < 64:
        parser.error(f"--vocabulary {options.vocabulary}: must be at least 64")
    needing = [level for level in options.levels if level in NEED_FAIRSEQ]
    if needing and not cases.HAS_FAIRSEQ:
        parser.error(f"{', '.join(needing)}: needs fairseq, which is not installed; core, grid and memory do not")
    single = [level for level in options.levels if level in IN_FLOAT32]
    if single and options.dtype != "float32":
        parser.error(f"--dtype {options.dtype}: {' and '.join(single)} run in float32")
    half = options.dtype in ("bfloat16", "float16")
    if options.device == "cuda" and not half and {"grid", "gpu"} & set(options.levels):
        parser.error(f"--dtype {options.dtype}: grid measures by FlashAttention, in bfloat16 or float16")

    options.left_out = {}
    if for_gpu or not options.levels:
        wanted = ON_A_GPU if for_gpu else ON_A_CPU
        for level in wanted:
            if level in NEED_FAIRSEQ and not cases.HAS_FAIRSEQ:
                options.left_out[level] = "needs fairseq, which is not installed"
            elif level in IN_FLOAT32 and options.dtype != "float32":
                options.left_out[level] = f"--dtype {options.dtype}: runs in float32"
        options.levels = [level for level in wanted if level not in options.left_out]
    return options


def run(options: Namespace) -> Iterator[List[Row]]:
    """The rows of one table after the other."""
    for level, tables in LEVELS.items():
        if level in options.levels:
            yield from tables(options)


def _burn() -> None:
    a = torch.randn(1500, 1500)
    while True:
        a @ a


def main(arguments: Optional[List[str]] = None) -> None:
    options = parse(arguments)
    if options.memory_of:
        level, name, shape = json.loads(options.memory_of)
        print(json.dumps(memory.peak_memory(level, name, options, Shape(*shape))))
        return
    about = machine(options)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    for level, reason in options.left_out.items():
        print(f"{level}: not measured ({reason})")
    burner = multiprocessing.get_context("spawn").Process(target=_burn, daemon=True) if options.busy else None
    if burner:
        burner.start()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: List[Row] = [cases.level_left_out(level, reason) for level, reason in options.left_out.items()]
    path = options.out / "benchmark.csv"
    logging.disable(logging.INFO)  # fairseq turns on everyone's debugging messages
    try:
        for table in run(options):
            write_csv(path, rows + table, about)  # each time: a run that is stopped keeps what it has
            if not isinstance(table, Unfinished):
                print_table(table)
                rows += table
        draw(options.out / "benchmark.svg", rows, about)
    finally:
        if burner:
            burner.kill()
        logging.disable(logging.NOTSET)
    print(f"\n{path}, {options.out}/benchmark.svg")
    failed = [row for row in rows if row.get("reason", "").startswith(cases.FAILED)]
    if failed:
        raise SystemExit(f"{len(failed)} failed: {'; '.join(dict.fromkeys(row['name'] for row in failed))}")


if __name__ == "__main__":
    main()
