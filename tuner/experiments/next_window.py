"""A search of one recorded window, checked on windows of the next day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gorgo.apps.claims.verdict import ClaimVerdict
from tuner.experiments.comparison import OURS, PAPER, TUNING, TuningExperiment, e2e, fifth, part_ratio, ttft
from tuner.experiments.task import Search, Task
from tuner.experiments.windows import Windows

GROUP = "next window"
#: A load at which weights matter, below the one at which the fleet saturates.
LOAD = 1.25
NEXT = "art-chat-apr6"
#: Windows of the next day for each search.
NEXT_WINDOWS = range(3)
SEARCH = Search(candidates=16, seeds=2, held_out_seeds=6)


def experiment(seeds: Sequence[int]) -> TuningExperiment:
    """Compare what each search found with the defaults."""
    few, policies = fifth(seeds), (PAPER, OURS)
    runs = yield [_search(policy, seed) for policy in policies for seed in few]
    weights = {(policy, seed): runs[_search(policy, seed)].weights for policy in policies for seed in few}
    runs = yield [
        _next(*place, number, given) for place in weights for number in NEXT_WINDOWS for given in ({}, weights[place])
    ]
    verdicts = []
    for policy in policies:
        searches = [runs[_search(policy, seed)] for seed in few]
        pairs = [
            tuple(runs[_next(policy, seed, number, given)].whole for given in (weights[policy, seed], {}))
            for seed in few
            for number in NEXT_WINDOWS
        ]
        reasons = "; ".join(search.reasons[-1] for search in searches)
        note = f"moved in {sum(search.accepted for search in searches)} of {len(few)}: {reasons}"
        text = f"{policy}, twin on one window: the next day's, found / defaults"
        ratios = [part_ratio([(ours, theirs) for ours, theirs in pairs], figure) for figure in (ttft, e2e)]
        verdicts += [
            ClaimVerdict.of_ratio(GROUP, (f"{text}, p95 TTFT",), ratios[0], at_most=1.0, note=note),
            ClaimVerdict.of_ratio(GROUP, (f"{text}, p95 E2E",), ratios[1]),
        ]
    return verdicts


def _search(policy: str, seed: int) -> Task:
    windows = Windows(shapes=(TUNING,), draw=seed, time_scale=LOAD)
    return Task(windows=windows, policy=policy, search=SEARCH, seed=seed)


def _next(policy: str, seed: int, number: int, weights: Mapping[str, float]) -> Task:
    windows = Windows(shapes=(NEXT,), draw=seed + 100 * number, time_scale=LOAD)
    return Task(windows=windows, policy=policy, seed=seed, weights=tuple(sorted(weights.items())))
