"""Answers that engines cache: which prompt goes on with one, and how much of it counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest
from gorgo.core.prefix import index as module
from gorgo.core.prefix.index import LEAST_REPORTS, WINDOW, Answers, Behind
from gorgo.core.router import Router
from tests.core.routers import a_request, blocks_of, dispatched, make_router, submitted

#: A conversation of blocks of 64 tokens: its first prompt, and the second one with the answer of 200 tokens.
FIRST = replace(a_request("first", prompt_tokens=300, blocks=blocks_of(1, 2, 3, 4)), boundaries=(100, 300))
SECOND = replace(
    a_request("second", prompt_tokens=600, blocks=blocks_of(*range(1, 10))), boundaries=(100, 300, 500, 600)
)
MATCH = np.array([0.0, 256.0])


def after(answer: int, *, slot: int = 1) -> Answers:
    answers = Answers()
    answers.add(slot, FIRST, answer)
    return answers


def test_the_next_turn_goes_on_with_the_answer() -> None:
    assert after(200).behind(SECOND, MATCH, 256.0) == {1: Behind(256.0, 244.0)}


def test_an_answer_counts_on_the_replica_that_gave_it_alone() -> None:
    assert after(200, slot=0).behind(SECOND, MATCH, 256.0) is None
    assert after(200, slot=5).behind(SECOND, MATCH, 256.0) is None


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [(190, 234.0), (210, 244.0), (400, 244.0), (401, None), (65, 109.0), (64, None)],
)
def test_a_message_of_another_length_is_another_text(answer: int, tokens: float | None) -> None:
    """Of 200 tokens: half of an answer at least, twice of it and a block at most. Reasoning is not sent again."""
    expected = None if tokens is None else {1: Behind(256.0, tokens)}
    assert after(answer).behind(SECOND, MATCH, 256.0) == expected


@pytest.mark.parametrize("boundaries", [(), (600,), (100, 600), (100, 420, 600), (300,), (100, 300)])
def test_a_prompt_that_has_no_message_where_the_other_ended_goes_on_with_no_answer(boundaries: tuple[int, ...]) -> None:
    assert after(200).behind(replace(SECOND, boundaries=boundaries), MATCH, 256.0) is None


def test_lengths_that_are_estimated_from_bytes_may_differ() -> None:
    assert after(200).behind(replace(SECOND, boundaries=(97, 290, 484, 600)), MATCH, 256.0) == {1: Behind(256.0, 228.0)}


def test_a_match_that_ends_elsewhere_has_no_answer() -> None:
    assert after(200).behind(SECOND, np.array([0.0, 192.0]), 192.0) is None


def test_the_same_prompt_again_has_no_answer_behind_it() -> None:
    assert after(200).behind(FIRST, MATCH, 256.0) is None


def test_a_prompt_without_messages_or_a_full_block_is_not_remembered() -> None:
    answers = Answers()
    answers.add(0, replace(FIRST, boundaries=()), 200)
    answers.add(0, replace(FIRST, blocks=b""), 200)
    answers.add(0, FIRST, 0)
    assert len(answers) == 0


def test_the_oldest_prompts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PROMPTS", 2)
    answers = Answers()
    for word in (1, 2, 1, 3):
        answers.add(0, replace(FIRST, blocks=blocks_of(word)), 200)
    assert len(answers) == 2
    found = [answers.behind(replace(SECOND, blocks=blocks_of(word, 0)), np.array([64.0]), 64.0) for word in (1, 2, 3)]
    assert [one is not None for one in found] == [True, False, True]


def test_a_replica_that_has_left_leaves_nothing() -> None:
    answers = after(200)
    learn(answers, *[1.0] * LEAST_REPORTS)
    answers.remove_replica(1)
    assert len(answers) == 0
    assert answers.found_tokens(1, Behind(256.0, 200.0)) == 0.0


def learn(answers: Answers, *shares: float, tokens: float = 200.0) -> None:
    for share in shares:
        answers.on_report(1, Behind(256.0, tokens), found_tokens=256.0 + share * tokens)


def test_nothing_counts_before_three_reports() -> None:
    answers = Answers()
    learn(answers, *[1.0] * (LEAST_REPORTS - 1))
    assert answers.found_tokens(1, Behind(256.0, 1000.0)) == 0.0
    learn(answers, 1.0)
    assert answers.found_tokens(1, Behind(256.0, 1000.0)) == 1000.0
    assert answers.found_tokens(0, Behind(256.0, 1000.0)) == 0.0, "of another replica nothing is known"


def test_an_engine_that_finds_whole_blocks_misses_as_many_tokens_of_any_answer() -> None:
    answers = Answers()
    learn(answers, *[0.9] * LEAST_REPORTS)
    assert answers.found_tokens(1, Behind(256.0, 1000.0)) == pytest.approx(980.0)
    assert answers.found_tokens(1, Behind(256.0, 10.0)) == 0.0


def test_an_engine_that_caches_no_answers_is_known() -> None:
    answers = Answers()
    learn(answers, *[1.0] * WINDOW)
    learn(answers, *[0.0] * WINDOW)
    assert answers.found_tokens(1, Behind(256.0, 1000.0)) == 0.0
    learn(answers, *[0.2] * WINDOW)
    assert answers.found_tokens(1, Behind(256.0, 1000.0)) == pytest.approx(200.0)


def test_a_report_below_the_match_says_nothing_of_the_answer() -> None:
    answers = Answers()
    learn(answers, *[1.0] * LEAST_REPORTS, *[-0.1] * WINDOW)
    assert answers.found_tokens(1, Behind(256.0, 1000.0)) == 1000.0


# -- in the Router


def serve(router: Router, request: RouteRequest, *, cached: int, now: float) -> int:
    """Serve a request with an answer of 200 tokens; return the estimated cached tokens."""
    dispatch = dispatched(submitted(router, request, now=now))
    router.on_first_token(dispatch.attempt_id, now=now + 0.1)
    outcome = Outcome(
        AttemptResult.COMPLETED, 200, prompt_tokens=request.prompt_tokens, cached_tokens=cached, output_tokens=200
    )
    router.on_finish(dispatch.attempt_id, outcome, now=now + 0.2)
    return dispatch.decision.estimated_cached_tokens


def conversation(router: Router, word: int, *, found: int) -> int:
    """Serve both turns; return the estimated cached tokens of the second."""
    first = replace(FIRST, request_id=f"first-{word}", blocks=blocks_of(word, 2, 3, 4))
    second = replace(SECOND, request_id=f"second-{word}", blocks=blocks_of(word, *range(2, 10)))
    serve(router, first, cached=0, now=10.0 * word)
    return serve(router, second, cached=found, now=10.0 * word + 5.0)


@pytest.mark.parametrize(("policy", "expected"), [("gorgo-ms", 496), ("prefix-cache-and-load", 256)])
def test_cached_answers_count_where_the_index_is_bounded(policy: str, expected: int) -> None:
    router = make_router("a", policy=policy)
    estimated = [conversation(router, word, found=496) for word in range(1, 5)]
    assert estimated == [256, 256, 256, expected]


def test_an_engine_without_cached_answers_is_estimated_as_before() -> None:
    router = make_router("a", policy="gorgo-ms")
    assert [conversation(router, word, found=256) for word in range(1, 7)] == [256] * 6
