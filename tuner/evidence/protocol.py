"""The paper's protocol: tune on one window, freeze, meet two others at other loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from gorgo.apps.demo.options import DEFAULT_POLICIES as PUBLISHED
from tuner.evidence.statement import (
    OURS,
    PAPER,
    PROTOCOL,
    TUNING,
    Experiment,
    Runs,
    Statement,
    campaign,
    e2e,
    geometric,
    part_ratio,
    stated,
    ttft,
)
from tuner.evidence.task import Task
from tuner.evidence.windows import Windows

HELD_OUT = (("art-chat-apr6", 2.0), ("art-chat-apr7", 3.0))
BASELINES = tuple(name for name in PUBLISHED if name not in (PAPER, "random"))


def _tuning(policy: str, seed: int) -> Task:
    return Task(windows=Windows(shapes=(TUNING,), draw=seed), policy=policy, seed=seed, campaign=campaign(PROTOCOL))


def _held_out(shape: str, load: float, policy: str, seed: int, weights: Mapping[str, float] | None = None) -> Task:
    windows = Windows(shapes=(shape,), draw=seed, time_scale=load)
    return Task(windows=windows, policy=policy, seed=seed, weights=tuple(sorted((weights or {}).items())))


def _protocol_first(seeds: Sequence[int]) -> list[Task]:
    tuned = [_tuning(policy, seed) for policy in (PAPER, OURS) for seed in seeds]
    plain = (*BASELINES, PAPER, OURS)
    return tuned + [_held_out(*where, policy, seed) for where in HELD_OUT for policy in plain for seed in seeds]


def _frozen(where: tuple[str, float], policy: str, seed: int, runs: Runs) -> Task:
    return _held_out(*where, policy, seed, runs[_tuning(policy, seed)].weights)


def _protocol_then(seeds: Sequence[int], runs: Runs) -> list[Task]:
    return [_frozen(where, policy, seed, runs) for where in HELD_OUT for policy in (PAPER, OURS) for seed in seeds]


def _protocol_judge(seeds: Sequence[int], runs: Runs) -> Iterator[Statement]:
    for where in HELD_OUT:
        best = min(
            BASELINES, key=lambda name: median(runs[_held_out(*where, name, seed)].whole.ttft_ms_p95 for seed in seeds)
        )
        for policy, bound in ((PAPER, 0.96), (OURS, 0.90)):
            pairs = [
                (runs[_frozen(where, policy, seed, runs)].whole, runs[_held_out(*where, best, seed)].whole)
                for seed in seeds
            ]
            plain = [
                runs[_frozen(where, policy, seed, runs)].whole.ttft_ms_p95
                / runs[_held_out(*where, policy, seed)].whole.ttft_ms_p95
                for seed in seeds
            ]
            whole = part_ratio(pairs, e2e)
            yield stated(
                "protocol",
                f"{where[0]} x{where[1]:g}: frozen {policy} / {best}, p95 TTFT, median",
                part_ratio(pairs, ttft),
                value=median(ttft(ours) / ttft(theirs) for ours, theirs in pairs),
                at_most=bound,
                note=f"p95 E2E {whole.value:.3f}; against its own defaults {geometric(plain):.3f}" if whole else "",
            )


EXPERIMENT = Experiment(
    "protocol", _protocol_first, lambda seeds, runs: list(_protocol_judge(seeds, runs)), _protocol_then
)
