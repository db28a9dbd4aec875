"""What the ends of attempts say about the prefix index."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.request import EngineSample
from gorgo.core.router import Router
from tests.core.routers import COMPLETED, GONE, a_request, dispatched, make_router, submitted


def prompt(name: int, count: int = 40) -> bytes:
    """So many blocks that no other prompt shares."""
    return b"".join((1000 * name + number).to_bytes(8, "little") for number in range(count))


def send(router: Router, name: int, *, now: float, count: int = 40) -> str:
    request = a_request(f"r{name}-{now}", prompt_tokens=count * 64, blocks=prompt(name, count))
    return dispatched(submitted(router, request, now=now)).attempt_id


def held_of(router: Router, *names: int) -> list[float]:
    return [float(router.index.match(prompt(name), 1)[0]) for name in names]


@pytest.mark.parametrize(("policy", "left"), [("gorgo-ms", [40, 0, 40]), ("gorgo", [0, 40, 40])])
def test_a_stream_that_ends_after_others_is_the_last_to_go_where_the_index_is_bounded(
    policy: str, left: list[float]
) -> None:
    """The engine held its blocks to the end, so it used them last; the published index knows no uses by the engine."""
    router = make_router(
        policy=policy,
        replicas=[ReplicaSpec("a", "here", kv_capacity_tokens=100 * 64)],
        limits=RouterLimits(max_index_blocks=100),
    )
    long = send(router, 1, now=0.0)
    router.on_first_token(long, now=1.0)
    short = send(router, 2, now=2.0)
    router.on_first_token(short, now=3.0)
    router.on_finish(short, COMPLETED, now=4.0)
    router.on_finish(long, COMPLETED, now=5.0)
    router.on_first_token(send(router, 3, now=6.0), now=7.0)
    assert held_of(router, 1, 2, 3) == left


def test_an_answer_without_a_first_token_of_its_own_confirms_its_prompt() -> None:
    router = make_router("a", policy="gorgo")
    router.on_finish(send(router, 1, now=0.0), COMPLETED, now=1.0)
    router.on_finish(send(router, 1, now=2.0), GONE, now=3.0)
    assert held_of(router, 1) == [40], "what was confirmed is not withdrawn by a later end"


def test_an_end_on_a_replica_that_has_left_says_nothing_of_the_one_in_its_slot() -> None:
    router = make_router("a", policy="gorgo-ms")
    attempts = [send(router, name, now=0.0) for name in (1, 2)]
    router.replicas.set_fleet([ReplicaSpec("b", "here")], now=1.0)
    router.on_first_token(attempts[0], now=2.0)
    for attempt in attempts:
        router.on_finish(attempt, COMPLETED, now=3.0)
    assert held_of(router, 1, 2) == [0, 0]


def test_a_replica_holds_as_many_blocks_as_its_pool_has_room_for() -> None:
    """6,400 tokens are a hundred blocks of 64, and fifty of 128; what the engine tells counts over regions.yaml."""
    router = make_router(policy="gorgo-ms", replicas=[ReplicaSpec("a", "here", kv_capacity_tokens=6400)])
    for name in range(1, 15):
        router.on_finish(send(router, name, now=0.0, count=10), COMPLETED, now=1.0)
    assert router.index.resident_blocks(0) == 100
    router.settings.set_limits(replace(router.settings.limits, block_tokens=128.0), now=5.0)
    assert router.index.resident_blocks(0) == 50
    router.replicas.on_engine_sample("a", EngineSample(kv_capacity_tokens=128 * 20 + 127), now=6.0)
    assert router.index.resident_blocks(0) == 20
