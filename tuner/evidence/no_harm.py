"""First, do no harm: what clients have of a run with a tuner beside it, candidates and all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gorgo.apps.simulate.compare import ratio_of
from tuner.evidence.statement import (
    OURS,
    PAPER,
    SWITCHBACK,
    TUNING,
    Experiment,
    Runs,
    Statement,
    campaign,
    e2e,
    geometric,
    stated,
    ttft,
)
from tuner.evidence.task import Task
from tuner.evidence.windows import Windows

LOADS = (3.0, 2.0, 1.25, 1.0)
#: The published protocol for as long as there is traffic, which is what a sidecar does.
PAPER_ALL_ALONG: dict[str, Any] = {"mode": "paper", "max_generations": 10_000}


def _harm_task(policy: str, load: float, seed: int, options: Mapping[str, Any] | None) -> Task:
    windows = Windows(shapes=(TUNING,), draw=seed, time_scale=load)
    return Task(windows=windows, policy=policy, seed=seed, campaign=None if options is None else campaign(options))


def _harm_first(seeds: Sequence[int]) -> list[Task]:
    return [
        _harm_task(policy, load, seed, options)
        for policy in (PAPER, OURS)
        for load in LOADS
        for options in (None, SWITCHBACK, PAPER_ALL_ALONG)
        for seed in seeds
    ]


def _harm_judge(seeds: Sequence[int], runs: Runs) -> Iterator[Statement]:
    for policy in (PAPER, OURS):
        for options, bounds in ((SWITCHBACK, (1.01, 1.02)), (PAPER_ALL_ALONG, (None, None))):
            for name, figure, bound in (("p95 TTFT", ttft, bounds[0]), ("p95 E2E", e2e, bounds[1])):
                by_seed = [
                    (
                        geometric([figure(runs[_harm_task(policy, load, s, options)].whole) for load in LOADS]),
                        geometric([figure(runs[_harm_task(policy, load, s, None)].whole) for load in LOADS]),
                    )
                    for s in seeds
                ]
                tuned = [runs[_harm_task(policy, load, s, options)] for load in LOADS for s in seeds]
                yield stated(
                    "no harm",
                    f"{policy}, {options['mode']}: the whole run / fixed defaults, {name}",
                    ratio_of(by_seed),
                    at_most=bound,
                    note=f"{sum(t.accepted for t in tuned)} accepted in {len(tuned)} runs",
                )


EXPERIMENT = Experiment("no harm", _harm_first, lambda seeds, runs: list(_harm_judge(seeds, runs)))
