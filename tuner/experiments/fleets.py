"""Fleets and traffic on which the published weights are wrong: what tuning wins there, and what it costs meanwhile.

Four sets of weights serve the same held-out windows, drawn anew:

- the defaults;
- those of a live campaign in the default mode over a day of traffic;
- those of a search of one recorded window, with a p95 E2E that is not above the defaults';
- the best of a grid under the same condition on p95 E2E, chosen on the held-out windows themselves: the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from gorgo.apps.claims.verdict import ClaimVerdict
from tuner.experiments.comparison import OURS, PAPER, SWITCHBACK, Runs, TuningExperiment, e2e, half, part_ratio, ttft
from tuner.experiments.task import Search, Task
from tuner.experiments.windows import STRIDE, Windows

GROUP, SEARCH_GROUP = "fleets", "fleets by twin"
#: A set that is worse than the defaults by more misses its target: one per cent, either way.
NO_WORSE = 1.01
SEARCH = Search(candidates=24, seeds=1, held_out_seeds=3)
GRID: Mapping[str, Mapping[str, Sequence[float]]] = {
    PAPER: {"w_rtt": (0.5, 5.0, 20.0, 80.0), "w_queue": (0.03, 0.1, 0.5, 2.0)},
    OURS: {"m_rtt": (0.5, 1.0, 2.0), "m_queue": (0.5, 1.0, 2.0)},
}
#: Draws of the held-out windows are far from those of the recorded ones.
HELD_OUT = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A fleet and its traffic.

    Parameters
    ----------
    fleet, shape, time_scale:
        As in `Task` and `Windows`; some four requests a second.
    windows:
        Of the live campaign: a day or less.
    gain:
        Upper bound of tuned over default p95 TTFT; None where the defaults are good.
    """

    fleet: str
    shape: str
    time_scale: float
    windows: int
    gain: float | None = None

    @property
    def label(self) -> str:
        """Return fleet and traffic in words."""
        return f"{self.fleet}, {self.shape}, time scale {self.time_scale:g}"


SETTINGS = (
    Setting(fleet="small-model", shape="short-chat", time_scale=3.0, windows=24, gain=0.90),
    Setting(fleet="mixed-gpus", shape="art-chat-apr6", time_scale=3.0, windows=14, gain=0.90),
    Setting(fleet="mixed-gpus", shape="rag", time_scale=2.0, windows=36, gain=0.90),
    Setting(fleet="dense-70b", shape="short-chat", time_scale=3.0, windows=24),
    Setting(fleet="fast-links", shape="art-chat-apr6", time_scale=2.0, windows=14),
)


def by_campaign(seeds: Sequence[int]) -> TuningExperiment:
    """Tune live, freeze, serve held-out windows; a fifth of the seeds, because a run is a day."""
    few = half(seeds)[:2]
    runs = yield [task for one in SETTINGS for seed in few for task in (_live(one, seed), _live(one, seed, tuned=True))]
    found = {(one, seed): runs[_live(one, seed, tuned=True)].weights for one in SETTINGS for seed in few}
    runs = yield [
        task
        for (one, seed), weights in found.items()
        for task in (_held_out(one, PAPER, seed, {}), _held_out(one, PAPER, seed, weights))
    ]
    return [
        verdict
        for one in SETTINGS
        for verdict in _verdicts(
            GROUP, one, PAPER, few, runs, [found[one, seed] for seed in few], "tuned live", _cost(one, few, runs)
        )
    ]


def by_search(seeds: Sequence[int]) -> TuningExperiment:
    """Search one recorded window, freeze, serve held-out windows; the best of the grid beside it."""
    few = half(seeds)[:3]
    cases = [(one, policy) for one in SETTINGS for policy in GRID]
    runs = yield [
        *(_search(one, policy, seed) for one, policy in cases for seed in few),
        *(_held_out(one, policy, seed, weights) for one, policy in cases for seed in few for weights in grid(policy)),
        *(_held_out(one, policy, seed, {}) for one, policy in cases for seed in few),
    ]
    found = {(one, policy): [runs[_search(one, policy, seed)].weights for seed in few] for one, policy in cases}
    runs = yield [
        _held_out(one, policy, seed, weights)
        for (one, policy), by_seed in found.items()
        for seed, weights in zip(few, by_seed, strict=True)
    ]
    verdicts: list[ClaimVerdict] = []
    for one, policy in cases:
        best = _best_of_grid(one, policy, few, runs)
        verdicts += _verdicts(SEARCH_GROUP, one, policy, few, runs, found[one, policy], "found by the twin", "")
        verdicts += _verdicts(
            SEARCH_GROUP, one, policy, few, runs, [best] * len(few), "best of the grid", _shown(best), bounded=False
        )
    return verdicts


