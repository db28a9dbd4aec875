"""`gorgo-residual`: `gorgo-ms` and what a model adds to its prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gorgo.core.policy.interface import Candidates, Choice, Prediction
from gorgo.core.training.learning import Learner, TrainingSpec
from gorgo.errors import ConfigError
from gorgo.policies.gorgo_ms import GorgoMs
from gorgo.policies.learned.gorgo_residual import FEATURES, PRIOR, GorgoResidual, clipped
from tests.policies.learned.models import BrokenFake, LinearFake
from tests.policies.table import COUNTS, choose, request, table


def residual(model: LinearFake | None = None) -> GorgoResidual:
    policy = GorgoResidual()
    policy.adopt(model)
    return policy


def beyond_prior(factors: dict[str, float], **given: Any) -> LinearFake:
    """A model of the prior plus factors on features."""
    return LinearFake(FEATURES, {PRIOR: 1.0, **factors}, **given)


def replicas(rows: int = 2, **given: Any) -> Candidates:
    """Equal replicas 100 ms away, 1 ms a token: 1.1 s for the prompt."""
    known: dict[str, Any] = {
        "prefill_token_s": [0.001] * rows,
        "slowdown": [1.0] * rows,
        "rtt_s": [0.1] * rows,
        "drained_at_s": [-np.inf] * rows,
        "head_due_s": [np.inf] * rows,
    }
    return table(rows, **{**known, **given})


def same_as_gorgo_ms(choice: Choice, plain: Choice) -> None:
    assert choice.cost is not None
    assert plain.cost is not None
    assert (choice.row, list(choice.cost)) == (plain.row, list(plain.cost))
    assert choice.predicted_ttft_s == plain.predicted_ttft_s
    assert choice.prediction is not None
    assert plain.prediction is not None
    for name in ("idle_s", "backlog_s", "prefill_s"):
        np.testing.assert_array_equal(getattr(choice.prediction(), name), getattr(plain.prediction(), name))


def test_it_is_a_learner() -> None:
    assert isinstance(GorgoResidual(), Learner)


def test_without_a_model_it_is_gorgo_ms_draw_for_draw() -> None:
    rng = np.random.default_rng(2)
    for seed in range(200):
        rows = int(rng.integers(1, 20))
        counts: dict[str, Any] = {name: rng.integers(0, 3, rows) for name in COUNTS}
        candidates = table(
            rows, rtt_s=rng.choice([0.0, 0.1, np.nan], rows), cached=rng.integers(0, 900, rows), **counts
        )
        choice, plain = (choose(policy, candidates, seed=seed) for policy in (residual(), GorgoMs()))
        same_as_gorgo_ms(choice, plain)
        assert choice.fallback is None
        assert choice.features is not None
        assert choice.features[:, -1] == pytest.approx(np.minimum(plain_prior(plain), 1e6), rel=1e-6)


def plain_prior(choice: Choice) -> list[float]:
    assert choice.prediction is not None
    parts = choice.prediction()
    return list(parts.idle_s + parts.backlog_s)


def test_features_before_a_decision_are_those_of_the_choice() -> None:
    candidates = replicas(9, running_requests=list(range(9)))
    choice = choose(residual(), candidates)
    np.testing.assert_array_equal(residual().features(request(), candidates), choice.features)


def test_a_learned_residual_changes_the_cost_and_the_prediction() -> None:
    policy = residual(beyond_prior({"running_requests": 0.5}))
    choice = choose(policy, replicas(running_requests=[4, 0], in_flight_requests=[0, 1]))
    np.testing.assert_allclose(choice.terms["residual"], [2000, 0], atol=1e-3)
    assert choice.row == 1
    assert choice.predict is not None
    assert [choice.predict(0), choice.predict(1)] == pytest.approx([3.1, 1.1])
    assert choice.prediction is not None
    parts = choice.prediction()
    np.testing.assert_allclose([parts.idle_s, parts.backlog_s], [[1.1, 1.1], [2.0, 0.0]], atol=1e-6)


def test_a_row_out_of_range_has_no_residual() -> None:
    model = beyond_prior({"running_requests": 0.5}, low={"running_requests": 0}, high={"running_requests": 10})
    choice = choose(residual(model), replicas(3, running_requests=[5, 11, 12]))
    np.testing.assert_allclose(choice.terms["residual"], [2500, 5500, 0], atol=1e-3)
    assert choice.fallback is None
    assert choice.predict is not None
    assert choice.predict(2) == pytest.approx(1.1)


def test_the_residual_is_clipped() -> None:
    parts = Prediction(np.array([1.1] * 3), np.array([0.5, 0.5, 0.0]), np.array([1.0] * 3))
    np.testing.assert_allclose(clipped(np.array([99.0, -99.0, -99.0]), parts, limit_s=10.0), [10.0, -1.5, -1.0])
    np.testing.assert_allclose(clipped(np.array([99.0, -99.0, 0.01]), parts, limit_s=0.1), [0.1, -0.1, 0.01])


def test_of_an_answer_in_one_piece_what_replicas_differ_by_decides_and_no_first_token_is_predicted() -> None:
    """20 s to the end on either, and half a second per running request: the limit is 10 s."""
    model = beyond_prior({"running_requests": 0.5}, constant=20.0)
    whole = replace(request(), streamed=False)
    choice = choose(residual(model), replicas(running_requests=[4, 0], in_flight_requests=[0, 1]), asked=whole)
    np.testing.assert_allclose(choice.terms["residual"], [2000, 0], atol=1e-3)
    assert choice.row == 1
    assert choice.predicted_ttft_s == pytest.approx(1.1), "the prior's: the model has the time to the end"


class WaitingFake(LinearFake):
    """A model with 15 s of waits in each engine, which are no residual, where the priors are half wrong."""

    prior_error = 0.5

    def base_s(self, table: np.ndarray) -> np.ndarray:
        return table[:, -1].astype(np.float64) + 15.0


def test_waits_in_the_engine_count_out_of_range_and_beyond_the_limit() -> None:
    model = WaitingFake(
        FEATURES, {PRIOR: 1.0, "running_requests": 0.5}, constant=15.0, low={"running_requests": 0},
        high={"running_requests": 40},
    )  # fmt: skip
    choice = choose(residual(model), replicas(3, running_requests=[4, 30, 90]))
    np.testing.assert_allclose(choice.terms["residual"], [17_000, 25_000, 15_000], atol=1e-2)
    assert choice.predict is not None
    assert choice.predict(2) == pytest.approx(16.1)


def test_where_the_priors_are_right_the_choice_is_that_of_gorgo_ms_and_the_prediction_corrected() -> None:
    model = WaitingFake(FEATURES, {PRIOR: 1.0, "running_requests": 0.5}, constant=15.0)
    candidates = replicas(running_requests=[4, 0], in_flight_requests=[0, 1])
    plain, trusted = choose(GorgoMs(), candidates), choose(residual(model), candidates, trusted_error=0.5)
    assert plain.cost is not None
    assert trusted.cost is not None
    assert (trusted.row, list(trusted.cost)) == (plain.row, list(plain.cost))
    assert list(trusted.terms["residual"]) == [0.0, 0.0]
    assert trusted.predict is not None
    assert trusted.predict(0) == pytest.approx(1.1 + 15.0 + 2.0)
    assert choose(residual(model), candidates, trusted_error=0.49).row != plain.row


def test_a_limit_of_zero_is_gorgo_ms() -> None:
    candidates = replicas(running_requests=[4, 0])
    for model in (beyond_prior({"running_requests": 0.5}), WaitingFake(FEATURES, {PRIOR: 1.0})):
        same_as_gorgo_ms(choose(residual(model), candidates, residual_limit=0.0), choose(GorgoMs(), candidates))


def test_an_unknown_round_trip_has_no_prediction() -> None:
    choice = choose(residual(beyond_prior({})), replicas(rtt_s=[np.nan, 0.1]))
    assert choice.predict is not None
    assert choice.predict(0) is None
    assert choice.predict(1) == pytest.approx(1.1)


@pytest.mark.parametrize("answer", [None, float("nan")], ids=["raises", "NaN"])
def test_a_model_that_fails_leaves_the_decision_to_gorgo_ms(answer: float | None) -> None:
    candidates = replicas(drained_at_s=[9.0, 0.0])
    choice = choose(residual(BrokenFake(FEATURES, answer)), candidates)
    assert (choice.row, choice.fallback, choice.cost) == (choose(GorgoMs(), candidates).row, "no_model", None)


def test_features_without_the_prior_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected 'prior_s'"):
        GorgoResidual(TrainingSpec("residual", ("rtt_s",)))


def test_the_time_before_the_decision_counts() -> None:
    candidates = replace(replicas(), now=100.0)
    choice = choose(residual(beyond_prior({})), candidates, asked=replace(request(), received_s=99.5))
    assert choice.predicted_ttft_s == pytest.approx(1.6)
