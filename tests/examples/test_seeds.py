"""--seeds means the same for the sweep and for the examples."""

import pytest
from common.seeds import seeds


@pytest.mark.parametrize(
    "words, expected",
    [("1", [1]), ("3", [1, 2, 3]), ("3-5", [3, 4, 5]), ("7-7", [7]), ("0-1", [0, 1])],
)
def test_a_number_stands_for_as_many_seeds_and_a_range_for_itself(words, expected):
    assert list(seeds(words)) == expected
