"""One candidate against the incumbent: what every way of measuring them has in common.

Owns the seam between the campaign, which knows weights, and its modes, which know only two arms.

Theory of operation: a trial says which arm should be in force (`arm`), and counts in `turn` how often it wanted
weights put; the campaign puts them when the count has moved and calls `began` once they are in force. A put is repeated
for the same arm too: the proxy gives every put a new version, and the version is how samples of one block are told from
those of the next.
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
    Objectives are p95 TTFT in ms, `figures` the offspring's; None where it did not come to that.
    """

    accepted: bool
    reason: str
    objective_ms: float | None = None
    incumbent_objective_ms: float | None = None
    figures: WindowStats | None = None
    incumbent_figures: WindowStats | None = None
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

    def began(self, version: int, *, now: float) -> None:
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
