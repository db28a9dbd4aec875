"""Z-scores."""

from __future__ import annotations

import numpy as np
import pytest

from gorgo.learning.models.base import Scaler


def test_scores_of_the_training_rows_have_mean_0_and_deviation_1() -> None:
    table = np.random.default_rng(0).lognormal(8, 2, (1000, 3)).astype(np.float32)
    scores = Scaler.of(table).apply(table)
    assert scores.dtype == np.float32
    assert scores.mean(axis=0) == pytest.approx(0.0, abs=1e-4)
    assert scores.std(axis=0) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.1, 123_456.7])
def test_constant_feature_scores_0_whatever_its_value_becomes(value: float) -> None:
    table = np.full((1000, 1), value, dtype=np.float32)
    assert Scaler.of(table).apply(table + 7) == pytest.approx(0.0)
