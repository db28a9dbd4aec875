"""The interface of trials: one candidate against the incumbent, as two arms.

Theory of operation: `arm` names the arm that should be in force, and `turn` counts the requests for a put. The
campaign puts weights when the count has changed, and calls `on_applied` once they are in force. The same arm is put
again too: every put has a new version of its own, which separates the samples of one block from those of the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tuner.objective import TunerSample, WindowStats

Arm = Literal["incumbent", "offspring"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a trial.

    `refused`: by the guard, whatever the objective. `breach`: the weights have to be rolled back at once. Objectives
    are p95 TTFT in ms, `stats` the offspring's; None if not measured.
    """

    accepted: bool
    reason: str
    objective_ms: float | None = None
    incumbent_objective_ms: float | None = None
    stats: WindowStats | None = None
    incumbent_stats: WindowStats | None = None
    refused: bool = False
    breach: bool = False


@dataclass(frozen=True, slots=True)
class Abandon:
    """A trial that cannot be finished now, without a result."""

    reason: str


Outcome = Verdict | Abandon | None


class Trial(Protocol):
    """Measures two arms and decides between them."""

    turn: int
    offspring_version: int | None

    @property
    def arm(self) -> Arm:
        """Return the arm that should be in force."""
        ...

    def on_applied(self, version: int, *, now: float) -> None:
        """Record that the weights of `arm` are in force under this version."""
        ...

    def on_samples(self, samples: Iterable[TunerSample], *, now: float) -> Outcome: ...

    def on_time(self, *, now: float) -> Outcome: ...

    def void(self) -> None:
        """Drop the current measurement: samples were lost, or the proxy restarted."""
        ...

    def next_time(self) -> float | None:
        """Return when `on_time` has something to do."""
        ...

    def state(self) -> dict[str, Any]:
        """Return finished measurements as JSON."""
        ...

    def load(self, state: Mapping[str, Any]) -> None: ...
