"""Fleets and traffic on which the published weights are wrong: what tuning wins there, and what it costs meanwhile.

Four sets of weights serve the same held-out windows, drawn anew:

- the defaults;
- those of a live campaign in the default mode over a day of traffic;
- those of a search of one recorded window, with a p95 E2E that is not above the defaults';
- the best of a grid under the same condition on p95 E2E, chosen on the held-out windows themselves: the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

from gorgo.apps.claims.verdict import ClaimVerdict
from gorgo.apps.simulate.job import STEADY
from tuner.experiments.comparison import (
    OURS,
    PAPER,
    SWITCHBACK,
    Runs,
    TuningExperiment,
    e2e,
    fifth,
    part_ratio,
    ttft,
)
from tuner.experiments.task import Search, Task
from tuner.experiments.windows import STRIDE, Windows

GROUP, SEARCH_GROUP, FURTHER_GROUP = "fleets", "fleets by twin", "further fleets"
#: A set that is worse than the defaults by more misses its target: one per cent, either way.
NO_WORSE = 1.01
SEARCH = Search(candidates=16, seeds=1, held_out_seeds=3)
GRID: Mapping[str, Mapping[str, Sequence[float]]] = {
    PAPER: {"w_rtt": (0.5, 5.0, 20.0, 80.0), "w_queue": (0.03, 0.1, 0.5, 2.0)},
    OURS: {"m_rtt": (0.5, 1.0, 2.0), "m_queue": (0.5, 1.0, 2.0)},
}
LIVE_SEEDS = 3
#: Draws of the held-out windows are far from those of the recorded ones.
HELD_OUT = 500_000
#: Requests of a held-out or recorded window, and those before its figures begin.
REQUESTS, WARM_UP = 3_000, 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A fleet and its traffic.

    Parameters
    ----------
    fleet, shape, time_scale, scenario, policy:
        As in `Task` and `Windows`; one to four requests a second.
    windows:
        Of the live campaign: one and a half to five hours.
    gain:
        Upper bound of tuned over default p95 TTFT; None where the defaults are good.
    """

    fleet: str
    shape: str
    time_scale: float
    windows: int
    scenario: str = STEADY
    policy: str = PAPER
    gain: float | None = None

    @property
    def label(self) -> str:
        """Return fleet, traffic and policy in words."""
        fleet = self.fleet if self.scenario == STEADY else f"{self.fleet} under {self.scenario}"
        return f"{fleet}, {self.shape}, time scale {self.time_scale:g}: {self.policy}"


#: The target is of these, where tuning wins most or the default mode once did harm.
SETTINGS = (
    Setting(fleet="small-model", shape="short-chat", time_scale=3.0, windows=2, gain=0.90),
    Setting(fleet="mixed-gpus-x3", shape="art-chat-apr6", time_scale=1.06, windows=7, gain=0.90),
    Setting(fleet="dense-70b-x2", shape="short-chat", time_scale=3.0, windows=6, gain=0.90),
    Setting(fleet="h100", shape="short-chat", time_scale=3.0, windows=2),
)
FURTHER = (
    Setting(fleet="dense-70b", shape="short-chat", time_scale=3.0, windows=4),
    Setting(fleet="small-model", shape="wildchat-like", time_scale=3.0, windows=2, gain=0.90),
    Setting(fleet="mixed-gpus-x2", shape="art-chat-apr6", time_scale=1.06, windows=8, gain=0.90),
    Setting(fleet="mixed-gpus", shape="rag", time_scale=2.0, windows=3),
    Setting(fleet="fast-links", shape="art-chat-apr6", time_scale=2.0, windows=3),
    Setting(fleet="small-model", shape="short-chat", time_scale=3.0, windows=2, policy=OURS),
    Setting(fleet="mixed-gpus-x2", shape="art-chat-apr6", time_scale=1.0, windows=4, policy=OURS),
    Setting(fleet="dense-70b-x2", shape="short-chat", time_scale=3.0, windows=2, policy=OURS),
    Setting(fleet="h100", shape="short-chat", time_scale=3.0, windows=2, policy=OURS),
    Setting(fleet="mixed-gpus", shape="rag", time_scale=2.0, windows=3, policy=OURS, scenario="priors-fast"),
    Setting(fleet="mixed-gpus", shape="rag", time_scale=2.0, windows=3, policy=OURS, scenario="priors-slow"),
)


def by_campaign(seeds: Sequence[int]) -> TuningExperiment:
    """Tune live, freeze, serve held-out windows; three seeds at most, because a run is hours of traffic."""
    return _by_campaign(GROUP, SETTINGS, seeds[:LIVE_SEEDS])


def further(seeds: Sequence[int]) -> TuningExperiment:
    """The same on the other fleets, with a fifth of the seeds."""
    return _by_campaign(FURTHER_GROUP, FURTHER, fifth(seeds))


def _by_campaign(group: str, settings: Sequence[Setting], few: Sequence[int]) -> TuningExperiment:
    runs = yield [task for one in settings for seed in few for task in (_live(one, seed), _live(one, seed, tuned=True))]
    found = {(one, seed): runs[_live(one, seed, tuned=True)].weights for one in settings for seed in few}
    runs = yield [
        task
        for (one, seed), weights in found.items()
        for task in (_held_out(one, seed, {}), _held_out(one, seed, weights))
    ]
    verdicts: list[ClaimVerdict] = []
    for one in settings:
        sets = [found[one, seed] for seed in few]
        verdicts += _verdicts(group, one, few, runs, sets, "tuned live", "; ".join(map(_shown, sets)))
        verdicts += _cost(group, one, few, runs)
    return verdicts


