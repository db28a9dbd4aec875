"""Errors of a run's models: each outcome beside what the model in use at its dispatch predicts for its features.

A model is trained before the outcomes that it is measured by, so none of these is one that it has seen. A decision
that a guard took counts as well: the model would have predicted it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from gorgo.core.training.model import Model, TrainingSpec
from gorgo.core.training.outcomes import TrainingRows
from gorgo.lab.sim.training import TrainingController, TrainingRound
from gorgo.learning.trainer import Trainer

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasts:
    """Outcomes in the order in which they ended: measured times and the predicted ones, NaN where unknown. In s."""

    dispatched_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    predicted_ttft_s: Floats
    predicted_tpot_s: Floats

    def between(self, begin_s: float, end_s: float) -> Forecasts:
        """Return the outcomes of requests that were dispatched in a span of time."""
        inside = (self.dispatched_s >= begin_s) & (self.dispatched_s < end_s)
        return Forecasts(**{name: getattr(self, name)[inside] for name in self.__slots__})

    def errors(self) -> dict[str, float | None]:
        """Return mean and median errors as shares of the measured time; None without a prediction."""
        found: dict[str, float | None] = {}
        for name, predicted, measured in self._both():
            known = np.isfinite(predicted) & (measured > 0.0)
            errors = np.abs(predicted[known] - measured[known]) / measured[known]
            found[f"{name}_mean"] = float(errors.mean()) if len(errors) else None
            found[f"{name}_median"] = float(np.median(errors)) if len(errors) else None
        return found

    def means_ms(self) -> Mapping[str, float | None]:
        """Return means of predictions and, of the same outcomes, of measured times, ms."""
        found: dict[str, float | None] = {}
        for name, predicted, measured in self._both():
            known = np.isfinite(predicted) & np.isfinite(measured)
            for word, values in (("predicted", predicted), ("modelled", measured)):
                found[f"{word}_{name}_ms"] = float(np.mean(values[known] * 1e3)) if known.any() else None
        return found

    def _both(self) -> Sequence[tuple[str, Floats, Floats]]:
        return ("ttft", self.predicted_ttft_s, self.ttft_s), ("tpot", self.predicted_tpot_s, self.tpot_s)


class RecordedTrainer(Trainer):
    """A trainer that retains what it was given."""

    def __init__(self, spec: TrainingSpec, seed: int, incumbent: Model | None = None) -> None:
        super().__init__(spec, seed, incumbent)
        self.rows: list[TrainingRows] = []

    def add(self, rows: TrainingRows) -> None:
        super().add(rows)
        self.rows.append(rows)


class RunTraining:
    """The training of a run, and what there is to say of its models; parameters as in `TrainingController`."""

    def __init__(self, *, seed: int, model: Model | None = None, until_s: float = inf) -> None:
        self.controller = TrainingController(self._make_trainer, seed=seed, model=model, until_s=until_s)
        self._model = model
        self._trainers: list[RecordedTrainer] = []

    @property
    def adopted_s(self) -> list[float]:
        return [one.adopted_s for one in self.controller.rounds if one.adopted_s is not None]

    def forecasts(self) -> Forecasts:
        parts = [rows for trainer in self._trainers for rows in trainer.rows]
        return forecasts(parts, self.controller.rounds, self._model)

    def _make_trainer(self, spec: TrainingSpec, seed: int, incumbent: Model | None) -> RecordedTrainer:
        trainer = RecordedTrainer(spec, seed, incumbent)
        self._trainers.append(trainer)
        return trainer


def forecasts(parts: Sequence[TrainingRows], rounds: Sequence[TrainingRound], first: Model | None) -> Forecasts:
    """Return every outcome that is not censored with the prediction of the model that was in use at its dispatch.

    `first` is the model at the start; a round that was not adopted predicts nothing.
    """
    if not parts:
        return Forecasts(**dict.fromkeys(Forecasts.__slots__, np.empty(0)))
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
    return Forecasts(
        dispatched_s=rows.dispatched_s, ttft_s=rows.ttft_s, tpot_s=rows.tpot_s, predicted_ttft_s=ttft_s,
        predicted_tpot_s=tpot_s,
    )  # fmt: skip
