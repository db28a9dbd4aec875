"""The interface of a trained model: predicted times of a table of candidates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Model(Protocol):
    """One immutable result of a training: parameters, statistics of its samples, version."""

    @property
    def version(self) -> int:
        """The number of the round, from 1."""

    @property
    def kind(self) -> str:
        """As in `TrainingSpec`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns of a table."""

    @property
    def low(self) -> NDArray[np.float32]:
        """Least value of each feature in the training."""

    @property
    def high(self) -> NDArray[np.float32]:
        """Greatest value of each feature in the training."""

    @property
    def samples(self) -> int:
        """Samples of the training."""

    def ttft_s(self, table: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the predicted time from dispatch to first token of each row, s."""

    def tpot_s(self, table: NDArray[np.float32]) -> NDArray[np.float64] | None:
        """Return the predicted time per output token of each row, s; `None` if the model has none."""

    def arrays(self) -> tuple[dict[str, NDArray[Any]], Mapping[str, Any]]:
        """Return the parameters for a file: arrays by name, and what goes into its JSON header."""


def model_digest(model: Model) -> str:
    """Return 32 hexadecimal digits: the same for models of the same parameters, in whichever process."""
    arrays, parts = model.arrays()
    digest = blake2b(json.dumps([model.kind, model.version, model.names, dict(parts)]).encode(), digest_size=16)
    for name, array in sorted({**arrays, "low": model.low, "high": model.high}.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
