"""What is measured: the jobs of a round, and the figures that are drawn from them.

Owns names, sizes and lengths; `load.Job` says what the kinds mean.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SMALL, LARGE = 500, 90_000
MEMORY = "memory"
STREAMS = 64
_OPEN_STREAMS = 1000
_GAP_MS = 10
_TOKENS = 128
#: Longer than any window, so that held streams end only when the load closes them.
_ENDLESS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A named job for `load.Job`; `process` and `port` are filled in per relay."""

    name: str
    job: Mapping[str, Any]
    #: Whether the engine itself is measured too, to subtract it.
    direct: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How many rounds, the factor on the length of each job, and the jobs' names (none: all of them)."""

    rounds: int
    scale: float
    only: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        """Whether a job is one of them."""
        return not self.only or name in self.only


#: About four minutes, and well under one.
FULL, QUICK = Plan(4, 1.0), Plan(1, 0.6)


def plan_from_environment() -> Plan:
    """`GORGO_BENCH_QUICK=1` asks for the quick one."""
    return QUICK if os.environ.get("GORGO_BENCH_QUICK") else FULL


def memory(plan: Plan) -> Scenario:
    """A thousand open streams: their memory, once per relay, before anything else has grown its heap."""
    job = {"kind": "hold", "size": SMALL, "tokens": _ENDLESS, "gap_ms": 1000, "connections": _OPEN_STREAMS}
    return Scenario(name=MEMORY, job={**job, "seconds": 1.0 * plan.scale})


def each_round(plan: Plan) -> list[Scenario]:
    """The jobs of one round, each done by every relay before the next begins."""
    closed = {"kind": "closed", "seconds": 1.0 * plan.scale, "stream": False, "tokens": _TOKENS, "connections": 16}
    paced = {"kind": "paced", "seconds": 3.0 * plan.scale, "tokens": 8, "gap_ms": _GAP_MS}
    streams = {"size": SMALL, "gap_ms": _GAP_MS, "connections": STREAMS}
    every = [
        Scenario(name="requests_small", job={**closed, "size": SMALL}),
        Scenario(name="requests_large", job={**closed, "size": LARGE}),
        Scenario(name="ttft_small", job={**paced, "size": SMALL}, direct=True),
        Scenario(name="ttft_large", job={**paced, "size": LARGE}, direct=True),
        # Two streams one after the other on each connection.
        Scenario(name="streams", job={**streams, "kind": "closed", "tokens": _TOKENS, "seconds": 2.0 * plan.scale}),
        Scenario(name="events", job={**streams, "kind": "hold", "tokens": _ENDLESS, "seconds": 2.0 * plan.scale}),
    ]
    return [scenario for scenario in every if plan.takes(scenario.name)]
