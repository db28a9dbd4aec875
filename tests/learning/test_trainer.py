"""Rounds of training."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from gorgo.core.training.model import Model, ModelKind, TrainingSpec
from gorgo.errors import ConfigError
from gorgo.learning import model_file
from gorgo.learning.trainer import TEST_ROWS, Trainer, errors, fit, is_tested
from tests.learning.outcomes import NAMES, numbered, training_rows


def trained(subject: Trainer) -> Model:
    """The model of a round that is adopted."""
    model = subject.train()
    assert model is not None
    return model


def trainer(kind: str = "linear", **fields: object) -> Trainer:
    spec = TrainingSpec(kind, NAMES, first_samples=300, round_samples=100)  # type: ignore[arg-type]
    return Trainer(replace(spec, **fields), seed=7)  # type: ignore[arg-type]


def test_first_round_is_due_when_its_model_has_enough_samples_and_later_ones_after_new_rows() -> None:
    subject = trainer()
    tested = is_tested(training_rows(400))
    enough = int(np.flatnonzero(np.cumsum(~tested) == 300)[0]) + 1
    subject.add(training_rows(enough - 1))
    assert not subject.due()
    subject.add(training_rows(1, first_seq=enough - 1))
    assert subject.due()
    assert trained(subject).samples == 300
    assert not subject.due()
    subject.add(training_rows(99, first_seq=enough))
    assert not subject.due()
    subject.add(training_rows(1, first_seq=enough + 99))
    assert subject.due()
    assert trained(subject).version == 2


def test_a_round_waits_for_a_share_of_the_stored_samples_too() -> None:
    subject = trainer(store="stratified", round_growth=0.5)
    subject.add(training_rows(1000))
    stored = trained(subject).samples
    new = int(0.5 * stored)
    subject.add(training_rows(new - 1, first_seq=1000))
    assert new > 2 * subject.spec.round_samples
    assert not subject.due(), "half of what is stored now has to be new"
    subject.add(training_rows(stored, first_seq=1000 + new - 1))
    assert subject.due()


def test_rounds_go_on_from_the_last_version() -> None:
    spec = TrainingSpec("linear", NAMES)
    subject = Trainer(spec, seed=7, incumbent=replace(fit(training_rows(50), spec, 0, 1), version=12))  # type: ignore[type-var]
    subject.add(training_rows(60))
    assert trained(subject).version == 13


@pytest.mark.parametrize("store", ["fifo", "stratified"])
def test_a_tenth_of_the_rows_is_tested_by_and_no_round_trains_on_them(store: str) -> None:
    subject = trainer(store=store)
    subject.add(training_rows(2000))
    subject.train()
    report = subject.report()
    assert report.samples + report.tested == 2000
    assert report.tested == pytest.approx(200, rel=0.2)


def test_row_is_tested_by_or_trained_on_whatever_it_comes_with() -> None:
    whole = is_tested(numbered(1000))
    assert (is_tested(numbered(600, first=400)) == whole[400:]).all()
    assert whole.mean() == pytest.approx(0.1, rel=0.2)


def test_rows_to_test_by_are_bounded() -> None:
    subject = trainer(store="stratified")
    subject.add(training_rows(20_000))
    subject.train()
    assert subject.report().tested == TEST_ROWS


def test_report_has_the_errors_of_unseen_rows() -> None:
    subject = trainer("rls")
    subject.add(training_rows(3000, noise=0.1))
    model = trained(subject)
    report = subject.report()
    assert (report.version, report.kind, report.added) == (1, "rls", 3000)
    assert report.ttft_mape is not None
    assert 0.05 < report.ttft_mape < 0.12
    assert report.tpot_mape is not None
    assert report.tpot_mape < 0.01
    unseen = training_rows(500, seed=9)
    ttft = float(np.mean(np.abs(model.ttft_s(unseen.features) - unseen.ttft_s) / unseen.ttft_s))
    assert errors(model, unseen)[0] == pytest.approx(ttft)


def test_error_counts_no_censored_row_and_no_unknown_time() -> None:
    subject = trainer("rls")
    subject.add(training_rows(500))
    model = trained(subject)
    rows = training_rows(10, seed=2)
    none = replace(rows, censored=np.ones(10, dtype=np.bool_), tpot_s=np.full(10, np.nan))
    assert errors(model, none) == (None, None)
    one = replace(rows, censored=np.arange(10) > 0)
    assert errors(model, one)[0] == pytest.approx(errors(model, rows.select(slice(0, 1)))[0])


def test_row_with_a_number_that_is_not_finite_is_counted_and_left_out() -> None:
    subject = trainer()
    rows = training_rows(100)
    rows.features[3, 0] = np.nan
    rows.ttft_s[5] = np.inf
    subject.add(rows)
    model = trained(subject)
    report = subject.report()
    assert (report.added, report.rejected, report.samples + report.tested) == (100, 2, 98)
    assert np.isfinite(model.ttft_s(training_rows(5).features)).all()


def test_report_before_a_round_counts_rows() -> None:
    subject = trainer()
    subject.add(training_rows(10))
    assert subject.report().as_dict() == {
        **{"version": 0, "kind": None, "added": 10, "rejected": 0, "samples": 0, "censored": 0, "tested": 0},
        **{"whole_answers": 0, "ttft_mape": None, "tpot_mape": None, "e2e_mape": None, "refused": 0, "verdict": None},
    }


def test_censored_rows_are_trained_on() -> None:
    subject = trainer()
    rows = training_rows(300)
    subject.add(replace(rows, censored=np.ones(300, dtype=np.bool_)))
    subject.train()
    report = subject.report()
    assert report.censored == report.samples > 0


def test_round_without_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rows"):
        trainer().train()


@pytest.mark.parametrize("rule", ["coreset", "random"])
def test_same_rows_and_seed_make_the_same_models_however_they_are_cut(rule: str) -> None:
    def last(batch: int) -> bytes:
        subject = trainer("mlp", epochs=1, fifo=200, replay=200, replay_rule=rule, judged=False)
        rows = training_rows(1000, noise=0.1)
        for first in range(0, 1000, batch):
            subject.add(rows.select(slice(first, first + batch)))
            if (first + batch) % 100 == 0 and subject.due():
                model = trained(subject)
        return model_file.dumps(model)

    assert last(100) == last(100)
    assert last(50) == last(100)


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


def knowing(rows: int, *, seed: int = 3) -> Model:
    """A model in use that was trained on so many rows of the same traffic."""
    return fit(training_rows(rows, seed=seed, noise=0.3), TrainingSpec("rls", NAMES), seed=1, version=9)


def test_a_model_of_few_outcomes_does_not_replace_one_of_thousands() -> None:
    """A restart: the process has the outcomes since, some hundred of them."""
    incumbent = knowing(5000)
    subject = Trainer(TrainingSpec("rls", NAMES, first_samples=100), seed=7, incumbent=incumbent)
    subject.add(training_rows(120, noise=0.3))
    assert subject.due()
    assert subject.train() is None
    report = subject.report()
    assert (report.refused, report.version) == (1, 10)
    assert report.verdict is not None
    assert report.verdict.endswith("samples, and version 9 has 5,000")


def test_no_model_is_adopted_that_predicts_the_same_held_out_rows_worse() -> None:
    """A bad hour: the times of these outcomes follow nothing, and so does a model of them alone."""
    subject = trainer("rls", first_samples=50)
    subject.add(training_rows(2000, noise=0.05))
    first = trained(subject)
    shuffled = training_rows(400, seed=5, first_seq=2000)
    order = np.random.default_rng(0).permutation(400)
    narrow = Trainer(replace(subject.spec, fifo=300, replay_rule="none"), seed=7, incumbent=first)
    narrow.add(replace(shuffled, ttft_s=9.0 * shuffled.ttft_s[order], tpot_s=shuffled.tpot_s[order]))
    narrow._test.append(training_rows(300, seed=8, first_seq=2400))
    assert narrow.train() is None
    verdict = narrow.report().verdict
    assert verdict is not None
    assert verdict.startswith("error ")
    assert "held-out rows, where version 1 has" in verdict


def test_a_better_model_is_adopted_and_rounds_after_a_refused_one_go_on() -> None:
    subject = Trainer(TrainingSpec("rls", NAMES, first_samples=100), seed=7, incumbent=knowing(40))
    subject.add(training_rows(3000, noise=0.05))
    assert trained(subject).version == 10
    assert subject.report().verdict is None
    subject.add(training_rows(1000, seed=2, first_seq=3000, noise=0.05))
    assert subject.due()
    subject.train()
    assert subject.report().version == 11


def test_a_change_of_the_traffic_is_learned_though_older_rows_are_held_out_too() -> None:
    """Engines that are three times slower: the newest held-out rows tell."""
    subject = trainer("rls", fifo=2000, replay_rule="none")
    subject.add(training_rows(8000))
    trained(subject)
    slower = training_rows(2500, seed=4, first_seq=8000)
    subject.add(replace(slower, ttft_s=3.0 * slower.ttft_s))
    model = trained(subject)
    assert errors(model, replace(slower, ttft_s=3.0 * slower.ttft_s))[0] == pytest.approx(0.0, abs=0.1)


def test_a_training_that_is_not_judged_adopts_every_model() -> None:
    subject = Trainer(TrainingSpec("rls", NAMES, judged=False), seed=7, incumbent=knowing(5000))
    subject.add(training_rows(120, noise=0.3))
    assert trained(subject).version == 10


def test_answers_in_one_piece_have_an_error_of_their_own() -> None:
    subject = trainer("rls")
    rows = training_rows(1000)
    subject.add(replace(rows, unstreamed=np.arange(1000) % 2 == 0))
    model = trained(subject)
    report = subject.report()
    assert report.ttft_mape is not None
    assert report.e2e_mape is not None
    assert report.whole_answers == pytest.approx(450, rel=0.1)
    one = replace(rows.select(slice(0, 1)), unstreamed=np.ones(1, dtype=np.bool_))
    assert errors(model, one)[0] is None
