"""Random schedules of faults, for properties of whole simulations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from gorgo.lab.sim.faults import Fault, Kill, Partition, Slow, StaleMetrics, replicas_in
from gorgo.lab.sim.fleet import SimFleet, SimReplica


def draw_faults(
    rng: np.random.Generator,
    fleet: SimFleet,
    duration_s: float,
    *,
    every_s: float = 120.0,
    lasts_s: float = 30.0,
) -> list[Fault]:
    """A random schedule: kills, partitions, slow replicas and stale metrics, all over by `duration_s`.

    Three lanes run beside each other (unreachable, slow, stale metrics); in each a fault follows the
    other, after a gap of `every_s` on average and for `lasts_s` on average, so that no two of one kind overlap. In the
    first lane at least one replica always stays. Bounded: a gap is never shorter than a tenth of its mean.
    """
    return [
        *_fault_sequence(rng, duration_s, every_s, lasts_s, lambda *when: _outage(rng, fleet, *when)),
        *_fault_sequence(rng, duration_s, every_s, lasts_s, lambda *when: _slow(rng, fleet, *when)),
        *_fault_sequence(rng, duration_s, every_s, lasts_s, lambda *when: StaleMetrics(_any(rng, fleet), *when)),
    ]


def _fault_sequence(
    rng: np.random.Generator,
    duration_s: float,
    every_s: float,
    lasts_s: float,
    make: Callable[[float, float], Fault | None],
) -> Iterator[Fault]:
    """Faults one after the other."""
    at_s = 0.0
    while True:
        start_s = at_s + every_s * max(0.1, rng.exponential())
        at_s = start_s + lasts_s * rng.uniform(0.2, 1.8)
        if at_s > duration_s:
            return
        fault = make(start_s, at_s)
        if fault is not None:
            yield fault


def _outage(rng: np.random.Generator, fleet: SimFleet, start_s: float, end_s: float) -> Fault | None:
    """Return a kill or a partition that leaves a replica; None in a fleet of one."""
    replica = _drawn(rng, fleet)
    if rng.random() < 0.5 and len(replicas_in(fleet, replica.region)) < len(fleet.replicas):
        return Partition(replica.region, start_s, end_s)
    return Kill(replica.name, start_s, end_s) if len(fleet.replicas) > 1 else None


def _slow(rng: np.random.Generator, fleet: SimFleet, start_s: float, end_s: float) -> Fault:
    factor = float(np.exp(rng.uniform(np.log(1.5), np.log(10.0))))
    return Slow(_drawn(rng, fleet).name, factor, start_s, end_s)


def _any(rng: np.random.Generator, fleet: SimFleet) -> str | None:
    """One replica, or once in four all of them."""
    replica = _drawn(rng, fleet).name
    return None if rng.random() < 0.25 else replica


def _drawn(rng: np.random.Generator, fleet: SimFleet) -> SimReplica:
    return fleet.replicas[int(rng.integers(len(fleet.replicas)))]
