"""Comparisons: variants on one fleet and traffic, what was published of them, and the targets.

A ratio is the geometric mean over seeds with common random numbers, with its 95 % interval. Systems print it as
published: baseline over variant, so that more is better, or variant over baseline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from experiments.published import Published
from experiments.runner import Runs, Task
from experiments.simulated import SimTask, TaskRun
from experiments.tables import ClaimVerdict
from experiments.variants import find_variant
from gorgo.lab.simulate.compare import Figure, Ratio, mean_interval, ratio_of

_PARTS = ("mean", "p50", "p95", "p99")
_SPREADS = {"TTFT": "ttft_ms", "E2E": "e2e_s", "ITL": "itl_ms", "TPOT": "tpot_ms", "E2E/token": "e2e_per_token_ms"}


#: Figures by their name in the tables. Less is better, but for hits and tokens.
MEASURES: Mapping[str, Figure] = {
    **{f"{part} {name}": attrgetter(f"{spread}.{part}") for name, spread in _SPREADS.items() for part in _PARTS},
    "MAPE": lambda row: row.prediction_error_ratio,
    "hit": lambda row: row.cache_hit,
    "largest share": lambda row: max(row.share.values(), default=None),
    "output tokens/s": lambda row: row.tokens_per_s,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonTarget:
    """A ratio that is shown: `figure` of the variant `of` and of `against`, by label."""

    of: str
    against: str
    figure: str
    at_most: float | None = None  #: A row without a bound is shown for comparison.
    at_least: float | None = None
    published: Published | None = None
    note: str = ""  #: In the place of a published figure.


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantComparison:
    """Variants on one fleet and traffic."""

    group: str  #: As in `ClaimVerdict`; `--only` names it.
    title: str  #: In the first column of the tables.
    base: SimTask  #: The task of every run, but for its variant and seed.
    variants: Sequence[str]  #: By label; the order of the runs and of the tables.
    targets: Sequence[ComparisonTarget] = ()
    inverted: bool = False  #: Whether a ratio is baseline over variant.
    family: str = ""  #: Comparisons of one family are one picture.
    x: str | float = ""  #: The place of this one in it.
    marks: Mapping[float, str] = field(default_factory=dict)  #: What begins at the start of a slice, s.

    def task(self, variant: str, seed: int) -> SimTask:
        return replace(self.base, variant=find_variant(variant), seed=seed)

    def scaled(self, factor: float) -> VariantComparison:
        return replace(self, base=self.base.scaled(factor))

    def with_targets(self, changes: Mapping[tuple[str, str], Mapping[str, Any]]) -> VariantComparison:
        """Return the same with other fields of some targets, by variant and figure."""
        targets = [replace(one, **changes.get((one.of, one.figure), {})) for one in self.targets]
        return replace(self, targets=targets)

    def tasks(self, seeds: Sequence[int]) -> Iterator[SimTask]:
        """Yield every run; those of one seed, which share their feed, follow one another."""
        for seed in seeds:
            yield from (self.task(variant, seed) for variant in self.variants)

    def runs_of(self, variant: str, runs: Runs, seeds: Sequence[int]) -> list[TaskRun]:
        return [runs[task] for seed in seeds if (task := self.task(variant, seed)) in runs]

    def ratio(self, of: str, against: str, figure: str, seeds: Sequence[int], runs: Runs) -> Ratio | None:
        """Return the ratio of two variants as the system prints it."""
        tasks = {variant: [self.task(variant, seed) for seed in seeds] for variant in (of, against)}
        of, against = (against, of) if self.inverted else (of, against)
        return ratio_between(tasks[of], tasks[against], MEASURES[figure], runs)

    def mean(self, variant: str, figure: str, seeds: Sequence[int], factor: float, runs: Runs) -> Ratio | None:
        """Return the mean of a variant's figure: a measure of rows, or a value of runs."""
        values = [value_of(run, figure) for run in self.runs_of(variant, runs, seeds)]
        return mean_of([factor * value for value in values if value is not None])

    def verdicts(self, runs: Runs, seeds: Sequence[int]) -> Iterator[ClaimVerdict]:
        """Yield a verdict per target; of baselines over variants its label ends with the published figure."""
        for one in self.targets:
            text = one.note if one.published is None else one.published.text
            labels = (self.title, one.of, one.against, one.figure, *([text] if self.inverted else []))
            ratio = self.ratio(one.of, one.against, one.figure, seeds, runs)
            yield ClaimVerdict.of_ratio(self.group, labels, ratio, at_most=one.at_most, at_least=one.at_least)


def ratio_between(tasks: Sequence[Task], others: Sequence[Task], figure: Figure, runs: Runs) -> Ratio | None:
    """Return the ratio of two rows of tasks, seed by seed; pairs without both figures are left out."""
    pairs = [
        (figure(runs[one].row), figure(runs[other].row))
        for one, other in zip(tasks, others, strict=True)
        if one in runs and other in runs
    ]
    return ratio_of([(one, other) for one, other in pairs if one and other])


def mean_of(values: Sequence[float]) -> Ratio | None:
    """Return a mean with its 95 % interval as a ratio is shown; None without a value."""
    if not values:
        return None
    mean, low, high = (*mean_interval(values), None, None)[:3]
    return Ratio(mean or 0.0, low, high, len(values))


def value_of(run: TaskRun, figure: str) -> float | None:
    return MEASURES[figure](run.row) if figure in MEASURES else run.values.get(figure)
