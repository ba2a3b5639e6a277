"""Test the kernels as NVIDIA's machine code: values, gradients, and what the sanitizer says.

They run in processes of their own, because this one may have them interpreted.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)
ROOT, PARTS = Path(__file__).parents[2], 2
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def emulate(*arguments: str) -> list[dict]:
    command = [sys.executable, "scripts/emulate.py", "--json", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT)
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert reports and result.returncode == any(report["fault"] for report in reports), result.stderr[-2000:]
    return reports


@pytest.mark.parametrize("part", range(PARTS))
def test_the_kernels_are_right(part):
    """Run every pair of mixing, normalizer, dtype, masks, dropout or sinks, and stages."""
    assert not [report for report in emulate("--part", f"{part}/{PARTS}") if report["fault"]]


@pytest.mark.slow
def test_all_kernels_are_right():
    assert not [report for report in emulate("--all") if report["fault"]]


def test_a_product_of_16_numbers_shows_the_fault_of_triton():
    """A product is right exactly if four threads, of kWidth neighbours each, do not multiply more than its numbers."""
    command = [sys.executable, "-m", "tests.ptx.bytes_and_join"]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, check=True)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) == 4 and all((line["error"] < 1e-5) == (4 * line["width"] <= 16) for line in found)
    assert all(line["error"] < 1e-5 for line in found if line["bytes"] > 1)
