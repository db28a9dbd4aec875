"""Out of a bad start by the twin: its first requests are the recorded window, and what is found there is put."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tuner.evidence.bad_start import BAD_STARTS, LEFT_AFTER, bad_task
from tuner.evidence.kept import AnyTask
from tuner.evidence.statement import TUNING, Experiment, Runs, Statement, e2e, half, part_ratio, stated, ttft
from tuner.evidence.task import Task
from tuner.evidence.twin_task import TwinTask
from tuner.evidence.windows import Windows

#: The first window's 7,200 requests are recorded, and the search has the seven minutes in which the others come.
PUT_AFTER = 9_000
#: The defaults are among what is tried; little is to be found beyond them.
SMALL: dict[str, Any] = {"candidates": 6, "seeds": 1, "held_out_seeds": 5}


def _search(policy: str, seed: int) -> TwinTask:
    """On the first of the windows that `bad_task` runs, from where that starts."""
    weights, box, asked = BAD_STARTS[policy]
    windows = Windows(shapes=(TUNING,), draw=seed)
    return TwinTask(windows=windows, policy=policy, seed=seed, weights=weights, box=box, asked=asked, **SMALL)


def _put(policy: str, seed: int, runs: Runs) -> Task:
    """The bad start until `PUT_AFTER` requests have come, then what the twin says."""
    found = runs[_search(policy, seed)].weights
    return replace(bad_task(policy, seed, None, bad=True), later=(PUT_AFTER, tuple(sorted(found.items()))))


def _first(seeds: Sequence[int]) -> list[AnyTask]:
    return [
        task
        for policy in BAD_STARTS
        for seed in half(seeds)
        for task in (_search(policy, seed), bad_task(policy, seed, None, bad=False))
    ]


def _then(seeds: Sequence[int], runs: Runs) -> list[Task]:
    return [_put(policy, seed, runs) for policy in BAD_STARTS for seed in half(seeds)]


def _judge(seeds: Sequence[int], runs: Runs) -> Iterator[Statement]:
    for policy, (weights, _, _) in BAD_STARTS.items():
        words = ", ".join(f"{name} {value:g}" for name, value in weights)
        pairs = [
            (runs[_put(policy, seed, runs)].tail, runs[bad_task(policy, seed, None, bad=False)].tail)
            for seed in half(seeds)
        ]
        moved = sum(runs[_search(policy, seed)].accepted for seed in half(seeds))
        first_tokens = part_ratio(pairs, ttft)
        yield stated(
            "bad start by twin",
            f"{policy} from {words}, the twin's find put / defaults, p95 E2E after {LEFT_AFTER:,} requests",
            part_ratio(pairs, e2e),
            at_most=1.05,
            note=f"p95 TTFT {first_tokens.value:.3f}; moved in {moved} of {len(pairs)}" if first_tokens else "",
        )


EXPERIMENT = Experiment("bad start by twin", _first, lambda seeds, runs: list(_judge(seeds, runs)), _then)
