"""Errors of a model's predictions against outcomes that it was not trained on."""

from __future__ import annotations

import numpy as np

from gorgo.core.arrays import Floats
from gorgo.core.training.model import Model
from gorgo.core.training.outcomes import TrainingRows


def error_shares(model: Model, rows: TrainingRows) -> tuple[Floats, Floats]:
    """Return the absolute errors of time to first token and time per output token, as shares of the measured time.

    Rows without a measured time have none; nor has a model that does not predict it.
    """
    ended = ~rows.censored & (rows.ttft_s > 0.0)
    timed = rows.tpot_s > 0.0
    ttft_s = model.ttft_s(rows.features[ended]) if ended.any() else np.empty(0)
    tpot_s = model.tpot_s(rows.features[timed]) if timed.any() else None
    gaps = np.empty(0) if tpot_s is None else np.abs(tpot_s - rows.tpot_s[timed]) / rows.tpot_s[timed]
    return np.abs(ttft_s - rows.ttft_s[ended]) / rows.ttft_s[ended], gaps
