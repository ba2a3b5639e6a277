"""Choose the default cases of a product: `@covering` pairwise, `@each_once` every value,
`@first_of` one case.

`--all` runs the product.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def covering(**axes: Iterable[Any]):
    """Parametrise a test over the product of `axes`, a name and its values each.

    Every value of an axis meets every value of each other axis in a case of the default suite; all
    other cases are marked slow.
    """
    return _parametrize(axes, pairwise)


def each_once(**axes: Iterable[Any]):
    """Parametrise a test over the product of `axes`; the default suite has as few cases as have
    every value.
    """
    return _parametrize(
        axes, lambda sizes: [tuple(i % size for size in sizes) for i in range(max(sizes))]
    )


def first_of(**axes: Iterable[Any]):
    """Parametrise a test over the product of `axes`; the default suite has the first case alone."""
    return _parametrize(axes, lambda sizes: [(0,) * len(sizes)])


def _parametrize(
    axes: dict[str, Iterable[Any]], choose: Callable[[list[int]], list[tuple[int, ...]]]
):
    values = {name: list(given) for name, given in axes.items()}
    chosen = set(choose([len(given) for given in values.values()]))
    cases = []
    for row in itertools.product(*(range(len(given)) for given in values.values())):
        arguments = [given[i] for given, i in zip(values.values(), row)]
        cases.append(pytest.param(*arguments, marks=() if row in chosen else pytest.mark.slow))
    return pytest.mark.parametrize(", ".join(values), cases)


def pairwise(sizes: list[int]) -> list[tuple[int, ...]]:
    """Return rows of indices, one for each axis,
    in which every pair of values of two axes occurs.
    """
    if len(sizes) == 1:
        return [(i,) for i in range(sizes[0])]
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(sizes)), 2)
        for i, j in itertools.product(range(sizes[a]), range(sizes[b]))
    }
    rows = []
    while missing:
        row = dict(min(missing))
        for axis in (axis for axis in range(len(sizes)) if axis not in row):
            row[axis] = max(
                range(sizes[axis]), key=lambda i: len(missing & _pairs({**row, axis: i}))
            )
        missing -= _pairs(row)
        rows.append(tuple(row[axis] for axis in range(len(sizes))))
    return rows


def _pairs(row: dict[int, int]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(sorted(row.items()), 2))
