"""Read the tasks of GLUE from tasks.toml."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

from common.archives import Archive

URL = "https://dl.fbaipublicfiles.com"
HIGHEST = 5.0  # the largest similarity of STS-B; the smallest is 0


class Task(NamedTuple):
    """An entry of tasks.toml, which explains the fields at its beginning."""

    archives: tuple[Archive, ...]  # a single .zip, or the files themselves
    files: Mapping[str, str]
    examples: Mapping[str, range]
    texts: tuple[str, ...]
    labels: tuple[str, ...]
    predictions: Mapping[str, str]
    label: str = "label"
    metrics: tuple[str, ...] = ("accuracy",)
    header: Optional[tuple[str, ...]] = None

    @property
    def classes(self) -> int:
        """Return the value of --num-classes."""
        return len(self.labels) or 1


def _task(name: str, entry: dict[str, Any]) -> Task:
    """Return a task.

    `files` and `predictions` have defaults that depend on the folder and on the name.
    """
    folder = entry.pop("folder", None)
    files = {
        "train": f"{folder}/train.tsv",
        "valid": f"{folder}/dev.tsv",
        "test": f"{folder}/test.tsv",
    }
    entry = {"files": files, "predictions": {"test": f"{name}.tsv"}, **entry}
    archives = tuple(_archive(file, sha256) for file, sha256 in entry.pop("archives").items())
    examples = {}
    for subset, number in entry.pop("examples").items():
        least, most = number if isinstance(number, list) else (number, number)
        examples[subset] = range(least, most + 1)
    return Task(archives, examples=examples, **entry)


def _archive(file: str, sha256: str) -> Archive:
    folder = "senteval/senteval_data" if file.startswith("msr_paraphrase") else "glue/data"
    return Archive(file, (f"{URL}/{folder}/{file}",), sha256)


TASKS = {
    name: _task(name, entry)
    for name, entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}
