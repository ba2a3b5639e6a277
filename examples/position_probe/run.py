#!/usr/bin/env python
"""Show which attentions can see positions from distances alone: n zeros in, 1 .. n out.

This is the probe of the l2 essay.

    examples/position_probe/run.py                  minutes on a CPU
    examples/position_probe/run.py --quick          seconds: a test, with few models
    examples/position_probe/run.py --attentions softmax l2 --relative-position t5 --models decoder

Train each attention in fairseq's encoder and in its language model, on up to n zeros, and test it
on more. The only positions are those of --relative-position. Also compare the states of all zeros
at random weights, in float64: where an attention cannot see positions, they are equal. The exit
status is 1 if the results contradict the theory. Write results.json, position_probe.png and
position_probe.svg to --output.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import markdown
from common.cores import CORES
from common.defaults import fill_defaults
from common.errors import failing
from position_probe.figure import draw
from position_probe.probe import (
    KINDS,
    POSITIONS,
    PROBED,
    Outcome,
    Setting,
    examine,
    random_spread,
    train,
)

from mixhead_plugin.fairseq.analysis.output import json_value

DEFAULTS = {"n": 16, "seeds": 3, "steps": 800}
QUICK = {"n": 6, "seeds": 1, "steps": 100}
AT_LEAST = {"n": 2, "seeds": 1, "steps": 1, "jobs": 1}
fail = failing("position_probe")
FACTORS = (1.5, 2, 4)
EQUAL = 1e-10  # states that differ by less are equal; rounding makes 1e-15


def parse(arguments: list[str] | None) -> Namespace:
    parser = argparse.ArgumentParser(
        prog="position_probe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    named = "\n".join(f"  {name:14}{_flags(name)}" for name in PROBED)
    parser.epilog = f"attentions and their flags:\n{named}"
    every = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument(
        "--attentions",
        choices=PROBED,
        default=list(PROBED),
        help="some of those below",
        **every,
    )
    parser.add_argument(
        "--relative-position",
        choices=POSITIONS,
        default=list(POSITIONS),
        help="rotary, t5",
        **every,
    )
    parser.add_argument(
        "--models",
        choices=KINDS,
        default=["encoder", "decoder"],
        help="encoder, decoder (causal), gau-encoder, gau-decoder (gated attention units, with "
        "rotary alone)",
        **every,
    )
    parser.add_argument("--n", type=int, help=f"the longest row in training ({DEFAULTS['n']})")
    parser.add_argument("--seeds", type=int, help=f"models of each kind ({DEFAULTS['seeds']})")
    parser.add_argument(
        "--steps",
        type=int,
        help=f"of the training; the decoder has half of them ({DEFAULTS['steps']})",
    )
    parser.add_argument("--learning-rate", type=float, default=0.01, help="(%(default)s)")
    parser.add_argument("--jobs", type=int, default=min(8, CORES), help="processes (%(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="other defaults: --n 6 --seeds 1 --steps 100"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/position_probe"), help="(%(default)s)"
    )
    options = parser.parse_args(arguments)
    fill_defaults(options, QUICK if options.quick else DEFAULTS, AT_LEAST, fail)
    if not 0 < options.learning_rate < math.inf:
        fail(f"--learning-rate {options.learning_rate}: must be above 0")
    return options


def _flags(name: str) -> str:
    """Return what --help says of an attention."""
    probed = PROBED[name]
    said = [text for text in (probed.flags.format(n="n"), probed.what) if text]
    return "; ".join(said) or "fairseq's own"


def longer(n: int) -> list[int]:
    return [round(factor * n) for factor in FACTORS]


class Result(NamedTuple):
    """Hold the measurements of one model."""

    setting: Setting
    outcome: Outcome  # after its training
    spread: float  # of the states of zeros, at random weights


def measure(setting: Setting, options: Namespace) -> Result:
    """Train and test one model."""
    torch.set_num_threads(1)  # the model is too small for more
    probe = train(setting, options.steps, options.learning_rate)
    outcome = examine(probe, setting.n, longer(setting.n))
    return Result(setting, outcome, random_spread(setting))


def measure_all(plan: list[Setting], options: Namespace) -> list[Result]:
    """Return the results in the order of `plan`."""
    work = partial(measure, options=options)
    if options.jobs == 1:
        return [work(setting) for setting in tqdm(plan, desc="models", disable=None)]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        return list(tqdm(pool.map(work, plan), desc="models", total=len(plan), disable=None))


def planned(options: Namespace) -> list[Setting]:
    """Return every model to train."""
    choices = itertools.product(options.models, options.attentions, options.relative_position)
    plan = []
    for kind, name, position in choices:
        if KINDS[kind].causal and PROBED[name].markers == "end":
            continue  # a causal model cannot see a marker at the end
        if position not in KINDS[kind].positions:
            continue
        for seed in range(options.seeds):
            plan.append(Setting(kind, name, position, options.n, seed))
    return plan


def rows_of(results: list[Result]) -> list[dict[str, Any]]:
    """Return a row for every model, attention and kind of position, with lists over the seeds."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        setting = result.setting
        key = (setting.kind, setting.variant, setting.position)
        groups.setdefault(key, []).append(result)
    return [row_of(of_all_seeds) for of_all_seeds in groups.values()]


