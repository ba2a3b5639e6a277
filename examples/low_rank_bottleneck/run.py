#!/usr/bin/env python
"""Measure how large a head must be to give any attention weights.

This is theorem 1 of the low-rank bottleneck paper.

    examples/low_rank_bottleneck/run.py                     minutes on a CPU
    examples/low_rank_bottleneck/run.py --quick             seconds: a test, with few sizes
    examples/low_rank_bottleneck/run.py --sizes 4 8 16 --sharpness 3

First check the theorem; the exit status is 1 if that fails. Then fit W_Q, W_K and Mixhead's M of a
layer, for each head size: its attention weights are fitted to random matrices whose rows sum to 1.
Write results.json, low_rank_bottleneck.png and low_rank_bottleneck.svg to --output.
"""

import argparse
import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import markdown
from common.defaults import fill_defaults
from common.errors import failing
from low_rank_bottleneck.figure import draw
from low_rank_bottleneck.fitting import (
    STARTS,
    Problem,
    effective_rank,
    fit,
    random_problem,
    uniform_squares,
)
from low_rank_bottleneck.theorems import Check, checks, smallest_error

DEFAULTS = dict(
    positions=32,
    heads=4,
    seeds=5,
    iterations=300,
    sizes=[1, 2, 4, 8, 12, 16, 20, 24, 28, 30, 31, 32],
)
QUICK = dict(positions=8, heads=2, seeds=2, iterations=60, sizes=[1, 2, 4, 7, 8])
AT_LEAST = dict(positions=2, heads=2, seeds=2, iterations=1)


class Attention(NamedTuple):
    """A curve of the figure."""

    normalizer: str
    mixed: bool


ATTENTIONS = {
    "softmax": Attention("softmax", mixed=False),
    "sigsoftmax": Attention("sigsoftmax", mixed=False),
    "mixhead": Attention("softmax", mixed=True),
}
FIXHEAD = "fixhead"  # softmax with heads of size n
fail = failing("low_rank_bottleneck")
TASKS = {"own": "every head has a matrix of its own", "one": "one matrix from all heads"}


