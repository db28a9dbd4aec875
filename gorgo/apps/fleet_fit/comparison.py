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
from gorgo.apps.demo.options import PAPER, RANDOM
from gorgo.apps.fleet_fit.fit import FITTED_ON, median_stats, task_of
from gorgo.apps.fleet_fit.measure import FitRun, FitTask
from gorgo.apps.fleet_fit.published import (
    AFFINITY,
    FIGURE_NAMES,
    HACKED_E2E_RATIO,
    HACKED_WEIGHTS,
    LOAD_SWEEP,
    WILDCHAT,
    WILDCHAT_TIME_SCALE,
    WILDCHAT_WEIGHTS,
    WINDOWS,
    PublishedWindow,
    RunStats,
)
from gorgo.apps.rank import spearman
from gorgo.sim.engine.profiles import EngineProfile

#: Every figure is within this factor of the measured one, or missed.
WITHIN = 1.3
_TTFT_P95, _E2E_P95 = FIGURE_NAMES.index("TTFT p95"), FIGURE_NAMES.index("E2E p95")


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
class ClaimRow:
    """One comparison of the paper: a ratio of two of its figures, and the same ratio simulated."""

    on: str
    of: str
    against: str
    figure: str
    published: float
    simulated: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetComparison:
    """The tables of a profile: table 2, its windows, the load sweep, and the claims.

    `hits` is the share of prompt tokens found cached by window and policy.
    """

    profile: str
    seeds: int
    stats: Sequence[FigureRow]
    windows: Sequence[WindowRow]
    sweep: Sequence[FigureRow]
    claims: Sequence[ClaimRow]
    hits: Mapping[str, Mapping[str, float]]


def tasks_of(profile: EngineProfile, h100: EngineProfile, seeds: Sequence[int]) -> list[FitTask]:
    """Return every run that a comparison needs; `h100` is the profile of the fleet for WildChat."""
    tasks = [task for seed in seeds for _, task in _named(profile, h100, seed)]
    return list(dict.fromkeys(tasks))


def compare(
    profile: EngineProfile, h100: EngineProfile, seeds: Sequence[int], runner: Runner[FitTask, FitRun]
) -> FleetComparison:
    """Return the tables, having run what is missing."""
    runs = runner.runs(tasks_of(profile, h100, seeds), title="paper's tables")
    by_seed = [{name: runs[task] for name, task in _named(profile, h100, seed)} for seed in seeds]
    found = {name: median_stats([named[name].stats for named in by_seed]) for name in by_seed[0]}
    stats = [
        FigureRow(window=window.name, policy=policy, figure=figure, simulated=ours, measured=theirs)
        for window in WINDOWS
        for policy, measured in window.stats.items()
        for figure, ours, theirs in zip(
            FIGURE_NAMES, found[window.name, policy].values(), measured.values(), strict=True
        )
    ]
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
        claims=list(_claims(found)),
        hits=hits,
    )


#: Name of a run: what it is on, and the policy.
_Name = tuple[str, str]
_HACKED, _WILDCHAT = "appendix D", "WildChat"


def _named(profile: EngineProfile, h100: EngineProfile, seed: int) -> Iterator[tuple[_Name, FitTask]]:
    for window in WINDOWS:
        for policy in window.stats:
            yield (window.name, policy), task_of(window, policy, profile, seed=seed)
    last = WINDOWS[-1]
    for policy, loads in LOAD_SWEEP.items():
        for time_scale in loads:
            yield (_load(time_scale), policy), task_of(last, policy, profile, seed=seed, time_scale=time_scale)
    held_out = WINDOWS[1]
    yield (_HACKED, PAPER), task_of(held_out, PAPER, profile, seed=seed, weights=HACKED_WEIGHTS)
    for policy in WILDCHAT:
        yield (
            (_WILDCHAT, policy),
            FitTask(
                trace="wildchat-like",
                time_scale=WILDCHAT_TIME_SCALE,
                policy=policy,
                weights=tuple(WILDCHAT_WEIGHTS.items()) if policy == PAPER else (),
                profile=h100,
                seed=seed,
            ),
        )


def _load(time_scale: float) -> str:
    return f"April 7, time scale {time_scale:g}"


def _window(window: PublishedWindow, rows: Sequence[FigureRow]) -> WindowRow:
    order = [row for row in rows if row.figure == FIGURE_NAMES[_TTFT_P95]]
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


def _sweep(found: Mapping[_Name, RunStats]) -> Iterator[FigureRow]:
    for policy, loads in LOAD_SWEEP.items():
        for time_scale, measured in loads.items():
            for place, theirs in zip((_TTFT_P95, _E2E_P95), measured, strict=True):
                yield FigureRow(
                    window=_load(time_scale),
                    policy=policy,
                    figure=FIGURE_NAMES[place],
                    simulated=found[_load(time_scale), policy].values()[place],
                    measured=theirs,
                )


def _claims(found: Mapping[_Name, RunStats]) -> Iterator[ClaimRow]:
    """Yield the published comparisons: held-out windows, the load sweep, reward hacking, WildChat."""

    def simulated(on: str, of: str, on_other: str, against: str, place: int) -> float:
        return found[on, of].values()[place] / found[on_other, against].values()[place]

    for window in WINDOWS:
        for place in (_TTFT_P95, _E2E_P95):
            ours, theirs = window.stats[PAPER].values()[place], window.stats[AFFINITY].values()[place]
            yield ClaimRow(
                on=window.name,
                of=PAPER,
                against=AFFINITY,
                figure=FIGURE_NAMES[place],
                published=ours / theirs,
                simulated=simulated(window.name, PAPER, window.name, AFFINITY, place),
            )
    for against in (AFFINITY, "least-request"):
        for time_scale in LOAD_SWEEP[against]:
            for number, place in enumerate((_TTFT_P95, _E2E_P95)):
                yield ClaimRow(
                    on=_load(time_scale),
                    of=PAPER,
                    against=against,
                    figure=FIGURE_NAMES[place],
                    published=LOAD_SWEEP[PAPER][time_scale][number] / LOAD_SWEEP[against][time_scale][number],
                    simulated=simulated(_load(time_scale), PAPER, _load(time_scale), against, place),
                )
    yield ClaimRow(
        on="appendix D, queue weight 0",
        of=PAPER,
        against=f"{PAPER} as learned",
        figure=FIGURE_NAMES[_E2E_P95],
        published=HACKED_E2E_RATIO,
        simulated=simulated(_HACKED, PAPER, WINDOWS[1].name, PAPER, _E2E_P95),
    )
    for place, (ours, theirs) in enumerate(zip(WILDCHAT[PAPER], WILDCHAT[RANDOM], strict=True)):
        yield ClaimRow(
            on=_WILDCHAT,
            of=PAPER,
            against=RANDOM,
            figure=FIGURE_NAMES[place],
            published=ours / theirs,
            simulated=simulated(_WILDCHAT, PAPER, _WILDCHAT, RANDOM, place),
        )
