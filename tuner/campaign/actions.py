"""Actions of a campaign: frozen records for its shell to execute in their order.

The shell answers a `PutWeights` or `RollBack` with `Campaign.on_weights_applied` and its ticket; others need no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuner.campaign.generation import Generation


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
