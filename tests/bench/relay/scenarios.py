"""What is measured: the jobs of a round, and the figures that are drawn from them.

Owns names, sizes and lengths, and what load and bench say to each other: a job and its figures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SMALL, LARGE = 500, 90_000
MEMORY = "memory"
STREAMS = 64
_OPEN_STREAMS = 1000
_GAP_MS = 10
_TOKENS = 128
#: Longer than any window, so that held streams end only when the load closes them.
ENDLESS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to send, and how.

    Parameters
    ----------
    kind
        `closed`: each of `connections` sends its next request when the last one is answered. `paced`: seeded
        exponential arrivals, `rate` requests a second, whatever the answers do. `hold`: `connections` streams stay
        open; counting starts when all run.
    seconds
        How long to send (closed, paced) or to count (hold).
    """

    kind: Literal["closed", "paced", "hold"]
    port: int
    #: First process of the relay; None measures no process.
    process: int | None
    seconds: float
    size: int
    tokens: int
    gap_ms: int = 0
    stream: bool = True
    connections: int = 8
    rate: float = 50.0
    #: Longest time until all streams of `hold` run.
    open_s: float = 8.0
    #: Of `hold`: more streams are opened once no more than so many wait for their first token; `None`: at once.
    most_waiting: int | None = None
    tls: bool = False
    #: Where every other connection goes: of a relay that is two routers.
    second_port: int | None = None


@dataclass(slots=True, kw_only=True)
class Figures:
    """What came of a job. `requests` counts those answered well; `bad` those with a wrong status or token count."""

    requests: int = 0
    tokens: int = 0
    bad: int = 0
    cpu_s: float = 0.0
    #: Of the relay's first process alone.
    first_cpu_s: float = 0.0
    waited_s: float = 0.0
    wall_s: float = 0.0
    resident_before: int = 0
    resident_after: int = 0
    ttft_s: list[float] = field(default_factory=list)
    #: Median, p99 and longest gap between two reads of a held stream.
    gap_s: list[float] = field(default_factory=list)
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A named job; `process`, `port` and `tls` are filled in per relay."""

    name: str
    job: Mapping[str, Any]
    #: Whether the engine itself is measured too, to subtract it.
    direct: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How many rounds at most, the factor on the length of each job, and the jobs' names (none: all of them)."""

    rounds: int
    scale: float
    only: tuple[str, ...] = ()
    #: Relays whose limit is searched for; none: all that are comparable.
    searched: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        """Whether a job is one of them."""
        return not self.only or name in self.only


#: About a quarter of an hour, and well under two minutes.
FULL, SHORT = Plan(4, 1.0), Plan(1, 0.4, searched=("gorgo",))


def plan_from_environment() -> Plan:
    """`GORGO_BENCH_SHORT=1` asks for the short one."""
    return SHORT if os.environ.get("GORGO_BENCH_SHORT") else FULL


def streams_at(count: int, scale: float) -> Scenario:
    """So many open streams of 100 events a second each."""
    job = {"kind": "hold", "size": SMALL, "tokens": ENDLESS, "gap_ms": _GAP_MS, "connections": count}
    return Scenario(name=f"{count} streams", job={**job, "seconds": 1.5 * scale})


def each_round(plan: Plan) -> list[Scenario]:
    """The jobs of one round, each done by every relay before the next begins."""
    closed = {"kind": "closed", "seconds": 1.0 * plan.scale, "stream": False, "tokens": _TOKENS, "connections": 16}
    paced = {"kind": "paced", "seconds": 4.0 * plan.scale, "tokens": 8, "gap_ms": _GAP_MS}
    streams = {"size": SMALL, "gap_ms": _GAP_MS, "connections": STREAMS}
    memory = {
        "kind": "hold",
        "open_s": 60.0,
        "size": SMALL,
        "tokens": ENDLESS,
        "gap_ms": 1000,
        "connections": _OPEN_STREAMS,
    }
    every = [
        # Before anything else has grown the heap of processes that have just started.
        Scenario(name=MEMORY, job={**memory, "seconds": 1.0 * plan.scale}),
        Scenario(name="requests_small", job={**closed, "size": SMALL}),
        Scenario(name="requests_large", job={**closed, "size": LARGE}),
        Scenario(name="ttft_small", job={**paced, "size": SMALL}, direct=True),
        Scenario(name="ttft_large", job={**paced, "size": LARGE}, direct=True),
        # Two streams one after the other on each connection.
        Scenario(name="streams", job={**streams, "kind": "closed", "tokens": _TOKENS, "seconds": 2.0 * plan.scale}),
        Scenario(name="events", job={**streams, "kind": "hold", "tokens": ENDLESS, "seconds": 2.0 * plan.scale}),
    ]
    return [scenario for scenario in every if plan.takes(scenario.name)]
