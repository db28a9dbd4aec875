"""The fleet that a simulation runs: which engine each replica is, and how far away.

Owns the records. What the Router is told of a replica (`spec`, with priors that may be wrong) is apart from what it is
(`profile`), so that an experiment can make the two differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.lab.sim.engine.profiles import EngineProfile
from gorgo.lab.sim.network import Link


@dataclass(frozen=True, slots=True)
class SimReplica:
    """One simulated replica.

    Parameters
    ----------
    spec:
        What the Router knows: name, region, priors.
    profile:
        What the engine is.
    link:
        The way from the proxy to it.
    """

    spec: ReplicaSpec
    profile: EngineProfile
    link: Link

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def region(self) -> str:
        return self.spec.region


@dataclass(frozen=True, slots=True)
class SimFleet:
    """All replicas, in the order in which they join the Router's fleet; `name` is empty for that of regions.yaml."""

    replicas: Sequence[SimReplica]
    name: str = ""
