"""The numbers that fairseq logs are read by the name of their set."""

import pytest
from common.logs import last_numbers

LOG = """
2026 | INFO | valid1 | {"epoch": 1, "loss": "1.0"}
2026 | INFO | a+b (c | {"epoch": 1, "loss": "2.0"}
2026 | INFO | valid1 | {"epoch": 2, "loss": "3.0"}
"""


@pytest.mark.parametrize(
    "name, loss",
    [("valid1", "3.0"), ("a+b (c", "2.0"), ("valid.", None)],
    ids=["the last one", "signs of patterns", "no pattern"],
)
def test_the_last_line_of_a_set_counts(name, loss):
    assert last_numbers(LOG.splitlines(), name).get("loss") == loss
