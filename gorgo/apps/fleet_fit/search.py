"""The search: least squares on logarithms, one constant of the profile at a time.

Theory of operation. A loss is the mean square of ln(simulated / measured) over figures, policies and windows, so that
2x and 0.5x count alike and milliseconds as much as seconds. Each constant in turn is tried one step up and one down on
a logarithmic scale. A step that lowers the loss is taken and grows; two that do not halve the constant's step. The
search ends with its budget of evaluations, or when all steps are small. Simulated runs repeat exactly, so no evaluation
is made twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log

from gorgo.apps.fleet_fit.published import RunStats

#: A step that succeeds grows by this factor, two that fail shrink it.
GROW, SHRINK = 1.5, 0.5
#: Steps below this are within the difference of two hosts of one kind.
STEP_MIN = 0.015


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """A constant of the profile that is fitted: its field, its bounds, and the first step on the logarithmic scale."""

    name: str
    low: float
    high: float
    step: float = 0.15


@dataclass(frozen=True, slots=True)
class FitEvaluation:
    """Values that were tried, and their loss."""

    values: Mapping[str, float]
    loss: float


@dataclass(slots=True)
class CoordinateSearch:
    """A finished search; `evaluations` are in order, the best one is `best`."""

    evaluations: list[FitEvaluation] = field(default_factory=list)

    @property
    def best(self) -> FitEvaluation:
        return min(self.evaluations, key=lambda one: one.loss)


def log_ratios(simulated: RunStats, measured: RunStats) -> list[float]:
    """Return ln(simulated / measured) of each figure.

    Example
    -------
    >>> one = RunStats(500, 2000, 3000, 2, 4, 6, 10)
    >>> log_ratios(one, one)
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    return [log(ours / theirs) for ours, theirs in zip(simulated.values(), measured.values(), strict=True)]


def mean_square(values: Iterable[float]) -> float:
    """Return the mean of the squares of at least one value."""
    squares = [value * value for value in values]
    return sum(squares) / len(squares)


def coordinate_search(
    loss: Callable[[Mapping[str, float]], float],
    start: Mapping[str, float],
    dimensions: Sequence[Dimension],
    *,
    evaluations: int,
    on_evaluation: Callable[[FitEvaluation], None] = lambda _: None,
) -> CoordinateSearch:
    """Return the search from `start`, which has a value for every dimension; at most so many evaluations.

    Example
    -------
    >>> found = coordinate_search(
    ...     lambda values: (values["x"] - 3.0) ** 2, {"x": 1.0}, [Dimension(name="x", low=0.1, high=10)], evaluations=60
    ... )
    >>> round(found.best.values["x"], 1)
    3.0
    """
    search = CoordinateSearch()
    known: dict[tuple[float, ...], float] = {}

    def tried(values: Mapping[str, float]) -> float | None:
        """Evaluate, or return None once the budget is spent."""
        key = tuple(values[one.name] for one in dimensions)
        if key not in known:
            if len(search.evaluations) >= evaluations:
                return None
            known[key] = loss(values)
            search.evaluations.append(FitEvaluation(dict(values), known[key]))
            on_evaluation(search.evaluations[-1])
        return known[key]

    best, lowest = dict(start), tried(start)
    steps = {one.name: one.step for one in dimensions}
    while lowest is not None and max(steps.values()) >= STEP_MIN:
        for one in dimensions:
            for sign in (1.0, -1.0):
                values = {**best, one.name: _moved(best[one.name], sign * steps[one.name], one)}
                found = tried(values)
                if found is None:
                    return search
                if found < lowest:
                    best, lowest = values, found
                    steps[one.name] *= GROW
                    break
            else:
                steps[one.name] *= SHRINK
    return search


def _moved(value: float, step: float, dimension: Dimension) -> float:
    """Return the value one step on, within its bounds and with four digits: a profile is read by people."""
    return float(f"{min(max(value * exp(step), dimension.low), dimension.high):.4g}")
