"""What passes between the proxy and the process that trains: settings there, then `TrainingRows`, and replies back."""

from __future__ import annotations

from typing import Any

from gorgo.core.record import record
from gorgo.core.training.model import TrainingSpec


@record
class Settings:
    """What a training starts with. `version` is that of the model in use, 0 without one."""

    spec: TrainingSpec
    seed: int
    version: int


@record
class Reply:
    """The answer to some outcomes: the trainer's report, and after a round its model as bytes of a model file."""

    report: dict[str, Any]
    model: bytes | None = None
    #: Of the round, s.
    seconds: float = 0.0
