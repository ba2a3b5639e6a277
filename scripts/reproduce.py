#!/usr/bin/env python3
"""The papers' tables, made again: what there is, the runs, their costs, and a report beside the papers' numbers.

    scripts/reproduce.py list                                   every row, its state, its cost, its command
    scripts/reproduce.py run table7 --scale small               five variants, three seeds each
    scripts/reproduce.py run table2 --jobs 8                    the paper's own size, on eight GPUs
    scripts/reproduce.py run table2 --only vanilla,B            one row of it
    scripts/reproduce.py cost table7 --scale small              time and memory of each row, on an idle machine
    scripts/reproduce.py spectrum table7 --scale small          effective ranks of the trained models
    scripts/reproduce.py report                                 results/README.md, with figures

Scales: `full` is the paper's row; `small` a model and a text for minutes on a CPU, where there is such a grid; `tiny`
the same with six updates, to try the tool. Each run has a folder below --out, and goes on where it was interrupted.
What is finished is in results/<table>.json and results/README.md at once (`tiny`: in --out/results), and is not run
again unless its flags have changed.

The text is made once, by examples/<recipe>/prepare.sh; `list` says by which.

Of the recipes' variables DATA, GPUS and PRECISION may be set, as for examples/sweep.py; runs of another PRECISION are
other runs. DRY_RUN=1 prints what `run` would do.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (the system's may be older)
    sys.exit(f"reproduce: error: {sys.executable} is Python {sys.version.split()[0]}: must be 3.11 or later")

import argparse
import contextlib
import itertools
import json
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "examples")]

from reproduction import costs, estimates, keeping, listing, results, running, spectra, tables  # noqa: E402
from reproduction.errors import Problem, fail, warn  # noqa: E402
from reproduction.tables import SCALES, SEEDS  # noqa: E402


class Parser(argparse.ArgumentParser):
    """One that says what is wrong in one line."""

    def error(self, message: str) -> None:
        fail(message)


def number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a number, at least 1")
    return int(text)


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    found = Parser(prog="reproduce.py", description=__doc__, formatter_class=raw, epilog=estimates.__doc__)
    commands = found.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, summary: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=summary, description=summary, formatter_class=raw)
        made.add_argument(
            "--out", type=Path, default=ROOT / "runs" / "reproduce", help="folder of the runs (default: runs/reproduce)"
        )
        made.add_argument(
            "--results", type=Path, help="folder of the JSON and the report (default: results; of tiny, OUT/results)"
        )
        return made

    def of_a_table(name: str, summary: str) -> argparse.ArgumentParser:
        made = command(name, summary)
        made.add_argument("table", help="table1, table2, ..., as `list` says")
        made.add_argument("--scale", choices=SCALES, default="full", help="(default: %(default)s)")
        return made

    listed = command("list", "every row of the papers")
    listed.add_argument("--json", action="store_true", help="for programs")
    ran = of_a_table("run", "train and evaluate what is missing")
    ran.add_argument("--seeds", type=number, default=SEEDS, help="1, 2, ... as many (default: %(default)s)")
    ran.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="LABEL,LABEL",
        help="rows with these labels; repeated, the rows of each",
    )
    ran.add_argument(
        "--jobs", type=number, default=1, help="runs at a time, which share out GPUs or cores (default: %(default)s)"
    )
    ran.add_argument("--again", action="store_true", help="train also what results/ has, but --out has not")
    cost = of_a_table("cost", "seconds per update and peak memory of each row, in turn; wants an idle machine")
    cost.add_argument("--rounds", type=number, default=5, help="(default: %(default)s)")
    cost.add_argument("--updates", type=number, default=30, help="of each run of a round (default: %(default)s)")
    spectrum = of_a_table("spectrum", "effective ranks of the attention matrices of the trained models in --out")
    spectrum.add_argument("--seeds", type=number, default=SEEDS, help="(default: %(default)s)")
    command("report", "README.md and figures, from the JSON files alone")
    return found


def main(arguments: Optional[Sequence[str]] = None) -> int:
    try:
        status = perform(parser().parse_args(arguments))
        sys.stdout.flush()
        return status
    except Problem as problem:
        fail(str(problem))
    except BrokenPipeError:  # of `| head`, which has what it wants
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own flush
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        warn("interrupted")
        return 128 + signal.SIGINT
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def perform(args: argparse.Namespace) -> int:
    """The exit status of a command, and what it does."""
    tried = getattr(args, "scale", None) == "tiny"
    folder = args.results or (args.out / "results" if tried else ROOT / "results")
    if (dry := os.environ.get("DRY_RUN")) and args.command in ("cost", "spectrum"):
        fail(f"DRY_RUN={dry}: `{args.command}` has no dry run, `run` has one; unset it")
    if args.command == "list":
        content = [listing.of_table(table, args.out, folder) for table in tables.tables().values()]
        every = {"tables": content, "others": listing.others()}
        print(json.dumps(every, indent=1) if args.json else listing.text(content))
        return 0
    if args.command == "report":
        studies = results.studies(folder)
        if not studies:
            fail(f"{folder}: has no results; `scripts/reproduce.py run table7 --scale small` makes some")
        print(keeping.write_report(folder))
        draw(folder, studies, again=True)
        return 0
    table = tables.table(args.table)
    if args.command == "run":
        status = running.run(table, args.scale, args.seeds, args.only, args.jobs, args.out, folder, args.again)
        return status if os.environ.get("DRY_RUN") else publish(status, args.scale, folder)
    keeping.comparable(folder, table, args.scale)  # said before the measuring, not after it
    if args.command == "cost":
        status = costs.measure(table, args.scale, args.rounds, args.updates, args.out, folder)
    else:
        status = spectra.measure(table, args.scale, args.seeds, args.out, folder)
    return publish(status, args.scale, folder)


def publish(status: int, scale: str, folder: Path) -> int:
    """The exit status of a command that has written a table's file, with the report and the figures made of it."""
    try:
        if studies := results.studies(folder):
            if scale != "tiny":
                keeping.write_report(folder)
            draw(folder, studies)
    except Problem as problem:
        warn(f"error: {problem}")
        return status or 1
    return status


def draw(folder: Path, studies: Sequence[results.Study], again: bool = False) -> None:
    """The figures of all tables whose results have changed since theirs were drawn; `again` of all."""
    of_tables = [list(same) for _, same in itertools.groupby(studies, key=lambda study: study.table)]
    wanted = [same for same in of_tables if again or not results.are_drawn(same, folder)]
    if not wanted:
        return
    try:
        import matplotlib  # noqa: F401

        import mixhead_plugin  # noqa: F401 (has the style of all figures)
    except ImportError as error:
        python = f".venv/bin/python {sys.argv[0]}"
        raise Problem(f"no figures: {error}; the environment of the recipes has what they need: {python}") from error
    from reproduction import figures

    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # fairseq has everything logged
    for same in wanted:
        try:
            made = figures.draw(same, folder)
        except OSError as error:
            raise Problem(f"{error.filename or folder}: cannot be written: {error.strerror or error}") from error
        with contextlib.suppress(OSError):  # after SIGHUP the terminal may be gone
            for path in made:
                print(path)


if __name__ == "__main__":
    sys.exit(main())
