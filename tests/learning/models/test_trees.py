"""Boosted trees on known functions; most tests need the extra."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.training.model import TrainingSpec
from gorgo.errors import MissingExtra
from gorgo.learning.models.trees import TreesModel, fit_trees, import_lightgbm
from gorgo.learning.trainer import fit
from gorgo.policies.learned.lodestar import Lodestar
from gorgo.policies.learned.predicted_latency import PredictedLatency
from tests.learning.extra import needs_lightgbm
from tests.learning.outcomes import NAMES, training_rows, with_censoring

SPEC = TrainingSpec("trees", NAMES)


def fitted(rows: object, seed: int = 0) -> TreesModel:
    return fit_trees(rows, SPEC, seed=seed, version=1)  # type: ignore[arg-type]


@needs_lightgbm
def test_both_times_of_unseen_rows_are_within_a_twentieth() -> None:
    model, unseen = fitted(training_rows(4000)), training_rows(500, seed=9)
    tpot = model.tpot_s(unseen.features)
    assert tpot is not None
    assert np.mean(np.abs(model.ttft_s(unseen.features) / unseen.ttft_s - 1)) < 0.05
    assert np.mean(np.abs(tpot / unseen.tpot_s - 1)) < 0.05


@needs_lightgbm
def test_rows_with_and_without_a_queue_have_models_of_their_own_from_200_each() -> None:
    rows = training_rows(1500)
    queued = np.flatnonzero(rows.features[:, NAMES.index("queued_requests")] > 0)
    idle = np.flatnonzero(rows.features[:, NAMES.index("queued_requests")] == 0)
    enough = rows.select(np.concatenate([queued[:200], idle[:200]]))
    assert sorted(fitted(enough).boosters) == ["tpot_idle", "tpot_queued", "ttft_idle", "ttft_queued"]
    fewer = rows.select(np.concatenate([queued[:199], idle[:200]]))
    assert sorted(fitted(fewer).boosters) == ["tpot", "ttft"]
    unknown = replace(enough, tpot_s=np.where(np.arange(400) == 0, np.nan, enough.tpot_s))
    assert sorted(fitted(unknown).boosters) == ["tpot", "ttft"]


@needs_lightgbm
def test_model_without_a_queue_does_not_use_the_columns_of_the_queue() -> None:
    model = fitted(training_rows(1500))
    used = {NAMES[column] for column in model.boosters["ttft_idle"].columns.tolist()}
    assert used == set(NAMES) - {"queued_requests", "is_queued"}
    assert len(model.boosters["ttft_queued"].columns) == len(NAMES)


@needs_lightgbm
def test_each_row_is_predicted_by_the_model_of_its_queue() -> None:
    model, table = fitted(training_rows(1500)), training_rows(60, seed=3).features
    expected = [
        model.boosters["ttft_queued" if row[NAMES.index("queued_requests")] > 0 else "ttft_idle"].predict(row[None])[0]
        for row in table
    ]
    assert model.ttft_s(table) == pytest.approx(expected)


@needs_lightgbm
def test_same_seed_makes_the_same_trees_and_another_seed_others() -> None:
    rows = training_rows(390, noise=0.1)
    texts = [fitted(rows, seed).boosters["ttft"].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@needs_lightgbm
def test_censored_rows_are_bounds() -> None:
    rows, unseen = with_censoring(training_rows(4000), seed=1, patience_s=1.0), training_rows(500, seed=9)

    def bias(censored: bool) -> float:
        model = fitted(replace(rows, censored=rows.censored & censored))
        return float(np.mean(model.ttft_s(unseen.features) - unseen.ttft_s))

    assert bias(False) < -0.25
    assert abs(bias(True)) < 0.1


@needs_lightgbm
def test_model_without_known_times_per_token_predicts_none() -> None:
    rows = training_rows(300)
    model = fitted(replace(rows, tpot_s=np.full(300, np.nan)))
    assert model.tpot_s(rows.features) is None


@needs_lightgbm
def test_logarithms_as_targets_are_predicted_as_times() -> None:
    rows, unseen = training_rows(4000), training_rows(500, seed=9)
    model = fit_trees(rows, replace(SPEC, target="log"), seed=0, version=1)
    tpot = model.tpot_s(unseen.features)
    assert tpot is not None
    assert np.mean(np.abs(model.ttft_s(unseen.features) / unseen.ttft_s - 1)) < 0.05
    assert np.mean(np.abs(tpot / unseen.tpot_s - 1)) < 0.05


@needs_lightgbm
def test_model_passes_a_pipe() -> None:
    model, table = fitted(training_rows(300)), training_rows(10).features
    assert (pickle.loads(pickle.dumps(model)).ttft_s(table) == model.ttft_s(table)).all()


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(MissingExtra, match=r"gorgo-router\[learned\]"):
        import_lightgbm()


def test_without_the_package_no_other_model_takes_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(MissingExtra, match=r"boosted trees need the extra: .*gorgo-router\[learned\]"):
        fit(training_rows(100), SPEC, seed=0, version=1)


def test_a_policy_of_trees_is_refused_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.learning.models.trees.find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"gorgo-router\[learned\]"):
        PredictedLatency().require_packages()
    PredictedLatency(replace(PredictedLatency().training, kind="rls")).require_packages()
    Lodestar().require_packages()
