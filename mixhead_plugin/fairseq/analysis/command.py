"""Run a command: `python -m mixhead_plugin.analysis <command> ...`."""

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

import mixhead_plugin
from mixhead_plugin.errors import OptionError, end_in_one_line

PROGRAM = "python -m mixhead_plugin.analysis"
# Each is a module of this package; the first line of its docstring is the command's summary.
COMMANDS = ("view", "spectrum", "mixing", "importance", "ablate", "prune")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in `arguments`, by default those of the process."""
    mixhead_plugin.register()
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="See and cut the attention heads of a trained model. view writes one HTML "
        "file, each other command PNG, SVG and JSON into --output. Checkpoints are those of "
        "fairseq-train, of the plugin's and of fairseq's own architectures.",
        epilog="<command> --help explains one.",
    )
    commands = parser.add_subparsers(required=True, metavar="<command>")
    for name in COMMANDS:
        module = import_module(f"mixhead_plugin.fairseq.analysis.{name}")
        assert module.__doc__ is not None
        subparser = commands.add_parser(
            name,
            usage=f"{PROGRAM} {name} ...",
            help=module.__doc__.splitlines()[0],
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run, draws=name != "view")
    args = parser.parse_args(arguments)
    if args.draws and find_spec("matplotlib") is None:
        raise OptionError("pictures need matplotlib: pip install matplotlib")
    try:
        args.run(args)
    except BrokenPipeError:  # in `ablate ... | head`; `end_in_one_line` ends silently
        raise
    except OSError as error:  # a file is missing, or cannot be read or written
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise OptionError(message) from error


def run_as_program() -> None:
    """Run the command of this process, which ends with one line where it refuses its input."""
    sys.argv[0] = PROGRAM  # the name in front of an error, instead of __main__.py
    # fairseq switches on debug messages of all libraries; matplotlib has one for every font.
    for name in ("fairseq", "matplotlib", "PIL"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # fairseq pins without CUDA
    warnings.filterwarnings("ignore", "'pin_memory' argument is set", UserWarning)
    end_in_one_line()
    main()
