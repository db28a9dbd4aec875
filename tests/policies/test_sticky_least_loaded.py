from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.policies.registry import make_policy
from tests.core.routers import a_request, blocks_of, dispatched, finished, make_router, submitted
from tests.policies.table import choose, request, rows_chosen, table

NAME = "sticky-least-loaded"


def test_the_least_loaded_of_the_holders_serves_beside_an_idle_replica() -> None:
    candidates = table(3, cached=[640, 64, 0], in_flight_requests=[9, 5, 0])
    choice = choose(make_policy(NAME), candidates)
    assert (choice.row, choice.fallback) == (1, None)


def test_equal_holders_are_chosen_by_chance() -> None:
    candidates = table(3, cached=[64, 640, 0], in_flight_requests=[5, 5, 0])
    assert rows_chosen(make_policy(NAME), candidates) == {0, 1}


def test_without_a_holder_the_least_loaded_of_all_serves() -> None:
    choice = choose(make_policy(NAME), table(3, in_flight_requests=[3, 1, 2]))
    assert (choice.row, choice.fallback) == (1, "no_match")


def test_a_replica_with_less_than_the_prefix_is_no_holder() -> None:
    candidates = table(2, cached=[128, 0], in_flight_requests=[5, 0])
    assert choose(make_policy(NAME), candidates, prefix_len=128).row == 0
    assert choose(make_policy(NAME), candidates, prefix_len=192).row == 1


def test_the_prefix_of_a_request_goes_before_the_weight() -> None:
    candidates = table(2, cached=[128, 0], in_flight_requests=[5, 0])
    asked = replace(request(prompt_tokens=640), prefix_len=192)
    assert choose(make_policy(NAME), candidates, asked=asked, prefix_len=64).row == 1
    assert choose(make_policy(NAME), candidates, asked=replace(asked, prefix_len=128), prefix_len=192).row == 0


def test_a_prefix_shorter_than_a_block_is_compared_as_one_block() -> None:
    assert choose(make_policy(NAME), table(2, cached=[64, 0], in_flight_requests=[5, 0]), prefix_len=1).row == 0


@pytest.mark.parametrize(("prompt_tokens", "row"), [(63, 1), (64, 0), (191, 0)])
def test_a_prompt_shorter_than_the_prefix_is_compared_by_its_full_blocks(prompt_tokens: int, row: int) -> None:
    full = prompt_tokens // 64 * 64
    candidates = table(2, cached=[full, 0], prompt_tokens=prompt_tokens, in_flight_requests=[5, 0])
    asked = request(prompt_tokens=prompt_tokens)
    assert choose(make_policy(NAME), candidates, asked=asked, prefix_len=1000).row == row


@pytest.mark.parametrize(("prefix_len", "cached"), [(100, 64), (127, 64), (128, 128), (191, 128)])
def test_a_prefix_is_rounded_down_to_blocks_of_the_text(prefix_len: int, cached: int) -> None:
    holder = table(2, cached=[cached, 0], in_flight_requests=[5, 0])
    assert choose(make_policy(NAME), holder, prefix_len=prefix_len).row == 0
    less = table(2, cached=[cached - 64, 0], in_flight_requests=[5, 0])
    assert choose(make_policy(NAME), less, prefix_len=prefix_len).fallback == "no_match"


@pytest.mark.parametrize(("prefix_len", "needed"), [(100, 96), (96, 96), (95, 80), (7, 16)])
def test_a_prefix_of_known_tokens_is_rounded_down_to_blocks_of_the_engine(prefix_len: int, needed: int) -> None:
    known = replace(request(prompt_tokens=640), kv_hashes={16: list(range(40))})
    for cached, row in ((needed, 0), (needed - 16, 1)):
        candidates = table(2, cached=[cached, 0], in_flight_requests=[5, 0])
        assert choose(make_policy(NAME), candidates, asked=known, prefix_len=prefix_len).row == row


def test_a_burst_of_one_prefix_goes_to_one_replica_before_any_answer() -> None:
    router = make_router("a", "b", "c", policy=NAME)
    burst = [a_request(f"r{tail}", prompt_tokens=192, blocks=blocks_of(1, 2, 100 + tail)) for tail in range(8)]
    replicas = {dispatched(submitted(router, each, now=0.0)).replica for each in burst}
    assert len(replicas) == 1
    other = dispatched(submitted(router, a_request("other", prompt_tokens=192, blocks=blocks_of(7, 8, 9)), now=0.0))
    assert other.replica not in replicas


def test_a_failed_attempt_leaves_no_holder() -> None:
    router = make_router("a", "b", policy=NAME)
    blocks = blocks_of(1, 2, 3)
    first = dispatched(submitted(router, a_request("first", prompt_tokens=192, blocks=blocks), now=0.0))
    outcome = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="connect_failed")
    retried = dispatched(finished(router, first.attempt_id, outcome, now=0.1))
    assert retried.replica != first.replica
    again = dispatched(submitted(router, a_request("again", prompt_tokens=192, blocks=blocks), now=0.2))
    assert again.replica == retried.replica
    assert again.decision.fallback is None
