"""Choose the default cases of a product.

`@covering` is pairwise, `@each_once` has every value, `@first_of` one case.

`scripts/test.sh --all` runs the whole product. `scripts/test.sh` makes the chosen cases alone,
because making the others, only to deselect them, would take longer than many of the tests.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

# the number of values of each axis -> the chosen cases, an index for each axis
Choice = Callable[[list[int]], list[tuple[int, ...]]]


def covering(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise a test over the product of `axes`, a name and its values each.

    Every value of an axis meets every value of each other axis in a case of the default suite; all
    other cases are slow.
    """
    return _product(axes, pairwise)


def each_once(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise a test over the product of `axes`.

    The default suite has as few cases as have every value.
    """
    return _product(axes, diagonal)


def first_of(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise a test over the product of `axes`; the default suite has the first case alone."""
    return _product(axes, origin)


def _product(axes: dict[str, Iterable[Any]], choose: Choice) -> pytest.MarkDecorator:
    # a list, because an iterator can be read only once
    values = {name: list(given) for name, given in axes.items()}
    return pytest.mark.product(values, choose)


# ---- what tests/conftest.py calls ---------------------------------------------------------------


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Give a test the cases of its products."""
    with_slow = "not slow" not in metafunc.config.getoption("markexpr")
    for mark in metafunc.definition.iter_markers("product"):
        axes, choose = mark.args
        metafunc.parametrize(list(axes), cases(axes, choose, with_slow))


def cases(axes: dict[str, list[Any]], choose: Choice, with_slow: bool) -> list[Any]:
    """Return the chosen cases, or the whole product, the others marked slow.

    The last axis moves fastest.
    """
    sizes = [len(values) for values in axes.values()]
    chosen = set(choose(sizes))
    rows = itertools.product(*map(range, sizes)) if with_slow else sorted(chosen)
    found = []
    for row in rows:
        arguments = [values[i] for values, i in zip(axes.values(), row)]
        marks = () if row in chosen else pytest.mark.slow
        found.append(pytest.param(*arguments, marks=marks))
    return found


# ---- which cases are chosen: rows of indices, one for each axis --------------------------------


def origin(sizes: list[int]) -> list[tuple[int, ...]]:
    """Return the first case."""
    return [(0,) * len(sizes)]


def diagonal(sizes: list[int]) -> list[tuple[int, ...]]:
    """Return as many rows as the longest axis has values; each axis begins again when it ends."""
    return [tuple(i % size for size in sizes) for i in range(max(sizes))]


def pairwise(sizes: list[int]) -> list[tuple[int, ...]]:
    """Return rows in which every pair of values of two axes occurs."""
    if len(sizes) == 1:
        return [(i,) for i in range(sizes[0])]
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(sizes)), 2)
        for i, j in itertools.product(range(sizes[a]), range(sizes[b]))
    }
    rows = []
    while missing:
        # a row begins with a pair that is missing; each other axis takes the value that adds most
        row = dict(min(missing))
        for axis in range(len(sizes)):
            if axis not in row:
                row[axis] = _best_value(row, axis, sizes[axis], missing)
        missing -= _pairs(row)
        rows.append(tuple(row[axis] for axis in range(len(sizes))))
    return rows


Pair = tuple[tuple[int, int], tuple[int, int]]  # (axis, value), (axis, value)


def _best_value(row: dict[int, int], axis: int, size: int, missing: set[Pair]) -> int:
    def added(value: int) -> int:
        return sum(tuple(sorted([(axis, value), known])) in missing for known in row.items())

    return max(range(size), key=added)


def _pairs(row: dict[int, int]) -> set[Pair]:
    return set(itertools.combinations(sorted(row.items()), 2))
