from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from gorgo.errors import ConfigError
from gorgo.lab.sim.routers.group import RouterGroup
from tests.lab.sim.feeds import conversations
from tests.lab.sim.fleets import three_regions

FEED = conversations(300, every_s=0.1)


def test_random_requests_are_spread_evenly_and_alike_for_one_seed() -> None:
    group = RouterGroup(count=4)
    counts = Counter(group.router_of(request, seed=0) for request in FEED)
    assert set(counts) == {0, 1, 2, 3}
    assert min(counts.values()) > 50
    again = [group.router_of(request, seed=0) for request in FEED]
    assert again == [group.router_of(request, seed=0) for request in FEED]
    assert again != [group.router_of(request, seed=1) for request in FEED]


def test_a_session_stays_with_its_router() -> None:
    group = RouterGroup(count=4, split="session")
    routers = {(request.session_id, group.router_of(request, seed=index)) for index, request in enumerate(FEED)}
    assert len(routers) == len({request.session_id for request in FEED})


def test_one_router_that_sees_all_gets_every_request() -> None:
    group = RouterGroup(count=8, sharing="all")
    assert {group.router_of(request, seed=0) for request in FEED} == {0}


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
