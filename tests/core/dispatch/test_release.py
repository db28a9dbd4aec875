"""Load that is released before the outcome of its attempt is known, and outcomes that the client has already."""

from __future__ import annotations

import pytest

from gorgo.core.limits import ClientLimits, ClientRules, RouterLimits
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.router import Router
from tests.core.routers import a_request, dispatched, make_router, rejected, submitted

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
