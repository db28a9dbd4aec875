"""A prediction by priors plus what was measured beyond it, learned: no cold start, and no extrapolation.

Owns the waits that an engine imposes (`EngineWaits`) and the model with its fit (`ResidualModel`). Leaves the priors to
the policy that makes the rows.

Theory of operation. The base of a prediction is the prior with the waits that an engine imposes (`EngineWaits`). A
small network learns measured TTFT minus the base, on most of the rows. This residual is taken in units of the base's
square root, between its absolute and its relative size: short times and long ones both count. A large error counts in
proportion, since a single stall is no rule. The learned residual is multiplied by the factor from 0 to 1 that fits the
other rows best, and by 0 unless that takes a share off their mean error: a network that has learned noise, or a few
stalls, adds nothing. It is clipped to what the training had, and is 0 for a row out of its
range. A prediction is at least a share of the base.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.numeric import Floats
from gorgo.core.training.learning import TrainingSpec
from gorgo.core.training.outcomes import TrainingRows
from gorgo.errors import ConfigError
from gorgo.learning.base import FittedModel, Scaler, capped_ttft_s, facts
from gorgo.learning.network import Descent, Perceptron, descend, last_layer_gradients

# Waits that an engine imposes beyond a prediction by priors: for its running step, and for KV memory.
#
# Theory of operation. Both follow from what is counted there, so they hold beyond the range of a training too:
#
# - A request comes in the middle of a step, and shares the next one with what decodes. The share of a decode step that
#   this takes is fitted, robustly: a stall is no rule.
# - A prompt that does not fit into the free KV memory waits until answers end. Of n that decode n / h end per second,
#   if each takes h; each makes room for one more, which takes u tokens of its own: its uncached ones. So s tokens take
#   s * h / (n * u). h and u are means over the training. Prefills run meanwhile, so the longer of both waits counts.
#
# An answer in one piece has the median time that such answers take beyond their first token in addition: it is the same
# on every replica, and a small network need not learn it.


#: The feature that is the prediction by priors, s, and the one that is 0 for an answer in one piece.
PRIOR, STREAMED = "prior_s", "streamed"
#: Share of a step before anything is learned: half of the one that runs.
_USUAL_SHARE, _MOST_SHARE = 0.5, 2.0
#: Weight of the usual share, as rows whose step is as long as their prediction.
_USUAL_ROWS = 1.0
#: Error, as a share of the prediction, from which on it counts in proportion; and repetitions of the fit.
_WAITS_LINEAR_FROM, _FITS = 0.1, 20
#: A shorter prediction counts as this one, s.
_LEAST_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWaits:
    """Learned constants of both waits.

    Parameters
    ----------
    step_share:
        Of a decode step.
    hold_s:
        For each request that decodes: time in which a token of KV memory becomes free, s.
    answer_s:
        From the first token to the end of an answer in one piece, s.
    """

    step_share: float = 0.0
    hold_s: float = 0.0
    answer_s: float = 0.0

    def base_s(self, table: NDArray[np.float32], names: tuple[str, ...]) -> Floats:
        """Return the prediction by priors with both waits, s; a wait whose features are not among `names` is 0."""
        prior_s, step_s, memory = _columns(table, names)
        first_s: Floats = np.maximum(prior_s, self.hold_s * memory) + self.step_share * step_s
        if not self.answer_s or STREAMED not in names:
            return first_s
        return np.where(table[:, names.index(STREAMED)] > 0.0, first_s, first_s + self.answer_s)


def fit_waits(rows: TrainingRows) -> EngineWaits:
    """Return the waits of measured rows; none without a row. Those before a first token are those of streams alone."""
    rows = rows.select(~rows.censored)
    streams, whole = rows.select(~rows.unstreamed), rows.select(rows.unstreamed)
    waits = EngineWaits()
    if len(streams):
        hold_s = _hold_s(streams)
        prior_s, step_s, memory = _columns(streams.features, streams.names)
        prior_s = np.maximum(prior_s, hold_s * memory)
        share = _share(step_s, streams.ttft_s - prior_s, np.maximum(prior_s + step_s, _LEAST_S))
        waits = EngineWaits(step_share=share, hold_s=hold_s)
    if len(whole):
        beyond_s = float(np.median(whole.ttft_s - waits.base_s(whole.features, whole.names)))
        waits = replace(waits, answer_s=max(beyond_s, 0.0))
    return waits


def _columns(table: NDArray[np.float32], names: tuple[str, ...]) -> tuple[Floats, Floats, Floats]:
    """Return prior, step, and tokens short per request that decodes."""

    def column(name: str) -> Floats:
        values: Floats = table[:, names.index(name)].astype(np.float64) if name in names else np.zeros(len(table))
        return values

    return (
        column(PRIOR),
        column("decode_step_s"),
        column("kv_short_tokens") / np.maximum(column("decoding_requests"), 1.0),
    )


def _hold_s(rows: TrainingRows) -> float:
    new_tokens = rows.prompt_tokens - rows.cached_tokens
    if "uncached_tokens" in rows.names:
        estimated = rows.features[:, rows.names.index("uncached_tokens")]
        new_tokens = np.where(np.isnan(new_tokens), estimated, new_tokens)
    decode_s = rows.e2e_s - rows.ttft_s
    complete = np.isfinite(new_tokens) & np.isfinite(decode_s)
    return float(decode_s[complete].mean() / max(float(new_tokens[complete].mean()), 1.0)) if complete.any() else 0.0


def _share(step_s: Floats, beyond_s: Floats, scale_s: Floats) -> float:
    """Return the share of a step that explains most of the times beyond, by Huber's loss of errors over `scale_s`."""
    step, beyond, share = step_s / scale_s, beyond_s / scale_s, _USUAL_SHARE
    for _ in range(_FITS):
        weight = step * np.minimum(1.0, _WAITS_LINEAR_FROM / np.maximum(np.abs(beyond - share * step), 1e-9))
        share = float((weight @ beyond + _USUAL_ROWS * _USUAL_SHARE) / (weight @ step + _USUAL_ROWS))
        share = min(max(share, 0.0), _MOST_SHARE)
    return share


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
        Mean error of the prior alone, as a share of the measured times of streams.
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
        waits = {name: getattr(self.waits, name) for name in ("step_share", "hold_s", "answer_s")}
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
    """Return the mean error of the prior as a share of the measured times; 0 without a row.

    It is that of first tokens, where there are any: of an answer in one piece a prior says little.
    """
    if not measured.unstreamed.all():
        measured = measured.select(~measured.unstreamed)
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
