"""Random distributions of the generators, from uniform numbers.

Only `random.Random.random` is used, whose sequence Python guarantees, and values are rounded to whole numbers before
they are written: a shape gives the same bytes on every machine and Python.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class RandomDraws:
    """Draws of one seed, in one order."""

    def __init__(self, seed: int) -> None:
        self.uniform = random.Random(seed).random

    def exponential(self, mean: float) -> float:
        return -mean * math.log(1 - self.uniform())

    def log_normal(self, median: float, sigma: float) -> float:
        normal = math.sqrt(-2 * math.log(1 - self.uniform())) * math.cos(2 * math.pi * self.uniform())
        return median * math.exp(sigma * normal)

    def geometric(self, mean: float) -> int:
        """At least 1."""
        return 1 + int(math.log(1 - self.uniform()) / math.log(1 - 1 / mean)) if mean > 1 else 1

    def rank(self, count: int) -> int:
        """0 to count - 1, the n-th in proportion to 1/n."""
        target = self.uniform() * sum(1 / n for n in range(1, count + 1))
        for rank in range(count):
            target -= 1 / (rank + 1)
            if target < 0:
                return rank
        return count - 1

    def below(self, count: int) -> int:
        """0 to count - 1, each as likely."""
        return min(int(self.uniform() * count), count - 1)

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in any order, each as likely."""
        mixed = list(items)
        for last in range(len(mixed) - 1, 0, -1):
            other = self.below(last + 1)
            mixed[last], mixed[other] = mixed[other], mixed[last]
        return mixed
