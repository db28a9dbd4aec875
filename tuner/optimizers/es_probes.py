"""(1+1)-ES after probes: each weight alone by a quarter and then an eighth of its box, before steps at random.

Theory of operation: default weights can be wrong by a factor of ten, of which steps of `SIGMA0` show a noisy test
nothing. A quarter of the box, on a log scale, is a change that hours of traffic can tell; where it goes too far, as for
a guarded figure, an eighth may do. Each direction, up and down per weight, is repeated while it succeeds and ends with
its first failure; after a success the way back by the same step is not tried. The ES continues from there with its
first step size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from tuner.optimizers.base import BUDGET
from tuner.optimizers.es import OnePlusOneES
from tuner.saved_fields import SavedFields
from tuner.space import LogBox

#: Probes from one end of a weight's box in log space to the other, longest steps first.
PARTS = (4, 8)
#: Shorter probes, cut off by the box, are left out: the ES takes such steps.
SHORTEST = 0.1

#: Index of a weight, 1 for up or -1 for down, and the parts of its box.
Direction = tuple[int, int, int]


class ProbingES(OnePlusOneES):
    """(1+1)-ES that first probes each weight up, then each down, by a quarter of its box and then by an eighth.

    Parameters
    ----------
    options:
        As of `OnePlusOneES`.
    """

    name: ClassVar[str] = "es-probes"

    def __init__(
        self, box: LogBox, start: Mapping[str, float], rng: np.random.Generator, *, budget: int = BUDGET, **options: Any
    ) -> None:
        super().__init__(box, start, rng, budget=budget, **options)
        self._directions = _all_directions(len(box))

    def recentre(self, weights: Mapping[str, float]) -> None:
        super().recentre(weights)
        self._directions = _all_directions(len(self.box))

    def _propose(self) -> tuple[float, ...]:
        while self._directions:
            point = self._probe(self._directions[0])
            if point is not None:
                return point
            del self._directions[0]
        return super()._propose()

    def _probe(self, direction: Direction) -> tuple[float, ...] | None:
        """Return the parent moved in that direction; None if the box leaves too little room."""
        at, sign, parts = direction
        low, high = self.box.low[at], self.box.high[at]
        moved = min(max(self._parent[at] + sign * (high - low) / parts, low), high)
        if abs(moved - self._parent[at]) < SHORTEST * (high - low):
            return None
        return (*self._parent[:at], moved, *self._parent[at + 1 :])

    def _judged(self, *, better: bool) -> None:
        if not self._directions:
            super()._judged(better=better)
        elif better:
            at, sign, parts = self._directions[0]
            self._directions = [one for one in self._directions if one != (at, -sign, parts)]
        else:
            del self._directions[0]

    def _more(self) -> dict[str, Any]:
        return super()._more() | {"directions": [list(direction) for direction in self._directions]}

    def _load_more(self, state: Mapping[str, Any]) -> None:
        super()._load_more(state)
        saved = SavedFields(state, f"saved optimizer {self.name!r}")
        known = {direction: list(direction) for direction in _all_directions(len(self.box))}
        left = saved.items("directions", most=len(known))
        if any(row not in known.values() for row in left):
            raise saved.wrong("directions", "triples of a weight's index, 1 or -1, and 4 or 8")
        self._directions = [(at, sign, parts) for at, sign, parts in left]


def _all_directions(weights: int) -> list[Direction]:
    return [(at, sign, parts) for parts in PARTS for sign in (1, -1) for at in range(weights)]
