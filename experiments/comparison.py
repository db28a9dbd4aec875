"""Comparisons: variants on one fleet and traffic, what was published of them, and the targets.

A ratio is the geometric mean over seeds with common random numbers, with its 95 % interval. Systems print it as
published: baseline over variant, so that more is better, or variant over baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from experiments.published import Published
from experiments.runner import Runs, Task
from experiments.simulated import SimTask, TaskRun
from experiments.tables import ClaimVerdict
from experiments.variants import find_variant
from gorgo.lab.results import ResultRow
from gorgo.lab.simulate.compare import Figure, Ratio, mean_interval, ratio_of

_PARTS = ("mean", "p50", "p95", "p99")
_SPREADS = {"TTFT": "ttft_ms", "E2E": "e2e_s", "ITL": "itl_ms", "TPOT": "tpot_ms", "E2E/token": "e2e_per_token_ms"}


def _part(name: str, part: str) -> Figure:
    return lambda row: getattr(getattr(row, name), part)


#: Figures by their name in the tables. Less is better, but for hits and tokens.
MEASURES: Mapping[str, Figure] = {
    **{f"{part} {name}": _part(field_name, part) for name, field_name in _SPREADS.items() for part in _PARTS},
    "MAPE": lambda row: row.prediction_error_ratio,
    "hit": lambda row: row.cache_hit,
    "largest share": lambda row: max(row.share.values(), default=None),
    "output tokens/s": lambda row: row.tokens_per_s,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonTarget:
    """A ratio that is shown: `figure` of the variant `of` and of `against`, by label.

    Parameters
    ----------
    at_most, at_least:
        Bounds; a row without one is shown for comparison.
    published:
        What was published of it; None: nothing.
    note:
        In the place of a published figure.
    """

    of: str
    against: str
    figure: str
    at_most: float | None = None
    at_least: float | None = None
    published: Published | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantComparison:
    """Variants on one fleet and traffic.

    Parameters
    ----------
    group:
        As in `ClaimVerdict`; `--only` names it.
    title:
        In the first column of the tables.
    base:
        The task of every run, but for its variant and seed.
    variants:
        By label; the order of the runs and of the tables.
    targets:
        Rows of ratios.
    inverted:
        Whether a ratio is baseline over variant.
    family, x:
        Comparisons of one family are one picture; the place of this one in it.
    marks:
        What begins at the start of a slice, s.
    """

    group: str
    title: str
    base: SimTask
    variants: Sequence[str]
    targets: Sequence[ComparisonTarget] = ()
    inverted: bool = False
    family: str = ""
    x: str | float = ""
    marks: Mapping[float, str] = field(default_factory=dict)

    def task(self, variant: str, seed: int) -> SimTask:
        return replace(self.base, variant=find_variant(variant), seed=seed)

    def scaled(self, factor: float) -> VariantComparison:
        return replace(self, base=self.base.scaled(factor))

    def tasks(self, seeds: Sequence[int]) -> Iterator[SimTask]:
        """Yield every run; those of one seed, which share their feed, follow one another."""
        for seed in seeds:
            yield from (self.task(variant, seed) for variant in self.variants)

    def runs_of(self, variant: str, runs: Runs, seeds: Sequence[int]) -> list[TaskRun]:
        return [runs[task] for seed in seeds if (task := self.task(variant, seed)) in runs]

    def ratio(self, target: ComparisonTarget, of: str, runs: Runs, *, seeds: Sequence[int]) -> Ratio | None:
        """Return a target's ratio for the variant `of`, as the system prints it."""
        return ratio_between(
            [self.task(of, seed) for seed in seeds],
            [self.task(target.against, seed) for seed in seeds],
            MEASURES[target.figure],
            runs,
            inverted=self.inverted,
        )

    def mean_of(
        self, variant: str, figure: str, seeds: Sequence[int], factor: float = 1.0
    ) -> Callable[[Runs], Ratio | None]:
        """Return what reads the mean of a variant's figure from the runs: a measure of rows, or a value of runs."""

        def found(runs: Runs) -> Ratio | None:
            values = [value_of(run, figure) for run in self.runs_of(variant, runs, seeds)]
            return mean_of([factor * value for value in values if value is not None])

        return found

    def verdicts(self, runs: Runs, seeds: Sequence[int], *, published: bool = False) -> Iterator[ClaimVerdict]:
        """Yield a verdict per target; with `published` its label ends with the published figure."""
        for target in self.targets:
            text = () if not published else (target.note if target.published is None else target.published.text,)
            yield ClaimVerdict.of_ratio(
                self.group,
                (self.title, target.of, target.against, target.figure, *text),
                self.ratio(target, target.of, runs, seeds=seeds),
                at_most=target.at_most,
                at_least=target.at_least,
            )


def ratio_between(
    tasks: Sequence[Task], others: Sequence[Task], figure: Figure, runs: Runs, *, inverted: bool = False
) -> Ratio | None:
    """Return the ratio of two rows of tasks, seed by seed; pairs without both figures are left out."""
    pairs = [
        (figure(runs[one].row), figure(runs[other].row))
        for one, other in zip(tasks, others, strict=True)
        if one in runs and other in runs
    ]
    known = [(one, other) for one, other in pairs if one and other]
    return ratio_of([(other, one) for one, other in known] if inverted else known)


def mean_of(values: Sequence[float]) -> Ratio | None:
    """Return a mean with its 95 % interval as a ratio is shown; None without a value."""
    if not values:
        return None
    mean, low, high = (*mean_interval(values), None, None)[:3]
    return Ratio(mean or 0.0, low, high, len(values))


def value_of(run: TaskRun, figure: str) -> float | None:
    return MEASURES[figure](run.row) if figure in MEASURES else run.values.get(figure)


def rows_of(runs: Sequence[TaskRun]) -> list[ResultRow]:
    return [run.row for run in runs]
