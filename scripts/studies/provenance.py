"""Record where the numbers of a run come from: machine, versions, commit and data."""

import contextlib
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.machines import CORES

ROOT = Path(__file__).resolve().parents[2]
# The files with the text of a recipe: those of fairseq-preprocess, the scores of STS-B, and the
# questions of SQuAD.
TEXT = ("*.bin", "dict*.txt", "*.label", "train.json", "valid.json")
PACKAGES = ("torch", "numpy", "fairseq", "fairseq-fixed", "ve-fairseq")


def device(on_gpus: bool, visible: str | None = None) -> str:
    """Return what a run computes on: the processor, behind the kinds of GPUs if it uses them.

    Args:
        on_gpus: whether the run uses GPUs
        visible: CUDA_VISIBLE_DEVICES of the run; None for that of this command
    """
    names = gpus(visible) if on_gpus else []
    return ", ".join([*dict.fromkeys(names), f"{processor()}, {CORES} cores"])


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python, of this project and of the packages of the recipes.

    Raises OSError if the Python of the recipes cannot tell them.
    """
    source = (ROOT / "mixhead_plugin" / "__init__.py").read_text()
    version = source.partition('__version__ = "')[2].partition('"')[0]
    code = f"""
import json, platform
from importlib.metadata import distributions

packages = {{d.name: d.version for d in distributions() if d.name in {PACKAGES}}}
print(json.dumps({{"python": platform.python_version(), **packages}}))
"""
    found = json.loads(told(python_of_recipes(), "its versions", code))
    return {**found, "mixhead_plugin": version}


def gpus(visible: str | None) -> list[str]:
    """Return the names of the GPUs that the recipes use.

    `visible` is as in `device`. Raises OSError if the Python of the recipes cannot tell them.
    """
    code = """
import json
from torch import cuda

print(json.dumps([cuda.get_device_name(number) for number in range(cuda.device_count())]))
"""
    return json.loads(told(python_of_recipes(), "its GPUs", code, visible))


def python_of_recipes() -> str:
    """Return the Python of .venv, or else the one beside the fairseq-train on the PATH.

    That of this command may be another one, and without torch.
    """
    of_project = ROOT / ".venv" / "bin" / "python"
    beside_fairseq = Path(shutil.which("fairseq-train") or "python3").with_name("python3")
    return str(of_project if of_project.exists() else beside_fairseq)


@functools.cache
def told(python: str, what: str, code: str, visible: str | None = None) -> str:
    """Return what a Python prints. Raises OSError if it fails.

    Args:
        python: the path of the Python
        what: what it is asked for, for the message
        code: the program that prints it
        visible: CUDA_VISIBLE_DEVICES of the program; None for that of this command
    """
    variables = dict(os.environ)
    if visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    ended = subprocess.run(
        [python, "-c", code], stdout=subprocess.PIPE, text=True, env=variables, check=False
    )
    if ended.returncode:
        raise OSError(f"{python} cannot tell {what}; its message is above")
    return ended.stdout


def commit() -> str:
    """Return the commit, with + if files differ from it; empty outside of git.

    It is read each time, because a sweep runs for days, and the checkout may move meanwhile.
    """
    git = ["git", "-C", str(ROOT)]
    describe = ["describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    with contextlib.suppress(OSError):
        ended = subprocess.run([*git, *describe], capture_output=True, text=True, check=False)
        return ended.stdout.strip()
    return ""


def add_commit(record: dict[str, Any]) -> None:
    """Add the current commit to those of a run."""
    before = record.get("commit") or ""
    known = [*before.split(", "), commit()]
    record["commit"] = ", ".join(dict.fromkeys(filter(None, known)))


def checksum(folders: str) -> str | None:
    """Return 12 digits of the SHA-256 of the text that fairseq reads; None if there is none.

    Args:
        folders: the folders of the data, with colons between them, as fairseq takes them
    """
    files: list[Path] = []
    for folder in folders.split(":"):
        for kind in TEXT:
            files += Path(folder).rglob(kind)
    # a text that is missing now may be there for the next run of a sweep, so only the checksum of
    # one that was found is kept
    return checksum_of(tuple(sorted(files))) if files else None


@functools.cache
def checksum_of(files: Sequence[Path]) -> str:
    """Return 12 digits of the SHA-256 of some files and their names."""
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{path.name} {digest}\n".encode())
    return whole.hexdigest()[:12]
