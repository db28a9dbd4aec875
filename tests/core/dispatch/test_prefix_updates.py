"""What the ends of attempts say about the prefix index."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import EngineSample
from gorgo.core.prefix.residency import LEAST_REPORTS
from gorgo.core.router import Router
from tests.core.parts import make_parts
from tests.core.routers import COMPLETED, FAILED, GONE, a_request, dispatched, make_router, submitted


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


CAPACITY = 100


def sized_router(*names: str, policy: str = "gorgo-ms") -> Router:
    specs = [ReplicaSpec(name, "here", kv_capacity_tokens=CAPACITY * 64) for name in names]
    return make_router(policy=policy, replicas=specs)


def fills(router: Router, *, now: float) -> list[float]:
    """As the next decision reads them."""
    probe = a_request(f"probe-{now}", prompt_tokens=10, blocks=b"")
    router.on_finish(dispatched(submitted(router, probe, now=now)).attempt_id, COMPLETED, now=now)
    return [float(fill) for fill in router._fleet.columns.cache_fill]


def test_a_cache_is_as_full_as_the_prompts_that_were_sent_there() -> None:
    router = sized_router("a")
    assert fills(router, now=0.0) == [0.0]
    attempt = send(router, 1, now=1.0, count=40)
    assert fills(router, now=1.1) == [0.4]
    router.on_first_token(attempt, now=2.0)
    router.on_finish(attempt, COMPLETED, now=3.0)
    send(router, 2, now=4.0, count=70)
    assert fills(router, now=4.1) == [0.7], "the first one was evicted as a whole"


def test_a_prompt_that_failed_a_flush_and_a_larger_pool_change_the_fill() -> None:
    router = sized_router("a")
    router.on_finish(send(router, 1, now=0.0), GONE, now=1.0)
    assert fills(router, now=1.1) == [0.0]
    router.on_first_token(send(router, 2, now=2.0), now=3.0)
    router.replicas.on_engine_sample("a", EngineSample(kv_capacity_tokens=2 * CAPACITY * 64), now=3.5)
    assert fills(router, now=3.6) == [0.2]
    router.caches.flush(now=4.0)
    assert fills(router, now=4.1) == [0.0]


def test_the_fill_of_a_pool_of_unknown_size_is_nothing() -> None:
    router = make_router("a")
    send(router, 1, now=0.0)
    assert fills(router, now=0.1) == [0.0]


def test_a_replica_in_the_slot_of_another_has_an_empty_cache() -> None:
    router = sized_router("a")
    send(router, 1, now=0.0)
    assert fills(router, now=0.1) == [0.4]
    router.replicas.set_fleet([ReplicaSpec("b", "here", kv_capacity_tokens=CAPACITY * 64)], now=1.0)
    assert fills(router, now=1.1) == [0.0]


def found_share(router: Router) -> float:
    return router._prefix_updater.found_share


def test_the_share_of_found_tokens_begins_at_a_half_and_follows_the_prompts() -> None:
    """Of 2,560 tokens nothing is found, and then all."""
    router = sized_router("a")
    assert found_share(router) == 0.5
    router.on_first_token(send(router, 1, now=0.0), now=0.5)
    first = 64_000 * 255 / 256 / (128_000 * 255 / 256 + 2560)
    assert found_share(router) == pytest.approx(first)
    send(router, 1, now=1.0)
    total = (128_000 * 255 / 256 + 2560) * 255 / 256 + 2560
    assert found_share(router) == pytest.approx((64_000 * (255 / 256) ** 2 + 2560) / total)


def test_a_prompt_counts_once_however_often_it_is_evaluated_and_sent() -> None:
    router = sized_router("a", "b")
    request = a_request("r", prompt_tokens=2560, blocks=prompt(1))
    first = dispatched(submitted(router, request, now=0.0))
    once = found_share(router)
    assert once < 0.5
    again, _ = router.on_finish(first.attempt_id, FAILED, now=0.5)
    assert isinstance(again, Dispatch), "it is sent to the other one"
    assert found_share(router) == once


@pytest.mark.parametrize(("found", "part"), [(1.0, 1.0), (0.25, 0.25), (0.0, 0.0)])
def test_a_copy_is_worth_the_part_of_a_prefix_that_engines_find(found: float, part: float) -> None:
    """Four sessions went on from 40 blocks on the first replica; the second lacks them."""
    parts = make_parts("a", "b", policy="gorgo-ms")
    for session in range(4):
        parts.index.confirm(prompt(1) + prompt(10 + session, 5), 0)
    for _ in range(LEAST_REPORTS):
        parts.found_shares.learn(0, None, confirmed_tokens=40 * 64.0, found_tokens=40 * 64.0 * found)
    request = a_request(prompt_tokens=50 * 64, blocks=prompt(1) + prompt(90, 10))
    terms = parts.dispatch(request, now=0.0).decision.terms
    np.testing.assert_allclose(terms["shared"], [0.0, -terms["prefill"][1] * part * 40 * 4 / 6 / 50], atol=1e-6)
