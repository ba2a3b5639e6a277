"""Repair faults of fairseq, one in each file. The environment variable MIXHEAD_REPAIRS chooses
among them.
"""

import os
import textwrap
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.repairs.replace import install

GROUPS = {
    "required": "fairseq, or a model of the plugin, does not run without them",
    "data": "fairseq loses or corrupts work, or runs the code of a hostile file",
    "trap": "fairseq reports success without doing what was asked, or hides what is wrong",
}
# The files of each group. If two replace the same function, the later one in this list runs first.
_NAMES = {
    "required": """
        safe_globals numpy_long truncated_bptt learning_rate before_training printed_alignments
        hydra_help
    """,
    "data": """
        checkpoint_files checksums atomic_checkpoints save_dir one_training diverged_models
        binarized_data fasta_index dictionaries epoch_batches shared_epoch worker_epoch
        end_of_epoch next_training signals validation_threads nan_detector orphaned_workers
    """,
    "trap": (
        "restore_file wrong_names unknown_fields overrides dropped_scales no_worker "
        "torchrun_workers longer_inputs"
    ),
}
# A file may define other VERSIONS.
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
        """Install the functions that the file marks by `replaces`, and call its `apply` if it has
        one.
        """
        for value in list(vars(self.module).values()):
            if hasattr(value, "replaces"):
                install(value)
        getattr(self.module, "apply", lambda: None)()


def _repair(group: str, name: str) -> Repair:
    """Return the repair in a file, whose docstring has two paragraphs:
    the remedy, and the fault.
    """
    module = import_module(f"{__name__}.{name}")
    remedy, fault = module.__doc__.strip().split("\n\n")
    return Repair(
        group,
        module,
        remedy,
        fault,
        getattr(module, "VERSIONS", VERSIONS),
        getattr(module, "ISSUE", ""),
    )


REPAIRS = {name: _repair(group, name) for group, names in _NAMES.items() for name in names.split()}
_applied: set[str] = set()


def apply(groups: Iterable[str] = tuple(GROUPS)) -> None:
    """Apply the repairs of `groups` that MIXHEAD_REPAIRS chooses, each once in a process."""
    for name in chosen():
        if name not in _applied and REPAIRS[name].group in groups:
            _applied.add(name)
            REPAIRS[name].apply()


def chosen(words: str = "") -> list[str]:
    """Return the repairs that `words`, else MIXHEAD_REPAIRS, name: `all`, or groups and names
    separated by commas.

    A minus leaves one out: `-save_dir` and `all,-save_dir` are all but this one. The group
    `required` is always chosen: without it fairseq cannot load the plugin's own checkpoints.
    """
    given = [
        word.strip() for word in (words or os.environ.get("MIXHEAD_REPAIRS") or "all").split(",")
    ]
    known = ["all", *GROUPS, *REPAIRS]
    for word in given:
        if word.removeprefix("-") not in known:
            raise OptionError(
                f"MIXHEAD_REPAIRS {word!r}: must be one or several of {', '.join(known)}; "
                "a minus in front leaves one out"
            )
        if word.startswith("-") and _group(word.removeprefix("-")) == "required":
            raise OptionError(f"MIXHEAD_REPAIRS {word!r}: the group required cannot be left out")
    left_out = {word.removeprefix("-") for word in given if word.startswith("-")}
    wanted = {word for word in given if not word.startswith("-")} or {"all"}

    def covers(words: set[str], name: str) -> bool:
        return not words.isdisjoint({"all", REPAIRS[name].group, name})

    return [
        name
        for name, repair in REPAIRS.items()
        if repair.group == "required" or (covers(wanted, name) and not covers(left_out, name))
    ]


def _group(word: str) -> str:
    """Return the group that a word of MIXHEAD_REPAIRS belongs to: of a repair its own, else the
    word.
    """
    return REPAIRS[word].group if word in REPAIRS else word


def table() -> str:
    """Return the table of all repairs as text; MIXHEAD_REPAIRS marks those that it leaves out."""
    on = chosen()
    lines = [
        "MIXHEAD_REPAIRS chooses: all (the default), or groups and names separated by commas.",
        "",
    ]
    lines[1:1] = ["A minus leaves one out: MIXHEAD_REPAIRS=-save_dir is all but this one."]
    for group, meaning in GROUPS.items():
        lines += [f"{group}: {meaning}", ""]
        for name, repair in REPAIRS.items():
            if repair.group == group:
                rows = {"fault": repair.fault, "repair": repair.remedy, "issue": repair.issue}
                rows["seen in"] = repair.versions
                lines.append(f"  {name}" if name in on else f"  {name} (off)")
                for title, text in rows.items():
                    lines += textwrap.wrap(
                        text, 100, initial_indent=f"    {title:8}", subsequent_indent=" " * 12
                    )
                lines.append("")
    return "\n".join(lines).rstrip()
