"""The twin: search one recorded window, meet the next day's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tuner.evidence.kept import AnyTask
from tuner.evidence.statement import (
    OURS,
    PAPER,
    TUNING,
    Experiment,
    Runs,
    Statement,
    e2e,
    fifth,
    part_ratio,
    stated,
    ttft,
)
from tuner.evidence.task import Task
from tuner.evidence.twin_task import TwinTask
from tuner.evidence.windows import Windows

#: A load at which weights matter, below the one at which the fleet saturates.
TWIN_LOAD = 1.25
NEXT = "art-chat-apr6"
#: Windows of the next day on which one search's find is checked.
NEXT_WINDOWS = 3


def _search_task(policy: str, seed: int) -> TwinTask:
    windows = Windows(shapes=(TUNING,), draw=seed, time_scale=TWIN_LOAD)
    return TwinTask(windows=windows, policy=policy, candidates=16, seeds=2, held_out_seeds=6, seed=seed)


def _next_task(policy: str, seed: int, number: int, weights: Mapping[str, float]) -> Task:
    windows = Windows(shapes=(NEXT,), draw=seed + 100 * number, time_scale=TWIN_LOAD)
    return Task(windows=windows, policy=policy, seed=seed, weights=tuple(sorted(weights.items())))


def _next_first(seeds: Sequence[int]) -> list[AnyTask]:
    return [_search_task(policy, seed) for policy in (PAPER, OURS) for seed in fifth(seeds)]


def _next_then(seeds: Sequence[int], runs: Runs) -> list[Task]:
    return [
        _next_task(policy, seed, number, weights)
        for policy in (PAPER, OURS)
        for seed in fifth(seeds)
        for number in range(NEXT_WINDOWS)
        for weights in ({}, runs[_search_task(policy, seed)].weights)
    ]


def _next_judge(seeds: Sequence[int], runs: Runs) -> Iterator[Statement]:
    for policy in (PAPER, OURS):
        searches = [(seed, runs[_search_task(policy, seed)]) for seed in fifth(seeds)]
        pairs = [
            (
                runs[_next_task(policy, seed, number, found.weights)].whole,
                runs[_next_task(policy, seed, number, {})].whole,
            )
            for seed, found in searches
            for number in range(NEXT_WINDOWS)
        ]
        moved = sum(found.accepted for _, found in searches)
        said = "; ".join(found.reasons[-1] for _, found in searches)
        for name, figure in (("p95 TTFT", ttft), ("p95 E2E", e2e)):
            yield stated(
                "next window",
                f"{policy}, twin on one window: the next day's, found / defaults, {name}",
                part_ratio(pairs, figure),
                at_most=1.0 if figure is ttft else None,
                note=f"moved in {moved} of {len(searches)}: {said}" if figure is ttft else "",
            )


EXPERIMENT = Experiment("next window", _next_first, lambda seeds, runs: list(_next_judge(seeds, runs)), _next_then)
