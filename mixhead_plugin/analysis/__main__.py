"""`python -m mixhead_plugin.analysis <command> ...`"""

import argparse
import logging
import sys
import textwrap
import warnings
from contextlib import contextmanager
from importlib import import_module
from typing import Iterator, List, NamedTuple, NoReturn, Optional, Sequence

import torch

from mixhead_plugin.errors import OptionError

PROGRAM = "python -m mixhead_plugin.analysis"


class Command(NamedTuple):
    """One command; its module has `add_arguments(parser)` and `run(args)`, and its docstring explains it."""

    module: str
    summary: str
    source: str
    example: str


COMMANDS = {
    "spectrum": Command(
        "spectrum",
        "how many dimensions the attention matrices have: singular values and effective rank",
        "mixhead figures 1 and 3; Roy and Vetterli 2007",
        "spectrum stock/checkpoint_best.pt mixhead/checkpoint_best.pt --labels stock,Mixhead --length 128",
    ),
    "mixing": Command(
        "mixing",
        "the matrices that mix the heads, and how far they are from the identity and from orthogonal",
        "mixhead sections 3.1 to 3.3",
        "mixing mixhead/checkpoint_best.pt --limit 20",
    ),
    "curves": Command(
        "curves",
        "learning curves of several trainings from their logs",
        "mixhead figure 2",
        "curves stock/train.log mixhead/train.log --labels stock,Mixhead",
    ),
    "importance": Command(
        "importance",
        "how much the loss depends on each head, by one backward pass per batch",
        "Michel et al. 2019, section 4.1 and figure 4",
        "importance checkpoint_best.pt --subset valid",
    ),
    "ablate": Command(
        "ablate",
        "what a model loses without each single head, and with only one head per layer",
        "Michel et al. 2019, figures 3 and 5",
        "ablate checkpoint_best.pt --limit 20",
    ),
    "prune": Command(
        "prune",
        "score while the least important heads go, and a smaller checkpoint without them",
        "Michel et al. 2019, figures 7 and 8",
        "prune checkpoint_best.pt --fraction 0.4 --save pruned.pt",
    ),
}


class Parser(argparse.ArgumentParser):
    """One that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        sys.exit(2)


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary} ({command.source})" for name, command in COMMANDS.items()]
    wrapped = [textwrap.fill(line, 100, subsequent_indent=" " * (width + 4)) for line in lines]
    return "\n".join(
        [
            f"usage: {PROGRAM} <command> ...",
            "",
            "See and cut the attention heads of a trained model. Each command writes PNG, SVG and JSON into --output.",
            "Checkpoints are those of fairseq-train, of the plugin's and of fairseq's own architectures.",
            "",
            *wrapped,
            "",
            "<command> --help explains one.",
        ]
    )


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run one command.

    Args:
        arguments: the command and its flags; by default the process's

    Returns:
        the exit status: 0, or 1 if something that the flags name cannot be used; mistyped flags end in SystemExit(2)
    """
    words: List[str] = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0 if words else 2
    name = words[0]
    if name not in COMMANDS:
        print(f"analysis: error: {name}: no such command; must be one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    try:
        with quiet_libraries():
            module = import_module(f"mixhead_plugin.analysis.{command.module}")
            parser = Parser(
                prog=f"analysis {name}",
                usage=f"{PROGRAM} {name} ...",
                description=module.__doc__,
                epilog=f"Source: {command.source}\nExample: {PROGRAM} {command.example}",
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            module.add_arguments(parser)
            args = parser.parse_args(words[1:])
            figures = import_module("mixhead_plugin.analysis.figures")
            figures.check_folder("--output", args.output, args.output)  # not after an hour of computing
            module.run(args)
    except (OptionError, OSError) as error:
        print(f"analysis {name}: error: {error}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ")[0]
        print(f"analysis {name}: error: {reason}; try a smaller --max-tokens or --cpu", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"analysis {name}: interrupted", file=sys.stderr)
        return 130
    return 0


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """fairseq tells the course of every loading, turns on the debugging messages of others, and pins without CUDA."""
    loggers = [logging.getLogger(name) for name in ("fairseq", "matplotlib", "PIL")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'pin_memory' argument is set", UserWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
