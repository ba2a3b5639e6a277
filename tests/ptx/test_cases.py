"""Test the kernels as NVIDIA's machine code: values, gradients, and what the sanitizer says.

They run in processes of their own, because this one may have them interpreted.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FAULTS = Path(__file__).with_name("faults.py")
KERNELS = Path(__file__).parents[2] / "mixhead_plugin" / "ops" / "triton"


def reports(*command: str) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *command]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines, result.stderr[-2000:]
    is_faulty = any(line.get("fault") for line in lines)
    assert bool(result.returncode) == is_faulty, result.stderr[-2000:]
    return lines


# Both families of kernels, and every normalizer, dtype, mask, extra, number of stages and shape.
FIVE = [
    "none/sigsoftmax/float16/mask/dropout/3/4x16",
    "none/sigmoid/float32/padding/dropout/1/4x16",
    "per-query/softmax/float16/padding/plain/2/4x16",
    "per-query/sigsoftmax/float32/mask-by-head/dropout/1/3x16",
    "per-query/l2/bfloat16/causal/sink/3/4x16",
]


def must_be_right(reports):
    assert [report for report in reports if report["fault"]] == []


def test_the_kernels_are_right():
    found = reports("scripts/emulate.py", "--json", *FIVE)
    assert len(found) == len(FIVE)
    must_be_right(found)


@pytest.mark.slow
def test_the_kernels_are_right_in_every_pair_of_values():
    must_be_right(reports("scripts/emulate.py", "--json", "--all"))


def test_the_faults_of_the_source_have_a_place():
    _, _, behind = FAULTS.read_text().partition('SOURCE = """\n')
    rows, _, _ = behind.partition('"""')
    for line in rows.splitlines():
        kind, _, file, text, _ = line.split(" # ")
        assert text in (KERNELS / f"{file}.py").read_text(), kind


def test_a_product_of_16_numbers_shows_the_fault_of_triton():
    """A product is right exactly if four threads do not multiply more than its numbers.

    Each multiplies kWidth neighbours.
    """
    found = reports("-m", "tests.ptx.bytes_and_join")
    assert len(found) == 4
    for line in found:
        is_right = line["error"] < 1e-5
        assert is_right == (4 * line["width"] <= 16)
        if line["bytes"] > 1:
            assert is_right
