"""The decisions of a simulated Router, as a log would have them."""

from __future__ import annotations

from collections import deque

from gorgo.core.router import Router
from gorgo.core.training.learning import RecordedOutcome
from gorgo.lab.decisions import MAX_DECISIONS, LoggedDecision, decision_of


class DecisionCollector:
    """A controller of a simulation that collects the newest decisions of its Router.

    Parameters
    ----------
    most:
        As many as a log is read.
    """

    def __init__(self, most: int = MAX_DECISIONS) -> None:
        self.decisions: deque[LoggedDecision] = deque(maxlen=most)
        self._next_s: float | None = 0.0

    @property
    def next_s(self) -> float | None:
        """Return when it begins to collect; None afterwards."""
        return self._next_s

    def act(self, router: Router, now: float) -> None:  # noqa: ARG002 - a controller's signature
        """Begin to collect."""
        router.settings.record_outcomes(self)
        self._next_s = None

    def record_outcome(self, outcome: RecordedOutcome) -> None:
        """Take one ended attempt."""
        decision = decision_of(outcome)
        if decision is not None:
            self.decisions.append(decision)
