"""The fleet that a simulation runs, from regions.yaml: the Router is told of each replica what `gorgo serve` tells it.

Owns the step from the configuration. What an engine is comes from the `simulation` section, what the router assumes
of it from `replicas`, so that priors can be wrong here as they can be there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gorgo.config.model import Config, SimulationConfig
from gorgo.config.router_settings import replica_spec, router_limits
from gorgo.core.limits import RouterLimits
from gorgo.errors import ConfigError
from gorgo.lab.profile_file import is_profile_file, read_profile
from gorgo.lab.sim.engine.profiles import EngineProfile, find_profile
from gorgo.lab.sim.fleet import SimFleet, SimReplica, find_fleet
from gorgo.lab.sim.network import Link
from gorgo.lab.sim.workload import BLOCK_TOKENS


def fleet_of(config: Config, *, source: Path) -> SimFleet:
    """Every replica that is not draining, on its profile of the `simulation` section.

    Models are left out: a trace asks for none. Raises `ConfigError` for a region without a round trip and
    `UnknownProfile`.
    """
    simulation = config.simulation
    replicas = []
    for replica in config.replicas:
        if replica.draining:
            continue
        rtt_ms = simulation.rtt_ms.get(replica.region)
        if rtt_ms is None:
            place = f"simulation.rtt_ms.{replica.region}"
            raise ConfigError(f"{source}: {place}: missing; expected the mean round trip to that region in ms")
        spec = replace(replica_spec(replica), models=())
        profile = profile_of(simulation, replica.name)
        replicas.append(SimReplica(spec, profile, Link(rtt_s=rtt_ms / 1e3)))
    if not replicas:
        lack = "all are draining" if config.replicas else "none"
        raise ConfigError(f"{source}: replicas: {lack}; expected one to simulate")
    return SimFleet(tuple(replicas))


def chosen_fleet(config: Config, name: str | None, *, source: Path) -> SimFleet:
    """Return the named fleet, or without a name that of the configuration; raises `UnknownFleet`."""
    return fleet_of(config, source=source) if name is None else find_fleet(name)


def profile_of(simulation: SimulationConfig, replica: str) -> EngineProfile:
    """Return the engine profile of a replica, by name or from a file. Raises `UnknownProfile` and `ConfigError`."""
    name = simulation.profiles.get(replica, simulation.profile)
    return read_profile(Path(name)) if is_profile_file(name) else find_profile(name)


def limits_of(config: Config) -> RouterLimits:
    """The Router's bounds as `gorgo serve` sets them, with blocks of a trace's size."""
    return replace(router_limits(config), block_tokens=float(BLOCK_TOKENS))


def with_queue_for_all(limits: RouterLimits, *, enabled: bool) -> RouterLimits:
    """Return the limits with the queue of the proxy under every policy, or under none."""
    overload = replace(limits.overload, queue_enabled=enabled, queue_every_policy=enabled)
    return replace(limits, overload=overload)
