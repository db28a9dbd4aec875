"""What the experiments share: policies, tuner options, parts of the seeds, and ratios of two runs.

Every comparison pairs runs of the same windows and the same network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Any, TypeAlias

from gorgo.apps.claims.runner import Experiment
from gorgo.apps.simulate.compare import Ratio, ratio_of
from tuner.experiments.task import Task, TaskRun
from tuner.offline.score import RunScore

#: Shape of the window that is tuned on.
TUNING = "art-chat-apr5"
OURS, PAPER = "gorgo-ms", "gorgo"
Options: TypeAlias = tuple[tuple[str, Any], ...]
#: 672 samples: a window of 128, then 17 hops of 32.
PROTOCOL: Options = (("max_generations", 17), ("mode", "paper"))
SWITCHBACK: Options = (("mode", "switchback"),)

Runs: TypeAlias = Mapping[Task, TaskRun]
TuningExperiment: TypeAlias = Experiment[Task, TaskRun]


def half(seeds: Sequence[int]) -> Sequence[int]:
    """Return half of the seeds, at least two: for long runs."""
    return seeds[: max(2, len(seeds) // 2)]


def fifth(seeds: Sequence[int]) -> Sequence[int]:
    """Return a fifth of the seeds: a search is some forty runs."""
    return seeds[: max(1, len(seeds) // 5)]


def twice(seeds: Sequence[int]) -> list[int]:
    """Return 20 seeds for 10."""
    return [*seeds, *(seed + 500 for seed in seeds)]


def ttft(part: RunScore) -> float:
    return nan if part.ttft_ms_p95 is None else part.ttft_ms_p95


def e2e(part: RunScore) -> float:
    return nan if part.e2e_s_p95 is None else part.e2e_s_p95


def part_ratio(pairs: Sequence[tuple[RunScore, RunScore]], figure: Callable[[RunScore], float]) -> Ratio | None:
    return ratio_of([(figure(one), figure(other)) for one, other in pairs])
