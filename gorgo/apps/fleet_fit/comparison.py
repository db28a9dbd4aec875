"""The paper's tables beside simulated ones: every figure of table 2, and every claim as the ratio that was published.

Owns the rows. A simulated figure is the median over seeds: the paper has one run each, and a run in which a hash sends
four tenths of the load to one replica is no typical one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import mean

import numpy as np

from gorgo.apps.claims.runner import Runner
from gorgo.apps.fleet_fit.claims import ClaimRow, claims_of
from gorgo.apps.fleet_fit.fit import FITTED_ON, median_stats
from gorgo.apps.fleet_fit.measure import FitRun, FitTask
from gorgo.apps.fleet_fit.named_runs import RunName, load_name, named_tasks
from gorgo.apps.fleet_fit.published import (
    FIGURE_NAMES,
    HALF_LOAD,
    HALF_LOAD_TIME_SCALE,
    LOAD_SWEEP,
    P95,
    WINDOWS,
    PublishedWindow,
    RunStats,
)
from gorgo.apps.rank import spearman
from gorgo.sim.engine.profiles import EngineProfile

#: Every figure is within this factor of the measured one, or missed.
WITHIN = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRow:
    """One figure of table 2: simulated and measured."""

    window: str
    policy: str
    figure: str
    simulated: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.simulated / self.measured

    @property
    def met(self) -> bool:
        return 1 / WITHIN <= self.ratio <= WITHIN


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRow:
    """One window: simulated over measured as a geometric mean over policies by figure, and over all.

    `rho` compares the order of the policies by p95 TTFT; `within` is the share of figures that are met.
    """

    window: str
    fitted: bool
    ratios: Mapping[str, float]
    ratio: float
    within: float
    rho: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetComparison:
    """The tables of a profile: table 2, its windows, the load sweep (3), half load (5), and the claims of all.

    `surge` and `surge_sweep` have April 7 in tables 2 and 5, and 3, beside runs with its load in one wave; `hits` is
    the share of prompt tokens found cached by window and policy.
    """

    profile: str
    seeds: int
    stats: Sequence[FigureRow]
    windows: Sequence[WindowRow]
    sweep: Sequence[FigureRow]
    half_load: Sequence[FigureRow]
    surge: Sequence[FigureRow]
    surge_sweep: Sequence[FigureRow]
    claims: Sequence[ClaimRow]
    hits: Mapping[str, Mapping[str, float]]


def tasks_of(profile: EngineProfile, h100: EngineProfile, seeds: Sequence[int]) -> list[FitTask]:
    """Return every run that a comparison needs; `h100` is the profile of the fleet for WildChat."""
    tasks = [task for seed in seeds for _, task in named_tasks(profile, h100, seed)]
    return list(dict.fromkeys(tasks))


def compare(
    profile: EngineProfile, h100: EngineProfile, seeds: Sequence[int], runner: Runner[FitTask, FitRun]
) -> FleetComparison:
    """Return the tables, having run what is missing."""
    runs = runner.runs(tasks_of(profile, h100, seeds), title="paper's tables")
    by_seed = [{name: runs[task] for name, task in named_tasks(profile, h100, seed)} for seed in seeds]
    found = {name: median_stats([named[name].stats for named in by_seed]) for name in by_seed[0]}
    stats = [row for window in WINDOWS for row in _stats_rows(window.name, window.stats, found)]
    hits = {
        window.name: {
            policy: mean(named[window.name, policy].cache_hit for named in by_seed) for policy in window.stats
        }
        for window in WINDOWS
    }
    return FleetComparison(
        profile=profile.name,
        seeds=len(seeds),
        stats=stats,
        windows=[_window(window, [row for row in stats if row.window == window.name]) for window in WINDOWS],
        sweep=list(_sweep(found)),
        half_load=list(_stats_rows(load_name(HALF_LOAD_TIME_SCALE), HALF_LOAD, found)),
        surge=list(_surge(found)),
        surge_sweep=list(_sweep(found, surge=True)),
        claims=list(claims_of(found)),
        hits=hits,
    )


def _stats_rows(name: str, measured: Mapping[str, RunStats], found: Mapping[RunName, RunStats]) -> Iterator[FigureRow]:
    """Yield the seven figures of every policy."""
    for policy, stats in measured.items():
        for figure, ours, theirs in zip(FIGURE_NAMES, found[name, policy].values(), stats.values(), strict=True):
            yield FigureRow(window=name, policy=policy, figure=figure, simulated=ours, measured=theirs)


def _window(window: PublishedWindow, rows: Sequence[FigureRow]) -> WindowRow:
    order = [row for row in rows if row.figure == "TTFT p95"]
    return WindowRow(
        window=window.name,
        fitted=window.name in FITTED_ON,
        ratios={name: _geometric([row.ratio for row in rows if row.figure == name]) for name in FIGURE_NAMES},
        ratio=_geometric([row.ratio for row in rows]),
        within=mean(row.met for row in rows),
        rho=spearman(np.array([row.simulated for row in order]), np.array([row.measured for row in order])),
    )


def _geometric(values: Sequence[float]) -> float:
    return exp(mean(map(log, values)))


def _sweep(found: Mapping[RunName, RunStats], *, surge: bool = False) -> Iterator[FigureRow]:
    for policy, loads in LOAD_SWEEP.items():
        for time_scale, measured in loads.items():
            name = load_name(time_scale, surge=surge)
            for place, theirs in zip(P95, measured, strict=True):
                yield FigureRow(
                    window=name,
                    policy=policy,
                    figure=FIGURE_NAMES[place],
                    simulated=found[name, policy].values()[place],
                    measured=theirs,
                )


def _surge(found: Mapping[RunName, RunStats]) -> Iterator[FigureRow]:
    last = WINDOWS[-1]
    yield from _stats_rows(load_name(last.time_scale, surge=True), last.stats, found)
    yield from _stats_rows(load_name(HALF_LOAD_TIME_SCALE, surge=True), HALF_LOAD, found)
