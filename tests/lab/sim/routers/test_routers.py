"""Several routers of one fleet in virtual time."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import numpy as np
import pytest

from gorgo.errors import ConfigError
from gorgo.lab.sim.engine.driver import SimAttempt
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.network import RandomTable, TripDelays
from gorgo.lab.sim.oracle import make_oracle
from gorgo.lab.sim.records import SimResult
from gorgo.lab.sim.remote_replica import RemoteReplica
from gorgo.lab.sim.routers import FirstTokenTimeouts, RouterGroup
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.sim.workload import SimRequest
from gorgo.policies.registry import make_policy
from tests.lab.sim.fleets import conversations, three_regions

FEED = conversations(400, every_s=0.12, users=40)


def simulation(policy: str = "gorgo-ms", *, near: bool = False, **changes: Any) -> Simulation:
    fleet = three_regions(a=0.002, b=0.002, c=0.002) if near else three_regions()
    group = RouterGroup(**{"count": 4, **changes})
    return Simulation(fleet, make_oracle() if policy == "oracle" else make_policy(policy), seed=0, routers=group)


def hit(result: SimResult) -> float:
    cached = [record.cached_tokens or 0 for record in result.records]
    return sum(cached) / sum(record.input_tokens for record in result.records)


def check(run: Simulation) -> None:
    for shell in run.shells:
        shell.router.check()
        assert shell.router.in_flight == 0
        assert {row.in_flight_tokens for row in shell.router.view.snapshots(now=0.0)} == {0}


def test_routers_over_one_set_of_engines_serve_every_request_once() -> None:
    run = simulation(sharing="store", loss=0.2)
    result = run.run(FEED)
    check(run)
    assert [record.id for record in result.records] == [str(request.index) for request in FEED]
    assert {record.status for record in result.records} == {200}
    served = [len(shell.router.view.newest_decisions(len(FEED))) for shell in run.shells]
    assert min(served) > 60
    assert sum(served) == len(FEED)


@pytest.mark.parametrize("sharing", [pytest.param("store", marks=pytest.mark.system), "local"])
def test_reports_give_routers_the_hit_of_one_that_sees_all(sharing: str) -> None:
    """Of three feeds: one decision that differs moves the hits of one feed by up to a point either way."""
    feeds = [conversations(400, every_s=0.12, users=40, seed=seed) for seed in range(3)]
    alone, shared, one = (
        np.mean([hit(simulation(near=True, sharing=each).run(feed)) for feed in feeds])
        for each in ("none", sharing, "all")
    )
    assert alone < one - 0.1
    assert shared > one - 0.01


def test_workers_of_one_machine_report_every_10_ms_and_routers_with_a_store_every_100() -> None:
    local, store = RouterGroup(count=2, sharing="local"), RouterGroup(count=2, sharing="store")
    assert (local.interval_s, local.report_delay_s) == (0.01, 0.001)
    assert (store.interval_s, store.report_delay_s) == (0.1, 0.005)
    assert RouterGroup(count=2, sharing="local", delay_s=0.25).report_delay_s == 0.25
    sent = []
    for sharing in ("local", "store"):
        run = simulation(count=2, sharing=sharing)
        run.run(FEED[:100])
        assert run.store is not None
        sent.append(run.store.reports)
    assert sent[0] > sent[1], "a router without news does not report"


def test_one_router_that_sees_all_decides_as_a_router_without_a_group() -> None:
    single = Simulation(three_regions(), make_policy("gorgo-ms"), seed=0).run(FEED)
    grouped = simulation(count=8, sharing="all").run(FEED)
    assert [record.as_json() for record in grouped.records] == [record.as_json() for record in single.records]


def test_a_run_with_a_store_is_the_same_every_time() -> None:
    runs = [simulation(sharing="store", loss=0.3).run(FEED[:200]) for _ in range(2)]
    assert [record.as_json() for record in runs[0].records] == [record.as_json() for record in runs[1].records]


def test_policies_with_a_state_are_one_per_router() -> None:
    run = simulation("multi-depth", sharing="store")
    run.run(FEED[:100])
    assert len({id(shell.router.settings.policy) for shell in run.shells}) == 4
    check(run)


def test_the_oracle_of_each_router_sees_the_engines_from_there() -> None:
    result = simulation("oracle", split="region", count=3).run(FEED[:60])
    assert {record.status for record in result.records} == {200}
    assert {record.region for record in result.records} == {"us-ashburn", "eu-frankfurt", "ap-seoul"}


def test_routers_of_three_regions_serve_their_own_region_first() -> None:
    idle = conversations(60, every_s=2.0, users=40)
    run = simulation(split="region", count=3)
    result = run.run(idle)
    homes = {"us-ashburn": 0, "eu-frankfurt": 1, "ap-seoul": 2}
    group = RouterGroup(count=3, split="region")
    served_at_home = [
        homes[record.region or ""] == group.router_of(request, seed=0)
        for request, record in zip(idle, result.records, strict=True)
    ]
    assert np.mean(served_at_home) > 0.8


def test_the_store_counts_reports_and_their_bytes() -> None:
    run = simulation(sharing="store")
    result = run.run(FEED[:100])
    assert run.store is not None
    # Twice a second if nothing has changed, at most ten times and once per long prefill.
    assert 2 * 4 * (result.ended_s - 1.0) < run.store.reports < 10 * 4 * result.ended_s + 100
    assert run.store.bytes > 50 * run.store.reports


def test_a_router_that_is_killed_fails_its_requests_and_releases_its_engines() -> None:
    run = simulation(sharing="store", count=2)
    killed_s = FEED[200].arrival_s + 0.01
    run.kernel.at(killed_s, lambda: run.replace_router(0))
    result = run.run(FEED)
    check(run)
    broken = [record for record in result.records if record.error == "router_killed"]
    assert broken
    assert all(record.scheduled_s <= killed_s <= record.scheduled_s + (record.e2e_s or 0.0) for record in broken)
    others = [record for record in result.records if record.error is None]
    assert {record.status for record in others} == {200}
    assert all(site.model.running == site.model.queued == 0 for site in run.engines.values())


@pytest.mark.parametrize("sharing", ["none", "store"])
def test_a_new_router_knows_what_the_store_has(sharing: str) -> None:
    run = simulation(sharing=sharing, count=1)
    known: list[int] = []

    def replace() -> None:
        run.replace_router(0)
        peers = run.router.peers.exchange
        known.append(0 if peers is None else len(peers.prefixes))

    run.kernel.at(FEED[200].arrival_s, replace)
    run.run(FEED)
    check(run)
    assert (known[0] > 100) == (sharing == "store")


def test_a_replica_that_one_router_ejects_is_probed_by_the_others() -> None:
    run = simulation(sharing="store", count=2)
    probed: list[float] = []
    port = run.shells[1].ports["ap-seoul-0"][1]
    probe = port.background.probe

    def record() -> None:
        probed.append(run.kernel.now)
        probe()

    port.background.probe = record  # type: ignore[method-assign]

    def eject() -> None:
        for _ in range(3):
            run.shells[0].on_probe("ap-seoul-0", None)

    run.kernel.at(5.0, eject)
    run.run(FEED)
    assert [at for at in probed if 5.0 < at < 5.2]


def test_reports_of_caches_are_for_one_router() -> None:
    with pytest.raises(ConfigError, match="expected none or usage"):
        Simulation(
            three_regions(), make_policy("gorgo-ms"), seed=0, cache_reports="events", routers=RouterGroup(count=2)
        )


def test_an_empty_feed_ends_at_once() -> None:
    feed: list[SimRequest] = []
    assert simulation(sharing="store").run(feed).records == []


# group


GROUP_FEED = conversations(300, every_s=0.1)


def test_random_requests_are_spread_evenly_and_alike_for_one_seed() -> None:
    group = RouterGroup(count=4)
    counts = Counter(group.router_of(request, seed=0) for request in GROUP_FEED)
    assert set(counts) == {0, 1, 2, 3}
    assert min(counts.values()) > 50
    again = [group.router_of(request, seed=0) for request in GROUP_FEED]
    assert again == [group.router_of(request, seed=0) for request in GROUP_FEED]
    assert again != [group.router_of(request, seed=1) for request in GROUP_FEED]


def test_a_session_stays_with_its_router() -> None:
    group = RouterGroup(count=4, split="session")
    routers = {(request.session_id, group.router_of(request, seed=index)) for index, request in enumerate(GROUP_FEED)}
    assert len(routers) == len({request.session_id for request in GROUP_FEED})


def test_one_router_that_sees_all_gets_every_request() -> None:
    group = RouterGroup(count=8, sharing="all")
    assert {group.router_of(request, seed=0) for request in GROUP_FEED} == {0}


def test_a_router_of_another_region_has_that_region_near() -> None:
    group, fleet = RouterGroup(count=3, split="region"), three_regions()
    links = [[round(link.rtt_s, 3) for link in group.links(fleet, number)] for number in range(3)]
    assert links == [[0.002, 0.095, 0.18], [0.097, 0.002, 0.275], [0.182, 0.275, 0.002]]
    random = RouterGroup(count=3)
    assert [link.rtt_s for link in random.links(fleet, 2)] == [0.002, 0.095, 0.18]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": 0}, "at least 1"),
        ({"split": "region", "sharing": "all"}, "in one region"),
        ({"loss": 1.5}, "share of 0 to 1"),
        ({"delay_s": -1.0}, "not negative"),
    ],
)
def test_a_wrong_group_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterGroup(**wrong)


# How long an attempt may be without content, and that those are given up alone that have none.


DRAWS = RandomTable(0)


class Giver:
    """A site that notes what it is to give up, and when."""

    def __init__(self, kernel: EventQueue) -> None:
        self.kernel = kernel
        self.given_up: list[tuple[float, str]] = []

    def time_out(self, sending: SimAttempt) -> None:
        self.given_up.append((self.kernel.now, sending.request_id))
        sending.done = True


def sending(name: str) -> SimAttempt:
    trips = TripDelays(DRAWS, 0)
    return SimAttempt(name, f"{name}/1", b"", prompt_tokens=1, output_tokens=1, body_bytes=0, trips=trips)


class Lab:
    def __init__(self) -> None:
        self.kernel = EventQueue()
        self.site = Giver(self.kernel)
        self.deadlines = FirstTokenTimeouts(self.kernel)

    def watch(self, name: str, *, at_s: float) -> SimAttempt:
        one = sending(name)
        self.kernel.at(at_s, lambda: self.deadlines.watch(one, cast(RemoteReplica, self.site)))
        return one


def test_an_attempt_is_given_up_two_minutes_after_it_was_sent() -> None:
    lab = Lab()
    for name, at_s in (("one", 0.0), ("two", 0.0), ("three", 50.0)):
        lab.watch(name, at_s=at_s)
    lab.kernel.run()
    assert lab.site.given_up == [(120.0, "one"), (120.0, "two"), (170.0, "three")]


def test_an_attempt_with_content_or_an_end_is_not_given_up_and_holds_up_no_other() -> None:
    lab = Lab()
    content, over = lab.watch("content", at_s=0.0), lab.watch("over", at_s=1.0)
    lab.watch("late", at_s=2.0)
    lab.kernel.at(100.0, lambda: setattr(content, "has_first_token", True))
    lab.kernel.at(100.0, lambda: setattr(over, "done", True))
    lab.kernel.run()
    assert lab.site.given_up == [(122.0, "late")]


def test_a_pause_in_the_traffic_ends_no_watch() -> None:
    lab = Lab()
    lab.watch("one", at_s=0.0)
    lab.watch("two", at_s=500.0)
    lab.kernel.run()
    assert lab.site.given_up == [(120.0, "one"), (620.0, "two")]
    assert lab.kernel.handled == 4, "and asks for no event in between"
