"""Rounds of training: rows come in, and a model comes out when enough of them are new.

Owns one fit (`fit`), and the rounds with their buffers and errors (`Trainer`). Leaves which rows are retained to
`buffers`, and the mathematics to `models`. A simulation's controller and the worker beside a proxy use the same object.
It measures no time.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.record import record
from gorgo.core.training.model import Model, TrainingSpec
from gorgo.core.training.outcomes import TrainingRows
from gorgo.errors import ConfigError
from gorgo.learning.buffers import FifoReplay, RowRing, StratifiedStore
from gorgo.learning.models import trees
from gorgo.learning.models.linear import fit_linear, fit_rls
from gorgo.learning.models.network import fit_mlp
from gorgo.learning.models.residual import fit_residual

# One training: rows, settings and a seed make a model.


def fit(rows: TrainingRows, spec: TrainingSpec, seed: int, version: int) -> Model:
    """Return the model of a round.

    Parameters
    ----------
    rows:
        All that the round trains on, with the features of `spec.names`.
    spec:
        Kind and settings. Kind `trees` without LightGBM makes a model of kind `rls`.
    seed, version:
        Chance of the round, and the number that the model gets. The same arguments make the same model.

    Raises `ConfigError` for other features, or without a row.
    """
    if rows.names != spec.names:
        raise ConfigError(f"training: rows of features {', '.join(rows.names)}; expected {', '.join(spec.names)}")
    if not len(rows):
        raise ConfigError("training: no rows; expected at least one")
    rng = np.random.default_rng((seed, version))
    match spec.kind:
        case "mlp":
            return fit_mlp(rows, spec, rng=rng, version=version)
        case "residual":
            return fit_residual(rows, spec, rng=rng, version=version)
        case "linear":
            return fit_linear(rows, spec, version=version)
        case "trees" if trees.available():
            return trees.fit_trees(rows, spec, seed=int(rng.integers(2**31)), version=version)
        case _:
            return fit_rls(rows, spec, version=version)


#: Share of the rows that no round trains on, and how many of the newest are stored to measure errors by.
TEST_SHARE = 0.1
TEST_ROWS = 1000
#: Spreads numbers in sequence over 64 bits: 2^64 over the golden ratio.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


@record
class TrainingReport:
    """A round.

    Parameters
    ----------
    version, kind:
        Of the model; version 0 and no kind before the first round.
    added, rejected:
        Rows received so far, and those among them with a number that is not finite.
    samples, censored:
        Rows that the round trained on, and those among them without a first token.
    tested:
        Rows that errors were measured by; no round trains on them.
    ttft_mape, tpot_mape:
        Mean of the error's share of the measured time; `None` without such a row or prediction.
    """

    version: int = 0
    kind: str | None = None
    added: int = 0
    rejected: int = 0
    samples: int = 0
    censored: int = 0
    tested: int = 0
    ttft_mape: float | None = None
    tpot_mape: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return asdict(self)


class Trainer:
    """The buffers of one policy's training, and its rounds.

    Parameters
    ----------
    spec:
        Kind of model, buffers, and when a round is due.
    seed:
        Of all chance.
    version:
        Number of the last round before this object: the first one here is the next.

    Example
    -------
    >>> trainer = Trainer(TrainingSpec("linear", ("prompt_tokens",), first_samples=2), seed=0)
    >>> trainer.due(), trainer.report().version
    (False, 0)
    """

    def __init__(self, spec: TrainingSpec, seed: int, version: int = 0) -> None:
        self.spec = spec
        self._seed = seed
        self._version = version
        self._store: FifoReplay | StratifiedStore = (
            FifoReplay(spec, np.random.default_rng((seed, version)))
            if spec.store == "fifo"
            else StratifiedStore(spec.names)
        )
        self._test = RowRing(spec.names, TEST_ROWS)
        self._added = 0
        self._rejected = 0
        self._since_round = 0
        #: Rows so far that rounds train on: a policy refuses a model of fewer than `first_samples`.
        self._trainable = 0
        self._model: Model | None = None
        self._report = TrainingReport()

    def add(self, rows: TrainingRows) -> None:
        """Take outcomes; the number of a row decides whether it is trained on or tested by."""
        usable = np.isfinite(rows.features).all(axis=1) & np.isfinite(rows.ttft_s)
        tested = is_tested(rows)
        self._added += len(rows)
        self._rejected += int(np.sum(~usable))
        self._since_round += int(np.sum(usable))
        self._trainable += int(np.sum(usable & ~tested))
        self._store.add(rows.select(np.flatnonzero(usable & ~tested)))
        self._test.append(rows.select(np.flatnonzero(usable & tested)))

    def due(self) -> bool:
        """Return whether enough rows came since the last round; before the first one, enough to train on."""
        if self._model is None:
            return self._trainable >= max(self.spec.first_samples, 1)
        return self._since_round >= max(self.spec.round_samples, self.spec.round_growth * len(self._store))

    def train(self) -> Model:
        """Return the next model. Raises `ConfigError` without a row."""
        if isinstance(self._store, FifoReplay):
            self._store.fill_replay(self._model)
        rows = self._store.stored()
        self._model = model = fit(rows, self.spec, self._seed, self._version + 1)
        self._version += 1
        self._since_round = 0
        test = self._test.stored()
        ttft, tpot = errors(model, test)
        self._report = TrainingReport(
            version=model.version,
            kind=model.kind,
            samples=len(rows),
            censored=int(np.sum(rows.censored)),
            tested=len(test),
            ttft_mape=ttft,
            tpot_mape=tpot,
        )
        return model

    def report(self) -> TrainingReport:
        """Return the last round and the rows so far."""
        fields = self._report.as_dict() | {"added": self._added, "rejected": self._rejected}
        return TrainingReport(**fields)


def is_tested(rows: TrainingRows) -> NDArray[np.bool_]:
    """Return which rows are left out of training, by a hash of their numbers."""
    numbers = np.uint64(rows.first_seq) + np.arange(len(rows), dtype=np.uint64)
    spread = (numbers * _SPREAD) >> np.uint64(32)
    return spread < np.uint64(TEST_SHARE * 2**32)


def errors(model: Model, rows: TrainingRows) -> tuple[float | None, float | None]:
    """Return the mean absolute percentage errors of TTFT and time per token, as shares of 1."""
    measured = ~rows.censored & (rows.ttft_s > 0.0)
    ttft = _mape(model.ttft_s(rows.features[measured]), rows.ttft_s[measured]) if measured.any() else None
    timed = rows.tpot_s > 0.0
    tpot = model.tpot_s(rows.features[timed]) if timed.any() else None
    return ttft, None if tpot is None else _mape(tpot, rows.tpot_s[timed])


def _mape(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    return float(np.mean(np.abs(predicted - measured) / measured))
