"""The targets of the group `engines`: every shape of traffic, two kinds of scheduler, full and partial hits.

Owns the workloads and their loads. At its load a shape keeps the fleet busy without saturating it, also where engines
find 60 % of each prefix.
"""

from __future__ import annotations

from collections.abc import Iterator

from gorgo.apps.claims.target import RatioTarget
from gorgo.apps.claims.workload import Workload
from gorgo.apps.demo.options import ALL_READINGS, OURS, PAPER
from gorgo.apps.simulate.job import STEADY
from gorgo.apps.traces import TraceFilters

#: Prompts as in the other groups, answers as the shape draws them; so many requests are three to seven minutes.
FILTERS = TraceFilters(max_input=24_000, limit=2_000)
#: Seeds of a check that count here: with three, half of the intervals are wider than what is claimed.
SEEDS = 10
#: Time scale of each shape.
SHAPES = {
    "art-chat-apr6": 1.5,
    "wildchat-like": 1.0,
    "toolagent-like": 2.0,
    "synthetic-like": 1.25,
    "rag": 1.0,
    "short-chat": 1.0,
    "groups": 1.0,
    "sharing": 1.0,
}
#: Named fleets of the two schedulers, and how much of a prefix engines find.
FLEETS = ("sglang", "vllm")
SCENARIOS = (STEADY, "partial-hits-60")
MEASURES_OF_GROUP = ("p95 TTFT", "p95 E2E")
#: `gorgo-ms` is at most so far behind the better of the published policy and the best baseline.
AT_MOST = 1.03


def engine_workloads() -> Iterator[Workload]:
    """Yield every shape on every fleet, with full and with partial hits."""
    for name, time_scale in SHAPES.items():
        shape = Workload(name=name, traces=(name,), filters=FILTERS, time_scale=time_scale, seeds=SEEDS)
        for fleet in FLEETS:
            yield from (shape.on(fleet).under(scenario) for scenario in SCENARIOS)


def engine_targets() -> Iterator[RatioTarget]:
    """Yield a target per workload and figure."""
    for figure in MEASURES_OF_GROUP:
        for workload in engine_workloads():
            yield RatioTarget(
                group="engines",
                policy=OURS,
                workloads=(workload,),
                others=(PAPER, *ALL_READINGS),
                figure=figure,
                at_most=AT_MOST,
            )
