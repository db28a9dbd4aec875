"""Changes of the fleet for the operator: health, regions, restarts of engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class HealthChanged:
    """Outlier detection ejected a replica, put it on probation (`half_open`) or readmitted it."""

    replica: str
    state: Literal["healthy", "ejected", "half_open"]


@dataclass(frozen=True, slots=True)
class RegionChanged:
    """All replicas of a region fail their probes, or one answers again."""

    region: str
    reachable: bool


@dataclass(frozen=True, slots=True)
class ReplicaRestarted:
    """An engine has started again: its counters went back, and its prefix index was emptied."""

    replica: str
    region: str


FleetEvent = HealthChanged | RegionChanged | ReplicaRestarted
