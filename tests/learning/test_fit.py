"""Every kind of model by the same call."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from gorgo.core.training.model import Model
from gorgo.core.training.spec import ModelKind, TrainingSpec
from gorgo.errors import ConfigError
from gorgo.learning import model_file
from gorgo.learning.fit import fit
from tests.learning.outcomes import NAMES, training_rows

KINDS = get_args(ModelKind)


def fitted(kind: ModelKind, seed: int = 1, rows: int = 300) -> Model:
    return fit(training_rows(rows, noise=0.05), TrainingSpec(kind, NAMES, epochs=3), seed=seed, version=4)


@pytest.mark.parametrize("kind", KINDS)
def test_model_has_its_facts_and_predicts_a_finite_time_per_row(kind: ModelKind) -> None:
    model, table = fitted(kind), training_rows(20, seed=2).features
    assert (model.version, model.names, model.samples) == (4, NAMES, 300)
    assert model.low.shape == model.high.shape == (len(NAMES),)
    assert (model.low <= model.high).all()
    times = model.ttft_s(table)
    assert times.shape == (20,)
    assert times.dtype == np.float64
    assert np.isfinite(times).all()
    tpot = model.tpot_s(table)
    assert (tpot is not None) is (kind in ("trees", "rls"))
    assert tpot is None or tpot.shape == (20,)


@pytest.mark.parametrize("kind", KINDS)
def test_same_rows_settings_and_seed_make_the_same_model(kind: ModelKind) -> None:
    assert model_file.dumps(fitted(kind)) == model_file.dumps(fitted(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_makes_a_model(kind: ModelKind) -> None:
    model = fitted(kind, rows=1)
    assert np.isfinite(model.ttft_s(training_rows(5).features)).all()


def test_rounds_have_chances_of_their_own() -> None:
    spec, rows = TrainingSpec("mlp", NAMES, epochs=1), training_rows(300)
    first, second = (fit(rows, spec, seed=1, version=version).ttft_s(rows.features) for version in (1, 2))
    assert not (first == second).all()


def test_rows_of_other_features_are_refused() -> None:
    spec = TrainingSpec("mlp", ("kv_usage",))
    with pytest.raises(ConfigError, match=r"rows of features uncached_tokens, .*; expected kv_usage"):
        fit(training_rows(10), spec, seed=0, version=1)


def test_no_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="no rows; expected at least one"):
        fit(training_rows(0), TrainingSpec("mlp", NAMES), seed=0, version=1)
