"""CMA-ES in log space with bounds, by the `cma` package: a population per generation, ask and tell one at a time.

Owns the translation. The search itself is `cma`'s.

Theory of operation: the package keeps its state in objects that only pickle can hold, and a pickle is neither readable
nor safe to load. But the search is a function of its start, its generator and the values it was told. So the state is
those, and loading replays them: at most `BUDGET` values, some 30 replayed generations at a millisecond or two each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from tuner.optimizers.base import BUDGET, MAX_SIGMA, BaseOptimizer, finite, generator_of, generator_state
from tuner.optimizers.es import SIGMA_MIN, first_step
from tuner.saved_fields import SavedFields
from tuner.space import LogBox

#: Of a saved state. Each value is given to the library again, some thousands in a second.
MAX_POPULATION, MAX_VALUES = 1000, 10_000


class CmaEs(BaseOptimizer):
    """CMA-ES: learns which factors belong together, at the price of a population per step.

    Values of one population are compared with each other, so they must be measured alike; `accepted` moves the
    incumbent, not the search.

    Parameters
    ----------
    sigma0, sigma_min:
        As of `OnePlusOneES`.
    population:
        Proposals per generation; `cma`'s default is 4 + 3 ln n: 6 for two weights.

    References
    ----------
    Hansen, "The CMA Evolution Strategy: A Tutorial", arXiv:1604.00772; https://github.com/CMA-ES/pycma.
    """

    name: ClassVar[str] = "cma"

    def __init__(
        self,
        box: LogBox,
        start: Mapping[str, float],
        rng: np.random.Generator,
        *,
        budget: int = BUDGET,
        sigma0: float | None = None,
        sigma_min: float = SIGMA_MIN,
        population: int | None = None,
    ) -> None:
        super().__init__(box, start, rng, budget=budget)
        self._sigma0 = first_step(box) if sigma0 is None else sigma0
        self._sigma_min, self._popsize = sigma_min, population
        self._begin(self._parent)

    @property
    def sigma(self) -> float:
        return float(self._es.sigma)

    def recentre(self, weights: Mapping[str, float]) -> None:
        super().recentre(weights)
        self._begin(self._parent)

    def stop(self) -> str | None:
        if self.sigma < self._sigma_min:
            return f"converged: steps of {self.sigma:.1%} are below {self._sigma_min:.1%}"
        reasons = self._es.stop()
        if reasons:
            return "cma: " + ", ".join(sorted(reasons))
        return super().stop()

    def _begin(self, point: tuple[float, ...]) -> None:
        """A new search from `point`, with an empty population."""
        self._origin, self._origin_rng = point, generator_state(self._rng)
        self._values: list[float] = []
        self._population: list[Any] = []
        import cma  # here, because it brings its plots along: a second of every start with any optimizer

        self._es = cma.CMAEvolutionStrategy(list(point), self._sigma0, self._options())

    def _options(self) -> dict[str, Any]:
        # `seed` nan leaves numpy's global generator alone; -10 also ignores a file of signals in the working folder.
        options = {
            "bounds": [list(self.box.low), list(self.box.high)],
            "randn": lambda *shape: self._rng.standard_normal(shape),
            "seed": np.nan,
            "verbose": -10,
            "verb_log": 0,
        }
        return options if self._popsize is None else options | {"popsize": self._popsize}

    def _propose(self) -> tuple[float, ...]:
        if not self._population:
            self._population = self._es.ask()
        return tuple(float(x) for x in self._population[len(self._values) % len(self._population)])

    def _scored(self, value: float) -> None:
        self._values.append(value)
        self._close_generation()

    def _close_generation(self) -> None:
        size = len(self._population)
        if len(self._values) % size == 0:
            self._es.tell(self._population, self._values[-size:])
            self._population = []

    def _more(self) -> dict[str, Any]:
        return {
            "sigma0": self._sigma0,
            "sigma_min": self._sigma_min,
            "population": self._popsize,
            "origin": list(self._origin),
            "origin_rng": self._origin_rng,
            "values": list(self._values),
        }

    def _load_more(self, state: Mapping[str, Any]) -> None:
        saved = SavedFields(state, f"saved optimizer {self.name!r}")
        self._sigma0 = saved.number("sigma0", least=0, most=MAX_SIGMA)
        self._sigma_min = saved.number("sigma_min", least=0, most=MAX_SIGMA)
        population = saved.value("population")
        self._popsize = None if population is None else saved.count("population", least=2, most=MAX_POPULATION)
        self._rng = generator_of(state["origin_rng"])
        values = [finite(value) for value in saved.items("values", most=MAX_VALUES)]
        origin = saved.items("origin", most=len(self.box))
        if len(origin) != len(self.box):
            raise saved.wrong("origin", f"{len(self.box)} coordinates")
        self._begin(tuple(finite(x) for x in origin))
        for value in values:
            self._propose()
            self._scored(value)
        if self._asked is not None:
            self._asked = self._propose()
