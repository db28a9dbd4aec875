"""The (1+1)-ES as the authors of the GORGO paper released it: sigma by the success rate of the last eight candidates.

For reproduction, in mode `paper`. `es` has the same steps and a rule that uses every candidate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import log
from typing import Any, ClassVar

import numpy as np

from tuner.optimizers.base import BUDGET, BaseOptimizer, finite
from tuner.optimizers.es import SIGMA0
from tuner.space import LogBox

#: Candidates whose success rate decides on sigma, the rate above which it grows, and its factor.
SUCCESS_WINDOW, TARGET_RATE, FACTOR = 8, 0.2, 0.817
#: Candidates after which the search ends. Sigma changes nine times at most, so it needs no bounds.
MAX_STEPS = 16


class ReleasedES(BaseOptimizer):
    """(1+1)-ES with the released rule; one comparison may accept a candidate that is worse by less than 0.5 %.

    References
    ----------
    The authors' package gorgo-lb 0.2.0, `GaussianESTuner`.
    """

    name: ClassVar[str] = "es-released"
    tolerance: ClassVar[float] = 0.005

    def __init__(
        self, box: LogBox, start: Mapping[str, float], rng: np.random.Generator, *, budget: int = BUDGET
    ) -> None:
        super().__init__(box, start, rng, budget=budget)
        self._begin()

    @property
    def sigma(self) -> float:
        return self._sigma

    def recentre(self, weights: Mapping[str, float]) -> None:
        super().recentre(weights)
        self._begin()

    def stop(self) -> str | None:
        if self._steps >= MAX_STEPS and self._steps < self.budget:
            return f"{MAX_STEPS} candidates, as released"
        return super().stop()

    def _begin(self) -> None:
        self._sigma, self._steps = SIGMA0, 0
        self._recent: deque[bool] = deque(maxlen=SUCCESS_WINDOW)

    def _propose(self) -> tuple[float, ...]:
        z = self._rng.standard_normal(len(self.box))
        parent = np.array([log(value) for value in self.incumbent.values()])
        return tuple(np.clip(parent + self._sigma * z, self.box.low, self.box.high).tolist())

    def _judged(self, *, better: bool) -> None:
        self._steps += 1
        self._recent.append(better)
        if len(self._recent) == SUCCESS_WINDOW:  # a rate over eight is never the target itself
            grows = sum(self._recent) / SUCCESS_WINDOW > TARGET_RATE
            self._sigma = self._sigma / FACTOR if grows else self._sigma * FACTOR

    def _more(self) -> dict[str, Any]:
        return {"sigma": self._sigma, "steps": self._steps, "recent": list(self._recent)}

    def _load_more(self, state: Mapping[str, Any]) -> None:
        self._sigma, self._steps = finite(state["sigma"]), int(state["steps"])
        self._recent = deque((bool(better) for better in state["recent"]), maxlen=SUCCESS_WINDOW)
