"""What a campaign wants done: frozen records for its shell to carry out, in their order.

Owns the records. The shell answers a `PutWeights` or `RollBack` with `Campaign.on_weights_applied` and its ticket; the
others need no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuner.campaign.generation import Generation


@dataclass(frozen=True, slots=True)
class PutWeights:
    """Route by these weights from now on. All of the policy's weights, by name; `ticket` names this order."""

    values: Mapping[str, float]
    reason: str
    ticket: int


@dataclass(frozen=True, slots=True)
class RollBack:
    """The same, because what is in force does harm: before anything else, and worth a line in the history."""

    values: Mapping[str, float]
    reason: str
    ticket: int


@dataclass(frozen=True, slots=True)
class RecordGeneration:
    """Write this row, before what follows is done."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Freeze:
    """Pin these weights, which are in force by now."""

    values: Mapping[str, float]
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Call `on_time` then, if nothing happens before. Seconds of the clock that `now` comes from."""

    until: float


@dataclass(frozen=True, slots=True)
class Stop:
    """The campaign is over."""

    reason: str


Action = PutWeights | RollBack | RecordGeneration | Freeze | Wait | Stop
