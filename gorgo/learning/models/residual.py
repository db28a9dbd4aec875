"""A prediction by priors plus what was measured beyond it, learned: no cold start, and no extrapolation.

Theory of operation. The base of a prediction is the prior with the waits that an engine imposes (`engine_waits`). A
small network learns measured TTFT minus the base, on most of the rows. This residual is taken in units of the base's
square root, between its absolute and its relative size: short times and long ones both count. A large error counts in
proportion, since a single stall is no rule. The learned residual is multiplied by the factor from 0 to 1 that fits the
other rows best, and by 0 unless that takes a share off their mean error: a network that has learned noise, or a few
stalls, adds nothing. It is clipped to what the training had, and is 0 for
a row out of its range. A prediction is at least a share of the base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.arrays import Floats
from gorgo.core.training.outcomes import TrainingRows
from gorgo.core.training.spec import TrainingSpec
from gorgo.errors import ConfigError
from gorgo.learning.models.base import FittedModel, facts
from gorgo.learning.models.descent import Descent, descend, last_layer_gradients
from gorgo.learning.models.engine_waits import PRIOR, EngineWaits, fit_waits
from gorgo.learning.models.network import Perceptron
from gorgo.learning.models.scaling import Scaler
from gorgo.learning.models.targets import capped_ttft_s

#: Range of a feature beyond the training's, as a share of its width: that of Lodestar's range check.
MARGIN = 0.1
HIDDEN = (32, 32)
#: Least prediction as a share of its base.
LEAST_SHARE = 0.2
#: Quantiles of the measured residuals to which a learned one is clipped: single stalls are no rule.
_QUANTILES = (0.01, 0.99)
#: Every so many rows one is left out of the descent, and decides on the factor.
_CHECK_EVERY = 5
#: Share of the mean error of the rows left out that a learned residual has to take off.
_EARNED = 0.05
#: Error, in units of the square root of a base, from which on it counts in proportion.
_LINEAR_FROM = 0.1
#: A shorter base has the unit of this one, s.
_LEAST_BASE_S = 0.01
#: A shorter measured time counts as this one where an error is a share of it, s.
_LEAST_TTFT_S = 0.001
#: Larger and more steps than Lodestar's: a small network needs more of them, and the first rounds have few rows.
_RATE, _BATCH = 2e-3, 64


@dataclass(frozen=True, slots=True, eq=False)
class ResidualModel(FittedModel):
    """A prior, waits of the engine, and a learned residual.

    Parameters
    ----------
    waits:
        Of the engine.
    network, scaler:
        Its output is minus the residual, in units of the base's square root.
    factor:
        Share of the residual that is added, 0 to 1.
    least, most:
        Range of the residual in that unit.
    prior_error:
        Mean error of the prior alone, as a share of the measured times.
    """

    waits: EngineWaits
    network: Perceptron
    scaler: Scaler
    factor: float
    least: float
    most: float
    prior_error: float
    kind: str = field(default="residual", init=False)

    def ttft_s(self, table: NDArray[np.float32]) -> Floats:
        """Return base plus residual of each row; the base alone for a row out of range."""
        base = self.base_s(table)
        residual = -self.network.outputs(self.scaler.apply(table)).astype(np.float64) * self.factor
        residual = np.clip(residual, self.least, self.most) * _unit(base)
        return np.where(self.in_range(table), np.maximum(base + residual, LEAST_SHARE * base), base)

    def base_s(self, table: NDArray[np.float32]) -> Floats:
        """Return the prior with the waits of the engine."""
        return self.waits.base_s(table, self.names)

    def in_range(self, table: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return whether each row is within the training's range, with a margin."""
        margin = MARGIN * (self.high - self.low)
        outside = (table < self.low - margin) | (table > self.high + margin)
        return np.asarray(~outside.any(axis=1))

    def tpot_s(self, table: NDArray[np.float32]) -> None:
        """Return `None`: it predicts no time per token."""

    def gradients(self, rows: TrainingRows, cap_s: float) -> NDArray[np.float32]:
        """Return the gradient of each row's squared error by the last layer's parameters, up to a factor of 2."""
        reward = -_residual(rows, self.waits, cap_s).astype(np.float32)
        return last_layer_gradients(self.network, self.scaler.apply(rows.features), reward, rows.censored)

    def arrays(self) -> tuple[dict[str, NDArray[Any]], Mapping[str, Any]]:
        """Return parameters and statistics; the header has the hidden widths and the numbers."""
        arrays: dict[str, NDArray[Any]] = {
            "parameters": self.network.parameters,
            "mean": self.scaler.mean,
            "inverse": self.scaler.inverse,
        }
        limits = {"factor": self.factor, "least": self.least, "most": self.most}
        limits["prior_error"] = self.prior_error
        waits = {"step_share": self.waits.step_share, "hold_s": self.waits.hold_s}
        return arrays, {"hidden": list(self.network.sizes[1:]), **limits, **waits}


