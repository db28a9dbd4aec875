"""The wait for KV memory: what is in flight by distinct blocks, what a full pool teaches, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.core.latency.kv_pool import KvDemand
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.router import Router
from tests.core.routers import a_request, blocks_of, dispatched, make_router, submitted, timed

BLOCK = 64


def small_pool(tokens: int = 2000) -> Router:
    """A router with one replica that prefills 1,000 tokens a second and whose pool has so many tokens."""
    return make_router(policy="gorgo-ms", replicas=[replace(timed("a"), kv_capacity_tokens=tokens)])


def send(router: Router, name: str, *, now: float, tokens: int = 1000) -> str:
    return dispatched(submitted(router, a_request(name, prompt_tokens=tokens, received_s=now), now=now)).attempt_id


def finish(router: Router, attempt_id: str, *, now: float, output_tokens: int = 100) -> None:
    outcome = Outcome(AttemptResult.COMPLETED, status=200, output_tokens=output_tokens)
    router.on_finish(attempt_id, outcome, now=now)


def view(router: Router, *, now: float) -> ReplicaSnapshot:
    (row,) = router.view.snapshots(now=now)
    return row


def test_a_first_token_that_waited_for_memory_teaches_no_prefill_speed() -> None:
    """The pool has two prompts of three: the third waits ten seconds for the first answer's end, and not for a prefill."""
    router = small_pool()
    first, second, third = (send(router, name, now=0.0) for name in ("first", "second", "third"))
    router.on_first_token(first, now=1.0)
    router.on_first_token(second, now=2.0)
    finish(router, first, now=10.0)
    before = view(router, now=10.0).prefill_slowdown
    router.on_first_token(third, now=11.0)
    assert view(router, now=11.0).prefill_slowdown == before


def test_a_first_token_in_a_pool_that_has_room_teaches_it() -> None:
    router = small_pool(tokens=4000)
    attempts = [send(router, name, now=0.0) for name in ("first", "second", "third")]
    for attempt_id, now in zip(attempts, (1.0, 2.0, 11.0), strict=True):
        router.on_first_token(attempt_id, now=now)
    assert view(router, now=11.0).prefill_slowdown > 2.0


def test_the_wait_for_memory_is_predicted_by_how_long_answers_held_theirs() -> None:
    """Of 2,000 tokens two prompts of 900 and three usual answers of 100 leave -100. One of 900 lacks 1,000, half a pool.

    An answer held its tokens for 0.9 s of prefill and 9.1 s after it, so that half a pool is free after 5 s. The
    prefills of the two before it take 1.8 s more.
    """
    router = small_pool()
    attempt_id = send(router, "learn", now=0.0, tokens=900)
    router.on_first_token(attempt_id, now=0.9)
    finish(router, attempt_id, now=10.0)
    for name in ("one", "two"):
        send(router, name, now=20.0, tokens=900)
    send(router, "late", now=20.0, tokens=900)
    (decision,) = router.view.decisions("late")
    assert decision.terms["queue"][0] == pytest.approx(1e3 * (5.0 + 1.8), rel=0.01)
    assert decision.estimate.queue_s == pytest.approx(5.0 + 1.8, rel=0.01)


def test_nobody_waits_for_memory_while_everything_fits() -> None:
    router = small_pool(tokens=100_000)
    attempt_id = send(router, "learn", now=0.0)
    router.on_first_token(attempt_id, now=1.0)
    finish(router, attempt_id, now=10.0)
    send(router, "one", now=20.0)
    send(router, "two", now=20.0)
    (decision,) = router.view.decisions("two")
    assert decision.terms["queue"][0] == pytest.approx(1e3, rel=0.01)


def test_a_pool_of_unknown_size_is_never_short() -> None:
    demand = KvDemand()
    demand.add("r", a_request("r", prompt_tokens=1000))
    assert demand.free_tokens(nan, BLOCK) == inf


def test_a_shared_prefix_is_in_the_pool_once() -> None:
    demand = KvDemand()
    for name, own in (("one", 7), ("two", 8)):
        demand.add(name, a_request(name, prompt_tokens=4 * BLOCK, blocks=blocks_of(1, 2, 3, own)))
    assert demand.tokens(BLOCK) == 5 * BLOCK
    demand.remove("one")
    assert demand.tokens(BLOCK) == 4 * BLOCK


PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=8)


@given(PROMPTS, st.sets(st.integers(0, 7)))
def test_distinct_tokens_are_those_of_a_set(prompts: list[list[int]], gone: set[int]) -> None:
    """Whether they are counted from the first prompt on, or all at once."""
    early, late = KvDemand(), KvDemand()
    early.tokens(BLOCK)
    there: dict[int, list[bytes]] = {}
    for number, words in enumerate(prompts):
        blocks = blocks_of(*words)
        request = a_request(str(number), prompt_tokens=BLOCK * len(words) + 5, blocks=blocks)
        early.add(str(number), request)
        late.add(str(number), request)
        there[number] = [blocks[at : at + 8] for at in range(0, len(blocks), 8)]
    for number in gone:
        early.remove(str(number))
        late.remove(str(number))
        there.pop(number, None)
    distinct = {block for blocks in there.values() for block in blocks}
    assert early.tokens(BLOCK) == late.tokens(BLOCK) == BLOCK * len(distinct) + 5 * len(there)
    early.check()
