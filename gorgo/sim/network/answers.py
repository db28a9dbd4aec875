"""Outcomes of answers by their status, as the proxy judges them."""

from __future__ import annotations

from gorgo.core.messages.request import AttemptResult, Outcome


def error_outcome(status: int) -> Outcome:
    """Return the outcome of an error status, as the proxy judges it."""
    error = f"status_{status}"
    if status in (429, 503):
        return Outcome(AttemptResult.BUSY, status=status, error=error)
    if status < 500:
        return Outcome(AttemptResult.UPSTREAM_4XX, status=status, unsent=True)
    return Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=status, error=error)
