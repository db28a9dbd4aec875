"""The prior with a learned residual."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.training.model import TrainingSpec
from gorgo.core.training.outcomes import TrainingRows
from gorgo.errors import ConfigError
from gorgo.learning.models.residual import LEAST_SHARE, PRIOR, EngineWaits, ResidualModel, fit_residual, fit_waits
from tests.learning.outcomes import NAMES as NAMES_OUTCOMES
from tests.learning.outcomes import rows_of, training_rows, with_censoring

SPEC = TrainingSpec("residual", NAMES_OUTCOMES)


def fitted(rows: object, seed: int = 0) -> ResidualModel:
    return fit_residual(rows, SPEC, rng=np.random.default_rng(seed), version=1)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model() -> ResidualModel:
    return fitted(training_rows(4000))


def prior_of(table: np.ndarray) -> np.ndarray:
    return table[:, NAMES_OUTCOMES.index(PRIOR)].astype(np.float64)


def test_learned_residual_halves_the_error_of_the_prior_and_more(model: ResidualModel) -> None:
    unseen = training_rows(1000, seed=9)
    error = np.mean(np.abs(model.ttft_s(unseen.features) - unseen.ttft_s))
    assert error < 0.2 * np.mean(np.abs(prior_of(unseen.features) - unseen.ttft_s))


def test_the_error_of_the_prior_is_a_share_of_the_measured_times(model: ResidualModel) -> None:
    rows = training_rows(4000)
    shares = np.abs(prior_of(rows.features) - rows.ttft_s) / rows.ttft_s
    assert model.prior_error == pytest.approx(float(np.mean(shares)), rel=1e-6)
    assert fitted(replace(rows, ttft_s=prior_of(rows.features))).prior_error == 0.0


def test_row_out_of_range_has_the_prior_alone(model: ResidualModel) -> None:
    table = training_rows(10, seed=9).features.copy()
    table[:5, NAMES_OUTCOMES.index("queued_requests")] = 50.0
    table[:5, NAMES_OUTCOMES.index(PRIOR)] = 7.0
    assert (model.ttft_s(table)[:5] == 7.0).all()
    assert model.in_range(table).tolist() == [False] * 5 + [True] * 5


def test_residual_of_noise_is_nothing() -> None:
    rows = training_rows(2000)
    rng = np.random.default_rng(1)
    noisy = replace(rows, ttft_s=np.maximum(prior_of(rows.features) + rng.normal(0, 0.3, 2000), 0.01))
    model = fitted(noisy)
    assert model.factor == 0.0
    assert (model.ttft_s(rows.features) == prior_of(rows.features)).all()


def test_prediction_is_clipped_to_the_measured_residuals_and_to_a_share_of_the_prior() -> None:
    rows = training_rows(2000)
    quick = replace(rows, ttft_s=np.full(2000, 1e-4))
    model = fitted(quick)
    predicted, prior = model.ttft_s(rows.features), prior_of(rows.features)
    assert (predicted >= LEAST_SHARE * prior - 1e-9).all()
    unit = np.sqrt(prior)
    assert (predicted - prior >= model.least * unit - 1e-9).all()
    assert (predicted <= prior + 1e-9).all()
    assert model.most == 0.0


def test_censored_rows_are_bounds() -> None:
    rows, unseen = with_censoring(training_rows(4000), seed=1, patience_s=1.0), training_rows(1000, seed=9)

    def bias(censored: bool) -> float:
        model = fitted(replace(rows, censored=rows.censored & censored))
        return float(np.mean(model.ttft_s(unseen.features) - unseen.ttft_s))

    assert bias(False) < -0.25
    assert abs(bias(True)) < 0.1


def test_gradient_of_a_row_follows_the_error_of_its_residual(model: ResidualModel) -> None:
    rows = training_rows(50, seed=4)
    unit = np.sqrt(prior_of(rows.features))
    learned = -model.network.outputs(model.scaler.apply(rows.features)).astype(np.float64)
    for late in (0.0, 0.3, -0.3):
        times = prior_of(rows.features) + (learned + late) * unit
        found = model.gradients(replace(rows, ttft_s=times), 60.0)
        assert found.shape == (50, model.network.sizes[-1] + 1)
        assert found[:, -1] == pytest.approx(late, abs=1e-3)


def test_only_censored_rows_leave_the_prior() -> None:
    rows = training_rows(200)
    model = fitted(replace(rows, censored=np.ones(200, dtype=np.bool_)))
    assert model.ttft_s(rows.features) == pytest.approx(prior_of(rows.features))


def test_features_without_the_prior_are_refused() -> None:
    with pytest.raises(ConfigError, match="no feature 'prior_s' among kv_usage"):
        fitted(training_rows(10, names=("kv_usage",)))


def test_same_seed_makes_the_same_model() -> None:
    rows = training_rows(300)
    assert (fitted(rows).network.parameters == fitted(rows).network.parameters).all()
    assert not (fitted(rows).network.parameters == fitted(rows, seed=1).network.parameters).all()


NAMES = ("uncached_tokens", "decoding_requests", "decode_step_s", "kv_short_tokens", "prior_s")
#: Of each request: tokens that it takes from the pool, and how long it holds them.
NEW_TOKENS, HOLD_S = 2000.0, 40.0


def outcomes(count: int, *, seed: int = 0, most_decoding: int = 20, short: float = 0.0) -> TrainingRows:
    """Requests that wait for 0.6 of a decode step; and for KV memory where `short` tokens of it are missing."""
    rng = np.random.default_rng(seed)
    decoding = rng.integers(0, most_decoding + 1, count).astype(np.float64)
    step_s = np.where(decoding > 0, 0.02 * (1 + decoding / 16), 0.0)
    prior_s = rng.uniform(0.05, 0.4, count)
    ttft_s = np.maximum(prior_s, short * HOLD_S / np.maximum(decoding, 1) / NEW_TOKENS) + 0.6 * step_s
    table = np.column_stack([np.full(count, NEW_TOKENS), decoding, step_s, np.full(count, short), prior_s])
    rows = rows_of(NAMES, table.astype(np.float32), ttft_s)
    return replace(
        rows, e2e_s=ttft_s + HOLD_S, prompt_tokens=np.full(count, 2500.0), cached_tokens=np.full(count, 500.0)
    )


def error(predicted_s: np.ndarray, rows: TrainingRows) -> float:
    return float(np.mean(np.abs(predicted_s - rows.ttft_s) / rows.ttft_s))


def test_the_share_of_a_step_and_the_release_of_memory_are_learned() -> None:
    waits = fit_waits(outcomes(500))
    assert waits.step_share == pytest.approx(0.6, abs=0.02)
    assert waits.hold_s == pytest.approx(HOLD_S / NEW_TOKENS)


def test_a_full_pool_is_predicted_before_any_request_has_waited_for_it() -> None:
    waits, full = fit_waits(outcomes(500)), outcomes(100, seed=1, short=30_000.0)
    assert error(waits.base_s(full.features, NAMES), full) < 0.05
    assert error(full.features[:, -1].astype(np.float64), full) > 0.9


def test_reported_cached_tokens_are_not_taken_and_estimates_count_without_a_report() -> None:
    rows = outcomes(200)
    unreported = replace(rows, cached_tokens=np.full(200, np.nan))
    wrong = replace(rows, prompt_tokens=np.full(200, 4500.0))
    assert fit_waits(unreported).hold_s == pytest.approx(HOLD_S / NEW_TOKENS)
    assert fit_waits(wrong).hold_s == pytest.approx(HOLD_S / 4000.0)


def test_one_stall_does_not_teach_the_share_of_a_step() -> None:
    rows = outcomes(500)
    stalled = rows.ttft_s.copy()
    stalled[::25] += 30.0
    assert fit_waits(replace(rows, ttft_s=stalled)).step_share == pytest.approx(0.6, abs=0.1)


def mixed(count: int, *, seed: int = 0) -> TrainingRows:
    """Every other answer comes in one piece, 8 s and a round of 20 ms per decode after its first token."""
    rows = outcomes(count, seed=seed)
    whole = np.arange(count) % 2 == 1
    ends_s = rows.ttft_s + 8.0 + 0.02 * rows.features[:, NAMES.index("decoding_requests")]
    ttft_s = np.where(whole, ends_s, rows.ttft_s)
    table = np.insert(rows.features, len(NAMES) - 1, ~whole, axis=1)
    return replace(
        rows, names=(*NAMES[:-1], "streamed", NAMES[-1]), features=table.astype(np.float32), ttft_s=ttft_s,
        e2e_s=np.maximum(rows.e2e_s, ttft_s), unstreamed=whole,
    )  # fmt: skip


def test_answers_in_one_piece_are_learned_beside_streams_and_teach_nothing_of_a_first_token() -> None:
    rows = mixed(1500)
    spec = TrainingSpec("residual", rows.names)
    model: ResidualModel = fit_residual(rows, spec, rng=np.random.default_rng(0), version=1)
    assert model.waits.step_share == pytest.approx(0.6, abs=0.02)
    assert model.waits.hold_s == pytest.approx(HOLD_S / NEW_TOKENS)
    assert model.waits.answer_s == pytest.approx(8.2, abs=0.1)
    unseen = mixed(200, seed=5)
    assert error(model.ttft_s(unseen.features), unseen) < 0.1
    streams = fit_residual(rows.select(~rows.unstreamed), spec, rng=np.random.default_rng(0), version=1)
    assert model.prior_error == pytest.approx(streams.prior_error)


def test_answers_in_one_piece_alone_make_a_model_that_is_not_trusted_as_its_priors() -> None:
    rows = mixed(800)
    whole = rows.select(rows.unstreamed)
    model = fit_residual(whole, TrainingSpec("residual", whole.names), rng=np.random.default_rng(0), version=1)
    assert model.prior_error > 0.5
    assert error(model.ttft_s(whole.features), whole) < 0.05


def test_without_outcomes_or_features_there_is_no_wait() -> None:
    none = TrainingRows.empty(NAMES)
    assert fit_waits(none).hold_s == 0.0
    table = np.array([[0.3]], dtype=np.float32)
    assert EngineWaits(step_share=0.5, hold_s=0.1).base_s(table, ("prior_s",)).tolist() == pytest.approx([0.3])


def test_a_row_out_of_range_has_the_waits_and_no_residual() -> None:
    rows = outcomes(800)
    spec = TrainingSpec("residual", NAMES)
    model: ResidualModel = fit_residual(rows, spec, rng=np.random.default_rng(0), version=1)
    busier = outcomes(100, seed=1, most_decoding=120, short=30_000.0)
    assert not model.in_range(busier.features).any()
    assert error(model.ttft_s(busier.features), busier) < 0.1
    np.testing.assert_array_equal(model.ttft_s(busier.features), model.base_s(busier.features))
