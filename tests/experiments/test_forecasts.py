from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.forecasts import RecordedTrainer, forecasts
from gorgo.core.training.model import TrainingSpec
from gorgo.core.training.outcomes import TrainingRows
from gorgo.lab.sim.training import TrainingRound
from tests.policies.learned.models import LinearFake

NAMES = ("prompt_tokens",)


def outcomes(*dispatched_s: float, ttft_s: float = 2.0, tpot_s: float = 0.04) -> TrainingRows:
    """Prompts of 1,000 tokens."""
    rows = TrainingRows.empty(NAMES, len(dispatched_s))
    rows.features[:] = 1000.0
    return replace(
        rows,
        dispatched_s=np.array(dispatched_s),
        ttft_s=np.full(len(rows), ttft_s),
        tpot_s=np.full(len(rows), tpot_s),
        e2e_s=np.full(len(rows), 9.0),
    )


def model(token_s: float, *, tpot: float | None = None) -> LinearFake:
    return LinearFake(NAMES, {NAMES[0]: token_s}, tpot=None if tpot is None else {NAMES[0]: tpot})


def test_an_outcome_is_predicted_by_the_model_that_was_in_use_at_its_dispatch() -> None:
    rounds = [
        TrainingRound(model(0.001, tpot=1e-5), 8.0, 10.0),
        TrainingRound(model(9.0), 18.0, None),  # frozen: never adopted
        TrainingRound(model(0.003), 28.0, 30.0),
    ]
    found = forecasts([outcomes(9.0, 10.0, 29.0), outcomes(30.0)], rounds, None)
    np.testing.assert_allclose(found.predicted_ttft_s, [np.nan, 1.0, 1.0, 3.0])
    np.testing.assert_allclose(found.predicted_tpot_s, [np.nan, 0.01, 0.01, np.nan])
    first = forecasts([outcomes(9.0)], rounds, model(0.002))
    assert first.predicted_ttft_s.tolist() == pytest.approx([2.0])


def test_errors_are_shares_of_the_measured_time_and_outcomes_without_a_model_are_left_out() -> None:
    rounds = [TrainingRound(model(0.001, tpot=5e-5), 0.0, 10.0), TrainingRound(model(0.004), 19.0, 20.0)]
    found = forecasts([outcomes(1.0, 11.0, 12.0, 21.0)], rounds, None)
    errors = found.errors()
    assert [errors["ttft_mean"], errors["ttft_median"]] == pytest.approx([2 / 3, 0.5])
    assert [errors["tpot_mean"], errors["tpot_median"]] == pytest.approx([0.25, 0.25])
    assert set(found.between(0.0, 10.0).errors().values()) == {None}
    assert found.means_ms()["modelled_ttft_ms"] == pytest.approx(2000.0)


def test_censored_outcomes_have_no_measured_time() -> None:
    rows = outcomes(11.0, 12.0)
    rows.censored[0] = True
    found = forecasts([rows], [TrainingRound(model(0.001), 0.0, 10.0)], None)
    assert found.dispatched_s.tolist() == [12.0]


def test_a_run_without_a_learner_has_no_errors() -> None:
    assert set(forecasts([], [], None).errors().values()) == {None}


def test_a_trainer_retains_what_it_was_given() -> None:
    trainer = RecordedTrainer(TrainingSpec("linear", NAMES, first_samples=10), seed=0)
    trainer.add(outcomes(*map(float, range(100))))
    trainer.train()
    assert sum(map(len, trainer.rows)) == 100
