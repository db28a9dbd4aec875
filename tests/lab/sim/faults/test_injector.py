"""Who is meant by a name or a region, and what reaches each replica."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gorgo.errors import UnknownReplica
from gorgo.lab.sim.faults.injector import FaultInjector
from gorgo.lab.sim.faults.scenarios import find_scenario
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.sim.workload import SimRequest, scaled
from gorgo.policies.registry import make_policy
from tests.lab.sim.fleets import three_regions


def six() -> Simulation:
    fleet = find_scenario("six-replicas").fleet(three_regions())
    return Simulation(fleet, make_policy("nearest"), seed=0)


def test_a_region_is_all_of_its_replicas_and_no_other() -> None:
    simulated = six()
    simulated.injector.set_rtt("ap-seoul", 0.5)
    assert {name for name, site in simulated.engines.items() if site.rtt_s == 0.5} == {"ap-seoul-0", "ap-seoul-1"}
    simulated.injector.set_rtt("mars", 9.0)
    assert max(site.rtt_s for site in simulated.engines.values()) == 0.5


def test_a_named_lever_moves_one_replica() -> None:
    simulated = six()
    injector, sites = simulated.injector, simulated.engines
    injector.set_slowdown("ap-seoul-1", 3.0)
    assert [name for name, site in sites.items() if site.model.slowdown == 3.0] == ["ap-seoul-1"]
    injector.kill("ap-seoul-0")
    injector.set_reachable("ap-seoul-1", False)
    assert [name for name, site in sites.items() if not site.alive] == ["ap-seoul-0", "ap-seoul-1"]
    injector.revive("ap-seoul-0")
    injector.set_reachable("ap-seoul-1", True)
    assert all(site.alive for site in sites.values())
    injector.set_metrics("us-ashburn-0", False)
    injector.set_probes("us-ashburn-1", False)
    assert [name for name, site in sites.items() if not site.ports[0].background.reports_metrics] == ["us-ashburn-0"]
    assert [name for name, site in sites.items() if not site.ports[0].background.reports_probes] == ["us-ashburn-1"]


@pytest.mark.parametrize(
    "act",
    [
        lambda injector: injector.set_slowdown("mars-0", 2.0),
        lambda injector: injector.kill("mars-0"),
        lambda injector: injector.revive("mars-0"),
        lambda injector: injector.set_reachable("mars-0", False),
        lambda injector: injector.set_metrics("mars-0", False),
        lambda injector: injector.set_probes("mars-0", False),
    ],
)
def test_an_unknown_replica_is_answered_with_the_known_ones(act: Callable[[FaultInjector], None]) -> None:
    with pytest.raises(UnknownReplica, match=r"'mars-0'; the fleet has: us-ashburn-0, .*ap-seoul-1"):
        act(six().injector)


def test_a_scale_stretches_the_time_and_nothing_else() -> None:
    feed = [
        SimRequest(index=n, arrival_s=float(n), prompt_tokens=10, output_tokens=1, blocks=b"", prefix_hash=n)
        for n in range(3)
    ]
    assert [request.arrival_s for request in scaled(feed, 2.0)] == [0.0, 2.0, 4.0]
    assert [(request.index, request.prefix_hash) for request in scaled(feed, 2.0)] == [(0, 0), (1, 1), (2, 2)]
    assert scaled(feed, 1.0) == tuple(feed)
