"""The last versions of the weights since the start, with the time and the requester of each."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime

from gorgo.core.router import Router
from gorgo.live.clock import Clock
from gorgo.live.control.transactions import ChangeRequest, WeightsChange

#: One day of a tuner with a proposal every 15 minutes.
MAX_HISTORY = 100


class WeightsHistory:
    """The history of one Router, oldest first."""

    def __init__(self, router: Router, clock: Clock) -> None:
        self._router = router
        self._clock = clock
        self._rows: deque[WeightsChange] = deque(maxlen=MAX_HISTORY)

    @property
    def rows(self) -> list[WeightsChange]:
        return list(self._rows)

    def record(self, change: ChangeRequest) -> None:
        """Record the version in force as the result of `change`."""
        policy, weights = self._router.settings.policy.name, self._router.settings.weights
        row = (weights.version, policy, dict(weights), now_text(self._clock), change.source, change.reason, change.by)
        self._rows.append(WeightsChange(*row))


def now_text(clock: Clock) -> str:
    """Return the time now in ISO 8601, UTC."""
    return datetime.fromtimestamp(clock(), UTC).isoformat(timespec="milliseconds")
