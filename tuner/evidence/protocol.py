"""The paper's protocol: tune on one window, freeze, meet two others at other loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from gorgo.apps.demo.options import PUBLISHED
from tuner.evidence.statement import (
    OURS,
    PAPER,
    PROTOCOL,
    SWITCHBACK,
    TUNING,
    Experiment,
    Runs,
    Statement,
    campaign,
    e2e,
    part_ratio,
    stated,
    ttft,
)
from tuner.evidence.task import Part, Task
from tuner.evidence.windows import Windows

HELD_OUT = (("art-chat-apr6", 2.0), ("art-chat-apr7", 3.0))
#: The published one, and what is used unless it is asked for.
MODES = (PROTOCOL, SWITCHBACK)
BASELINES = tuple(name for name in PUBLISHED if name not in (PAPER, "random"))


#: What a frozen set's p95 TTFT may be of the best baseline's.
BOUNDS = {PAPER: 0.96, OURS: 0.90}


def _tuning(policy: str, seed: int, options: Mapping[str, Any]) -> Task:
    return Task(windows=Windows(shapes=(TUNING,), draw=seed), policy=policy, seed=seed, campaign=campaign(options))


def held_out(shape: str, load: float, policy: str, seed: int, weights: Mapping[str, float] | None = None) -> Task:
    """A run of one of the two other windows."""
    windows = Windows(shapes=(shape,), draw=seed, time_scale=load)
    return Task(windows=windows, policy=policy, seed=seed, weights=tuple(sorted((weights or {}).items())))


def row_of(
    group: str,
    where: tuple[str, float],
    policy: str,
    frozen: Sequence[Part],
    seeds: Sequence[int],
    runs: Runs,
    *,
    tuned: str,
    at_most: float,
    note: str = "",
) -> Statement:
    """Frozen weights against the best baseline of that window, which is the one of the lowest median."""

    def middle(name: str) -> float:
        return median(runs[held_out(*where, name, seed)].whole.ttft_ms_p95 for seed in seeds)

    best = min(BASELINES, key=middle)
    pairs = [(one, runs[held_out(*where, best, seed)].whole) for one, seed in zip(frozen, seeds, strict=True)]
    own = [(one, runs[held_out(*where, policy, seed)].whole) for one, seed in zip(frozen, seeds, strict=True)]
    whole, defaults = part_ratio(pairs, e2e), part_ratio(own, ttft)
    figures = f"p95 E2E {whole.value:.3f}; p95 TTFT to own defaults {defaults.value:.3f}" if whole and defaults else ""
    return stated(
        group,
        f"{where[0]} x{where[1]:g}: {policy} {tuned}, frozen / {best}, median p95 TTFT",
        part_ratio(pairs, ttft),
        value=median(ttft(ours) / ttft(theirs) for ours, theirs in pairs),
        at_most=at_most,
        note="; ".join(one for one in (figures, note) if one),
    )


def _protocol_first(seeds: Sequence[int]) -> list[Task]:
    tuned = [_tuning(policy, seed, options) for policy in (PAPER, OURS) for options in MODES for seed in seeds]
    plain = (*BASELINES, PAPER, OURS)
    return tuned + [held_out(*where, policy, seed) for where in HELD_OUT for policy in plain for seed in seeds]


def _frozen(where: tuple[str, float], policy: str, seed: int, runs: Runs, options: Mapping[str, Any]) -> Task:
    return held_out(*where, policy, seed, runs[_tuning(policy, seed, options)].weights)


def _protocol_then(seeds: Sequence[int], runs: Runs) -> list[Task]:
    return [
        _frozen(where, policy, seed, runs, options)
        for where in HELD_OUT
        for policy in (PAPER, OURS)
        for options in MODES
        for seed in seeds
    ]


def _protocol_judge(seeds: Sequence[int], runs: Runs) -> Iterator[Statement]:
    for where in HELD_OUT:
        for policy, bound in BOUNDS.items():
            for options in MODES:
                frozen = [runs[_frozen(where, policy, seed, runs, options)].whole for seed in seeds]
                accepted = [runs[_tuning(policy, seed, options)].accepted for seed in seeds]
                yield row_of(
                    "protocol",
                    where,
                    policy,
                    frozen,
                    seeds,
                    runs,
                    tuned=f"tuned in mode {options['mode']}",
                    at_most=bound,
                    note=f"{sum(accepted)} accepted in {len(accepted)} runs",
                )


EXPERIMENT = Experiment(
    "protocol", _protocol_first, lambda seeds, runs: list(_protocol_judge(seeds, runs)), _protocol_then
)
