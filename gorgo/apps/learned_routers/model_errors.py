"""Errors of a run's models: each outcome beside what the model in use at its dispatch predicts for its features.

A model is trained before the outcomes that it is measured by, so none of these is one that it has seen. A decision
that a guard took counts as well: the model would have predicted it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from time import thread_time

import numpy as np
from numpy.typing import NDArray

from gorgo.core.training.model import Model
from gorgo.core.training.outcomes import TrainingRows
from gorgo.core.training.spec import TrainingSpec
from gorgo.learning.trainer import Trainer
from gorgo.sim.training import TrainingController, TrainingRound

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRound:
    """A round: the rows it trained on, the processor time it took, and errors on rows that no round trains on."""

    samples: int
    fit_cpu_s: float
    ttft_mape: float | None
    tpot_mape: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelErrors:
    """Errors of predictions as shares of the measured time; `None` without a prediction."""

    n: int = 0
    ttft_mean: float | None = None
    ttft_median: float | None = None
    tpot_mean: float | None = None
    tpot_median: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForecasts:
    """Outcomes in the order in which they ended: measured times and the predicted ones, NaN where unknown. In s."""

    dispatched_s: Floats = field(default_factory=lambda: np.empty(0))
    ttft_s: Floats = field(default_factory=lambda: np.empty(0))
    tpot_s: Floats = field(default_factory=lambda: np.empty(0))
    predicted_ttft_s: Floats = field(default_factory=lambda: np.empty(0))
    predicted_tpot_s: Floats = field(default_factory=lambda: np.empty(0))

    def between(self, begin_s: float, end_s: float) -> ModelForecasts:
        """Return the outcomes of requests that were dispatched in a span of time."""
        inside = (self.dispatched_s >= begin_s) & (self.dispatched_s < end_s)
        return ModelForecasts(**{name: getattr(self, name)[inside] for name in self.__slots__})

    def errors(self) -> ModelErrors:
        """Return means and medians."""
        ttft = _errors(self.predicted_ttft_s, self.ttft_s)
        tpot = _errors(self.predicted_tpot_s, self.tpot_s)
        return ModelErrors(
            n=len(ttft),
            ttft_mean=_mean(ttft),
            ttft_median=_median(ttft),
            tpot_mean=_mean(tpot),
            tpot_median=_median(tpot),
        )


class RecordedTrainer(Trainer):
    """A trainer that retains what it was given and what its rounds came to."""

    def __init__(self, spec: TrainingSpec, seed: int, version: int = 0) -> None:
        super().__init__(spec, seed, version)
        self.rows: list[TrainingRows] = []
        self.fitted: list[FittedRound] = []

    def add(self, rows: TrainingRows) -> None:
        """Take outcomes."""
        super().add(rows)
        self.rows.append(rows)

    def train(self) -> Model:
        """Return the next model."""
        begun_s = thread_time()
        model = super().train()
        cpu_s, report = thread_time() - begun_s, self.report()
        fitted = FittedRound(
            samples=report.samples, fit_cpu_s=cpu_s, ttft_mape=report.ttft_mape, tpot_mape=report.tpot_mape
        )
        self.fitted.append(fitted)
        return model


class RunTraining:
    """The training of a run, and what there is to say of its models.

    Parameters
    ----------
    seed, model, until_s:
        As in `TrainingController`.
    """

    def __init__(self, *, seed: int, model: Model | None = None, until_s: float = inf) -> None:
        self.controller = TrainingController(self._make_trainer, seed=seed, model=model, until_s=until_s)
        self._model = model
        self._trainers: list[RecordedTrainer] = []

    @property
    def fitted(self) -> list[FittedRound]:
        """Rounds in order."""
        return [one for trainer in self._trainers for one in trainer.fitted]

    @property
    def adopted_s(self) -> list[float]:
        """When each model was adopted."""
        return [one.adopted_s for one in self.controller.rounds if one.adopted_s is not None]

    def forecasts(self) -> ModelForecasts:
        """Return every outcome beside its prediction."""
        parts = [rows for trainer in self._trainers for rows in trainer.rows]
        return forecasts(parts, self.controller.rounds, self._model)

    def _make_trainer(self, spec: TrainingSpec, seed: int, version: int) -> RecordedTrainer:
        trainer = RecordedTrainer(spec, seed, version)
        self._trainers.append(trainer)
        return trainer


def forecasts(parts: Sequence[TrainingRows], rounds: Sequence[TrainingRound], first: Model | None) -> ModelForecasts:
    """Return every outcome with the prediction of the model that was in use at its dispatch.

    Parameters
    ----------
    parts:
        Outcomes; censored ones are left out.
    rounds:
        Of the run, in order; one that was not adopted predicts nothing.
    first:
        The model at the start.
    """
    if not parts:
        return ModelForecasts()
    rows = TrainingRows.concat(parts)
    rows = rows.select(~rows.censored)
    used = [(-inf, first), *((one.adopted_s, one.model) for one in rounds if one.adopted_s is not None)]
    place = np.searchsorted([adopted_s for adopted_s, _ in used], rows.dispatched_s, side="right") - 1
    ttft_s, tpot_s = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    for number, (_, model) in enumerate(used):
        chosen = np.flatnonzero(place == number)
        if model is None or not len(chosen):
            continue
        table = rows.features[chosen]
        ttft_s[chosen] = model.ttft_s(table)
        if (per_token := model.tpot_s(table)) is not None:
            tpot_s[chosen] = per_token
    return ModelForecasts(
        dispatched_s=rows.dispatched_s,
        ttft_s=rows.ttft_s,
        tpot_s=rows.tpot_s,
        predicted_ttft_s=ttft_s,
        predicted_tpot_s=tpot_s,
    )


def _errors(predicted: Floats, measured: Floats) -> Floats:
    known = np.isfinite(predicted) & (measured > 0.0)
    errors: Floats = np.abs(predicted[known] - measured[known]) / measured[known]
    return errors


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def _median(values: Floats) -> float | None:
    return float(np.median(values)) if len(values) else None
