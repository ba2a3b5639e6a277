"""`mixhead [path | repairs | check | fold | convert | hydra-train]`, or `python -m mixhead_plugin`.

Each command imports what it needs when it runs. So `mixhead path`, which stands in many command
lines, is fast and needs neither torch nor fairseq.
"""

import argparse
import runpy
import signal
import sys
from pathlib import Path

import mixhead_plugin
from mixhead_plugin.errors import end_in_one_line


def main() -> int:
    """Run one of the commands, and return the status of the process."""
    end_in_one_line()
    args = parsed()
    if args.command == "hydra-train":
        hydra_train(sys.argv[2:])
        return 0

    # No traceback for `mixhead repairs | head`. A training must not end so: its sockets may break.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if args.command == "repairs":
        from mixhead_plugin.fairseq.repairs import table

        print(table())
    elif args.command == "check":
        from mixhead_plugin.check.command import main as report

        return report(args.device, args.heads, args.head_dim, args.json)
    elif args.command == "fold":
        mixhead_plugin.register()
        from mixhead_plugin.fairseq.fold import fold

        fold(args.IN, args.OUT)
        print(f"wrote {args.OUT}")
    elif args.command == "convert":
        mixhead_plugin.register()
        from mixhead_plugin.fairseq.published import convert

        arch = convert(args.IN, args.OUT)
        print(f"wrote {args.OUT}, --arch {arch}")
    else:  # `path`, or no command
        print(Path(__file__).resolve().parent)
    return 0


def parsed() -> argparse.Namespace:
    """Return the command and its arguments; end the process if they are wrong."""
    parser = argparse.ArgumentParser(prog="mixhead", allow_abbrev=False)
    parser.add_argument(
        "--version", action="version", version=f"mixhead {mixhead_plugin.__version__}"
    )
    commands = parser.add_subparsers(dest="command", title="commands")
    commands.add_parser(
        "path", help="print the folder to give to fairseq's --user-dir (the default)"
    )
    commands.add_parser("repairs", help="print which faults of fairseq are repaired, and how")

    check = commands.add_parser(
        "check", help="compute variants of attention on this machine and compare them with float64"
    )
    check.add_argument(
        "--device", metavar="NAME", help="cpu, cuda or cuda:1; by default cuda if there is one"
    )
    check.add_argument("--heads", type=int, default=8, help="number of heads (%(default)s)")
    check.add_argument("--head-dim", type=int, default=64, help="size of a head (%(default)s)")
    check.add_argument("--json", action="store_true", help="print the report as JSON")

    fold = commands.add_parser(
        "fold", help="write a checkpoint that fairseq and other tools read without this plugin"
    )
    fold.add_argument(
        "IN",
        help="a checkpoint of this plugin; what --feature-mixing added goes into the projections",
    )
    fold.add_argument("OUT", help="a new file, of fairseq's own architecture")

    convert = commands.add_parser(
        "convert",
        help="write a checkpoint of the Mixhead authors' published code as one of this plugin",
    )
    convert.add_argument("IN", help="a checkpoint of their code, with Mixhead A or B")
    convert.add_argument("OUT", help="a new file, for fairseq's commands with --user-dir")

    commands.add_parser(
        "hydra-train",
        help="fairseq-hydra-train, repaired before it reads its flags, as Python 3.14 needs it",
        add_help=False,  # its flags are Hydra's, --help too
    )

    args, rest = parser.parse_known_args()
    if rest and args.command != "hydra-train":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def hydra_train(words: list[str]) -> None:
    """Run fairseq-hydra-train with these words of its command line."""
    mixhead_plugin.register()
    sys.argv = ["fairseq-hydra-train", *words]
    # As `python -m`: the repairs look into `__main__` to see which command runs.
    runpy.run_module("fairseq_cli.hydra_train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    sys.exit(main())
