"""The fit of the simulated engine to the GORGO paper's table 2: `python -m experiments fit`.

Theory of operation. A loss is the mean square of ln(simulated / measured) over figures, policies and windows, so that
2x and 0.5x count alike and milliseconds as much as seconds, and of what the order of the policies lacks. Each constant
in turn is tried one step up and one down on a logarithmic scale. A step that lowers the loss is taken and grows; two
that do not halve the constant's step. The search ends with its budget of evaluations, or when all steps are small.
Simulated runs repeat exactly, so no evaluation is made twice.

The rest of the profile stays as it is estimated: KV pool, chunk, number of experts and the largest CUDA graph are known
or weigh little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log, sqrt
from statistics import mean

import numpy as np

from experiments.runner import Runner
from experiments.systems import gorgo_paper as paper
from experiments.systems.gorgo_paper import PublishedTable, Stats
from gorgo.lab.rank import spearman
from gorgo.lab.sim.engine.profiles import EngineProfile

#: A step that succeeds grows by this factor, two that fail shrink it. Steps below the least are within the difference
#: of two hosts of one kind.
GROW, SHRINK, STEP_MIN = 1.5, 0.5, 0.015
#: With two seeds a hash that sends half of the load to one replica weighs as much as a typical one.
SEEDS = (0, 1, 2)
#: A figure further off counts as off by this factor, so that none outweighs all others: the paper has one run each.
OFF_MAX = 2.0
#: Weight of the square of what a window lacks of `RHO_MIN`.
RHO_WEIGHT = 0.25
#: The engine whose constants are fitted, with the authors' flags.
BASE = "2xL40S-Qwen3.5-35B-A3B-FP8-estimate"
Values = Mapping[str, float]
#: From an earlier search of half windows, whose derivatives of all figures led here on whole ones.
START: Values = {
    "prefill_tokens_per_s": 21_000.0,
    "prefill_kappa_s": 2.8e-9,
    "decode_base_s": 0.0084,
    "decode_eager_s": 0.028,
    "hit_share": 0.35,
    "decode_moe_s": 0.0165,
    "prefill_base_s": 0.008044,
}
#: Least, most and first step on the logarithmic scale of each constant; those that move most figures first.
DIMENSIONS: Mapping[str, tuple[float, float, float]] = {
    "prefill_tokens_per_s": (4_000, 40_000, 0.08),
    "prefill_kappa_s": (0.2e-9, 10e-9, 0.2),
    "decode_base_s": (0.002, 0.02, 0.1),
    "decode_eager_s": (0.005, 0.08, 0.2),
    "hit_share": (0.02, 1.0, 0.2),
    "decode_moe_s": (0.002, 0.06, 0.2),
    "prefill_base_s": (0.001, 0.08, 0.4),
}


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted values, and the square root of the loss on the windows of the fit before and after."""

    values: Values
    start: float
    fitted: float
    held_out: float  #: That on the held-out windows.
    evaluations: int  #: How many profiles were tried.


@dataclass(slots=True)
class CoordinateSearch:
    """Values that were tried with their losses, in order; at most `budget` of them."""

    loss: Callable[[Values], float]
    budget: int
    on_evaluation: Callable[[Values, float], None]
    tried: dict[tuple[float, ...], float] = field(default_factory=dict)

    def run(self, start: Values, dimensions: Mapping[str, tuple[float, float, float]]) -> tuple[Values, float]:
        """Return the best values and their loss; `start` has a value for every dimension.

        Example
        -------
        >>> search = CoordinateSearch(lambda values: (values["x"] - 3.0) ** 2, 60, lambda *tried: None)
        >>> round(search.run({"x": 1.0}, {"x": (0.1, 10, 0.15)})[0]["x"], 1)
        3.0
        """
        best, lowest = dict(start), self._evaluated(start)
        assert lowest is not None, "the budget is at least 1"
        steps = {name: step for name, (_, _, step) in dimensions.items()}
        while max(steps.values()) >= STEP_MIN:
            for name, (low, high, _) in dimensions.items():
                for sign in (1.0, -1.0):
                    moved = min(max(best[name] * exp(sign * steps[name]), low), high)
                    # Four digits: a profile is read by people.
                    values = {**best, name: float(f"{moved:.4g}")}
                    found = self._evaluated(values)
                    if found is None:
                        return best, lowest
                    if found < lowest:
                        best, lowest, steps[name] = values, found, steps[name] * GROW
                        break
                else:
                    steps[name] *= SHRINK
        return best, lowest

    def _evaluated(self, values: Values) -> float | None:
        """Return the loss, or None once the budget is spent."""
        key = tuple(values.values())
        if key not in self.tried:
            if len(self.tried) >= self.budget:
                return None
            self.tried[key] = self.loss(values)
            self.on_evaluation(values, self.tried[key])
        return self.tried[key]


def with_values(profile: EngineProfile, values: Values) -> EngineProfile:
    return replace(profile, **values)  # type: ignore[arg-type]


def fit_profile(
    base: EngineProfile, start: Values, runner: Runner, *, evaluations: int, seeds: Sequence[int] = SEEDS,
    on_evaluation: Callable[[Values, float], None],
) -> Fit:  # fmt: skip
    """Return the fit of `base` from `start`, with a value for each constant of `DIMENSIONS`."""
    fitted_on = [one for one in paper.WINDOWS if one.on in paper.FITTED_ON]
    others = [one for one in paper.WINDOWS if one.on not in paper.FITTED_ON]

    def loss(values: Values, windows: Sequence[PublishedTable] = fitted_on) -> float:
        return loss_of(with_values(base, values), windows, runner, seeds=seeds)

    search = CoordinateSearch(loss, evaluations, on_evaluation)
    values, lowest = search.run(start, DIMENSIONS)
    first = next(iter(search.tried.values()))
    return Fit(values, sqrt(first), sqrt(lowest), sqrt(loss(values, others)), len(search.tried))


def loss_of(
    profile: EngineProfile, windows: Sequence[PublishedTable], runner: Runner, *, seeds: Sequence[int]
) -> float:
    """Return the mean of the windows' losses. A simulated figure is the median over seeds, as in the tables."""
    tasks = {
        (window.on, policy): [paper.task_of(window, policy, profile, seed) for seed in seeds]
        for window in windows
        for policy in window.stats
    }
    runs = runner.runs([task for some in tasks.values() for task in some], title="fit")
    found = {
        name: paper.median_stats([paper.stats_of(runs[task].row) for task in some]) for name, some in tasks.items()
    }
    return mean(window_loss({policy: found[one.on, policy] for policy in one.stats}, one.stats) for one in windows)


def window_loss(simulated: Mapping[str, Stats], measured: Mapping[str, Stats]) -> float:
    bound = log(OFF_MAX)
    errors = [
        min(max(log(ours / theirs), -bound), bound)
        for policy in measured
        for ours, theirs in zip(simulated[policy], measured[policy], strict=True)
    ]
    lacking = max(0.0, paper.RHO_MIN - (rho_of(simulated, measured) or 0.0))
    return mean(error * error for error in errors) + RHO_WEIGHT * lacking**2


def rho_of(simulated: Mapping[str, Stats], measured: Mapping[str, Stats]) -> float | None:
    return spearman(
        np.array([simulated[policy][1] for policy in measured]), np.array([measured[policy][1] for policy in measured])
    )