def parse(arguments: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        prog="low_rank_bottleneck",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shown = {
        name: " ".join(map(str, value)) if name == "sizes" else value
        for name, value in DEFAULTS.items()
    }
    parser.add_argument(
        "--positions", type=int, help=f"n, the size of the matrices ({shown['positions']})"
    )
    parser.add_argument("--heads", type=int, help=f"heads of the layer ({shown['heads']})")
    parser.add_argument(
        "--sizes", type=int, nargs="+", help=f"sizes of a head, up to n ({shown['sizes']})"
    )
    parser.add_argument("--seeds", type=int, help=f"sets of matrices ({shown['seeds']})")
    parser.add_argument(
        "--sharpness",
        type=float,
        default=1.0,
        help="standard deviation of the matrices' logits (%(default)s)",
    )
    parser.add_argument(
        "--iterations", type=int, help=f"of L-BFGS in each fit ({shown['iterations']})"
    )
    parser.add_argument(
        "--quick", action="store_true", help="other defaults: 8 positions, 2 heads, 2 seeds, ..."
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/low_rank_bottleneck"), help="(%(default)s)"
    )
    options = parser.parse_args(arguments)
    sizes_given = options.sizes is not None
    fill_defaults(options, QUICK if options.quick else DEFAULTS, AT_LEAST, fail)
    if not 0 < options.sharpness <= 10:
        fail(f"--sharpness {options.sharpness}: must be above 0, and 10 at most")
    n = options.positions
    if not sizes_given:
        options.sizes = [size for size in options.sizes if size < n - 1] + [n - 1, n]
    for size in options.sizes:
        if not 1 <= size <= n:
            fail(f"--sizes {size}: must be between 1 and --positions {n}")
    options.sizes = sorted(set(options.sizes))
    return options


def measure(options: Namespace, problem: Problem) -> list[dict[str, Any]]:
    """Return a row for every task, attention and head size.

    fixhead's are those of softmax at size n.
    """
    plan = []
    for size in options.sizes:
        for name, attention in ATTENTIONS.items():
            # Heads without mixing are independent of each other: one fit serves both tasks.
            tasks = TASKS if attention.mixed else ["own"]
            plan += [(size, name, task) for task in tasks]
    if options.positions not in options.sizes:  # for fixhead
        plan.append((options.positions, "softmax", "own"))

    rows = []
    with tqdm(total=len(plan) * len(STARTS), desc="fits", disable=None) as bar:
        for size, name, task in plan:
            normalizer, mixed = ATTENTIONS[name]
            fits = []
            for start in STARTS:
                bar.set_postfix_str(f"{name}, size {size}")
                fits.append(
                    fit(
                        problem,
                        normalizer=normalizer,
                        head_size=size,
                        mixed=mixed,
                        together=task == "one",
                        start=start,
                        iterations=options.iterations,
                    )
                )
                bar.update()
            served_tasks = [task] if mixed else TASKS
            for served in served_tasks:
                targets = 1 if served == "one" else options.heads
                # [starts, S, targets]
                squares = torch.stack([fitted.squares[:, :targets] for fitted in fits])
                ranks = torch.stack([fitted.effective_rank[:, :targets] for fitted in fits])
                rows.append(_row(served, name, size, squares, ranks, problem, options))
    return _with_fixhead(rows, options)


def _row(
    task: str,
    name: str,
    size: int,
    squares: torch.Tensor,
    ranks: torch.Tensor,
    problem: Problem,
    options: Namespace,
) -> dict[str, Any]:
    """Return the result of each seed's better start; squares and ranks are [starts, S, targets]."""
    uniform = uniform_squares(problem.targets)[:, : squares.shape[2]]  # [S, targets]
    errors = (squares.sum(2) / uniform.sum(1)).sqrt()  # [starts, S]
    best, start = errors.min(0)
    chosen = ranks.mean(2).gather(0, start[None])[0]
    heads = options.heads if ATTENTIONS[name].mixed or task == "own" else 1
    parameters = 2 * heads * problem.embedding.shape[2] * size
    if ATTENTIONS[name].mixed:
        parameters += heads * squares.shape[2]
    return {
        "task": task,
        "attention": name,
        "head_size": size,
        "heads": heads,
        "parameters": parameters,
        "mean": float(best.mean()),
        "std": float(best.std()),
        "seeds": best.tolist(),
        "mean_of_start": dict(zip(STARTS, errors.mean(1).tolist())),
        "effective_rank": float(chosen.mean()),
    }


def _with_fixhead(rows: list[dict[str, Any]], options: Namespace) -> list[dict[str, Any]]:
    """Add fixhead, whose heads have size n: softmax of that size, which may not be asked for."""
    asked = [row for row in rows if row["head_size"] in options.sizes]
    for row in rows:
        if row["attention"] == "softmax" and row["head_size"] == options.positions:
            asked.append({**row, "attention": FIXHEAD})
    return asked


def bounds(problem: Problem, rows: list[dict[str, Any]]) -> list[Check]:
    """Check that no softmax head came below the bound of theorem 1."""
    results = []
    uniform = uniform_squares(problem.targets)[:, 0].sqrt()  # [S]
    for row in rows:
        if row["attention"] != "softmax" or row["task"] != "one":
            continue
        size = row["head_size"]
        least = smallest_error(problem.targets[:, 0], size) / uniform  # [S]
        if not least.any():
            continue
        errors = torch.tensor(row["seeds"], dtype=torch.float64)  # [S]
        name = f"theorem 1: softmax, head size {size}: error found / proven smallest error"
        results.append(Check(name, float((errors / least).min()), 1.0, above=True))
    return results


def print_checks(results: list[Check]) -> None:
    width = max(len(check.name) for check in results)
    for check in results:
        side = ">" if check.above else "<"
        verdict = "holds" if check.holds else "FAILS"
        print(f"{verdict}  {check.name:{width}}  {check.value:10.4g} {side} {check.limit:.4g}")


def table(task: str, rows: list[dict[str, Any]], sizes: list[int]) -> str:
    """Return a Markdown table with a line for every head size.

    The cells are mean and standard deviation over the seeds.
    """
    cells = {}
    for row in rows:
        if row["task"] == task:
            cells[row["attention"], row["head_size"]] = _cell(row)
    (fixhead,) = [cell for (name, _), cell in cells.items() if name == FIXHEAD]

    titles = ["head size", *ATTENTIONS, FIXHEAD]
    lines = []
    for size in sizes:
        lines.append([str(size), *(cells[name, size] for name in ATTENTIONS), fixhead])
    return markdown.table(titles, lines)


def _cell(row: dict[str, Any]) -> str:
    if row["mean"] < 1e-9:  # the optimizer's rounding
        return "0"
    return f"{row['mean']:.4f} ± {row['std']:.4f}"


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--output {options.output}: {error.strerror}")
    torch.set_num_threads(1)  # the matrices are too small for more
    begin = time.monotonic()
    problem = random_problem(options.positions, options.heads, options.seeds, options.sharpness)
    of_theory = checks(options.positions)
    print_checks(of_theory)
    try:
        rows = measure(options, problem)
    except ArithmeticError as error:
        fail(f"{error}; a smaller --sharpness than {options.sharpness} may help")
    of_results = bounds(problem, rows)
    print_checks(of_results)
    for task, what in TASKS.items():
        print(
            f"\n{what}: error, 1 is that of uniform weights\n\n{table(task, rows, options.sizes)}"
        )
    settings = {name: getattr(options, name) for name in (*DEFAULTS, "sharpness")}
    results = {
        "settings": settings,
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - begin),
        "effective_rank_of_targets": float(effective_rank(problem.targets).mean()),
        "checks": [
            {**check._asdict(), "holds": check.holds} for check in [*of_theory, *of_results]
        ],
        "errors": rows,
    }
    (options.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(options.output, rows, TASKS, settings)
    print(
        f"\n{results['seconds']} s; results.json, low_rank_bottleneck.png and .svg: "
        f"{options.output}"
    )
    if not all(check.holds for check in [*of_theory, *of_results]):
        fail("a check failed; see above")


if __name__ == "__main__":
    main()
