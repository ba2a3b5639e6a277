"""Repair what fairseq does wrong.

A repair is a file, or a folder of files, and has its name; the environment variable MIXHEAD_REPAIRS
chooses among them. Most mend one fault. Some mend several faults of one thing, such as the end of
an epoch or the lines of a dictionary: nobody would want one of these without the others.
"""

import os
import textwrap
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.replace import install_all

GROUPS = {
    "required": "fairseq, or a model of the plugin, does not work without them",
    "data": "fairseq loses or corrupts work, or runs the code of a hostile file",
    "trap": "fairseq reports success without doing what was asked, or hides what is wrong",
}
# The repairs of each group. If two replace the same function, the later one of this table runs
# first, and calls the earlier one as its original. Comments say where this matters.
_NAMES = {
    "required": (
        "safe_globals",
        "numpy_long",
        "numpy_float",
        "truncated_bptt",
        "hydra_help",
        "batch_buckets",
        "broadcast_metadata",
    ),
    "data": (
        "checkpoint_files",
        "checksums",
        "atomic_checkpoints",
        "save_dir",
        "one_training",
        "diverged_models",
        "binarized_data",
        "fasta_index",
        "dictionaries",
        "epoch_batches",
        "shared_epoch",
        "worker_epoch",
        "end_of_epoch",
        "next_training",
        "signals",
        "validation_threads",
        "nan_detector",
        "orphaned_workers",
        "store_ema",
    ),
    "trap": (
        # It runs before `one_training`: a missing file is refused before anybody waits for a lock.
        "restore_file",
        "wrong_names",
        "unknown_fields",
        "overrides",
        "dropped_scales",
        # It runs before `signals`, which has to know whether fairseq or torchrun starts workers.
        "no_worker",
        "torchrun_workers",
        "longer_inputs",
    ),
}
# A repair may define other VERSIONS.
VERSIONS = "fairseq 0.12.2 and its main branch (fairseq-fixed 0.12.3.1, ve-fairseq 0.12.3)"


class Repair(NamedTuple):
    """A fault of fairseq and its repair."""

    group: str  # a key of GROUPS
    module: ModuleType
    remedy: str
    fault: str
    versions: str
    issue: str  # in fairseq's repository, or ""

    def apply(self) -> None:
        """Install the functions that are marked by `replaces`; call its `apply` if it has one.

        `apply` is for what replacing a function cannot mend, such as a name that NumPy lacks.
        """
        install_all(self.module)
        if hasattr(self.module, "apply"):
            self.module.apply()


def _repair(group: str, name: str) -> Repair:
    """Return a repair; the docstring of its file has two paragraphs, the remedy and the fault."""
    module = import_module(f"{__name__}.{name}")
    assert module.__doc__ is not None
    remedy, fault = module.__doc__.strip().split("\n\n")
    return Repair(
        group=group,
        module=module,
        remedy=remedy,
        fault=fault,
        versions=getattr(module, "VERSIONS", VERSIONS),
        issue=getattr(module, "ISSUE", ""),
    )


REPAIRS: dict[str, Repair] = {}
for _group, _names in _NAMES.items():
    for _name in _names:
        REPAIRS[_name] = _repair(_group, _name)
_applied: set[str] = set()


def apply() -> None:
    """Apply the repairs that MIXHEAD_REPAIRS chooses, each once in a process."""
    for name in chosen():
        if name not in _applied:
            _applied.add(name)
            REPAIRS[name].apply()


def chosen() -> list[str]:
    """Return the names of the repairs that MIXHEAD_REPAIRS chooses.

    Its value is `all`, or groups and names separated by commas. A minus leaves one out: `-save_dir`
    and `all,-save_dir` are all but this one. The group `required` is always chosen: without it
    fairseq cannot load the plugin's own checkpoints.

    Raises:
        OptionError: an unknown word, or one that leaves out what is required
    """
    given = os.environ.get("MIXHEAD_REPAIRS") or "all"
    wanted: set[str] = set()
    left_out: set[str] = set()
    for word in given.split(","):
        word = word.strip()
        name = word.removeprefix("-")
        _refuse_unknown(word, name)
        if not word.startswith("-"):
            wanted.add(name)
        elif _is_required(name):
            raise OptionError(f"MIXHEAD_REPAIRS {word!r}: the group required cannot be left out")
        else:
            left_out.add(name)
    if not wanted:  # only words with a minus
        wanted = {"all"}

    chosen_names = []
    for name, repair in REPAIRS.items():
        words_for_it = {"all", repair.group, name}
        is_wanted = not wanted.isdisjoint(words_for_it)
        is_left_out = not left_out.isdisjoint(words_for_it)
        if repair.group == "required" or (is_wanted and not is_left_out):
            chosen_names.append(name)
    return chosen_names


def _refuse_unknown(word: str, name: str) -> None:
    """Refuse a word of MIXHEAD_REPAIRS, which is `name` with or without a minus."""
    known = ["all", *GROUPS, *REPAIRS]
    if name not in known:
        raise OptionError(
            f"MIXHEAD_REPAIRS {word!r}: must be one or several of {', '.join(known)}; "
            "a minus in front leaves one out"
        )


def _is_required(name: str) -> bool:
    """Return True if a word of MIXHEAD_REPAIRS names what is always chosen."""
    if name in REPAIRS:
        return REPAIRS[name].group == "required"
    return name == "required"


def table() -> str:
    """Return the table of all repairs as text; it marks those that MIXHEAD_REPAIRS leaves out."""
    on = chosen()
    lines = [
        "MIXHEAD_REPAIRS chooses: all (the default), or groups and names separated by commas.",
        "A minus leaves one out: MIXHEAD_REPAIRS=-save_dir is all but this one.",
        "",
    ]
    for group, meaning in GROUPS.items():
        lines += [f"{group}: {meaning}", ""]
        for name, repair in REPAIRS.items():
            if repair.group == group:
                lines.append(f"  {name}" if name in on else f"  {name} (off)")
                lines += _rows(repair)
                lines.append("")
    return "\n".join(lines).rstrip()


def _rows(repair: Repair) -> Iterable[str]:
    """Return the lines of a repair in the table: each title, and its text in a second column."""
    parts = {
        "fault": repair.fault,
        "repair": repair.remedy,
        "issue": repair.issue,
        "seen in": repair.versions,
    }
    lines = []
    for title, text in parts.items():
        lines += textwrap.wrap(
            text, 100, initial_indent=f"    {title:8}", subsequent_indent=" " * 12
        )
    return lines
