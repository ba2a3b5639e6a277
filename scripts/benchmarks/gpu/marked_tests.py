"""The part `tests`: the tests marked gpu."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.machine import cores
from benchmarks.gpu.settings import Settings
from benchmarks.steps import Row

ROOT = Path(__file__).resolve().parents[3]
NEED_FAIRSEQ = ["tests/robustness/test_equality.py", "tests/scripts/test_benchmark.py"]
FILES = [
    *NEED_FAIRSEQ,
    "tests/ops/test_triton_gpu.py",
    "tests/ops/test_fused.py",
    "tests/ops/test_extreme_scores.py",
    "tests/nn/test_on_a_gpu.py",
]


def tests(settings: Settings, step: str) -> Iterator[Row]:
    """Yield the outcome of each test marked gpu, as it ends.

    Tests that need fairseq run only where it is.
    """
    files = list(settings.tests) or FILES
    if importlib.util.find_spec("fairseq") is None:
        files = [name for name in files if name not in NEED_FAIRSEQ]
    if settings.quick:
        files = [
            "tests/ops/test_triton_gpu.py::test_a_captured_graph_draws_new_zeros_at_each_replay"
        ]
    workers = (
        min(cores(), 16) if settings.device == "cuda" and importlib.util.find_spec("xdist") else 0
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu and not slow",
        "-p",
        "no:cacheprovider",
    ]
    # Tests are handed out one by one, so that they begin in the order of the files.
    command += [
        "-p",
        "benchmarks.outcomes",
        *(["-n", str(workers), "--maxschedchunk=1"] if workers else []),
        *files,
    ]
    read, write = os.pipe()
    path = os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OUTCOMES": str(write)}
    environment.pop("TRITON_INTERPRET", None)
    process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[write])
    os.close(write)
    with os.fdopen(read) as lines:
        for line in lines:
            yield json.loads(line)
    if process.wait() not in (0, 1):  # 1: a test has failed, which its row says
        yield {
            "test": "pytest",
            "outcome": "failed",
            "message": f"exit status {process.returncode}, see the log",
        }
