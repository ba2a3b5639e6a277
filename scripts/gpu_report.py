"""Try everything on this machine's GPU in six minutes: scripts/gpu_report.sh."""

import argparse
import functools
import importlib.util
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# this checkout, whichever one is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks import gpu, steps
from studies.markdown import table

ROOT = Path(__file__).resolve().parents[1]
Report = dict[str, Any]


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_report.sh",
        description=(
            "Try the kernels on this machine's GPU: numbers, speed, registers, tests and a "
            "training."
        ),
    )
    names = ", ".join(gpu.PARTS)
    usual = [name for name, part in gpu.PARTS.items() if not part.asked]
    asked = " and ".join(name for name, part in gpu.PARTS.items() if part.asked)
    only = (
        f"parts of {names} (default: all but {asked}, which are for those who change the kernels)"
    )
    form_of_part = (
        "; PART=WORD+WORD takes the steps with one of the words in their names, and "
        "tests=FILE+FILE these tests"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PART",
        default=usual,
        help=f"{only}, in this order{form_of_part}",
    )
    parser.add_argument(
        "--seconds", type=float, default=360.0, help="for all parts (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results" / "gpu", help="folder (default: results/gpu)"
    )
    quick = (
        "a rehearsal: tiny sizes; with TRITON_INTERPRET=1 it needs no GPU, and its figures mean "
        "nothing"
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    args = parser.parse_args(words)
    unknown = sorted(words_by_part(args.only).keys() - gpu.PARTS.keys())
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: parts are {names}")
    if args.seconds <= 0:
        parser.error(f"--seconds {args.seconds:g}: must be above 0")
    return args


def words_by_part(only: Sequence[str]) -> dict[str, list[str]]:
    """Return the words of each part: of 'core=float16+0.1' float16 and 0.1, of 'core' none."""
    words = {}
    for part in only:
        name, _, of_part = part.partition("=")
        words[name] = of_part.split("+") if of_part else []
    return words


def device_of_this_machine() -> str:
    """Return "cuda", or "cpu" where triton interprets its kernels; end where there is neither."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    sys.exit(
        f"gpu_report.sh: {sys.executable} with torch {torch.__version__} sees no GPU; name another "
        "Python by PYTHON=, or rehearse with TRITON_INTERPRET=1 and --quick"
    )


def file_name(device: str) -> str:
    """Return the name of the report's files without an ending: that of the GPU."""
    name = torch.cuda.get_device_name() if device == "cuda" else "interpreter"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def chosen(names: list[str], words: Sequence[str]) -> list[str]:
    """Return the steps with one of the words in their names, in the order of the words.

    All if there are no words.
    """
    if not words:
        return names
    matching: dict[str, None] = {}  # in order, each step once
    for word in words:
        matching |= dict.fromkeys(name for name in names if word in name)
    return list(matching)


def refuse_strange_words(words_of: Mapping[str, Sequence[str]], settings: gpu.Settings) -> None:
    """End the command if a word chooses no step; pytest refuses those of the tests itself."""
    for name, words in words_of.items():
        if name == "tests" or not words:
            continue
        names = gpu.PARTS[name].steps(settings)
        for word in words:
            if not chosen(names, [word]):
                first = "; ".join(names[:3])
                sys.exit(
                    f"gpu_report.sh: --only {name}={word}: must be in the name of a step, such as "
                    f"{first}"
                )


def run_part(
    name: str, settings: gpu.Settings, seconds: float, log: Path, words: Sequence[str] = ()
) -> Report:
    """Return the rows of a part, and for each step that is not complete the reason."""
    part = gpu.PARTS[name]
    report: Report = {"title": part.title, "rows": [], "faults": {}, "steps": {}}
    if part.needs and importlib.util.find_spec(part.needs) is None:
        return report | {"left_out": f"needs {part.needs}, which is not installed"}
    began = time.monotonic()
    events = steps.run(
        functools.partial(part.run, settings),
        chosen(part.steps(settings), words),
        log,
        workers=gpu.machine.cores() if part.parallel and not settings.quick else 1,
        seconds=seconds,
        limit=seconds if settings.quick else part.limit,
    )
    for event in events:
        if event.row is not None:
            report["rows"].append(event.row)
            continue
        report["steps"][event.step] = round(event.seconds, 1)
        if event.fault:
            report["faults"][event.step] = event.fault
    report["seconds"] = round(time.monotonic() - began, 1)
    return report


def as_text(parts: dict[str, Report]) -> str:
    """Return the report as a page of tables."""
    lines = [
        "# Report of a GPU",
        "",
        "Made by `scripts/gpu_report.sh`. Times are in milliseconds where nothing is said.",
    ]
    for name, part in parts.items():
        lines += ["", f"## {part['title']}", ""]
        if "left_out" in part:
            lines.append(f"Left out: {part['left_out']}.")
            continue
        lines.append(f"`{name}`, {part['seconds']:g} s, {len(part['rows'])} rows")
        if part["rows"]:
            lines += ["", rows_table(part["rows"])]
        if part["faults"]:
            lines += ["", *(f"- {step}: {fault}" for step, fault in part["faults"].items())]
    return "\n".join([*lines, ""])


def rows_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table whose columns are the names of all rows, in order."""
    columns = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    lines = []
    for row in rows:
        lines.append([cell(row.get(column, "")) for column in columns])
    return table(columns, lines)


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def summary(part: Report) -> str:
    """Return one line on a part for the screen."""
    if "left_out" in part:
        return f"left out: {part['left_out']}"
    wrong = len(wrong_rows(part))
    incomplete = len(part["faults"])
    return (
        f"{len(part['rows'])} rows, {wrong} with a fault, {incomplete} steps not complete, "
        f"{part['seconds']:g} s"
    )


def wrong_rows(part: Report) -> list[dict[str, Any]]:
    """Return the rows with a fault, and those of tests that failed."""
    return [row for row in part["rows"] if row.get("fault") or row.get("outcome") == "failed"]


def main(words: Sequence[str] | None = None) -> int:
    """Write the report; return 1 if something is wrong or not complete."""
    args = parse(words)
    device = device_of_this_machine()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / file_name(device)
    # Many processes compile beside each other already.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    with tempfile.TemporaryDirectory(prefix="gpu_report", ignore_cleanup_errors=True) as made:
        # Compiled code goes where nothing was compiled before, whatever the caller has set, so that
        # the seconds of a first use are true.
        os.environ["TRITON_CACHE_DIR"] = f"{made}/triton"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{made}/inductor"
        parts = run_parts(args, device, Path(made), path)
    print(f"wrote {path}.json, .md and .log")
    is_right = all(not wrong_rows(part) and not part["faults"] for part in parts.values())
    return 0 if is_right else 1


def run_parts(args: argparse.Namespace, device: str, made: Path, path: Path) -> dict[str, Report]:
    """Run the parts one after the other, and write the report after each.

    Args:
        args: the flags
        device: "cuda" or "cpu"
        made: an empty folder for compiled code
        path: the report's path, without its suffixes
    """
    words_of = words_by_part(args.only)
    tests = tuple(words_of.get("tests", ()))
    settings = gpu.Settings(device, args.quick, made / "compiled", tests)
    refuse_strange_words(words_of, settings)
    log = path.with_suffix(".log").resolve()
    log.write_text("")
    parts: dict[str, Report] = {}
    deadline = time.monotonic() + args.seconds
    for name, words_of_part in words_of.items():
        # the words of this part choose files, and not among its steps
        of_steps = [] if name == "tests" else words_of_part
        left = deadline - time.monotonic()
        # A rehearsal shows every part to its end, however slow the interpreter is.
        seconds = left if args.quick else min(left, gpu.PARTS[name].seconds)
        parts[name] = run_part(name, settings, seconds, log, of_steps)
        content = json.dumps({"quick": args.quick, "parts": parts}, indent=1)
        path.with_suffix(".json").write_text(content)
        path.with_suffix(".md").write_text(as_text(parts))
        print(f"{name:10} {summary(parts[name])}", flush=True)
    return parts


if __name__ == "__main__":
    sys.exit(main())
