"""What passes between the proxy and the process that trains: settings there, then outcomes, and replies back.

A process that starts without settings tries model files instead.
"""

from __future__ import annotations

from typing import Any

from gorgo.core.record import record
from gorgo.core.training.learning import TrainingSpec
from gorgo.core.training.outcomes import TrainingRows


@record
class Settings:
    """What a training starts with. `incumbent` is the model in use as bytes of a model file, `None` without one."""

    spec: TrainingSpec
    seed: int
    incumbent: bytes | None


@record
class GivenModel:
    """The bytes of a model file, the file's name for errors, and the features that are expected."""

    data: bytes
    place: str
    names: tuple[str, ...]


@record
class Outcomes:
    """Some outcomes. No round begins while there are `more`: it would be one of a part of a ring."""

    rows: TrainingRows
    more: bool


@record
class Reply:
    """The answer to some outcomes: the trainer's report, and after a round its model as bytes of a model file.

    A round without a model leaves the one in use, which is better.
    """

    report: dict[str, Any]
    model: bytes | None = None
    is_round: bool = False
    #: Of the round, s.
    seconds: float = 0.0
