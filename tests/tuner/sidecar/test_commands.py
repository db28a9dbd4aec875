from __future__ import annotations

import pytest

from tuner.campaign.generation import Freeze, PutWeights, RollBack, Stop
from tuner.proxy_client import ProxyWeights
from tuner.sidecar import commands
from tuner.sidecar.commands import CommandQueue

CAMPAIGN = "gorgo tune, campaign 1,"
US = f"{CAMPAIGN} process 7"


def found(version: int, source: str | None = "admin", by: str | None = None) -> ProxyWeights:
    return ProxyWeights("gorgo", version, {"w_rtt": 0.5}, None, source, by)


def put(ticket: int) -> PutWeights:
    return PutWeights({"w_rtt": 0.5}, "r", ticket)


def test_a_newer_order_for_weights_replaces_an_older_one_and_keeps_the_rest() -> None:
    orders = CommandQueue(CAMPAIGN, US, 1)
    for one in (put(1), Freeze({}, "r"), RollBack({}, "r", 2), Stop("r")):
        orders.add(one)
    kinds = []
    while (order := orders.next) is not None:
        kinds.append(type(order))
        orders.done(order)
    assert kinds == [Freeze, RollBack, Stop]


def test_an_order_that_was_replaced_while_it_was_on_its_way_does_not_end_the_newer_one() -> None:
    orders = CommandQueue(CAMPAIGN, US, 1)
    first, second = put(1), put(2)
    orders.add(first)
    orders.add(second)
    orders.done(first)
    assert orders.next is second


def test_weights_that_a_restarted_proxy_has_kept_are_known_by_their_values() -> None:
    orders = CommandQueue(CAMPAIGN, US, 3)
    orders.see(found(3))
    orders.mark_sent({"w_rtt": 0.7})
    orders.restarted()
    stored = [ProxyWeights("gorgo", 9, {"w_rtt": value}, None, "state") for value in (0.5, 0.7, 0.9)]
    assert [orders.owner_of(one) for one in stored] == ["proxy's", "proxy's", "foreign"]


@pytest.mark.parametrize(
    ("known", "seen", "owner"),
    [
        (3, found(3), "known"),
        (3, found(4, by="operator"), "foreign"),
        (3, found(4, source="reload"), "foreign"),
        (3, found(4, source="freeze", by="operator"), "foreign"),
        (3, found(4, by=US), "ours"),
        (3, found(4, by=f"{CAMPAIGN} process 8"), "foreign"),  # two of them at once: each must see the other
        (None, found(4, by=f"{CAMPAIGN} process 8"), "ours"),  # the one that was killed before
        (None, found(4, by="gorgo tune, campaign 12, process 8"), "foreign"),
        (None, found(4, by="operator"), "foreign"),
        (None, found(1, source="configuration"), "proxy's"),
        (3, found(9, source="state"), "proxy's"),
    ],
)
def test_whose_weights_are_found(known: int | None, seen: ProxyWeights, owner: str) -> None:
    assert CommandQueue(CAMPAIGN, US, known).owner_of(seen) == owner


def test_an_order_waits_until_it_is_done_and_only_those_for_weights_can_be_dropped() -> None:
    orders = CommandQueue(CAMPAIGN, US, 1)
    assert (orders.next, len(orders)) == (None, 0)
    freeze = Freeze({}, "r")
    for one in (freeze, put(1)):
        orders.add(one)
    assert len(orders) == 2
    orders.done(put(1))
    assert orders.next is freeze, "not the one that is next"
    orders.drop_puts()
    assert (orders.next, len(orders)) == (freeze, 1)
    orders.done(freeze)
    orders.done(freeze)
    assert orders.next is None


def test_a_process_is_named_by_its_campaign() -> None:
    assert CommandQueue(CAMPAIGN, US, 1).by == US


def test_what_was_seen_last_is_in_force_until_the_proxy_is_another_run() -> None:
    orders = CommandQueue(CAMPAIGN, US, 1)
    assert (orders.version, orders.in_force) == (1, None)
    orders.see(found(4))
    assert (orders.version, orders.in_force) == (4, {"w_rtt": 0.5})
    orders.restarted()
    assert (orders.version, orders.in_force) == (None, None)


def stored(values: float) -> ProxyWeights:
    return ProxyWeights("gorgo", 9, {"w_rtt": values}, None, "state")


def test_a_process_that_has_seen_nothing_takes_what_a_proxy_has_kept_for_the_proxy_s() -> None:
    assert CommandQueue(CAMPAIGN, US, None).owner_of(stored(0.9)) == "proxy's"


def test_the_last_sixteen_weight_sets_are_known_for_ours() -> None:
    orders = CommandQueue(CAMPAIGN, US, 3)
    for place in range(17):
        orders.mark_sent({"w_rtt": float(place)})
    orders.restarted()
    assert [orders.owner_of(stored(float(place))) for place in (0, 1, 16)] == ["foreign", "proxy's", "proxy's"]


def test_sixteen_of_its_own_weights_are_remembered() -> None:
    assert commands.MAX_OWN == 16
