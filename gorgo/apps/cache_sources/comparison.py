"""Comparisons: variants on one fleet and traffic, and what the first of them is held against.

A ratio is variant over baseline: the geometric mean over seeds with common random numbers, and its 95 % interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gorgo.apps.cache_sources.fleets import CacheFleet
from gorgo.apps.cache_sources.measure import CacheRun, CacheTask, Source
from gorgo.apps.cache_sources.traffic import Traffic
from gorgo.apps.claims.verdict import ClaimVerdict
from gorgo.apps.results import ResultRow
from gorgo.apps.simulate.compare import Figure, ratio_of
from gorgo.sim.extensions import Startable

Runs = Mapping[CacheTask, CacheRun]

#: Figures of verdicts.
STATS: Mapping[str, Figure] = {
    "mean TTFT": lambda row: row.ttft_ms.mean,
    "p95 TTFT": lambda row: row.ttft_ms.p95,
    "p99 TTFT": lambda row: row.ttft_ms.p99,
    "p95 E2E": lambda row: row.e2e_s.p95,
    "hit": lambda row: row.cache_hit,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheVariant:
    """A policy with a source and weights, shown as `label`."""

    label: str
    policy: str
    source: Source = "cached_tokens"
    weights: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTarget:
    """`figure` of the variant `of` is within a bound times that of `against`, by label."""

    of: str
    against: str
    figure: str
    at_most: float | None = None
    at_least: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheComparison:
    """Variants on one fleet and traffic.

    Parameters
    ----------
    group:
        As in `ClaimVerdict`; `--only` names it.
    by_time:
        Whether figures over time are shown, of audited decisions.
    marks:
        What begins at the start of a slice, s.
    """

    group: str
    fleet: CacheFleet
    traffic: Traffic
    variants: Sequence[CacheVariant]
    targets: Sequence[CacheTarget] = ()
    faults: tuple[Startable, ...] = ()
    by_time: bool = False
    marks: Mapping[float, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.fleet.title}: {self.traffic.name}"

    def task(self, variant: CacheVariant, seed: int) -> CacheTask:
        return CacheTask(
            policy=variant.policy,
            source=variant.source,
            weights=variant.weights,
            fleet=self.fleet,
            traffic=self.traffic,
            faults=self.faults,
            audited=self.by_time,
            seed=seed,
        )

    def tasks(self, seeds: Sequence[int]) -> Iterator[CacheTask]:
        """Yield every run; those of one seed, which share their feed, follow one another."""
        for seed in seeds:
            for variant in self.variants:
                yield self.task(variant, seed)

    def runs_of(self, variant: CacheVariant, runs: Runs, seeds: Sequence[int]) -> list[CacheRun]:
        return [runs[self.task(variant, seed)] for seed in seeds]

    def verdicts(self, runs: Runs, seeds: Sequence[int]) -> Iterator[ClaimVerdict]:
        """Yield a verdict per target."""
        variants = {variant.label: variant for variant in self.variants}
        for target in self.targets:
            value = STATS[target.figure]
            own, other = (
                [value(run.row) for run in self.runs_of(variants[label], runs, seeds)]
                for label in (target.of, target.against)
            )
            pairs = [(one, base) for one, base in zip(own, other, strict=True) if one and base]
            yield ClaimVerdict.of_ratio(
                self.group,
                (self.title, target.of, target.against, target.figure),
                ratio_of(pairs),
                at_most=target.at_most,
                at_least=target.at_least,
            )


def rows_of(runs: Sequence[CacheRun]) -> list[ResultRow]:
    """Return the result rows of runs."""
    return [run.row for run in runs]
