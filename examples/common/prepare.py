"""What the preparations share: their folders, their flags, and fairseq-preprocess."""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.archives import fail, note

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def data_folder() -> Path:
    """DATA of the environment, which recipe.sh sets; made if it is not there."""
    folder = Path(os.environ["DATA"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"DATA={folder}: {error.strerror}")
    return folder


class Parser(argparse.ArgumentParser):
    """With DRY_RUN=1 nothing follows the reading of the command line, as in train.sh and evaluate.sh."""

    def parse_args(self, *arguments: Any, **settings: Any) -> Any:
        args = super().parse_args(*arguments, **settings)
        if os.environ.get("DRY_RUN"):
            print(" ".join(f"{name}={value}" for name, value in vars(args).items()))
            sys.exit()
        return args


def parser(description: str) -> Parser:
    """The command line of a prepare.sh with the flags that all have."""
    arguments = Parser(prog="prepare.sh", description=description)
    arguments.add_argument(
        "--any-counts",
        action="store_true",
        help="take text of your own in the same layout: numbers of lines and tokens are printed, not checked",
    )
    arguments.add_argument(
        "--workers", type=int, default=CORES, metavar="N", help="processes at a time (default: %(default)s)"
    )
    return arguments


def preprocess(destination: Path, workers: int, flags: Sequence[str]) -> None:
    """fairseq-preprocess into `destination`, which need not be there. Its log stays in destination/preprocess.log."""
    program = shutil.which("fairseq-preprocess")
    if program is None:
        fail("fairseq-preprocess is not on the PATH: run scripts/setup.sh, or activate an environment that has fairseq")
    note(f"fairseq-preprocess writes {destination.name.removesuffix('.unfinished')}, {workers} processes")
    command = [program, *map(str, flags), "--destdir", str(destination), "--workers", str(workers)]
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        fail(f"fairseq-preprocess ended with status {status}; its own words stand above")
