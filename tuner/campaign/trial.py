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
    """How a trial ended.

    `refused`: the guard said no, whatever the objective. `breach`: so much so that the weights have to go at once.
    Objectives are p95 TTFT in ms, `stats` the offspring's; None where it did not come to that.
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
    """A trial that cannot be finished now; nothing was learned about the candidate."""

    reason: str


Outcome = Verdict | Abandon | None


class Trial(Protocol):
    """Measures two arms and decides between them."""

    turn: int
    offspring_version: int | None

    @property
    def arm(self) -> Arm:
        """Which of the two should be in force."""
        ...

    def on_applied(self, version: int, *, now: float) -> None:
        """The weights of `arm` are in force under this version."""
        ...

    def on_samples(self, samples: Iterable[TunerSample], *, now: float) -> Outcome: ...

    def on_time(self, *, now: float) -> Outcome: ...

    def void(self) -> None:
        """Samples were lost, or the proxy restarted: what is being measured right now does not count."""
        ...

    def next_time(self) -> float | None:
        """When `on_time` has something to do."""
        ...

    def state(self) -> dict[str, Any]:
        """What was measured for good, as JSON; what is being measured is left out."""
        ...

    def load(self, state: Mapping[str, Any]) -> None: ...