def fit_residual(rows: TrainingRows, spec: TrainingSpec, *, rng: np.random.Generator, version: int) -> ResidualModel:
    """Return the model of measured minus base. Raises `ConfigError` for rows without the prior."""
    if PRIOR not in rows.names:
        raise ConfigError(f"training of kind 'residual': no feature {PRIOR!r} among {', '.join(rows.names)}")
    waits = fit_waits(rows)
    residual = _residual(rows, waits, spec.target_cap_s)
    scaler = Scaler.of(rows.features)
    table = scaler.apply(rows.features)
    network = Perceptron.xavier((len(rows.names), *HIDDEN), rng)
    for values in network.layers[-1]:
        values[:] = 0.0  # before the first step the prediction is the base
    checks = np.arange(len(rows)) % _CHECK_EVERY == _CHECK_EVERY - 1
    settings = Descent(epochs=spec.epochs, rate=_RATE, batch=_BATCH, linear_from=_LINEAR_FROM, dropout=())
    reward = -residual.astype(np.float32)
    descend(network, table[~checks], reward[~checks], rows.censored[~checks], rng=rng, settings=settings)
    measured = ~rows.censored
    learned = -network.outputs(table[checks & measured]).astype(np.float64)
    # A censored row says nothing of how much less than the bound a residual is.
    low, high = np.quantile(residual[measured], _QUANTILES) if measured.any() else (0.0, 0.0)
    return ResidualModel(
        **facts(rows, version),
        waits=waits,
        network=network,
        scaler=scaler,
        factor=earned_factor(learned, residual[checks & measured]),
        least=min(float(low), 0.0),
        most=max(float(high), 0.0),
        prior_error=_prior_error(rows.select(np.flatnonzero(measured)), spec.target_cap_s),
    )


def _residual(rows: TrainingRows, waits: EngineWaits, cap_s: float) -> Floats:
    """Return measured minus base of each row, in the unit of a residual; of a censored row a lower bound."""
    base = waits.base_s(rows.features, rows.names)
    result: Floats = (capped_ttft_s(rows, cap_s) - np.minimum(base, cap_s)) / _unit(base)
    return result


def _prior_error(measured: TrainingRows, cap_s: float) -> float:
    """Return the mean error of the prior as a share of the measured times; 0 without a row."""
    prior_s = np.minimum(measured.features[:, measured.names.index(PRIOR)].astype(np.float64), cap_s)
    ttft_s = np.maximum(capped_ttft_s(measured, cap_s), _LEAST_TTFT_S)
    return float(np.mean(np.abs(prior_s - ttft_s) / ttft_s)) if len(measured) else 0.0


def _unit(base: Floats) -> Floats:
    """Return the unit of a residual: of a time in s, the square root of the base."""
    return np.sqrt(np.maximum(base, _LEAST_BASE_S))


def earned_factor(learned: Floats, measured: Floats) -> float:
    """Return the factor from 0 to 1 on learned residuals that leaves the least squared error.

    It is 0 without rows, and where the mean error hardly falls.

    Example
    -------
    >>> stall = np.array([0.0] * 9 + [1.0])
    >>> earned_factor(np.full(10, 0.1), stall), earned_factor(stall / 2, stall)
    (0.0, 1.0)
    """
    power = float(learned @ learned)
    factor = min(1.0, max(0.0, float(learned @ measured) / power)) if power > 0.0 else 0.0
    left = np.abs(measured - factor * learned).sum()
    return factor if left <= (1.0 - _EARNED) * np.abs(measured).sum() else 0.0
