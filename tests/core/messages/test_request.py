"""What each result of an attempt means for its request and its replica."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest


def test_only_a_failure_before_content_and_a_busy_replica_are_retryable() -> None:
    retryable = {result for result in AttemptResult if result.retryable}
    assert retryable == {AttemptResult.FAILED_BEFORE_CONTENT, AttemptResult.BUSY}


def test_a_request_outlives_retryable_and_superseded_attempts_only() -> None:
    outlived = {result for result in AttemptResult if not result.final}
    assert outlived == {AttemptResult.FAILED_BEFORE_CONTENT, AttemptResult.BUSY, AttemptResult.SUPERSEDED}


def test_a_failure_of_the_replica_is_one_before_or_after_content() -> None:
    failed = {result for result in AttemptResult if result.failed}
    assert failed == {AttemptResult.FAILED_BEFORE_CONTENT, AttemptResult.FAILED_AFTER_CONTENT}


def _request(**more: object) -> RouteRequest:
    known: dict[str, object] = {"prompt_tokens": 100, "body_bytes": 400, **more}
    return RouteRequest("r", 0.0, blocks=b"", block_tokens=64.0, prefix_hash=0, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "context", "most"),
    [
        (_request(most_output_tokens=50), None, 50),
        (_request(most_output_tokens=50, answers=6), None, 300),
        (_request(most_output_tokens=10**12), 8192, 8192),
        (_request(), 8192, 8192),
        (_request(most_output_tokens=50, answers=None), 8192, 10**15),
        (_request(), None, 10**15),
    ],
)
def test_output_is_no_longer_than_the_request_allows(request_: RouteRequest, context: int | None, most: int) -> None:
    reported = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=90, cached_tokens=80, output_tokens=10**15)
    bounded = reported.bounded(request_, context)
    assert (bounded.prompt_tokens, bounded.cached_tokens, bounded.output_tokens) == (90, 80, most)
    of_bytes = replace(reported, answer_bytes=700).bounded(request_, context)
    assert of_bytes.output_tokens == (700 if request_.most_output_tokens is context is None else most)


def test_a_prompt_has_no_more_tokens_than_its_body_and_template_and_no_more_cached_than_that() -> None:
    reported = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=10**15, cached_tokens=10**15)
    for request, context, most in (
        (_request(), 8192, 4496),
        (_request(body_bytes=9000), None, 13_096),
        (_request(pinned_replica="a"), 8192, 8192),
    ):
        bounded = reported.bounded(request, context)
        assert (bounded.prompt_tokens, bounded.cached_tokens) == (most, most)
    alone = Outcome(AttemptResult.COMPLETED, status=200, cached_tokens=10**15).bounded(_request(), None)
    assert (alone.prompt_tokens, alone.cached_tokens) == (None, 4496)


def test_counts_that_a_request_can_have_used_are_left_as_they_are() -> None:
    reported = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=120, cached_tokens=64, output_tokens=50)
    assert reported.bounded(_request(most_output_tokens=50), 8192) is reported
