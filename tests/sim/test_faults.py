"""Faults against a world that writes down what is done to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest

from gorgo.errors import ScenarioError, UnknownReplica
from gorgo.sim.faults import (
    Fault,
    Freezing,
    Kill,
    LatePath,
    Partition,
    RttShift,
    Slow,
    StaleMetrics,
    StaleProbes,
)
from gorgo.sim.fleet import SimFleet
from gorgo.sim.kernel import Kernel
from gorgo.sim.random_faults import draw_faults
from gorgo.sim.scenario import find_scenario
from gorgo.sim.world import EngineView, World
from tests.sim.fleets import three_regions


class Diary:
    """A world in which nothing runs: a line per thing done, with its time."""

    def __init__(self, fleet: SimFleet) -> None:
        self.kernel = Kernel()
        self.fleet = fleet
        self.engines: Mapping[str, EngineView] = {}
        self.lines: list[tuple[object, ...]] = []

    def _note(self, *line: object) -> None:
        self.lines.append((self.kernel.now, *line))

    def set_slowdown(self, replica: str, factor: float) -> None:
        self._note("slowdown", replica, factor)

    def set_rtt(self, region: str, rtt_s: float) -> None:
        self._note("rtt", region, rtt_s)

    def kill(self, replica: str) -> None:
        self._note("kill", replica)

    def revive(self, replica: str) -> None:
        self._note("revive", replica)

    def set_metrics(self, replica: str, told: bool) -> None:
        self._note("metrics", replica, told)

    def set_probes(self, replica: str, told: bool) -> None:
        self._note("probes", replica, told)

    def set_path_delay(self, region: str, share: float, low_s: float, high_s: float) -> None:
        self._note("path", region, share, low_s, high_s)


class CutDiary(Diary):
    def set_reachable(self, replica: str, reachable: bool) -> None:
        self._note("reachable", replica, reachable)


def diary(*faults: Fault, world: Diary | None = None) -> list[tuple[object, ...]]:
    world = world or Diary(three_regions())
    a_world: World = world
    for fault in faults:
        fault.start(a_world)
    world.kernel.run()
    return world.lines


@pytest.mark.parametrize(
    ("fault", "done"),
    [
        (
            Slow("ap-seoul-0", 3.0, 10.0, 20.0),
            [(10.0, "slowdown", "ap-seoul-0", 3.0), (20.0, "slowdown", "ap-seoul-0", 1.0)],
        ),
        (RttShift("eu-frankfurt", 0.32, 5.0), [(5.0, "rtt", "eu-frankfurt", 0.32)]),
        (
            RttShift("eu-frankfurt", 0.32, 5.0, 6.0),
            [(5.0, "rtt", "eu-frankfurt", 0.32), (6.0, "rtt", "eu-frankfurt", 0.095)],
        ),
        (Kill("us-ashburn-0", 1.0, 2.0), [(1.0, "kill", "us-ashburn-0"), (2.0, "revive", "us-ashburn-0")]),
        (Kill("us-ashburn-0", 1.0), [(1.0, "kill", "us-ashburn-0")]),
        (
            StaleMetrics("us-ashburn-0", 1.0, 2.0),
            [(1.0, "metrics", "us-ashburn-0", False), (2.0, "metrics", "us-ashburn-0", True)],
        ),
        (StaleProbes("ap-seoul-0", 1.0), [(1.0, "probes", "ap-seoul-0", False)]),
        (
            LatePath("ap-seoul", end_s=9.0),
            [(0.0, "path", "ap-seoul", 0.015, 1.0, 3.0), (9.0, "path", "ap-seoul", 0.0, 0.0, 0.0)],
        ),
        (Partition("ap-seoul", 1.0, 2.0), [(1.0, "kill", "ap-seoul-0"), (2.0, "revive", "ap-seoul-0")]),
    ],
    ids=repr,
)
def test_a_fault_does_at_its_times_what_it_says(fault: Fault, done: list[tuple[object, ...]]) -> None:
    assert diary(fault) == done


def test_metrics_of_all_replicas_stop_at_once() -> None:
    lines = diary(StaleMetrics(None, 1.0))
    assert lines == [(1.0, "metrics", f"{region}-0", False) for region in ("us-ashburn", "eu-frankfurt", "ap-seoul")]


def test_a_partition_takes_all_of_its_region_and_only_cuts_where_the_world_can() -> None:
    six = find_scenario("six-replicas").fleet(three_regions())
    lines = diary(Partition("ap-seoul", 1.0, 2.0), world=CutDiary(six))
    assert lines == [
        (1.0, "reachable", "ap-seoul-0", False),
        (1.0, "reachable", "ap-seoul-1", False),
        (2.0, "reachable", "ap-seoul-0", True),
        (2.0, "reachable", "ap-seoul-1", True),
    ]


def test_a_freezing_replica_freezes_again_and_again_until_its_end() -> None:
    lines = diary(Freezing("us-ashburn-0", end_s=305.0))
    assert [(line[0], line[3]) for line in lines] == [
        (100.0, 40.0),
        (108.0, 1.0),
        (200.0, 40.0),
        (208.0, 1.0),
        (300.0, 40.0),
        (305.0, 1.0),
    ]


@pytest.mark.parametrize(
    "fault", [Slow("mars-0", 3.0, 0.0), Kill("mars-0", 0.0), StaleProbes("mars-0", 0.0), Freezing("mars-0", 1.0)]
)
def test_a_fault_of_a_replica_that_is_not_there_says_who_is(fault: Fault) -> None:
    with pytest.raises(UnknownReplica, match=r"'mars-0'.*us-ashburn-0, eu-frankfurt-0, ap-seoul-0"):
        diary(fault)


@pytest.mark.parametrize("fault", [RttShift("mars", 1.0, 0.0), Partition("mars", 0.0), LatePath("mars")])
def test_a_fault_of_a_region_without_replicas_says_which_there_are(fault: Fault) -> None:
    with pytest.raises(ScenarioError, match=r"'mars'.*us-ashburn, eu-frankfurt, ap-seoul"):
        diary(fault)


def test_a_freeze_without_an_end_is_refused() -> None:
    with pytest.raises(ScenarioError, match="an end"):
        diary(Freezing("us-ashburn-0", end_s=float("inf")))


def test_a_drawn_schedule_is_the_seed_s_and_leaves_somebody_alive() -> None:
    fleet, kinds = three_regions(), set()
    for seed in range(20):
        faults = draw_faults(np.random.default_rng(seed), fleet, 1800.0)
        assert repr(faults) == repr(draw_faults(np.random.default_rng(seed), fleet, 1800.0))
        kinds |= {type(fault) for fault in faults}
        assert 3 <= len(faults) <= 150
        for line in _lanes(faults):
            for (_, end_s), (start_s, _) in pairwise(line):
                assert start_s > end_s, "one after the other"
            assert all(0.0 < start_s < end_s <= 1800.0 for start_s, end_s in line)
        down: set[object] = set()
        for _, what, replica, *_ in diary(*faults):
            if what == "kill":
                down.add(replica)
            elif what == "revive":
                down.discard(replica)
            assert len(down) < len(fleet.replicas)
        assert not down, "all are back at the end"
    assert kinds == {Kill, Partition, Slow, StaleMetrics}


def test_a_lone_replica_is_never_drawn_to_die() -> None:
    alone = SimFleet(three_regions().replicas[:1])
    for seed in range(5):
        faults = draw_faults(np.random.default_rng(seed), alone, 1800.0)
        assert faults
        assert not any(isinstance(fault, Kill | Partition) for fault in faults)


def _lanes(faults: Sequence[Fault]) -> list[list[tuple[float, float]]]:
    kinds = ((Kill, Partition), (Slow,), (StaleMetrics,))
    return [[(fault.start_s, fault.end_s) for fault in faults if isinstance(fault, kind)] for kind in kinds]
