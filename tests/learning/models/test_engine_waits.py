"""Waits that an engine imposes: for its running step, and for KV memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.training.outcomes import TrainingRows
from gorgo.core.training.spec import TrainingSpec
from gorgo.learning.models.engine_waits import EngineWaits, fit_waits
from gorgo.learning.models.residual import ResidualModel, fit_residual
from tests.learning.outcomes import rows_of

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
