"""What passes between the proxy and the process that trains: settings and outcomes there, replies back."""

from __future__ import annotations

import pickle
import struct
from typing import Any

from gorgo.core.record import record
from gorgo.core.training.outcomes import TrainingRows
from gorgo.core.training.spec import TrainingSpec

#: Length of a pickle. Both ends are this program's own.
LENGTH = struct.Struct("!Q")


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


def encode(value: Settings | TrainingRows | Reply) -> bytes:
    """Return a value with its length before it."""
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data