def _live(one: Setting, seed: int, *, tuned: bool = False) -> Task:
    windows = Windows(shapes=(one.shape,) * one.windows, draw=seed, time_scale=one.time_scale)
    campaign = SWITCHBACK if tuned else None
    return Task(windows=windows, policy=PAPER, fleet=one.fleet, seed=seed, campaign=campaign)


def _search(one: Setting, policy: str, seed: int) -> Task:
    windows = Windows(shapes=(one.shape,), draw=seed, time_scale=one.time_scale, limit=6_000)
    return Task(windows=windows, policy=policy, fleet=one.fleet, seed=seed, search=SEARCH)


def _held_out(one: Setting, policy: str, seed: int, weights: Mapping[str, float]) -> Task:
    windows = Windows(shapes=(one.shape,), draw=HELD_OUT + STRIDE * seed, time_scale=one.time_scale, limit=6_000)
    return Task(
        windows=windows, policy=policy, fleet=one.fleet, seed=seed, weights=tuple(sorted(weights.items())), after=500
    )


def grid(policy: str) -> Iterator[Mapping[str, float]]:
    """Yield the points of a policy's grid."""
    names = GRID[policy]
    for values in product(*names.values()):
        yield dict(zip(names, values, strict=True))


def _best_of_grid(one: Setting, policy: str, seeds: Sequence[int], runs: Runs) -> Mapping[str, float]:
    """Return the weights of the lowest mean p95 TTFT whose mean p95 E2E is not above the defaults'."""
    plain = fmean(e2e(runs[_held_out(one, policy, seed, {})].tail) for seed in seeds)
    best: Mapping[str, float] = {}
    least = fmean(ttft(runs[_held_out(one, policy, seed, {})].tail) for seed in seeds)
    for weights in grid(policy):
        tails = [runs[_held_out(one, policy, seed, weights)].tail for seed in seeds]
        if fmean(map(e2e, tails)) <= plain and fmean(map(ttft, tails)) < least:
            best, least = weights, fmean(map(ttft, tails))
    return best


def _verdicts(
    group: str,
    one: Setting,
    policy: str,
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
        (runs[_held_out(one, policy, seed, weights)].tail, runs[_held_out(one, policy, seed, {})].tail)
        for seed, weights in zip(seeds, found, strict=True)
    ]
    gain = one.gain if one.gain is not None and policy == PAPER else NO_WORSE
    for name, figure, bound in (("p95 TTFT", ttft, gain), ("p95 E2E", e2e, NO_WORSE)):
        yield ClaimVerdict.of_ratio(
            group,
            (f"{one.label}: {policy}, {words} / defaults, {name}",),
            part_ratio(pairs, figure),
            at_most=bound if bounded else None,
            note=note or "; ".join(map(_shown, found)),
        )


def _cost(one: Setting, seeds: Sequence[int], runs: Runs) -> str:
    """Return what tuning cost and when it found something."""
    tuned = [runs[_live(one, seed, tuned=True)] for seed in seeds]
    pairs = [(run.whole, runs[_live(one, seed)].whole) for run, seed in zip(tuned, seeds, strict=True)]
    whole = part_ratio(pairs, ttft)
    found = [f"{run.first_accepted_s / 3600:.1f} h" for run in tuned if run.first_accepted_s is not None]
    lost = f"p95 TTFT while tuning {whole.value:.3f}" if whole else ""
    return f"{lost}; first accepted after {', '.join(found) or 'never'}; {'; '.join(_shown(r.weights) for r in tuned)}"


def _shown(weights: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in weights.items()) or "the defaults"
