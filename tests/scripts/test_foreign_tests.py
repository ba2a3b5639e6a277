"""The command that runs other people's tests against mixed models."""

import subprocess
import sys

import pytest

from tests.commands import ROOT

TESTS = """
import torch

def test_of_every_attention():
    attention = torch.nn.MultiheadAttention(8, 2)
    x = torch.randn(3, 1, 8)
    assert attention(x, x, x)[0].shape == x.shape

def test_of_plain_attentions_alone():
    assert not hasattr(torch.nn.MultiheadAttention(8, 2), "head_mixing")
"""


@pytest.mark.slow
def test_it_counts_both_runs_and_names_what_passes_in_the_plain_one_alone(tmp_path):
    (tmp_path / "test_attention.py").write_text(TESTS)
    command = [
        sys.executable,
        ROOT / "scripts/development/foreign_tests.py",
        "torch",
        tmp_path,
        "test_attention.py",
    ]

    run = subprocess.run(command, capture_output=True, text=True, check=True)

    plain, mixed, alone = run.stdout.splitlines()[1:]
    assert plain == "  plain: 2 passed, 0 failed, 0 skipped"
    assert mixed == "  mixed: 1 passed, 1 failed, 0 skipped"
    assert "test_of_plain_attentions_alone" in alone
