"""Random choices."""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice(random.Random):
    """One seeded generator, which every choice goes through."""

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        return options[self.randrange(len(options))]

    def weighted(self, options: dict[T, float]) -> T:
        return self.choices(list(options), list(options.values()))[0]
