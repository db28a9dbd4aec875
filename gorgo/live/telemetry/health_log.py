"""Log lines and counts for changes of the fleet: a replica or a region lost or back, an engine that restarted.

A loss is a warning, a recovery is not.
"""

from __future__ import annotations

import logging

from gorgo.core.messages.events import FleetEvent, HealthChanged, RegionChanged, ReplicaRestarted
from gorgo.live.logs import log
from gorgo.live.telemetry.metrics import Metrics

#: Event of a state, and its level.
_HEALTH = {
    "healthy": ("replica_readmitted", logging.INFO),
    "ejected": ("replica_ejected", logging.WARNING),
    "half_open": ("replica_on_trial", logging.INFO),
}


class HealthLog:
    """Logs each fleet event and counts restarts."""

    __slots__ = ("_metrics",)

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __call__(self, event: FleetEvent) -> None:
        match event:
            case HealthChanged():
                name, level = _HEALTH[event.state]
                log(name, level=level, replica=event.replica)
            case RegionChanged(reachable=True):
                log("region_reachable", region=event.region)
            case RegionChanged():
                log("region_unreachable", level=logging.WARNING, region=event.region)
            case ReplicaRestarted():
                log("replica_restarted", level=logging.WARNING, replica=event.replica)
                self._metrics.replica_restarted(event.replica, event.region)
