"""(1+1)-ES in log space: one parent, one offspring, one step size.

Owns four of them: with Rechenberg's 1/5 rule (`OnePlusOneES`), with the paper's first step (`PublishedES`), that after
probes of each weight alone (`ProbingES`), and as the authors of the GORGO paper released it (`ReleasedES`). Clipping is
`tuner.space`'s; whether an offspring is better may be decided by a test.

Theory of operation of the 1/5 rule: a step is a factor per weight, drawn around the parent. If more than one offspring
in five is better, the parent is far from the optimum and steps can be longer; if fewer, they overshoot. A success
multiplies sigma by exp(1/d), a failure by exp(-1/(4d)): at a success rate of 1/5 the two cancel.

The first step is a quarter of the box. A comparison on live traffic takes an hour whatever the step, so a day has some
twenty of them, and a default can be wrong by a factor of ten: steps of the paper's size pass it in several successes,
and where chance takes the first ones into the wrong direction, sigma shrinks before it is passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import exp, log
from typing import Any, ClassVar

import numpy as np

from gorgo.errors import TunerError
from tuner.optimizers.base import BUDGET, MAX_SIGMA, BaseOptimizer, finite
from tuner.saved_fields import SavedFields
from tuner.space import LogBox

#: The paper's first step: a factor of 1.65 either way at one standard deviation.
SIGMA0 = 0.5
#: First steps from one side of the box to the other in log space.
STEPS_ACROSS = 4
#: Five percent: what a step of that size changes in a p95 is below what hours of traffic can show.
SIGMA_MIN = 0.05
#: A factor of 7 at one standard deviation leaves most boxes; longer steps only find corners.
SIGMA_MAX = 2.0
#: Failures in a row after which there is nothing to find: 18 take sigma from SIGMA0 to SIGMA_MIN with two weights.
PATIENCE = 25
#: Draws until a proposal differs from its parent. In a corner three of four are clipped onto it; 0.75^20 is 0.3 %.
DRAWS = 20


def first_step(box: LogBox) -> float:
    """Return the first step size in a box: a quarter of its mean width in log space.

    >>> from gorgo.core.policy.weights import WeightSpec
    >>> round(first_step(LogBox((WeightSpec("m_rtt", 1.0, 0.25, 4.0, "factor"),))), 2)
    0.69
    """
    return min(box.width / STEPS_ACROSS, SIGMA_MAX)


class OnePlusOneES(BaseOptimizer):
    """(1+1)-ES whose first step is as large as the box allows.

    Parameters
    ----------
    sigma0:
        First step size, standard deviation of the logarithm of a weight's factor. None: `first_step` of the box.
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
        sigma0: float | None = None,
        sigma_min: float = SIGMA_MIN,
        damping: float | None = None,
        patience: int = PATIENCE,
    ) -> None:
        super().__init__(box, start, rng, budget=budget)
        sigma0 = first_step(box) if sigma0 is None else sigma0
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


class PublishedES(OnePlusOneES):
    """(1+1)-ES with the paper's first step, `SIGMA0`.

    Parameters
    ----------
    sigma0, options:
        As of `OnePlusOneES`.
    """

    name: ClassVar[str] = "es-published"

    def __init__(
        self,
        box: LogBox,
        start: Mapping[str, float],
        rng: np.random.Generator,
        *,
        budget: int = BUDGET,
        sigma0: float = SIGMA0,
        **options: Any,
    ) -> None:
        super().__init__(box, start, rng, budget=budget, sigma0=sigma0, **options)


# (1+1)-ES after probes: each weight alone by a quarter and then an eighth of its box, before steps at random.
#
# Theory of operation: default weights can be wrong by a factor of ten, of which steps of `SIGMA0` show a noisy test
# little. A quarter of the box, on a log scale, is a change that hours of traffic can tell; where it goes too far, as
# for a guarded figure, an eighth may do. Each direction, up and down per weight, is repeated while it succeeds and
# ends with its first failure; after a success the way back by the same step is not tried. The ES continues from there
# with the paper's first step: the longer ones are behind it.


#: Probes from one end of a weight's box in log space to the other, longest steps first.
PARTS = (4, 8)
#: Shorter probes, cut off by the box, are left out: the ES takes such steps.
SHORTEST = 0.1

#: Index of a weight, 1 for up or -1 for down, and the parts of its box.
Direction = tuple[int, int, int]


class ProbingES(PublishedES):
    """(1+1)-ES that first probes each weight up, then each down, by a quarter of its box and then by an eighth.

    Parameters
    ----------
    options:
        As of `PublishedES`.
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
        directions = {direction: list(direction) for direction in _all_directions(len(self.box))}
        left = saved.items("directions", most=len(directions))
        if any(direction not in directions.values() for direction in left):
            raise saved.wrong("directions", "triples of a weight's index, 1 or -1, and 4 or 8")
        self._directions = [(at, sign, parts) for at, sign, parts in left]


def _all_directions(weights: int) -> list[Direction]:
    return [(at, sign, parts) for parts in PARTS for sign in (1, -1) for at in range(weights)]


# The (1+1)-ES as the authors of the GORGO paper released it: sigma by the success rate of the last eight candidates.
#
# For reproduction, in mode `paper`. `PublishedES` has the same steps and a rule that uses every candidate.


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
