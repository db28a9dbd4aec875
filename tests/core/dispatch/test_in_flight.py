"""When things happen at an engine: half a round trip after they are sent, half a round trip before they are seen.

One replica that prefills 1,000 tokens a second, 100 ms away. Times are worked out by hand.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.core.messages.request import EngineSample
from gorgo.core.router import Router
from tests.core.routers import COMPLETED, GONE, a_request, blocks_of, dispatched, make_router, submitted, timed


def far_router() -> Router:
    router = make_router(policy="gorgo-ms", replicas=[timed("a")])
    for _ in range(200):
        router.on_probe("a", 0.1, now=0.0)
    return router


def send(router: Router, name: str, tokens: int, *, now: float, streamed: bool = True) -> str:
    request = a_request(name, prompt_tokens=tokens, received_s=now, streamed=streamed)
    return dispatched(submitted(router, request, now=now)).attempt_id


def view(router: Router, *, now: float) -> ReplicaSnapshot:
    (row,) = router.fleet_view(now=now)
    return row


def test_a_request_reaches_its_engine_half_a_round_trip_after_its_dispatch() -> None:
    """There at 0.05, done at 1.05; what is sent at 0.2 arrives at 0.25 and finds 0.8 s."""
    router = far_router()
    send(router, "first", 1000, now=0.0)
    assert view(router, now=0.2).backlog_s == pytest.approx(0.8)


def test_a_first_token_left_its_engine_half_a_round_trip_before_it_is_seen() -> None:
    """Seen at 1.1, made at 1.05: a second after the arrival, of which 5 ms were the step under way.

    Leaning on 5 s of prior that is a factor of (0.995 + 5) / 6. The next one's half a second begins at 1.05.
    """
    router = far_router()
    first = send(router, "first", 1000, now=0.0)
    send(router, "second", 500, now=0.0)
    router.on_first_token(first, now=1.1)
    row, factor = view(router, now=1.1), 5.995 / 6.0
    assert row.prefill_slowdown == pytest.approx(factor)
    assert row.backlog_s == pytest.approx(1.05 + 0.5 * factor - 1.1 - 0.05)


def test_an_engine_hears_of_an_end_half_a_round_trip_later() -> None:
    """Given up at 0.45, dropped at 0.5: the next one's half a second ends at 1.0, and what is sent at 0.45 finds it."""
    router = far_router()
    first = send(router, "first", 1000, now=0.0)
    send(router, "second", 500, now=0.0)
    router.on_finish(first, GONE, now=0.45)
    assert view(router, now=0.45).backlog_s == pytest.approx(0.5)


def test_an_answer_in_one_piece_teaches_no_speed_at_its_first_content() -> None:
    """Its content comes with its last token, so the time says nothing of its prefill; it is in line no longer."""
    router = far_router()
    whole = send(router, "whole", 1000, now=0.0, streamed=False)
    send(router, "second", 500, now=0.0)
    router.on_first_token(whole, now=0.5)
    row = view(router, now=0.5)
    assert row.prefill_slowdown == 1.0
    assert row.backlog_s == pytest.approx(0.45 + 0.5 - 0.5 - 0.05)


def test_a_reported_speed_is_relative_to_the_uncached_tokens_dispatched_there() -> None:
    """A usual request of 1,500 tokens takes 2.5 s by this prior, the 64 that are not cached of the one sent 1.064 s.

    The engine tells 4 ms a token, which is 1,564 tokens' time over (2.5 + 1.064) s of the prior.
    """
    slow_start = replace(timed("a"), prefill_base_s=1.0)
    router = make_router(policy="gorgo-ms", replicas=[slow_start])
    router.index.confirm(blocks_of(1, 2, 3), 0)
    request = a_request("r", prompt_tokens=256, blocks=blocks_of(1, 2, 3))
    attempt = dispatched(submitted(router, request, now=0.0)).attempt_id
    router.on_first_token(attempt, now=1.0)
    router.on_engine_sample("a", EngineSample(prefill_tokens_total=1e4, prefill_busy_s_total=40.0), now=2.0)
    assert view(router, now=2.0).prefill_slowdown_reported == pytest.approx(0.004 * 1564 / 3.564, rel=1e-3)


def test_load_is_released_once_whether_an_end_comes_before_or_after_a_first_token() -> None:
    router = far_router()
    first, second = send(router, "first", 1000, now=0.0), send(router, "second", 500, now=0.0)
    router.on_first_token(first, now=1.1)
    router.on_finish(first, COMPLETED, now=1.2)
    row = view(router, now=1.2)
    assert (row.in_flight_requests, row.in_flight_tokens, row.queued_prefill_tokens) == (1, 500, 500)
    router.on_finish(second, GONE, now=1.3)
    row = view(router, now=1.3)
    assert (row.in_flight_requests, row.in_flight_tokens, row.queued_prefill_tokens) == (0, 0, 0)
