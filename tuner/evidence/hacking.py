"""Reward hacking: all to the nearest replica, as in the paper's appendix D, without a guard and in the default mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from tuner.evidence.statement import (
    PAPER,
    PROTOCOL,
    SWITCHBACK,
    TUNING,
    Experiment,
    Runs,
    Statement,
    campaign,
    e2e,
    twice,
)
from tuner.evidence.task import Task
from tuner.evidence.windows import Windows

#: As near to the 0 of the paper as a log space comes: a queue of 200,000 tokens weighs as much as 1 ms of round trip.
HACKED = (("w_rtt", 0.23), ("w_queue", 1e-6))
HACKED_BOX = (("w_queue", 1e-7, 0.5),)


def _hack_task(seed: int, options: Mapping[str, Any] | None, *, hacked: bool = True) -> Task:
    return Task(
        windows=Windows(shapes=(TUNING,), draw=seed, time_scale=HACK_LOAD),
        policy=PAPER,
        weights=HACKED if hacked else (),
        box=HACKED_BOX,
        seed=seed,
        campaign=None if options is None else campaign(options),
    )


#: At a third of the load one replica still copes with all of it; at half it answers several times slower.
HACK_LOAD = 2.0


def _hack_first(seeds: Sequence[int]) -> list[Task]:
    many = twice(seeds)
    return [_hack_task(seed, options) for seed in many for options in (PROTOCOL, SWITCHBACK)] + [
        _hack_task(seed, None, hacked=False) for seed in many
    ]


def _hack_end(seed: int, end: Mapping[str, float]) -> Task:
    return replace(_hack_task(seed, None), weights=tuple(sorted(end.items())))


def _hack_then(seeds: Sequence[int], runs: Runs) -> list[Task]:
    return [
        _hack_end(seed, runs[_hack_task(seed, options)].weights)
        for seed in twice(seeds)
        for options in (PROTOCOL, SWITCHBACK)
    ]


def _hack_judge(seeds: Sequence[int], runs: Runs) -> Iterator[Statement]:
    many = twice(seeds)
    for name, options in (("guard off", PROTOCOL), ("switchback", SWITCHBACK)):
        ends = [runs[_hack_end(seed, runs[_hack_task(seed, options)].weights)].whole for seed in many]
        plain = [runs[_hack_task(seed, None, hacked=False)].whole for seed in many]
        ratios = [e2e(end) / e2e(base) for end, base in zip(ends, plain, strict=True)]
        shares = [end.max_share for end in ends]
        off = options is PROTOCOL
        yield Statement(
            group="reward hacking",
            text=f"{name}: largest share of one replica where it ends, {'median' if off else 'highest'}",
            value=median(shares) if off else max(shares),
            at_least=0.9 if off else None,
            at_most=None if off else 0.8,
        )
        yield Statement(
            group="reward hacking",
            text=f"{name}: p95 E2E where it ends / defaults, {'median' if off else 'highest'} of {len(many)} seeds",
            value=median(ratios) if off else max(ratios),
            at_least=2.0 if off else None,
            at_most=None if off else 1.5,
        )


EXPERIMENT = Experiment("reward hacking", _hack_first, lambda seeds, runs: list(_hack_judge(seeds, runs)), _hack_then)
