"""Decisions, results of attempts and samples: what counts as equal, what each result means, what is shown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.latency.ttft import TtftEstimate
from gorgo.core.messages.decision import Decision
from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest, Sample, SampleRing
from gorgo.core.policy.interface import TIE_EPSILON, argmin_tiebreak

# --- A choice by cost: what counts as equal, who wins then, and how a decision is shown.


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


# --- What each result of an attempt means for its request and its replica.


def test_only_a_failure_before_content_and_a_busy_replica_are_retryable() -> None:
    retryable = {result for result in AttemptResult if result.retryable}
    assert retryable == {AttemptResult.FAILED_BEFORE_CONTENT, AttemptResult.BUSY}


def test_a_request_outlives_retryable_and_superseded_attempts_only() -> None:
    outlived = {result for result in AttemptResult if not result.final}
    assert outlived == {AttemptResult.FAILED_BEFORE_CONTENT, AttemptResult.BUSY, AttemptResult.SUPERSEDED}


def test_a_failure_of_the_replica_is_one_before_or_after_content() -> None:
    failed = {result for result in AttemptResult if result.failed}
    assert failed == {AttemptResult.FAILED_BEFORE_CONTENT, AttemptResult.FAILED_AFTER_CONTENT}


def _request(**more: object) -> RouteRequest:
    known: dict[str, object] = {"prompt_tokens": 100, "body_bytes": 400, **more}
    return RouteRequest("r", 0.0, blocks=b"", block_tokens=64.0, prefix_hash=0, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "context", "most"),
    [
        (_request(most_output_tokens=50), None, 50),
        (_request(most_output_tokens=50, answers=6), None, 300),
        (_request(most_output_tokens=10**12), 8192, 8192),
        (_request(), 8192, 8192),
        (_request(most_output_tokens=50, answers=None), 8192, 10**15),
        (_request(), None, 10**15),
    ],
)
def test_output_is_no_longer_than_the_request_allows(request_: RouteRequest, context: int | None, most: int) -> None:
    reported = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=90, cached_tokens=80, output_tokens=10**15)
    bounded = reported.bounded(request_, context)
    assert (bounded.prompt_tokens, bounded.cached_tokens, bounded.output_tokens) == (90, 80, most)
    of_bytes = replace(reported, answer_bytes=700).bounded(request_, context)
    assert of_bytes.output_tokens == (700 if request_.most_output_tokens is context is None else most)


def test_a_prompt_has_no_more_tokens_than_its_body_and_template_and_no_more_cached_than_that() -> None:
    reported = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=10**15, cached_tokens=10**15)
    for request, context, most in (
        (_request(), 8192, 4496),
        (_request(body_bytes=9000), None, 13_096),
        (_request(pinned_replica="a"), 8192, 8192),
    ):
        bounded = reported.bounded(request, context)
        assert (bounded.prompt_tokens, bounded.cached_tokens) == (most, most)
    alone = Outcome(AttemptResult.COMPLETED, status=200, cached_tokens=10**15).bounded(_request(), None)
    assert (alone.prompt_tokens, alone.cached_tokens) == (None, 4496)


def test_counts_that_a_request_can_have_used_are_left_as_they_are() -> None:
    reported = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=120, cached_tokens=64, output_tokens=50)
    assert reported.bounded(_request(most_output_tokens=50), 8192) is reported


def sample(seq: int) -> Sample:
    return Sample(
        seq, f"r{seq}", 1.0, "a", "region", "gorgo", 1, 10, None, 0, None, None, None, None, 0.5, None, 200, 0, False
    )


def filled(count: int, *, kept: int) -> SampleRing:
    ring = SampleRing("boot", kept)
    for seq in range(1, count + 1):
        ring.append(sample(seq))
    return ring


def seqs(page: dict[str, object]) -> list[int]:
    rows = page["samples"]
    assert isinstance(rows, list)
    return [row["seq"] for row in rows]


def test_an_empty_ring_says_which_number_comes_next() -> None:
    page = SampleRing("boot", 3).after(0)
    assert page == {"boot_id": "boot", "first_seq": 1, "last_seq": 0, "samples": []}


def test_a_reader_pages_on_from_its_last_number() -> None:
    ring = filled(5, kept=10)
    assert seqs(ring.after(0, limit=2)) == [1, 2]
    assert seqs(ring.after(2, limit=2)) == [3, 4]
    assert seqs(ring.after(4)) == [5]
    assert seqs(ring.after(5)) == []


def test_a_reader_that_lags_sees_the_gap() -> None:
    page = filled(5, kept=3).after(1)
    assert (page["first_seq"], page["last_seq"]) == (3, 5)
    assert seqs(page) == [3, 4, 5]


def test_the_newest_sample_of_a_request_is_found_while_it_is_held() -> None:
    ring = SampleRing("boot", 3)
    for seq, name in enumerate(("a", "b", "a", "c", "d"), start=1):
        ring.append(replace(sample(seq), request_id=name))
    assert [found and found.seq for found in map(ring.for_request, "abcdx")] == [3, None, 4, 5, None]
    assert [each.seq for each in ring.newest(2)] == [5, 4]
    assert (len(ring), ring.first_seq, ring.last_seq, ring.next_seq) == (3, 3, 5, 6)
    assert [each.seq for each in ring] == [3, 4, 5]


def test_a_page_has_a_thousand_samples_at_most_and_none_where_none_are_asked_for() -> None:
    ring = filled(1001, kept=2000)
    assert (len(seqs(ring.after(0))), seqs(ring.after(0, limit=0)), seqs(ring.after(0, limit=-1))) == (1000, [], [])


def test_a_number_from_another_run_is_answered_with_nothing() -> None:
    assert seqs(filled(2, kept=3).after(900)) == []
    assert seqs(filled(2, kept=3).after(-5)) == [1, 2]
