"""Comparisons: how many times better a variant is than a baseline on some traffic, beside the published ratio.

A ratio is baseline over variant, so that more is better, as the papers print it: the geometric mean over seeds with
common random numbers, and its 95 % interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gorgo.apps.claims.target import MEASURES
from gorgo.apps.claims.verdict import ClaimVerdict
from gorgo.apps.learned_routers.measure import RouterRun, RouterTask
from gorgo.apps.learned_routers.traffic import Traffic
from gorgo.apps.simulate.compare import ratio_of
from gorgo.sim.kv_events.reports import CacheReports

Runs = Mapping[RouterTask, RouterRun]
#: Lodestar's.
USUAL_SCRAPES_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRatio:
    """A published ratio.

    Parameters
    ----------
    text:
        As printed, a range where several loads were measured.
    of:
        Label of the variant that has it.
    claim:
        What `OURS` has to exceed; None: nothing is claimed.
    """

    text: str
    of: str
    claim: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterComparison:
    """Variants against a baseline on one fleet and traffic.

    Parameters
    ----------
    group:
        As in `ClaimVerdict`; `--only` names it.
    stats:
        Keys of `MEASURES`, each with what was published of it.
    """

    group: str
    fleet: str
    traffic: Traffic
    against: str
    variants: Sequence[str]
    stats: Mapping[str, PublishedRatio | None]
    scrape_interval_s: float = USUAL_SCRAPES_S
    warm_up: float = 0.5
    cache_reports: CacheReports = "usage"
    also: Sequence[str] = field(default=())

    @property
    def label(self) -> str:
        scrapes = "" if self.scrape_interval_s == USUAL_SCRAPES_S else f", scrapes each {self.scrape_interval_s:g} s"
        reports = "" if self.cache_reports == "usage" else f", KV {self.cache_reports}"
        return f"{self.fleet}: {self.traffic.label}{scrapes}{reports}"

    def task(self, variant: str, seed: int) -> RouterTask:
        return RouterTask(
            variant=variant,
            fleet=self.fleet,
            traffic=self.traffic,
            seed=seed,
            scrape_interval_s=self.scrape_interval_s,
            warm_up=self.warm_up,
            cache_reports=self.cache_reports,
        )

    def tasks(self, seeds: Sequence[int]) -> Iterator[RouterTask]:
        """Yield every run; those of one seed, which share their feed, follow one another."""
        for seed in seeds:
            for variant in dict.fromkeys((self.against, *self.variants, *self.also)):
                yield self.task(variant, seed)

    def verdicts(self, runs: Runs, seeds: Sequence[int]) -> Iterator[ClaimVerdict]:
        """Yield a row per variant and figure, of the seeds that both runs have."""
        for figure, published in self.stats.items():
            value = MEASURES[figure]
            for variant in self.variants:
                found = [
                    (runs[self.task(self.against, seed)].row, runs[self.task(variant, seed)].row)
                    for seed in seeds
                    if self.task(self.against, seed) in runs and self.task(variant, seed) in runs
                ]
                pairs = [(value(base), value(own)) for base, own in found]
                ratio = ratio_of([(base, own) for base, own in pairs if base and own])
                yield ClaimVerdict.of_ratio(
                    self.group,
                    (self.label, variant, self.against, figure, _published(published, variant)),
                    ratio,
                    at_least=published.claim if published and variant in OURS else None,
                )


#: Variants that have to exceed what is published of the learned systems.
OURS = ("gorgo-residual",)


def _published(published: PublishedRatio | None, variant: str) -> str:
    return published.text if published is not None and published.of == variant else ""
