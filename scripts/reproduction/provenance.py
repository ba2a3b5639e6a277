"""Where and from what code a run is: the machine, the versions, the commit, of every start of its training."""

import contextlib
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple, Optional

import sweep

# What a result depends on, beside what is installed.
CODE = ("mixhead_plugin", "examples", "scripts/reproduction/unmixed_decoding", ":(exclude)*.md")


def about() -> dict[str, Any]:
    """Of this machine and this checkout, now."""
    return {
        "cpu": f"{processor()}, {sweep.CORES} cores",
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def load() -> float:
    """How many processes of the last quarter of an hour wanted a core, for each core; 1 is what one run makes."""
    return round(os.getloadavg()[2] / sweep.CORES, 2)


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def python_of_the_recipes() -> str:
    """As examples/common/recipe.sh finds it."""
    own = sweep.ROOT / ".venv" / "bin"
    if (own / "fairseq-train").exists():
        return str(own / "python")
    return str(Path(found).with_name("python")) if (found := which("fairseq-train")) else "python3"


VERSIONS = """
import json, platform
from importlib.metadata import PackageNotFoundError, version
found = {"python": platform.python_version()}
for name in ("torch", "fairseq", "fairseq-fixed"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def versions() -> dict[str, str]:
    command = [python_of_the_recipes(), "-c", VERSIONS]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    source = (sweep.ROOT / "mixhead_plugin" / "__init__.py").read_text()
    own = source.partition('__version__ = "')[2].partition('"')[0]
    return {**(json.loads(printed) if printed else {}), "mixhead_plugin": own}


def commit() -> Optional[str]:
    """With + behind it where the code of a result is not as committed; None outside of git."""

    def git(*words: str) -> Optional[str]:
        try:
            done = subprocess.run(["git", "-C", str(sweep.ROOT), *words], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    name = git("rev-parse", "--short=12", "HEAD")
    if name is None:
        return None
    return f"{name}+" if git("status", "--porcelain", "--", *CODE) else name


def checksum(folders: Sequence[Path]) -> Optional[str]:
    """SHA-256 of the prepared text that fairseq reads, its first 12 digits; None where there is none."""
    found = sorted(path for folder in folders for kind in ("*.bin", "dict*.txt") for path in folder.rglob(kind))
    whole = hashlib.sha256()
    for path in found:
        with path.open("rb") as file:
            whole.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()[:12] if found else None


# ---- of a run --------------------------------------------------------------------------------------------------------


class History(NamedTuple):
    """A run's about.json."""

    starts: Sequence[Mapping[str, Any]] = ()  # of the training: about(), its flags, data and threads, the load
    evaluated_at: Sequence[str] = ()  # commits
    evaluation_flags: Mapping[str, Mapping[str, Sequence[str]]] = {}  # by metric

    @property
    def last(self) -> Mapping[str, Any]:
        return self.starts[-1] if self.starts else {}

    @property
    def trained_at(self) -> list[str]:
        return list(dict.fromkeys(start["commit"] for start in self.starts if start.get("commit")))

    def fields(self) -> dict[str, Any]:
        """For the run's entry in the results."""
        found = {name: self.last.get(name) for name in ("flags", "data", "threads", "load", "versions", "date")}
        found["commit"] = ", ".join(self.trained_at) or None
        others = [commit for commit in self.evaluated_at if commit not in self.trained_at]
        return {**found, "evaluated_at": ", ".join(others)} if others else found


def read(folder: Path) -> History:
    """Empty where nothing was written down; a file from before this list is its one start."""
    try:
        content = json.loads((folder / "about.json").read_text())
        starts, evaluated_at = content.get("starts", [content]), content.get("evaluated_at", [])
        flags = {metric: dict(found) for metric, found in content.get("evaluation_flags", {}).items()}
        return History([dict(start) for start in starts], [str(commit) for commit in evaluated_at], flags)
    except (OSError, ValueError, TypeError, AttributeError):
        return History()


def write(folder: Path, history: History) -> None:
    sweep.write(folder / "about.json", history._asdict())


def started(folder: Path, flags: Mapping[str, Sequence[str]], data: Sequence[Path], threads: Optional[int]) -> None:
    """A training begins or goes on."""
    known = read(folder)
    start = {**about(), "flags": flags or None, "data": checksum(data), "threads": threads}
    write(folder, known._replace(starts=[*known.starts, start]))


def evaluated(folder: Path, metric: str, flags: Mapping[str, Sequence[str]]) -> None:
    """One of the run's numbers has just been made."""
    known, now = read(folder), commit()
    if now and now not in known.evaluated_at:
        known = known._replace(evaluated_at=[*known.evaluated_at, now])
    write(folder, known._replace(evaluation_flags={**known.evaluation_flags, metric: flags}))


def ended(folder: Path) -> None:
    """The load that the last start met, once the run has all its numbers."""
    known = read(folder)
    if known.starts and known.last.get("load") is None:
        write(folder, known._replace(starts=[*known.starts[:-1], {**known.last, "load": load()}]))
