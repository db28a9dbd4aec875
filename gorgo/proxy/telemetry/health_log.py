"""Log lines and counts for changes of the fleet: a replica or a region lost or back, an engine that restarted."""

from __future__ import annotations

import logging

from gorgo.core.messages.events import FleetEvent, HealthChanged, RegionChanged, ReplicaRestarted
from gorgo.proxy.logs import log
from gorgo.proxy.telemetry.metrics import Metrics

_HEALTH = {"healthy": "replica_readmitted", "ejected": "replica_ejected", "half_open": "replica_on_trial"}


class HealthLog:
    """Logs each fleet event as a warning and counts restarts."""

    __slots__ = ("_metrics",)

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __call__(self, event: FleetEvent) -> None:
        match event:
            case HealthChanged():
                log(_HEALTH[event.state], level=logging.WARNING, replica=event.replica)
            case RegionChanged():
                name = "region_reachable" if event.reachable else "region_unreachable"
                log(name, level=logging.WARNING, region=event.region)
            case ReplicaRestarted():
                log("replica_restarted", level=logging.WARNING, replica=event.replica)
                self._metrics.replica_restarted(event.replica, event.region)
