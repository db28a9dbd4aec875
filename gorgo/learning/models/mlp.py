"""The network of Lodestar: minus the TTFT of a replica's row by a multilayer perceptron.

References
----------
Lodestar: online learned routing of LLM requests, algorithm 4 and its appendix. Weights start anew in each round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.training.outcomes import TrainingRows
from gorgo.core.training.spec import TargetKind, TrainingSpec
from gorgo.learning.models.base import FittedModel, facts
from gorgo.learning.models.descent import Descent, descend, last_layer_gradients
from gorgo.learning.models.network import Perceptron
from gorgo.learning.models.scaling import Scaler
from gorgo.learning.models.targets import capped_ttft_s, decode, encode

HIDDEN = (128, 128, 128)


@dataclass(frozen=True, slots=True, eq=False)
class MlpModel(FittedModel):
    """A fitted network; its output is the reward, minus the TTFT or its logarithm.

    Parameters
    ----------
    network, scaler:
        Parameters, and statistics of the features.
    target:
        As in `TrainingSpec`.
    """

    network: Perceptron
    scaler: Scaler
    target: TargetKind = "seconds"
    kind: str = field(default="mlp", init=False)

    def ttft_s(self, table: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return minus the reward of each row, in one pass; below 0 where the network extrapolates so."""
        return decode(-self.network.outputs(self.scaler.apply(table)).astype(np.float64), self.target)

    def tpot_s(self, table: NDArray[np.float32]) -> None:
        """Return `None`: Lodestar predicts no time per token."""

    def gradients(self, rows: TrainingRows, cap_s: float) -> NDArray[np.float32]:
        """Return the gradient of each row's squared error by the last layer's parameters, up to a factor of 2."""
        reward = _rewards(rows, cap_s, self.target)
        return last_layer_gradients(self.network, self.scaler.apply(rows.features), reward, rows.censored)

    def arrays(self) -> tuple[dict[str, NDArray[Any]], Mapping[str, Any]]:
        """Return parameters and statistics; the header has the hidden widths."""
        arrays: dict[str, NDArray[Any]] = {
            "parameters": self.network.parameters,
            "mean": self.scaler.mean,
            "inverse": self.scaler.inverse,
        }
        return arrays, {"hidden": list(self.network.sizes[1:]), "target": self.target}


def fit_mlp(rows: TrainingRows, spec: TrainingSpec, *, rng: np.random.Generator, version: int) -> MlpModel:
    """Return a network trained from random weights on all rows."""
    scaler = Scaler.of(rows.features)
    network = Perceptron.xavier((len(rows.names), *HIDDEN), rng)
    reward = _rewards(rows, spec.target_cap_s, spec.target)
    settings = Descent(epochs=spec.epochs)
    descend(network, scaler.apply(rows.features), reward, rows.censored, rng=rng, settings=settings)
    return MlpModel(**facts(rows, version), network=network, scaler=scaler, target=spec.target)


def _rewards(rows: TrainingRows, cap_s: float, target: TargetKind) -> NDArray[np.float32]:
    return -encode(capped_ttft_s(rows, cap_s), target).astype(np.float32)
