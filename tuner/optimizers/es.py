"""(1+1)-ES in log space with Rechenberg's 1/5 rule: one parent, one offspring, one step size.

Owns the step and its size. Clipping is `tuner.space`'s; whether an offspring is better may be decided by a test.

Theory of operation: a step is a factor per weight, drawn around the parent. If more than one offspring in five is
better, the parent is far from the optimum and steps can be longer; if fewer, they overshoot. A success multiplies sigma
by exp(1/d), a failure by exp(-1/(4d)): at a success rate of 1/5 the two cancel.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp
from typing import Any, ClassVar

import numpy as np

from gorgo.errors import TunerError
from tuner.optimizers.base import BUDGET, MAX_SIGMA, BaseOptimizer
from tuner.saved_fields import SavedFields
from tuner.space import LogBox

#: The paper's first step: a factor of 1.65 either way at one standard deviation.
SIGMA0 = 0.5
#: Five percent: what a step of that size changes in a p95 is below what hours of traffic can show.
SIGMA_MIN = 0.05
#: A factor of 7 at one standard deviation leaves most boxes; longer steps only find corners.
SIGMA_MAX = 2.0
#: Failures in a row after which there is nothing to find: 18 take sigma from SIGMA0 to SIGMA_MIN with two weights.
PATIENCE = 25
#: Draws until a proposal differs from its parent. In a corner three of four are clipped onto it; 0.75^20 is 0.3 %.
DRAWS = 20


class OnePlusOneES(BaseOptimizer):
    """(1+1)-ES, with the paper's start.

    Parameters
    ----------
    sigma0:
        First step size, standard deviation of the logarithm of a weight's factor.
    sigma_min:
        Below it the search has converged.
    damping:
        d; 1 + n/2 for n weights by default.
    patience:
        Failures in a row after which to stop.

    References
    ----------
    GORGO, equation 4. Rechenberg, Evolutionsstrategie, 1973. The factors and d: Igel, Suttorp and Hansen, "A
    computational efficient covariance matrix update and a (1+1)-CMA for evolution strategies", GECCO 2006, algorithm 2,
    without its smoothing of the success rate.
    """

    name: ClassVar[str] = "es"

    def __init__(
        self,
        box: LogBox,
        start: Mapping[str, float],
        rng: np.random.Generator,
        *,
        budget: int = BUDGET,
        sigma0: float = SIGMA0,
        sigma_min: float = SIGMA_MIN,
        damping: float | None = None,
        patience: int = PATIENCE,
    ) -> None:
        super().__init__(box, start, rng, budget=budget)
        if not 0 < sigma_min < sigma0 <= SIGMA_MAX:
            raise TunerError(f"sigma0 is {sigma0!r}, sigma_min {sigma_min!r}; expected 0 < sigma_min < sigma0 <= 2")
        self.damping = 1 + len(box) / 2 if damping is None else damping
        self.patience = patience
        self.failures = 0
        self._sigma0, self._sigma_min = sigma0, sigma_min
        self._sigma = sigma0

    @property
    def sigma(self) -> float:
        return self._sigma

    def recentre(self, weights: Mapping[str, float]) -> None:
        super().recentre(weights)
        self._sigma, self.failures = self._sigma0, 0

    def stop(self) -> str | None:
        if self._sigma < self._sigma_min:
            return f"converged: steps of {self._sigma:.1%} are below {self._sigma_min:.1%}"
        if self.failures >= self.patience:
            return f"converged: no success in {self.failures} proposals"
        return super().stop()

    def _propose(self) -> tuple[float, ...]:
        for _ in range(DRAWS):
            point = self._step()
            if point != self._parent:
                break
        return point

    def _step(self) -> tuple[float, ...]:
        # (4)  x' = clip(exp(ln x + sigma * z)), z ~ N(0, I)
        z = self._rng.standard_normal(len(self.box))
        free = np.asarray(self._parent) + self._sigma * z
        return tuple(np.clip(free, self.box.low, self.box.high).tolist())

    def _judged(self, *, better: bool) -> None:
        # sigma <- sigma * exp((s - 1/5) / (d * (1 - 1/5))), s = 1 for a success and 0 for a failure
        exponent = 1 / self.damping if better else -1 / (4 * self.damping)
        self._sigma = min(self._sigma * exp(exponent), SIGMA_MAX)
        self.failures = 0 if better else self.failures + 1

    def _more(self) -> dict[str, Any]:
        return {
            "sigma": self._sigma,
            "failures": self.failures,
            "sigma0": self._sigma0,
            "sigma_min": self._sigma_min,
            "damping": self.damping,
            "patience": self.patience,
        }

    def _load_more(self, state: Mapping[str, Any]) -> None:
        saved = SavedFields(state, f"saved optimizer {self.name!r}")
        self._sigma, self.failures = saved.number("sigma", least=0, most=MAX_SIGMA), saved.count("failures")
        self._sigma0 = saved.number("sigma0", least=0, most=MAX_SIGMA)
        self._sigma_min = saved.number("sigma_min", least=0, most=MAX_SIGMA)
        self.damping, self.patience = saved.number("damping", least=0), saved.count("patience")
