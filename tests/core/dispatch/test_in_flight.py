"""When things happen at an engine: half a round trip after they are sent, half a round trip before they are seen.

One replica that prefills 1,000 tokens a second, 100 ms away. Times are worked out by hand.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.core.latency.decode import SHARE
from gorgo.core.latency.prefill import FADE_S, faded
from gorgo.core.limits import ClientLimits, ClientRules, RouterLimits
from gorgo.core.messages.request import AttemptResult, EngineSample, Outcome
from gorgo.core.policy.interface import Candidates
from gorgo.core.router import Router
from tests.core.learners import LeastPredicted
from tests.core.routers import (
    COMPLETED,
    GONE,
    a_request,
    blocks_of,
    dispatched,
    make_router,
    rejected,
    submitted,
    timed,
)


def far_router() -> Router:
    router = make_router(policy="gorgo-ms", replicas=[timed("a")])
    for _ in range(200):
        router.replicas.on_probe("a", 0.1, now=0.0)
    return router


def send(router: Router, name: str, tokens: int, *, now: float, streamed: bool = True) -> str:
    request = a_request(name, prompt_tokens=tokens, received_s=now, streamed=streamed)
    return dispatched(submitted(router, request, now=now)).attempt_id


def view(router: Router, *, now: float) -> ReplicaSnapshot:
    (row,) = router.view.snapshots(now=now)
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


def test_a_dispatched_prefill_is_a_share_of_the_engine_s_time_that_fades() -> None:
    """A second of prefill over 30 s, at 800 ms for all of it; it is there after the request has ended, and fades."""
    router = far_router()
    router.on_finish(send(router, "first", 1000, now=0.0), COMPLETED, now=2.0)

    def externality(name: str, now: float) -> float:
        attempt_id = send(router, name, 1, now=now)
        term: float = router.view.decisions(name)[0].terms["externality"][0]
        router.on_finish(attempt_id, COMPLETED, now=now)
        return term

    soon = externality("soon", 2.0)
    assert soon == pytest.approx(faded(1.0 / FADE_S, 2.0) * 800.0)
    assert 0.0 < externality("late", 300.0) < 0.02 * soon


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
    router.replicas.on_engine_sample("a", EngineSample(prefill_tokens_total=1e4, prefill_busy_s_total=40.0), now=2.0)
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


def learning_router() -> Router:
    """A router with a policy that learns, so that progress is counted."""
    router = make_router(policy="gorgo-ms", replicas=[timed("a")])
    router.settings.set_shadow(LeastPredicted(), now=0.0)
    return router


def row_of(router: Router, *, now: float) -> Candidates:
    """The columns of the only replica."""
    columns = router._fleet.columns
    return Candidates(np.zeros(1, np.intp), ("a",), columns, np.zeros(1), 0, is_all=True, now=now)


def counted(router: Router, *, now: float) -> dict[str, float]:
    names = ("prefilling_requests", "queued_prefill_tokens", "uncached_prefill_tokens", "decoding_requests")
    router.check()
    return {name: float(getattr(row_of(router, now=now), name)[0]) for name in names}


def test_requests_and_tokens_are_counted_before_and_after_the_first_token() -> None:
    router = learning_router()
    blocks = blocks_of(1, 2, 3)
    warm = send(router, "warm", 192, now=0.0)
    router.on_first_token(warm, now=0.5)
    router.on_finish(warm, COMPLETED, now=0.6)
    router.index.confirm(blocks, 0)
    request = a_request("hit", prompt_tokens=200, received_s=1.0, blocks=blocks)
    hit = dispatched(submitted(router, request, now=1.0)).attempt_id
    miss = send(router, "miss", 50, now=1.0)
    before = counted(router, now=1.0)
    assert before["prefilling_requests"] == 2
    assert before["queued_prefill_tokens"] == 250
    assert before["uncached_prefill_tokens"] == 250 - router.view.decisions("hit")[0].estimated_cached_tokens < 250
    router.on_first_token(hit, now=1.2)
    middle = counted(router, now=1.2)
    assert (middle["prefilling_requests"], middle["decoding_requests"], middle["uncached_prefill_tokens"]) == (1, 1, 50)
    router.on_finish(miss, GONE, now=1.3)
    router.on_finish(hit, COMPLETED, now=2.0)
    assert set(counted(router, now=2.0).values()) == {0.0}


def test_decode_tokens_are_the_first_ones_and_one_more_per_learned_gap() -> None:
    router = learning_router()
    teacher = send(router, "teacher", 10, now=0.0)
    router.on_first_token(teacher, now=1.0)
    assert np.isnan(row_of(router, now=2.0).decode_tokens[0]), "unknown before the first answer with a count"
    router.on_finish(teacher, replace(COMPLETED, output_tokens=101), now=3.0)
    alone_s = 0.02 / (1.0 + SHARE)
    assert row_of(router, now=3.0).token_gap_s[0] == pytest.approx(alone_s)
    assert row_of(router, now=3.0).decode_tokens[0] == 0.0
    for number in range(3):
        router.on_first_token(send(router, f"r{number}", 10, now=4.0), now=5.0 + number)
    assert row_of(router, now=8.0).decode_tokens[0] == pytest.approx(
        3 + (3.0 + 2.0 + 1.0) / (alone_s * (1.0 + 3 * SHARE))
    )
    router.check()


def test_an_answer_in_one_piece_teaches_no_gap() -> None:
    router = learning_router()
    whole = send(router, "whole", 10, now=0.0, streamed=False)
    router.on_first_token(whole, now=1.0)
    router.on_finish(whole, replace(COMPLETED, output_tokens=101), now=1.0)
    assert np.isnan(row_of(router, now=2.0).token_gap_s[0])


def test_rounding_in_the_sum_of_first_tokens_does_not_add_up() -> None:
    """A year of uptime, and requests that overlap: the sum is exact again whenever none decodes."""
    router, now = learning_router(), 3e7
    for lap in range(200):
        ids = [send(router, f"{lap}-{number}", 10, now=now) for number in range(3)]
        for number, attempt_id in enumerate(ids):
            router.on_first_token(attempt_id, now=now + 0.1 * number)
        for attempt_id in ids:
            now += 0.123456789
            router.on_finish(attempt_id, COMPLETED, now=now)
        assert row_of(router, now=now).first_tokens_s[0] == 0.0


def test_the_strictest_objective_per_token_on_a_replica_is_that_of_its_requests_in_flight() -> None:
    router = far_router()
    column = router._fleet.columns.slo_tpot_s
    requests = [replace(a_request(name), slo_tpot_s=slo_s) for name, slo_s in (("a", 0.05), ("b", 0.03), ("c", None))]
    attempts = [dispatched(submitted(router, request, now=0.0)).attempt_id for request in requests]
    assert column.tolist() == [0.03]
    router.on_finish(attempts[1], COMPLETED, now=1.0)
    assert column.tolist() == [0.05]
    router.on_finish(attempts[0], GONE, now=1.0)
    assert column.tolist() == pytest.approx([float("nan")], nan_ok=True)
    router.on_finish(attempts[2], COMPLETED, now=1.0)


def test_counts_begin_with_what_is_open_when_a_policy_begins_to_learn_and_are_unknown_without_one() -> None:
    router = make_router(policy="gorgo-ms", replicas=[timed("a")])
    decodes = [send(router, f"d{number}", 10, now=0.0) for number in range(3)]
    for first_s, attempt_id in zip((3.0, 1.0, 2.0), decodes, strict=True):
        router.on_first_token(attempt_id, now=first_s)
    waits = send(router, "waits", 50, now=3.0)
    row = row_of(router, now=3.0)
    assert np.isnan([row.decode_tokens[0], row.prefilling_requests[0], row.uncached_prefill_tokens[0]]).all()
    router.settings.set_shadow(LeastPredicted(), now=3.5)
    assert counted(router, now=3.5) == {
        "prefilling_requests": 1,
        "queued_prefill_tokens": 50,
        "uncached_prefill_tokens": 50,
        "decoding_requests": 3,
    }
    router.on_finish(decodes[1], replace(COMPLETED, output_tokens=101), now=4.0)
    mean = (1.0 * 1 + 1.0 * 2 + 1.0 * 3) / 3.0  # in the seconds from 1 to 4
    assert row_of(router, now=4.0).token_gap_s[0] == pytest.approx(0.03 / (1.0 + SHARE * mean))
    router.on_first_token(waits, now=4.5)
    router.settings.set_shadow(None, now=5.0)
    assert np.isnan(row_of(router, now=5.0).decode_tokens[0])
    for attempt_id in (decodes[0], decodes[2], waits):
        router.on_finish(attempt_id, COMPLETED, now=6.0)
    router.check()


def test_a_replica_that_joins_is_counted_too() -> None:
    router = learning_router()
    router.replicas.set_fleet([timed("a"), timed("b")], now=1.0)
    router.check()
    assert router._fleet.columns.decoding_requests.tolist() == [0.0, 0.0]


# --- Load that is released before the outcome of its attempt is known, and outcomes that the client has already.


USAGE = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=300, output_tokens=2, sent=True)


def load_of(router: Router, name: str) -> tuple[float, float]:
    (view,) = (view for view in router.view.snapshots(now=9.0) if view.name == name)
    return view.in_flight_requests, view.queued_prefill_tokens


def test_released_load_is_free_at_once_and_the_sample_has_the_end_of_that_time() -> None:
    router = make_router("a")
    first = dispatched(submitted(router, a_request("r"), now=1.0))
    assert router.on_released(first.attempt_id, now=2.0) == []
    assert (router.in_flight, load_of(router, "a"), len(router.samples)) == (0, (0, 0), 0)
    router.check()
    assert router.on_released(first.attempt_id, now=2.1) == [], "a second report changes nothing"
    assert router.on_finish(first.attempt_id, USAGE, now=2.6) == (None, [])
    (sample,) = router.samples
    assert (sample.finished_s, sample.input_tokens, sample.status) == (2.0, 300, 200)
    assert router.on_finish(first.attempt_id, USAGE, now=2.7) == (None, [])
    router.check()


def test_a_first_token_that_is_reported_after_the_release_counts_with_the_end_at_the_latest() -> None:
    router = make_router("a")
    first = dispatched(submitted(router, a_request("r", received_s=1.0), now=1.0))
    router.on_released(first.attempt_id, now=2.0)
    router.on_first_token(first.attempt_id, now=2.5)
    router.on_first_token(first.attempt_id, now=2.6)
    router.on_finish(first.attempt_id, USAGE, now=3.0)
    (sample,) = router.samples
    assert sample.ttft_ms == pytest.approx(1000.0)
    router.check()


def test_a_released_request_leaves_its_client_s_place_and_is_charged_at_its_outcome_once() -> None:
    limits = RouterLimits(clients=ClientRules(ClientLimits(max_in_flight=1, tokens_per_s=100.0)))
    router = make_router("a", limits=limits)
    first = dispatched(submitted(router, a_request("r", client="c", prompt_tokens=300), now=0.0))
    router.on_released(first.attempt_id, now=0.0)
    second = dispatched(submitted(router, a_request("s", client="c", prompt_tokens=1), now=0.0))
    assert rejected(submitted(router, a_request("t", client="c"), now=0.0)).code == "client_concurrency"
    used = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=300, output_tokens=700, sent=True)
    router.on_finish(first.attempt_id, used, now=0.0)
    assert rejected(submitted(router, a_request("t", client="c"), now=0.0)).code == "client_concurrency"
    router.on_finish(second.attempt_id, Outcome(AttemptResult.COMPLETED, status=200, sent=True), now=0.0)
    refusal = rejected(submitted(router, a_request("u", client="c"), now=0.0))
    assert refusal.code == "client_tokens"
    assert refusal.retry_after_s == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("outcome", "status", "failures"),
    [
        (Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="disconnected", sent=True), 502, 1),
        (Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=500, sent=True), 500, 1),
        (Outcome(AttemptResult.BUSY, status=429, sent=True), 429, 0),
        (Outcome(AttemptResult.DEADLINE_EXCEEDED, sent=True), 504, 0),
        (Outcome(AttemptResult.UPSTREAM_4XX, status=404, sent=True), 404, 0),
    ],
)
def test_a_failure_that_the_client_has_is_judged_and_not_retried(outcome: Outcome, status: int, failures: int) -> None:
    router = make_router("a", "b")
    first = dispatched(submitted(router, a_request("r"), now=1.0))
    assert router.on_finish(first.attempt_id, outcome, now=2.0) == (None, [])
    (sample,) = router.samples
    assert (sample.status, router.in_flight) == (status, 0)
    (view,) = (view for view in router.view.snapshots(now=9.0) if view.name == "a")
    assert view.failures == failures
