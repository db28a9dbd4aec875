"""Bad start weights: whether a campaign, or a search of the first window, leaves them, and how soon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gorgo.apps.claims.verdict import ClaimVerdict
from tuner.experiments.comparison import (
    OURS,
    PAPER,
    SWITCHBACK,
    TUNING,
    Runs,
    TuningExperiment,
    e2e,
    half,
    part_ratio,
    ttft,
)
from tuner.experiments.task import Search, Task
from tuner.experiments.windows import Windows

GROUP, SEARCH_GROUP = "bad start", "bad start by twin"
#: Requests after which a bad start must be left.
LEFT_AFTER = 10_000
#: The first window's 7,200 requests are recorded; the search has the seven minutes of the next 1,800.
PUT_AFTER = 9_000
#: The defaults are among the candidates; little is to be found beyond them.
SEARCH = Search(candidates=6, seeds=1, held_out_seeds=5)


class BadStart(NamedTuple):
    """Start weights, the box that allows them, and whether preferences move."""

    weights: tuple[tuple[str, float], ...]
    box: tuple[tuple[str, float, float], ...]
    tune_lambda: bool

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.weights)


BAD_STARTS: Mapping[str, BadStart] = {
    OURS: BadStart((("lambda", 0.02),), (("lambda", 0.01, 1.0),), tune_lambda=True),
    PAPER: BadStart((("w_rtt", 2.0), ("w_queue", 0.05)), (), tune_lambda=False),
}


def by_campaign(seeds: Sequence[int]) -> TuningExperiment:
    """Compare the bad start, left alone and tuned, with the defaults."""
    few = half(seeds)
    runs = yield [
        task
        for policy in BAD_STARTS
        for seed in few
        for task in (_defaults(policy, seed), _bad(policy, seed), _tuned(policy, seed))
    ]
    return [
        _verdict(GROUP, policy, words, few, runs, task, bound)
        for policy in BAD_STARTS
        for words, task, bound in (("left alone", _bad, None), ("tuned by switchback", _tuned, 1.05))
    ]


def by_search(seeds: Sequence[int]) -> TuningExperiment:
    """Record the first window, search it, and set what is found while the others arrive."""
    few = half(seeds)
    runs = yield [
        task for policy in BAD_STARTS for seed in few for task in (_search(policy, seed), _defaults(policy, seed))
    ]

    def put(policy: str, seed: int) -> Task:
        found = runs[_search(policy, seed)].weights
        return replace(_bad(policy, seed), later=(PUT_AFTER, tuple(sorted(found.items()))))

    runs = yield [put(policy, seed) for policy in BAD_STARTS for seed in few]
    return [
        _verdict(SEARCH_GROUP, policy, "the twin's find put", few, runs, put, 1.05, searched=True)
        for policy in BAD_STARTS
    ]


def _defaults(policy: str, seed: int) -> Task:
    """Three windows end to end with the default weights."""
    _, box, tune_lambda = BAD_STARTS[policy]
    windows = Windows(shapes=(TUNING,) * 3, draw=seed, time_scale=1.0)
    return Task(windows=windows, policy=policy, box=box, tune_lambda=tune_lambda, seed=seed, after=LEFT_AFTER)


def _bad(policy: str, seed: int) -> Task:
    return replace(_defaults(policy, seed), weights=BAD_STARTS[policy].weights)


def _tuned(policy: str, seed: int) -> Task:
    return replace(_bad(policy, seed), campaign=SWITCHBACK)


def _search(policy: str, seed: int) -> Task:
    """A search of the first window of `_bad`, from its start."""
    windows = Windows(shapes=(TUNING,), draw=seed)
    return replace(_bad(policy, seed), windows=windows, after=0, search=SEARCH)


def _verdict(
    group: str,
    policy: str,
    words: str,
    seeds: Sequence[int],
    runs: Runs,
    task: Callable[[str, int], Task],
    bound: float | None,
    *,
    searched: bool = False,
) -> ClaimVerdict:
    start = BAD_STARTS[policy]
    found = [runs[task(policy, seed)] for seed in seeds]
    pairs = [(one.tail, runs[_defaults(policy, seed)].tail) for one, seed in zip(found, seeds, strict=True)]
    if searched:
        moved = sum(runs[_search(policy, seed)].accepted for seed in seeds)
        end = f"moved in {moved} of {len(seeds)}"
    else:
        left = sum(any(one.weights[name] != value for name, value in start.weights) for one in found)
        end = f"left in {left} of {len(seeds)} runs"
    first_tokens = part_ratio(pairs, ttft)
    return ClaimVerdict.of_ratio(
        group,
        (f"{policy} from {start}, {words} / defaults, p95 E2E after {LEFT_AFTER:,} requests",),
        part_ratio(pairs, e2e),
        at_most=bound,
        note=f"p95 TTFT {first_tokens.value:.3f}; {end}" if first_tokens else "",
    )
