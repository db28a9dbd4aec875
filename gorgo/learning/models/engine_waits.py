"""Waits that an engine imposes beyond a prediction by priors: for its running step, and for KV memory.

Theory of operation. Both follow from what is counted there, so they hold beyond the range of a training too:

- A request comes in the middle of a step, and shares the next one with what decodes. The share of a decode step that
  this takes is fitted, robustly: a stall is no rule.
- A prompt that does not fit into the free KV memory waits until answers end. Of n that decode n / h end per second, if
  each takes h; each makes room for one more, which takes u tokens of its own: its uncached ones. So s tokens take
  s * h / (n * u). h and u are means over the training. Prefills run meanwhile, so the longer of both waits counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gorgo.core.arrays import Floats
from gorgo.core.training.outcomes import TrainingRows

#: The feature that is the prediction by priors, s.
PRIOR = "prior_s"
#: Share of a step before anything is learned: half of the one that runs.
_USUAL_SHARE, _MOST_SHARE = 0.5, 2.0
#: Weight of the usual share, as rows whose step is as long as their prediction.
_USUAL_ROWS = 1.0
#: Error, as a share of the prediction, from which on it counts in proportion; and repetitions of the fit.
_LINEAR_FROM, _FITS = 0.1, 20
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
    """

    step_share: float = 0.0
    hold_s: float = 0.0

    def base_s(self, table: NDArray[np.float32], names: tuple[str, ...]) -> Floats:
        """Return the prediction by priors with both waits, s; a wait whose features are not among `names` is 0."""
        prior_s, step_s, memory = _columns(table, names)
        return np.maximum(prior_s, self.hold_s * memory) + self.step_share * step_s


def fit_waits(rows: TrainingRows) -> EngineWaits:
    """Return the waits of measured rows; none without a row."""
    rows = rows.select(~rows.censored)
    if not len(rows):
        return EngineWaits()
    hold_s = _hold_s(rows)
    prior_s, step_s, memory = _columns(rows.features, rows.names)
    prior_s = np.maximum(prior_s, hold_s * memory)
    return EngineWaits(
        step_share=_share(step_s, rows.ttft_s - prior_s, np.maximum(prior_s + step_s, _LEAST_S)), hold_s=hold_s
    )


def _columns(table: NDArray[np.float32], names: tuple[str, ...]) -> tuple[Floats, Floats, Floats]:
    """Return prior, step, and tokens short per request that decodes."""

    def column(name: str) -> Floats:
        found: Floats = table[:, names.index(name)].astype(np.float64) if name in names else np.zeros(len(table))
        return found

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
    known = np.isfinite(new_tokens) & np.isfinite(decode_s)
    return float(decode_s[known].mean() / max(float(new_tokens[known].mean()), 1.0)) if known.any() else 0.0


def _share(step_s: Floats, beyond_s: Floats, scale_s: Floats) -> float:
    """Return the share of a step that explains most of the times beyond, by Huber's loss of errors over `scale_s`."""
    step, beyond, share = step_s / scale_s, beyond_s / scale_s, _USUAL_SHARE
    for _ in range(_FITS):
        weight = step * np.minimum(1.0, _LINEAR_FROM / np.maximum(np.abs(beyond - share * step), 1e-9))
        share = float((weight @ beyond + _USUAL_ROWS * _USUAL_SHARE) / (weight @ step + _USUAL_ROWS))
        share = min(max(share, 0.0), _MOST_SHARE)
    return share
