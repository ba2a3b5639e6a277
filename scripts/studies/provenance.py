"""Record where the numbers of a run come from: machine, versions, commit and data."""

import contextlib
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def about() -> dict[str, Any]:
    """Return the machine and the versions, which are the same for all runs of this command."""
    own = ROOT / ".venv" / "bin" / "python"
    beside_fairseq = Path(shutil.which("fairseq-train") or "python3").with_name("python3")
    python = str(own if own.exists() else beside_fairseq)
    names = ("torch", "numpy", "fairseq", "fairseq-fixed", "ve-fairseq")
    code = f"""import json, platform; from importlib.metadata import distributions
found = {{d.name: d.version for d in distributions() if d.name in {names}}}
print(json.dumps({{"python": platform.python_version(), **found}}))"""
    printed = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=False
    ).stdout
    source = (ROOT / "mixhead_plugin" / "__init__.py").read_text()
    version = source.partition('__version__ = "')[2].partition('"')[0]
    versions = {**json.loads(printed or "{}"), "mixhead_plugin": version}
    return {"device": f"{processor()}, {CORES} cores", "versions": versions}


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


@functools.cache
def commit() -> str:
    """Return the commit, with + if files differ from it; empty outside of git."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "describe",
        "--always",
        "--exclude=*",
        "--abbrev=12",
        "--dirty=+",
    ]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def add_commit(record: dict[str, Any]) -> None:
    """Add the current commit to those of a run."""
    record["commit"] = ", ".join(
        dict.fromkeys(filter(None, (*record.get("commit", "").split(", "), commit())))
    )


@functools.cache
def checksum(folders: str) -> str | None:
    """Return 12 digits of the SHA-256 of the text that fairseq reads; None if there is none."""
    found = [
        path
        for folder in folders.split(":")
        for kind in ("*.bin", "dict*.txt")
        for path in Path(folder).rglob(kind)
    ]
    whole = hashlib.sha256()
    for path in sorted(found):
        with path.open("rb") as file:
            whole.update(
                f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode()
            )
    return whole.hexdigest()[:12] if found else None
