"""Tables of a report in which a contender was left out, as that of a wrong or failed one."""

import json

import pytest
from development import gpu_tables

SIZE = "8x8x2048x64 bfloat16 0.0"
A = {"size": SIZE, "name": "triton: Mixhead A", "passes": "both", "ms": 3.0, "by_upstream": 2.0}
WRONG = {"size": SIZE, "name": "triton: Mixhead B", "fault": "the output is wrong"}


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Return a function that writes a report of the part `core` and returns its name."""
    monkeypatch.setattr(gpu_tables, "REPORTS", tmp_path)

    def report(name, *rows):
        (tmp_path / name).write_text(json.dumps({"parts": {"core": {"rows": rows}}}))
        return name

    return report


def lines_of(*reports):
    text = gpu_tables.attention_table("both", "by_upstream", gpu_tables.PLUGIN, reports)
    return text.splitlines()[2:]


def test_a_contender_that_was_left_out_has_no_line(report):
    torchs = {**A, "name": "flash: softmax", "ms": 1.5, "by_upstream": 1.0}
    assert lines_of(report("a.json", torchs, WRONG, A)) == [
        "| torch's softmax = 1.00 | 1.50 ms |",
        "| **Mixhead A** | 2.00 |",
    ]


def test_a_time_without_a_ratio_leaves_that_of_the_earlier_report(report, monkeypatch):
    """Torch's own attention was left out of the later one."""
    first = report("a.json", A)
    second = report("b.json", WRONG, {name: A[name] for name in A if name != "by_upstream"})
    assert lines_of(first, second) == ["| **Mixhead A** | 2.00 |"]

    monkeypatch.setattr(gpu_tables, "H200", (first, second))
    monkeypatch.setattr(gpu_tables, "H100", (first,))
    assert gpu_tables.ratios_of_both_passes("Mixhead A", "8x8x2048x64") == [2.0, 2.0]
