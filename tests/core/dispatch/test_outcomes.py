"""How a request ends for its client: status, word, when to come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.core.dispatch.in_flight import (
    RequestState,
    deadline_exceeded,
    model_not_found,
    no_replica,
    queue_full,
    quota_exceeded,
    region_not_allowed,
    replica_not_found,
    status_of,
    too_many_in_flight,
    upstream_error,
)
from gorgo.core.limits import QuotaExceeded
from gorgo.core.messages.actions import Reject
from gorgo.core.messages.request import AttemptResult, Outcome, Sample
from tests.core.routers import a_request, dispatched, make_router, submitted, timed

REQUEST = a_request("r", model="m", pinned_replica="p")


@pytest.mark.parametrize(
    ("reject", "status", "code", "message", "retry_after_s"),
    [
        (model_not_found(REQUEST), 404, "model_not_found", "no replica serves the model 'm'", None),
        (too_many_in_flight(REQUEST, 9), 429, "too_many_in_flight", "9 requests are in flight", 1.0),
        (replica_not_found(REQUEST), 404, "replica_not_found", "the replica 'p' with the stored response", None),
        (quota_exceeded(REQUEST, QuotaExceeded("why", "too much", 2.5)), 429, "why", "too much", 2.5),
        (no_replica(REQUEST, 3.5), 503, "no_replica", "no replica can take the request now", 3.5),
        (queue_full(REQUEST, 7, 4.5), 429, "queue_full", "7 requests are queued", 4.5),
        (
            deadline_exceeded(REQUEST, 5.5),
            429,
            "deadline_unreachable",
            "the TTFT deadline cannot be met",
            5.5,
        ),
        (
            region_not_allowed(replace(REQUEST, regions=frozenset({"west", "east"}))),
            *(403, "region_not_allowed", "may be served in east, west only, and its stored response is elsewhere"),
            None,
        ),
        (
            region_not_allowed(replace(REQUEST, regions=frozenset(), pinned_replica=None)),
            *(403, "region_not_allowed", "may be served in no region only, and no replica there serves it"),
            None,
        ),
    ],
)
def test_each_refusal_has_its_status_its_word_and_its_time(
    reject: Reject, status: int, code: str, message: str, retry_after_s: float | None
) -> None:
    assert (reject.request_id, reject.status, reject.code, reject.retry_after_s) == ("r", status, code, retry_after_s)
    assert message in reject.message


@pytest.mark.parametrize(
    ("outcome", "tried", "status", "code", "message", "retry_after_s"),
    [
        (
            Outcome(AttemptResult.BUSY, status=429),
            "a",
            429,
            "replicas_busy",
            "every replica is busy (tried 1 replica)",
            1.0,
        ),
        (Outcome(AttemptResult.BUSY, status=503), "ab", 503, "replicas_busy", "(tried 2 replicas)", 1.0),
        (Outcome(AttemptResult.BUSY), "a", 503, "replicas_busy", "busy", 1.0),
        (
            Outcome(AttemptResult.DEADLINE_EXCEEDED, status=504),
            "a",
            504,
            "total_timeout",
            "longer than its total timeout",
            None,
        ),
        (
            Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=504),
            "a",
            504,
            "upstream_timeout",
            "in time (tried 1",
            None,
        ),
        (Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="timeout"), "a", 504, "upstream_timeout", "in time", None),
        (
            Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="disconnected"),
            "ab",
            502,
            "upstream_failed",
            "replicas)",
            None,
        ),
        (Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=500), "a", 502, "upstream_failed", "could answer", None),
    ],
)
def test_the_last_failure_has_the_status_that_a_client_would_expect(
    outcome: Outcome, tried: str, status: int, code: str, message: str, retry_after_s: float | None
) -> None:
    reject = upstream_error(RequestState(REQUEST, tried_replicas=set(tried)), outcome)
    assert (reject.request_id, reject.status, reject.code, reject.retry_after_s) == ("r", status, code, retry_after_s)
    assert message in reject.message


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome(AttemptResult.COMPLETED, status=201), 201),
        (Outcome(AttemptResult.COMPLETED), 200),
        (Outcome(AttemptResult.UPSTREAM_4XX, status=422), 422),
        (Outcome(AttemptResult.CLIENT_DISCONNECTED, status=200), 499),
        (Outcome(AttemptResult.SUPERSEDED, status=200), 499),
        (Outcome(AttemptResult.FAILED_AFTER_CONTENT, status=200), 502),
        (Outcome(AttemptResult.DEADLINE_EXCEEDED, status=200), 504),
    ],
)
def test_a_sample_has_the_status_that_the_client_saw(outcome: Outcome, status: int) -> None:
    assert status_of(outcome) == status


def test_a_sample_has_the_decision_of_its_attempt_and_what_came_of_it() -> None:
    """100 tokens at a thousand a second, 10 ms away; received half a second before."""
    router = make_router(policy="gorgo-ms", replicas=[timed("a", "near")])
    sent = dispatched(submitted(router, a_request("r", prompt_tokens=100, received_s=-0.5), now=0.0))
    decision = sent.decision
    assert decision.predicted_ttft_s is not None
    router.on_first_token(sent.attempt_id, now=0.25)
    outcome = Outcome(
        AttemptResult.COMPLETED, status=200, prompt_tokens=90, cached_tokens=16, output_tokens=7, itl_s_p95=0.02
    )
    router.on_finish(sent.attempt_id, outcome, now=1.0)
    (sample,) = router.samples
    assert sample == Sample(
        seq=1,
        request_id="r",
        finished_s=1.0,
        replica="a",
        region="near",
        policy="gorgo-ms",
        weights_version=router.settings.weights.version,
        input_tokens=90,
        cached_tokens=16,
        estimated_cached_tokens=decision.estimated_cached_tokens,
        output_tokens=7,
        rtt_ms=10.0,
        predicted_ttft_ms=decision.predicted_ttft_s * 1e3,
        ttft_ms=750.0,
        e2e_s=1.5,
        itl_ms_p95=20.0,
        status=200,
        retries=0,
        hedged=False,
        terms={name: float(column[0]) for name, column in decision.terms.items()},
        best_cached_tokens=decision.best_cached_tokens,
        ttft_parts_ms=decision.estimate.attribute(0.75).as_ms(),
    )
    assert sample.terms
