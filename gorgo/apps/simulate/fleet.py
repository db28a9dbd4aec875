"""The fleet that a simulation runs, from regions.yaml: the Router is told of each replica what `gorgo serve` tells it.

Owns the step from the configuration. What an engine is comes from the `simulation` section, what the router assumes
of it from `replicas`, so that priors can be wrong here as they can be there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gorgo.config.model import Config
from gorgo.config.router_settings import replica_spec, router_limits
from gorgo.core.limits import RouterLimits
from gorgo.errors import ConfigError
from gorgo.sim.engine.profiles import find_profile
from gorgo.sim.fleet import SimFleet, SimReplica
from gorgo.sim.network.links import Link
from gorgo.sim.workload import BLOCK_TOKENS


def fleet_of(config: Config, *, source: Path) -> SimFleet:
    """Every replica that is not draining, on the profile of the `simulation` section.

    Models are left out: a trace asks for none. Raises `ConfigError` for a region without a round trip and
    `UnknownProfile`.
    """
    simulation = config.simulation
    profile = find_profile(simulation.profile)
    replicas = []
    for replica in config.replicas:
        if replica.draining:
            continue
        rtt_ms = simulation.rtt_ms.get(replica.region)
        if rtt_ms is None:
            place = f"simulation.rtt_ms.{replica.region}"
            raise ConfigError(f"{source}: {place}: missing; expected the mean round trip to that region in ms")
        spec = replace(replica_spec(replica), models=())
        replicas.append(SimReplica(spec, profile, Link(rtt_s=rtt_ms / 1e3)))
    if not replicas:
        raise ConfigError(f"{source}: replicas: all are draining; expected one to simulate")
    return SimFleet(tuple(replicas))


def limits_of(config: Config) -> RouterLimits:
    """The Router's bounds as `gorgo serve` sets them, with blocks of a trace's size."""
    return replace(router_limits(config), block_tokens=float(BLOCK_TOKENS))
