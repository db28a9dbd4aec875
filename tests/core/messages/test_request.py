"""What each result of an attempt means for its request and its replica."""

from __future__ import annotations

from gorgo.core.messages.request import AttemptResult


def test_only_a_failure_before_content_and_a_busy_replica_are_retryable() -> None:
    retryable = {result for result in AttemptResult if result.retryable}
    assert retryable == {AttemptResult.FAILED_BEFORE_CONTENT, AttemptResult.BUSY}


def test_a_request_outlives_retryable_and_superseded_attempts_only() -> None:
    outlived = {result for result in AttemptResult if not result.final}
    assert outlived == {AttemptResult.FAILED_BEFORE_CONTENT, AttemptResult.BUSY, AttemptResult.SUPERSEDED}


def test_a_failure_of_the_replica_is_one_before_or_after_content() -> None:
    failed = {result for result in AttemptResult if result.failed}
    assert failed == {AttemptResult.FAILED_BEFORE_CONTENT, AttemptResult.FAILED_AFTER_CONTENT}
