"""A choice by cost: what counts as equal, who wins then, and how a decision is shown."""

from __future__ import annotations

import numpy as np
import pytest

from gorgo.core.latency.ttft import TtftEstimate
from gorgo.core.messages.decision import Decision
from gorgo.core.policy.interface import TIE_EPSILON, argmin_tiebreak


def picked(cost: list[float], in_flight: list[float] | None = None) -> set[int]:
    """Every row that some seed picks."""
    loads = np.array(in_flight or [0.0] * len(cost))
    return {argmin_tiebreak(np.array(cost), loads, np.random.default_rng(seed)) for seed in range(60)}


@pytest.mark.parametrize(
    ("cost", "in_flight", "rows"),
    [
        ([3.0, 1.0, 2.0], None, {1}),
        ([1.0, 1.0001], [5.0, 0.0], {0}),
        ([1.0, 1.0 + 1e-8], [5.0, 0.0], {0}),
        ([1.0 + TIE_EPSILON / 2, 1.0], [0.0, 5.0], {0}),
        ([1.0, 1.0, 1.0], [2.0, 1.0, 1.0], {1, 2}),
        ([1.0, 1.0, 0.0], [2.0, 1.0, 9.0], {2}),
        ([1.0, 1.0], [1.0, 1.0], {0, 1}),
    ],
)
def test_the_least_cost_wins_then_the_fewest_in_flight_then_chance(
    cost: list[float], in_flight: list[float] | None, rows: set[int]
) -> None:
    assert picked(cost, in_flight) == rows


def decision(**more: object) -> Decision:
    fields = {
        "request_id": "r",
        "attempt": 2,
        "decided_s": 7.0,
        "policy": "nearest",
        "unit": "ms",
        "weights_version": 3,
        "weights": {"w": 0.5},
        "candidates": ("a", "b"),
        "row": 1,
        "terms": {"rtt": np.array([20.0, np.nan])},
        "cost": np.array([20.0, np.nan]),
        "prompt_tokens": 100,
        "estimated_cached_tokens": 40,
        "best_cached_tokens": 60,
        "cache_source": "history",
        "sampled_from": 4000,
        "predicted_ttft_s": 0.25,
        "estimate": TtftEstimate(0.001, 0.002, 0.003, 0.004, 0.005),
        "fallback": "imbalance",
        "excluded": {"c": "draining"},
    }
    return Decision(**{**fields, **more})  # type: ignore[arg-type]


def test_a_decision_is_shown_with_the_terms_of_each_candidate_and_unknown_is_null() -> None:
    assert decision().as_dict() == {
        "request_id": "r",
        "attempt": 2,
        "client": None,
        "model": None,
        "decided_s": 7.0,
        "policy": "nearest",
        "unit": "ms",
        "weights_version": 3,
        "weights": {"w": 0.5},
        "model_version": None,
        "replica": "b",
        "prompt_tokens": 100,
        "estimated_cached_tokens": 40,
        "best_cached_tokens": 60,
        "cache_source": "history",
        "sampled_from": 4000,
        "predicted_ttft_ms": 250.0,
        "predicted_parts_ms": {"router": 1.0, "previous_attempts": 2.0, "network": 3.0, "queue": 4.0, "prefill": 5.0},
        "objectives_ms": {"ttft": None, "tpot": None},
        "fallback": "imbalance",
        "shadow": None,
        "candidates": [
            {"replica": "a", "cost": 20.0, "terms": {"rtt": 20.0}},
            {"replica": "b", "cost": None, "terms": {"rtt": None}},
        ],
        "excluded": {"c": "draining"},
    }


def test_a_decision_shows_predictions_by_candidate_and_objectives_in_ms() -> None:
    shown = decision(estimates={"ttft": np.array([0.25, np.nan])}, slo_ttft_s=0.2, slo_tpot_s=0.05).as_dict()
    assert [row["estimates_ms"] for row in shown["candidates"]] == [{"ttft": 250.0}, {"ttft": None}]
    assert shown["objectives_ms"] == {"ttft": 200.0, "tpot": 50.0}


def test_a_decision_without_a_cost_or_a_prediction_says_so() -> None:
    shown = decision(cost=None, predicted_ttft_s=None).as_dict()
    assert shown["predicted_ttft_ms"] is None
    assert [row["cost"] for row in shown["candidates"]] == [None, None]
