"""Training from an outcome log: a model of all rows, its error on later rows, and what each feature adds.

Theory of operation. The newest fifth is held out: a model in use predicts what comes after its training. A feature adds
what the error grows by when its column is constant, in the training and in the test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gorgo.core.training.model import Model
from gorgo.core.training.outcomes import TrainingRows
from gorgo.core.training.spec import TrainingSpec
from gorgo.errors import TraceError
from gorgo.learning.fit import fit
from gorgo.learning.models.engine_waits import PRIOR
from gorgo.learning.trainer import errors

#: Share of the rows that is held out.
HELD_OUT = 0.2
#: Fewer rows fit by chance alone.
LEAST_ROWS = 50
#: Newest rows of a training without one feature: as many as a round of Lodestar has.
ABLATION_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class FeatureShare:
    """A feature, and the held-out errors of a model without it."""

    name: str
    ttft_error: float | None
    tpot_error: float | None


@dataclass(frozen=True, slots=True)
class LearnedModel:
    """A model of all rows, and errors of one without the newest fifth on that fifth.

    Errors are means of absolute errors as shares of the measured time; `None` without a measured or predicted one.
    """

    model: Model
    trained: int
    tested: int
    ttft_error: float | None
    tpot_error: float | None
    #: The same with the newest `ABLATION_ROWS` alone, beside which `features` stand.
    ablation_ttft_error: float | None
    ablation_tpot_error: float | None
    features: tuple[FeatureShare, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {
            "kind": self.model.kind,
            "samples": self.model.samples,
            "trained": self.trained,
            "tested": self.tested,
            "error_ttft": self.ttft_error,
            "error_tpot": self.tpot_error,
            "ablation": {
                "all": {"error_ttft": self.ablation_ttft_error, "error_tpot": self.ablation_tpot_error},
                "without": {
                    one.name: {"error_ttft": one.ttft_error, "error_tpot": one.tpot_error} for one in self.features
                },
            },
        }


def learn(
    rows: TrainingRows,
    spec: TrainingSpec,
    *,
    seed: int,
    ablation: bool = True,
    trained: Callable[[], None] | None = None,
) -> LearnedModel:
    """Train on `rows`, oldest first; `trained` is called after each of `trainings` rounds.

    Raises `TraceError` for too few rows.
    """
    if len(rows) < LEAST_ROWS:
        raise TraceError(f"the log has {len(rows)} outcomes of streams; expected {LEAST_ROWS} at least")

    def train(part: TrainingRows) -> Model:
        model = fit(part, spec, seed, 1)
        if trained is not None:
            trained()
        return model

    split = len(rows) - int(HELD_OUT * len(rows))
    before, after = rows.select(slice(0, split)), rows.select(slice(split, len(rows)))
    ttft, tpot = errors(train(before), after)
    recent = before.select(slice(max(0, split - ABLATION_ROWS), split))
    own: tuple[float | None, float | None] = (ttft, tpot)
    if ablation and len(recent) < len(before):
        own = errors(train(recent), after)
    shares = []
    for name in _ablated(spec) if ablation else ():
        column = spec.names.index(name)
        mean = float(np.mean(recent.features[:, column]))
        found = errors(train(_constant(recent, column, mean)), _constant(after, column, mean))
        shares.append(FeatureShare(name, *found))
    shares.sort(key=lambda one: -(one.ttft_error or 0.0))
    return LearnedModel(train(rows), len(before), len(after), ttft, tpot, *own, tuple(shares))


def trainings(spec: TrainingSpec, rows: int, *, ablation: bool) -> int:
    """Return how many rounds `learn` trains."""
    return 2 + (len(_ablated(spec)) + (rows - int(HELD_OUT * rows) > ABLATION_ROWS) if ablation else 0)


def _ablated(spec: TrainingSpec) -> tuple[str, ...]:
    """Return all features but the prediction that a residual is added to."""
    return tuple(name for name in spec.names if name != PRIOR)


def _constant(rows: TrainingRows, column: int, value: float) -> TrainingRows:
    """Return the rows with one feature that says nothing."""
    features = rows.features.copy()
    features[:, column] = value
    return replace(rows, features=features)
