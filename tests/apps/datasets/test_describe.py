from __future__ import annotations

from math import isnan

from gorgo.apps.datasets import describe_trace
from gorgo.apps.traces import TraceRequest


def request(index: int, ids: tuple[int, ...], user: str | None = "a", turns: int | None = 1) -> TraceRequest:
    return TraceRequest(index, float(index), 512 * max(1, len(ids)), 10, ids, None, user, turns)


def test_lengths_and_the_rate_are_over_all_requests() -> None:
    """Prompts of 100 to 500 and of 10,000 tokens in four seconds: their p95 is three quarters of the last step."""
    lengths = (100, 200, 300, 400, 500, 10_000)
    times_s = (3.0, 4.0, 4.5, 5.0, 6.0, 7.0)
    figures = describe_trace([TraceRequest(n, times_s[n], tokens, 10 * n, ()) for n, tokens in enumerate(lengths)])
    assert (figures.requests, figures.duration_s, figures.requests_per_s) == (6, 4.0, 1.5)
    assert (figures.input_p50, figures.input_mean, figures.output_mean) == (350.0, 11_500 / 6, 25.0)
    assert figures.input_p95 == 500 + 0.75 * 9500


def test_reuse_of_a_user_counts_only_what_the_same_user_had() -> None:
    figures = describe_trace([request(0, (1, 2)), request(1, (1, 3), user="b"), request(2, (1, 2))])
    assert figures.block_reuse == 3 / 6
    assert figures.user_block_reuse == 2 / 6
    assert (figures.users, figures.requests_per_user) == (2, 1.5)


def test_mean_turns_are_those_of_multi_turn_requests() -> None:
    figures = describe_trace([request(0, (1,)), request(1, (1, 2), turns=4), request(2, (1, 2, 3), turns=6)])
    assert figures.turns_mean == 5
    assert figures.multi_turn_share == 2 / 3


def test_without_conversations_there_is_a_share_but_no_mean() -> None:
    figures = describe_trace([request(0, (1,)), request(1, (2,))])
    assert (figures.turns_mean, figures.multi_turn_share) == (None, 0.0)


def test_what_one_request_does_not_tell_is_unknown_of_all() -> None:
    figures = describe_trace([request(0, (1,)), request(1, (1,), user=None, turns=None)])
    assert figures.users is None
    assert figures.requests_per_user is None
    assert figures.turns_mean is None
    assert figures.multi_turn_share is None
    assert figures.user_block_reuse is None
    assert figures.block_reuse == 0.5


def test_a_trace_of_texts_without_ids_has_no_known_reuse() -> None:
    figures = describe_trace([request(0, ()), request(1, ())])
    assert figures.block_reuse is None
    assert figures.user_block_reuse is None


def test_a_single_request_has_no_rate() -> None:
    assert isnan(describe_trace([request(0, (1,))]).requests_per_s)