def by_search(seeds: Sequence[int]) -> TuningExperiment:
    """Search one recorded window, freeze, serve held-out windows; the best of the grid beside it."""
    few = fifth(seeds)
    runs = yield [
        *(_search(one, seed) for one in SETTINGS for seed in few),
        *(_held_out(one, seed, weights) for one in SETTINGS for seed in few for weights in (*grid(one.policy), {})),
    ]
    found = {one: [runs[_search(one, seed)].weights for seed in few] for one in SETTINGS}
    runs = yield [
        _held_out(one, seed, weights) for one, sets in found.items() for seed, weights in zip(few, sets, strict=True)
    ]
    verdicts: list[ClaimVerdict] = []
    for one, sets in found.items():
        best = _best_of_grid(one, few, runs)
        note = "; ".join(map(_shown, sets))
        verdicts += _verdicts(SEARCH_GROUP, one, few, runs, sets, "found by the twin", note)
        bests = [best] * len(few)
        verdicts += _verdicts(SEARCH_GROUP, one, few, runs, bests, "best of the grid", _shown(best), bounded=False)
    return verdicts


def _live(one: Setting, seed: int, *, tuned: bool = False) -> Task:
    windows = Windows(shapes=(one.shape,) * one.windows, draw=seed, time_scale=one.time_scale)
    return replace(_task(one, windows, seed), campaign=SWITCHBACK if tuned else None)


def _search(one: Setting, seed: int) -> Task:
    windows = Windows(shapes=(one.shape,), draw=seed, time_scale=one.time_scale, limit=REQUESTS)
    return replace(_task(one, windows, seed), search=SEARCH)


def _held_out(one: Setting, seed: int, weights: Mapping[str, float]) -> Task:
    draw = HELD_OUT + STRIDE * seed
    windows = Windows(shapes=(one.shape,), draw=draw, time_scale=one.time_scale, limit=REQUESTS)
    return replace(_task(one, windows, seed), weights=tuple(sorted(weights.items())), after=WARM_UP)


def _task(one: Setting, windows: Windows, seed: int) -> Task:
    return Task(windows=windows, policy=one.policy, fleet=one.fleet, scenario=one.scenario, seed=seed)


def grid(policy: str) -> Iterator[Mapping[str, float]]:
    """Yield the points of a policy's grid."""
    names = GRID[policy]
    for values in product(*names.values()):
        yield dict(zip(names, values, strict=True))


def _best_of_grid(one: Setting, seeds: Sequence[int], runs: Runs) -> Mapping[str, float]:
    """Return the weights of the lowest mean p95 TTFT whose mean p95 E2E is not above the defaults'."""
    plain = fmean(e2e(runs[_held_out(one, seed, {})].tail) for seed in seeds)
    best: Mapping[str, float] = {}
    least = fmean(ttft(runs[_held_out(one, seed, {})].tail) for seed in seeds)
    for weights in grid(one.policy):
        tails = [runs[_held_out(one, seed, weights)].tail for seed in seeds]
        if fmean(map(e2e, tails)) <= plain and fmean(map(ttft, tails)) < least:
            best, least = weights, fmean(map(ttft, tails))
    return best


def _verdicts(
    group: str,
    one: Setting,
    seeds: Sequence[int],
    runs: Runs,
    found: Sequence[Mapping[str, float]],
    words: str,
    note: str,
    *,
    bounded: bool = True,
) -> Iterator[ClaimVerdict]:
    """Yield p95 TTFT and p95 E2E of frozen weights over those of the defaults."""
    pairs = [
        (runs[_held_out(one, seed, weights)].tail, runs[_held_out(one, seed, {})].tail)
        for seed, weights in zip(seeds, found, strict=True)
    ]
    gain = NO_WORSE if one.gain is None else one.gain
    for name, figure, bound in (("p95 TTFT", ttft, gain), ("p95 E2E", e2e, NO_WORSE)):
        yield ClaimVerdict.of_ratio(
            group,
            (f"{one.label}, {words} / defaults, {name}",),
            part_ratio(pairs, figure),
            at_most=bound if bounded else None,
            note=note,
        )


def _cost(group: str, one: Setting, seeds: Sequence[int], runs: Runs) -> Iterator[ClaimVerdict]:
    """Yield what clients got while it was tuned, over the defaults; the note says when something was found."""
    tuned = [runs[_live(one, seed, tuned=True)] for seed in seeds]
    pairs = [(run.whole, runs[_live(one, seed)].whole) for run, seed in zip(tuned, seeds, strict=True)]
    found = [f"{run.first_accepted_s / 3600:.1f} h" for run in tuned if run.first_accepted_s is not None]
    note = f"first accepted after {', '.join(found) or 'never'}"
    for name, figure in (("p95 TTFT", ttft), ("p95 E2E", e2e)):
        text = f"{one.label}, while it was tuned / defaults, {name}"
        yield ClaimVerdict.of_ratio(group, (text,), part_ratio(pairs, figure), note=note)


def _shown(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in weights.items()) or "the defaults"
