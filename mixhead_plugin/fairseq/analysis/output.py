"""Write the results of a command as pictures and JSON."""

import argparse
import json
import math
import os
import platform
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fairseq
import numpy as np
import torch

import mixhead_plugin
from mixhead_plugin.errors import OptionError
from mixhead_plugin.heads import figures

# Files whose name says nothing; that of their folder does.
USUAL_NAMES = ("checkpoint_best", "checkpoint_last", "model", "log", "train", "training")
# How the names of pictures end, of the first and of the second set of --subset.
ENDINGS_OF_SETS = ("", "-2")


def add_arguments(parser: ArgumentParser, labels: bool = False) -> None:
    """Add --output, and with `labels` a flag for the names of several inputs."""
    text = "folder for PNG, SVG and JSON (default: %(default)s)"
    parser.add_argument(
        "--output", type=writable_folder, default="analysis", metavar="DIR", help=text
    )
    if labels:
        parser.add_argument(
            "--labels",
            metavar="A,B,...",
            help="names of the inputs in the legend (default: theirs)",
        )


def writable_folder(path: str) -> str:
    """Parse a folder for argparse; refuse one where files cannot be written.

    It may not exist yet: then the folder above it counts.
    """
    there = Path(path).absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path}: {there} is not a writable folder")
    return path


def writable_file(path: str) -> str:
    """Parse a file for argparse; refuse one that cannot be written."""
    writable_folder(str(Path(path).absolute().parent))
    is_new = not os.path.exists(path)
    is_writable = os.path.isfile(path) and os.access(path, os.W_OK)
    if path.endswith("/") or not (is_new or is_writable):
        raise argparse.ArgumentTypeError(
            f"{path}: is a folder or read-only, must be a writable file"
        )
    return path


def name_of(path: str) -> str:
    """Return the name of a file without its suffix, or of its folder if that says more."""
    name = Path(path).stem
    folder = Path(path).resolve().parent.name
    return folder if name in USUAL_NAMES and folder else name


def labels(args: Namespace, defaults: Sequence[str]) -> list[str]:
    """Return the names of the inputs, from --labels or else from `defaults`; refuse equal names."""
    names = list(defaults) if args.labels is None else args.labels.split(",")
    if args.labels is not None and (len(names) != len(defaults) or not all(names)):
        raise OptionError(
            f"--labels {args.labels}: must be {len(defaults)} names, with commas between them"
        )
    if len(set(names)) < len(names):
        raise OptionError(
            f"--labels: two inputs have the same name, {','.join(names)}; name them by --labels A,B"
        )
    return names


def write(args: Namespace, command: str, results: dict[str, Any], pictures: dict[str, Any]) -> None:
    """Write the pictures and <command>.json into --output, and print the names of the files."""
    files = []
    for name, figure in pictures.items():
        files += figures.save(figure, args.output, name)

    flags = {}
    for key, value in vars(args).items():
        if isinstance(value, (str, int, float, list, dict)):  # argparse also holds functions
            flags[key] = value
    versions = {module.__name__: module.__version__ for module in (mixhead_plugin, torch, fairseq)}
    versions["python"] = platform.python_version()
    content = json_value({"command": command, "versions": versions, "flags": flags, **results})

    Path(args.output).mkdir(parents=True, exist_ok=True)
    file = Path(args.output) / f"{command}.json"
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    file.write_text(f"{text}\n", encoding="utf-8")
    files.append(file)
    for file in files:
        print(f"wrote {file}")


def json_value(value: Any) -> Any:
    """Return a value for JSON: tensors, arrays and tuples as lists, NaN and infinities as None."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): json_value(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