def row_of(results: list[Result]) -> dict[str, Any]:
    """Return the row of the results of all seeds; the answers are those of the first one."""
    setting = results[0].setting
    probed = PROBED[setting.variant]
    outcomes = [result.outcome for result in results]
    first = outcomes[0]
    errors = {}
    for length in first.longer:
        errors[str(length)] = [outcome.longer[length] for outcome in outcomes]
    answers = {}
    for length, row in first.answers.items():
        answers[str(length)] = [round(answer, 3) for answer in row]
    return {
        "model": setting.kind,
        "attention": setting.variant,
        "position": setting.position,
        "flags": " ".join(setting.flags()),
        "markers": probed.markers,
        "blind": probed.blind(KINDS[setting.kind].causal),
        "spread_at_random_weights": [result.spread for result in results],
        "spread_trained": [outcome.spread for outcome in outcomes],
        "passed": [outcome.passed for outcome in outcomes],
        "right": [outcome.right for outcome in outcomes],
        "error": [outcome.error for outcome in outcomes],
        "worst": [outcome.worst for outcome in outcomes],
        "error_of_longer": errors,
        "answers": answers,
    }


def against_theory(rows: list[dict[str, Any]]) -> list[str]:
    """Return what contradicts the theory.

    By the theory only blind attentions have equal states, and they never pass.
    """
    problems = []
    for row in rows:
        where = f"{row['model']}, {row['attention']}, {row['position']}"
        at_random_weights = row["spread_at_random_weights"]
        trained = row["spread_trained"]
        if not row["blind"]:
            if not all(spread > EQUAL for spread in at_random_weights):
                problems.append(f"{where}: states are equal at random weights")
            continue
        if not all(spread < EQUAL for spread in at_random_weights):
            most = max(at_random_weights)
            problems.append(f"{where}: states differ by {most:.1e} (at random weights)")
        if not all(spread < EQUAL for spread in trained):
            problems.append(f"{where}: states differ by {max(trained):.1e} (trained)")
        if any(row["passed"]):
            problems.append(f"{where}: passed, which it cannot")
    return problems


def table(rows: list[dict[str, Any]], kind: str) -> str:
    """Return a Markdown table with the means over the seeds.

    Every attention and kind of position of a model has a line.
    """
    rows = [row for row in rows if row["model"] == kind]
    lengths = list(rows[0]["error_of_longer"])
    n = len(next(iter(rows[0]["answers"].values())))
    titles = [
        "attention",
        "positions",
        "states differ by",
        "passed",
        "right",
        f"error, 1..{n}",
        *lengths,
    ]
    lines = []
    for row in rows:
        spreads = row["spread_at_random_weights"]
        apart = f"{max(spreads):.0e}" if row["blind"] else f"{min(spreads):.2g}"
        right = math.floor(1000 * statistics.mean(row["right"])) / 10  # 100 % must mean all
        cells = [
            row["attention"],
            row["position"],
            apart,
            f"{sum(row['passed'])}/{len(row['passed'])}",
            f"{right:.1f} %",
            f"{statistics.mean(row['error']):.2f}",
            *(f"{statistics.mean(row['error_of_longer'][length]):.1f}" for length in lengths),
        ]
        lines.append(cells)
    return markdown.table(titles, lines, left=2)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--output {options.output}: {error.strerror}")
    begin = time.monotonic()
    plan = planned(options)
    if not plan and "rotary" not in options.relative_position:
        fail("--relative-position t5: needs --models encoder or decoder, units have rotary alone")
    if not plan:
        fail("--attentions end-marker: needs --models encoder; a causal model cannot see the end")
    rows = rows_of(measure_all(plan, options))
    for kind in dict.fromkeys(row["model"] for row in rows):
        causal = "causal" if KINDS[kind].causal else "bidirectional"
        print(f"\n{kind} ({causal}), trained on 1 to {options.n} zeros\n\n{table(rows, kind)}")
    settings = {name: getattr(options, name) for name in (*DEFAULTS, "learning_rate", "jobs")}
    problems = against_theory(rows)
    results = {
        "settings": settings,
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - begin),
        "against_theory": problems,
        "rows": rows,
    }
    text = json.dumps(json_value(results), indent=1, allow_nan=False)
    (options.output / "results.json").write_text(text + "\n")
    draw(options.output, rows, options.n)
    print(f"\n{results['seconds']} s; results.json, position_probe.png and .svg: {options.output}")
    if problems:
        fail("contradicts the theory: " + "; ".join(problems))


if __name__ == "__main__":
    main()
