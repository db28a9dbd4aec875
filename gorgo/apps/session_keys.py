"""Policies that choose by the key of a session, on traces in which most requests have one key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from gorgo.core.policy.interface import Policy

#: Above it one replica gets more than half of the requests, whatever the fleet.
WARN_SHARE = 0.5


def is_keyed(policy: Policy) -> bool:
    """Return whether the policy chooses by the session's key alone: its class has `by_session = True`."""
    return bool(getattr(policy, "by_session", False))


def largest_share(keys: Iterable[Hashable]) -> float:
    """Return the share of the most common key; 0 without a key.

    >>> largest_share(["a", "b", "a", "a"])
    0.75
    """
    counts = Counter(keys)
    return max(counts.values()) / counts.total() if counts else 0.0


def warning(policy: str, share: float | None) -> str | None:
    """Return the warning for a share of requests with one key; None if there is nothing to warn of."""
    if share is None or share <= WARN_SHARE:
        return None
    return (
        f"{policy}: no request has a session id and {share:.0%} begin with the same tokens: they share one key, and "
        "one replica gets them. The trace suits no policy that is keyed by user or session"
    )
