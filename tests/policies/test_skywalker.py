from __future__ import annotations

from typing import Any

import pytest

from gorgo.policies.skywalker import SkyWalker
from tests.core.routers import a_request, dispatched, make_router, submitted
from tests.policies.table import choose, rows_chosen, table

#: Two replicas in each of three regions.
RTT_S = [0.002, 0.003, 0.095, 0.096, 0.180, 0.181]


def regions(**given: Any) -> Any:
    return table(6, rtt_s=RTT_S, **{"decoding_requests": [0.0] * 6, "queued_requests": [0.0] * 6} | given)


def test_the_near_region_serves_while_one_of_its_replicas_is_free_whatever_is_cached_elsewhere() -> None:
    choice = choose(SkyWalker(), regions(cached=[0, 64, 1000, 0, 0, 0], in_flight_requests=[1, 0, 0, 0, 0, 0]))
    assert (choice.row, choice.fallback) == (1, None)


def test_of_the_free_near_replicas_the_one_with_the_longest_match_serves_then_the_least_loaded() -> None:
    load = [9.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    decoding = {"in_flight_requests": load, "decoding_requests": load}
    assert choose(SkyWalker(), regions(cached=[640, 64, 0, 0, 0, 0], **decoding)).row == 0
    assert choose(SkyWalker(), regions(cached=[64, 64, 0, 0, 0, 0], **decoding)).row == 1
    assert rows_chosen(SkyWalker(), regions()) == {0, 1}


@pytest.mark.parametrize(("cached", "row"), [([900, 900, 0, 320, 640, 0], 4), ([900, 900, 0, 64, 64, 0], 3)])
def test_without_a_free_near_replica_the_region_with_the_longest_match_serves_the_nearest_of_equals(
    cached: list[int], row: int
) -> None:
    choice = choose(SkyWalker(), regions(cached=cached, in_flight_requests=[1, 1, 0, 0, 0, 0]))
    assert (choice.row, choice.fallback) == (row, "remote")


def test_another_region_serves_by_its_free_replicas_alone() -> None:
    choice = choose(SkyWalker(), regions(cached=[0, 0, 640, 0, 64, 0], in_flight_requests=[1, 1, 1, 0, 0, 0]))
    assert (choice.row, choice.fallback) == (4, "remote"), "the replica of the longest match is not free"


def test_where_no_replica_is_free_the_near_one_with_the_fewest_pending_serves() -> None:
    choice = choose(SkyWalker(), regions(cached=[900] * 6, in_flight_requests=[3, 2, 1, 1, 1, 1]))
    assert (choice.row, choice.fallback) == (1, "pending")


def test_a_reported_queue_is_pending_too_and_requests_that_decode_are_not() -> None:
    reported = choose(SkyWalker(), regions(queued_requests=[0.0, 2.0, 0.0, 0.0, 0.0, 0.0], cached=[0, 640, 0, 0, 0, 0]))
    assert reported.row == 0
    decoding = regions(in_flight_requests=[4.0, 5.0, 0, 0, 0, 0], decoding_requests=[4.0, 5.0, 0, 0, 0, 0])
    assert choose(SkyWalker(), decoding).fallback is None


def test_near_ms_says_how_far_apart_a_region_s_replicas_are() -> None:
    busy = regions(in_flight_requests=[1, 1, 0, 0, 0, 0], cached=[0, 0, 0, 0, 0, 640])
    assert choose(SkyWalker(), busy, near_ms=100.0).fallback is None
    assert choose(SkyWalker(), busy, near_ms=10.0).row == 5


def test_a_router_pushes_a_burst_across_regions_as_near_replicas_fill() -> None:
    router = make_router("a", "b", policy="skywalker")
    for name, rtt_s in (("a", 0.001), ("b", 0.1)):
        router.replicas.on_probe(name, rtt_s, now=0.0)
    burst = [dispatched(submitted(router, a_request(f"r{number}"), now=1.0)) for number in range(3)]
    assert [(one.replica, one.decision.fallback) for one in burst] == [("a", None), ("b", "remote"), ("a", "pending")]
    router.on_first_token(burst[0].attempt_id, now=1.5)
    router.on_first_token(burst[2].attempt_id, now=1.5)
    again = dispatched(submitted(router, a_request("r9"), now=2.0))
    assert (again.replica, again.decision.fallback) == ("a", None)
