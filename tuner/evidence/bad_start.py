"""From weights that nobody should start from: whether the tuner leaves them, and when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    half,
    part_ratio,
    stated,
    ttft,
)
from tuner.evidence.task import Task
from tuner.evidence.windows import Windows

#: Requests after which a bad start must be gone.
LEFT_AFTER = 10_000
#: By policy: the start, the box that allows it, and whether preferences move.
BAD_STARTS: Mapping[str, tuple[tuple[tuple[str, float], ...], tuple[tuple[str, float, float], ...], bool]] = {
    OURS: ((("lambda", 0.02),), (("lambda", 0.01, 1.0),), True),
    PAPER: ((("w_rtt", 2.0), ("w_queue", 0.05)), (), False),
}


def bad_task(policy: str, seed: int, options: Mapping[str, Any] | None, *, bad: bool) -> Task:
    """Three windows end to end, from the bad start or from the defaults."""
    weights, box, asked = BAD_STARTS[policy]
    return Task(
        windows=Windows(shapes=(TUNING,) * 3, draw=seed, time_scale=1.0),
        policy=policy,
        weights=weights if bad else (),
        box=box,
        asked=asked,
        seed=seed,
        campaign=None if options is None else campaign(options),
        after=LEFT_AFTER,
    )


def _bad_first(seeds: Sequence[int]) -> list[Task]:
    return [
        task
        for policy in BAD_STARTS
        for seed in half(seeds)
        for task in (
            bad_task(policy, seed, None, bad=False),
            bad_task(policy, seed, None, bad=True),
            bad_task(policy, seed, SWITCHBACK, bad=True),
        )
    ]


def _bad_judge(seeds: Sequence[int], runs: Runs) -> Iterator[Statement]:
    for policy, (weights, _, _) in BAD_STARTS.items():
        words = ", ".join(f"{name} {value:g}" for name, value in weights)
        for options, bound in ((None, None), (SWITCHBACK, 1.05)):
            pairs = [
                (
                    runs[bad_task(policy, seed, options, bad=True)].tail,
                    runs[bad_task(policy, seed, None, bad=False)].tail,
                )
                for seed in half(seeds)
            ]
            tuned = "left alone" if options is None else "tuned by switchback"
            ends = [runs[bad_task(policy, seed, options, bad=True)].weights for seed in half(seeds)]
            left = sum(any(end[name] != value for name, value in weights) for end in ends)
            yield stated(
                "bad start",
                f"{policy} from {words}, {tuned} / defaults, p95 E2E after {LEFT_AFTER:,} requests",
                part_ratio(pairs, e2e),
                at_most=bound,
                note=f"p95 TTFT {r.value:.3f}; left in {left} of {len(ends)} runs"
                if (r := part_ratio(pairs, ttft))
                else "",
            )


EXPERIMENT = Experiment("bad start", _bad_first, lambda seeds, runs: list(_bad_judge(seeds, runs)))
