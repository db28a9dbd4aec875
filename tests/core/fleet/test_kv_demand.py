"""The wait for KV memory: what is in flight by distinct blocks, what a full pool teaches, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.fleet.replica import KvDemand
from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.router import Router
from tests.core.routers import a_request, blocks_of, dispatched, make_router, submitted, timed


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
    """The pool has two prompts of three: the third waits ten seconds for an answer to end, and not for a prefill."""
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
    """Three prompts of 900 tokens with answers of 100 are half a pool more than there is, and memory comes by answers.

    An answer held its tokens for 0.9 s of prefill and 9.1 s after it, so that half a pool is free after 5 s, and there
    is room for a usual answer more, the other half, after 10 s. The prefills of the two before it take 1.8 s more.
    """
    router = small_pool()
    attempt_id = send(router, "learn", now=0.0, tokens=900)
    router.on_first_token(attempt_id, now=0.9)
    finish(router, attempt_id, now=10.0)
    for name in ("one", "two"):
        send(router, name, now=20.0, tokens=900)
    send(router, "late", now=20.0, tokens=900)
    (decision,) = router.view.decisions("late")
    assert decision.terms["queue"][0] == pytest.approx(1e3 * (10.0 + 1.8), rel=0.01)
    assert decision.estimate.queue_s == pytest.approx(10.0 + 1.8, rel=0.01)


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
    request = a_request("r", prompt_tokens=1000)
    demand.add("r", request, 1000)
    assert not demand.is_contended(nan)
    assert demand.short_tokens(request, nan) == 0.0


def test_a_shared_prefix_is_in_the_pool_once() -> None:
    """Of two prompts of four blocks with three in common five are there, and a third prompt adds its own block."""
    demand = KvDemand()
    one, two, three = (a_request(str(n), prompt_tokens=256, blocks=blocks_of(1, 2, 3, n)) for n in (7, 8, 9))
    demand.add("one", one, 256)
    demand.add("two", two, 64)
    assert demand.short_tokens(None, 64) == 4 * 64
    assert demand.short_tokens(three, 64) == 5 * 64
    demand.remove("one")
    assert demand.short_tokens(None, 64) == 3 * 64


def test_those_that_run_are_not_waited_for_beyond_what_waits() -> None:
    """An engine that lets more run than the pool should hold makes one wait for what is in line, and one answer."""
    demand = KvDemand()
    demand.on_answer(10.0, prompt_tokens=1000, output_tokens=0)
    for name in ("one", "two"):
        demand.add(name, a_request(name, prompt_tokens=1000), 1000)
    late = a_request("late", prompt_tokens=100)
    assert demand.wait_s(late, 100, 1000) == pytest.approx(10.0 * 2.1)
    demand.on_first_token("one")
    demand.on_first_token("two")
    assert demand.wait_s(late, 100, 1000) == pytest.approx(10.0 * 1.1)


def test_a_pool_that_lacks_one_token_makes_a_request_wait_for_a_whole_answer() -> None:
    """A pool of ten answers, each held for ten seconds: one ends every second, and the wait grows up to that."""
    demand = KvDemand()
    demand.on_answer(10.0, prompt_tokens=100, output_tokens=0)
    for number in range(9):
        demand.add(str(number), a_request(str(number), prompt_tokens=100), 100)
    waits_s = [demand.wait_s(a_request("late", prompt_tokens=tokens), tokens, 1000.0) for tokens in (1, 50, 101, 200)]
    assert waits_s == pytest.approx([0.01, 0.5, 1.01, 2.0])


PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=8)


@given(PROMPTS, st.sets(st.integers(0, 7)), st.lists(st.integers(0, 2), max_size=4))
def test_distinct_tokens_are_those_of_a_set(prompts: list[list[int]], gone: set[int], asked: list[int]) -> None:
    """Whether blocks are counted from the second prompt on, or all at once."""
    early, late = KvDemand(), KvDemand()
    there: dict[int, bytes] = {}
    for number, words in enumerate(prompts):
        request = a_request(str(number), prompt_tokens=64 * len(words) + 5, blocks=blocks_of(*words))
        early.add(str(number), request, 0.0)
        late.add(str(number), request, 0.0)
        assert early.short_tokens(None, 0.0) > 0.0
        there[number] = request.blocks
    for number in gone:
        early.remove(str(number))
        late.remove(str(number))
        there.pop(number, None)
    more = a_request("more", prompt_tokens=64 * len(asked) + 5, blocks=blocks_of(*asked))
    distinct = {blocks[at : at + 8] for blocks in [*there.values(), more.blocks] for at in range(0, len(blocks), 8)}
    expected = 64 * len(distinct) + 5 * (len(there) + 1) if there else 0.0
    assert early.short_tokens(more, 0.0) == late.short_tokens(more, 0.0) == expected
    early.check()
