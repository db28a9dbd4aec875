"""The interface of a log of outcomes: every ended attempt, with the features of all candidates at its decision."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.decision import Decision
from gorgo.core.messages.request import AttemptResult, RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.record import record
from gorgo.core.training.outcomes import OutcomeRow


@record
class RecordedOutcome:
    """An ended attempt.

    Parameters
    ----------
    decision:
        With the candidates and the row chosen.
    features:
        The recorder's table of the candidates.
    result:
        How it ended.
    e2e_s:
        From its dispatch to its end.
    row:
        Its times for a training; `None` for an end that says nothing of the time to a first token.
    """

    decision: Decision
    features: NDArray[np.float32]
    result: AttemptResult
    e2e_s: float
    row: OutcomeRow | None


class OutcomeRecorder(Protocol):
    """Takes outcomes. Both calls are part of a decision or of an event, so they wait for nothing."""

    def candidate_features(self, request: RouteRequest, candidates: Candidates) -> NDArray[np.float32]:
        """Return a row per candidate."""

    def record_outcome(self, outcome: RecordedOutcome) -> None:
        """Take one ended attempt."""
