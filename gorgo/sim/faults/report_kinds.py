"""Kinds of fault of what a router knows of caches: reports that fare badly, and a router that starts again.

Owns these faults; requests are served through all of them. `kinds` has the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from gorgo.errors import ScenarioError
from gorgo.sim.faults.api import FaultApi, ReportingCaches
from gorgo.sim.faults.kinds import one_or_all
from gorgo.sim.kv_events.path import PathFaults

_NONE = PathFaults()


@dataclass(frozen=True, slots=True)
class BadReports:
    """Reports of a replica's cache, or of all, are lost, doubled, reordered, late or cut off."""

    replica: str | None
    faults: PathFaults
    start_s: float
    end_s: float = inf

    def start(self, world: FaultApi) -> None:
        caches = _reporting(world)
        for name in one_or_all(world, self.replica):
            world.kernel.at(self.start_s, lambda name=name: caches.set_report_faults(name, self.faults))  # type: ignore[misc]
            if self.end_s < inf:
                world.kernel.at(self.end_s, lambda name=name: caches.set_report_faults(name, _NONE))  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class RouterRestart:
    """The router starts with an empty index; the engines are warm."""

    at_s: float

    def start(self, world: FaultApi) -> None:
        world.kernel.at(self.at_s, _reporting(world).restart_router)


def _reporting(world: FaultApi) -> ReportingCaches:
    if not isinstance(world, ReportingCaches):
        raise ScenarioError("expected a simulation whose engines report their caches")
    return world
