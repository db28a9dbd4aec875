"""The record of one generation, for the campaign, the history and the report, and the actions of a campaign.

Owns the records alone. Leaves to the campaign when an action is due, and to its shell how it is executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One weight set under test, and its result.

    Parameters
    ----------
    number:
        From 0 within the campaign; 0 is the start.
    started_s, finished_s:
        By the campaign's clock; in the history Unix time.
    weights, weights_version:
        The weight set, and the proxy's version of it; None if it never reached the proxy.
    sigma:
        Step size in log space; None for an optimizer without one.
    mode, optimizer:
        How it was compared, and which optimizer proposed it.
    n:
        Samples in its window; statistics without a sample are None.
    objective_ms, incumbent_objective_ms:
        p95 TTFT of the window and of the incumbent's.
    e2e_s_p95, itl_ms_p95, errors, max_share:
        Guarded: p95 end to end, p95 gap between tokens, failed requests, largest share of one replica.
    accepted, reason:
        The decision and its reason.
    """

    number: int
    started_s: float
    finished_s: float
    weights: Mapping[str, float]
    weights_version: int | None
    sigma: float | None
    mode: str
    optimizer: str
    n: int
    objective_ms: float | None
    incumbent_objective_ms: float | None
    e2e_s_p95: float | None
    itl_ms_p95: float | None
    errors: int
    max_share: float | None
    accepted: bool
    reason: str

    def as_json(self) -> dict[str, Any]:
        """Return the row of `gorgo history --json` and of the report's `history.json`."""
        return {**asdict(self), "weights": dict(self.weights)}


# Actions of a campaign: frozen records for its shell to execute in their order.
#
# The shell answers a `PutWeights` or `RollBack` with `Campaign.on_weights_applied` and its ticket; others need no
# answer.


@dataclass(frozen=True, slots=True)
class PutWeights:
    """Route by these weights, all of the policy's by name; `ticket` names this put."""

    values: Mapping[str, float]
    reason: str
    ticket: int


@dataclass(frozen=True, slots=True)
class RollBack:
    """The same because the weights in force do harm: before anything else, with an event in the history."""

    values: Mapping[str, float]
    reason: str
    ticket: int


@dataclass(frozen=True, slots=True)
class RecordGeneration:
    """Write this row before the next action."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Freeze:
    """Pin these weights, which are in force."""

    values: Mapping[str, float]
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Call `on_time` at `until`, by the clock of `now`, if nothing happens before."""

    until: float


@dataclass(frozen=True, slots=True)
class Stop:
    """The campaign is done."""

    reason: str


Action = PutWeights | RollBack | RecordGeneration | Freeze | Wait | Stop
