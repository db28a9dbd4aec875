"""A policy that learns, small enough to read: least predicted time to first token, least in flight without a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates, Choice, IndexKind, argmin_tiebreak, choose_min_cost
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.core.training.candidate_table import feature_table
from gorgo.core.training.learning import Model, TrainingSpec
from gorgo.core.training.outcomes import TrainingRows

NAMES = ("uncached_tokens", "rtt_s", "in_flight_requests")


class LinearModel:
    """The dot product of a row and `factors`."""

    kind = "linear"

    def __init__(
        self, factors: tuple[float, ...] = (0.001, 1.0, 0.1), *, version: int = 1, names: tuple[str, ...] = NAMES
    ) -> None:
        self.factors, self.version, self.names = factors, version, names
        self.samples = 1000
        self.low, self.high = np.zeros(len(names), np.float32), np.full(len(names), 1e9, np.float32)

    def ttft_s(self, table: NDArray[np.float32]) -> NDArray[np.float64]:
        return np.asarray(table @ np.array(self.factors), dtype=np.float64)

    def tpot_s(self, table: NDArray[np.float32]) -> NDArray[np.float64] | None:
        return None

    def arrays(self) -> tuple[dict[str, NDArray[Any]], Mapping[str, Any]]:
        return {"factors": np.array(self.factors)}, {}


class LeastPredicted:
    name: ClassVar[str] = "least-predicted"
    summary: ClassVar[str] = "least predicted time to first token"
    unit: ClassVar[str] = "s"
    index: ClassVar[IndexKind] = "any"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def __init__(self, spec: TrainingSpec | None = None) -> None:
        self.training = spec or TrainingSpec("linear", NAMES)
        self.feature_names = self.training.names
        self.model: Model | None = None

    def features(self, request: RouteRequest, candidates: Candidates) -> NDArray[np.float32]:
        return feature_table(self.feature_names, request, candidates)

    def adopt(self, model: Model | None) -> None:
        self.model = model

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        if self.model is None:
            load = candidates.in_flight_requests
            return Choice(argmin_tiebreak(load, load, rng), fallback="cold_start")
        table = self.features(request, candidates)
        chosen = choose_min_cost({"ttft": self.model.ttft_s(table)}, candidates, rng)
        return Choice(chosen.row, chosen.terms, chosen.cost, features=table)


class LeastSquaresTrainer:
    """Every row so far, and a model of least squares."""

    def __init__(self, spec: TrainingSpec, seed: int, incumbent: Model | None) -> None:
        self.spec, self.version = spec, 0 if incumbent is None else incumbent.version
        self.noise = 1e-9 * seed
        self.rows = TrainingRows.empty(spec.names)
        self._trained = 0

    def add(self, rows: TrainingRows) -> None:
        self.rows = TrainingRows.concat([self.rows, rows.select(~rows.censored)])

    def due(self) -> bool:
        return len(self.rows) - self._trained >= self.spec.round_samples

    def train(self) -> LinearModel:
        self._trained, self.version = len(self.rows), self.version + 1
        factors = np.linalg.lstsq(self.rows.features.astype(np.float64), self.rows.ttft_s, rcond=None)[0]
        return LinearModel(tuple((factors + self.noise).tolist()), version=self.version, names=self.spec.names)
