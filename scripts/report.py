#!/usr/bin/env python3
"""Make tables and pictures of runs, beside the papers' numbers.

Without arguments it writes results/tables.md and results/*.svg from results/*.json, and from the
list of comparisons, results/comparisons.csv.

    scripts/report.py
    scripts/report.py GRID.toml       print the table of a grid's finished runs
    scripts/report.py results/X.json  print the table of saved runs
    scripts/report.py examples/grids/mixhead_table_8.toml --save results/table8.json
    scripts/report.py results/convergence.json --compare 'softmax,5M in the time of B' B,5M

A number is the mean over seeds ± its standard deviation, with the number of seeds in brackets. The
gain says how much better a row is than the baseline with the same seed; above 0 is better. For
perplexities it is the difference of the logarithms in percent, for other metrics the difference.
From three seeds on, its 95% interval and p are those of scipy's paired t-test. The paper's models
and texts are larger, so its numbers are shown and not tested. A grid that plans a number of `seeds`
shows no result before every point has as many.
"""

import argparse
import os
import signal
from pathlib import Path

import matplotlib
from studies import effect_figures, effect_tables
from studies.faults import fail
from studies.pictures import draw
from studies.provenance import ROOT
from studies.study import Study, from_results, from_runs, save, with_kept
from studies.tables import comparison, markdown

matplotlib.use("Agg")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="report.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "grid",
        nargs="?",
        type=Path,
        help="a grid that scripts/sweep.py ran, or a .json file of saved runs (default: all "
        "results)",
    )
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs", help="folder of the runs (default: runs)"
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        action="append",
        default=[],
        metavar="LABEL,LABEL",
        help="print the gain of the first row over the second",
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write the runs to one JSON file, and its picture"
    )
    parser.add_argument(
        "--results", type=Path, default=ROOT / "results", help="saved runs (default: results)"
    )
    return parser.parse_args()


def refuse_without_grid(args: argparse.Namespace) -> None:
    """End the program if a flag about one study stands beside no study."""
    if args.save:
        fail(f"--save {args.save}: needs a grid, or a file of saved runs")
    for one, other in args.compare:
        fail(f"--compare {one} {other}: needs a grid, or a file of saved runs")


def refuse_unwritable(path: Path) -> None:
    """End the program if --save cannot be written, before the table is made."""
    if not path.parent.is_dir():
        fail(f"--save {path}: {path.parent} is no folder")
    if path.is_dir():
        fail(f"--save {path}: is a folder, must be a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        fail(f"--save {path}: cannot be written to")


def report_one(args: argparse.Namespace) -> None:
    """Print the table of one grid, or of one file of saved runs."""
    if args.grid.suffix == ".json":
        study = from_results(args.grid)
    else:
        study = from_runs(args.grid, args.runs)
    if args.save and args.save.exists():
        study = with_kept(study, args.save)
    print(markdown(study))
    for rows in args.compare:
        print(comparison(study, rows))
    if args.save:
        save(study, args.save)
        if not study.waits:
            draw(study, args.save.with_suffix(".svg"))


def report_all(results: Path) -> None:
    """Write tables.md and the pictures of all saved runs."""
    studies = [from_results(path) for path in sorted(results.glob("*.json"))]
    if not studies:
        fail(f"{results}: has no JSON files")
    how_to_read = " ".join(__doc__.split("\n\n")[-1].split())
    parts = [f"# Tables\n\nWritten by `scripts/report.py`. {how_to_read}\n"]
    if (results / "comparisons.csv").exists():
        parts.append(effect_tables.sections(results))
        effect_figures.draw(results)
    for study in studies:
        parts.append(section(study))
        if not study.waits:
            draw(study, results / f"{study.name}.svg")
    (results / "tables.md").write_text("\n".join(parts), encoding="utf-8")
    print(results / "tables.md")


def section(study: Study) -> str:
    """Return the table of a study with its picture, if it has one."""
    text = markdown(study)
    if not study.waits:
        text += f"\n![{study.grid.title}]({study.name}.svg)\n"
    return text


def main() -> None:
    args = arguments()
    if not args.grid:
        refuse_without_grid(args)
        report_all(args.results)
        return
    if args.save:
        refuse_unwritable(args.save)
    report_one(args)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no traceback for `report.py FILE | head`
    main()
