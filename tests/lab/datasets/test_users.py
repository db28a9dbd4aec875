"""Generated windows against the GORGO paper's table 4."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from itertools import pairwise, product

import pytest

from gorgo.errors import TraceError
from gorgo.lab.datasets import UsersShape, describe_trace, generate_requests, read_shape, shapes
from gorgo.lab.datasets.shape import RandomDraws
from gorgo.lab.datasets.users import quantile, user_rows
from gorgo.lab.traces import TraceRequest


@dataclass(frozen=True)
class Table4:
    """A column of the paper's table."""

    requests: float
    users: float
    requests_per_user: float
    turns_mean: float
    multi_turn_share: float
    input_p50: float
    input_mean: float
    input_p95: float
    block_reuse: float
    user_block_reuse: float


PAPER = {
    "art-chat-apr5": Table4(7195, 579, 12.8, 30.3, 0.739, 5638, 6877, 19886, 0.788, 0.785),
    "art-chat-apr6": Table4(7630, 606, 12.9, 27.7, 0.741, 5787, 7008, 20974, 0.776, 0.771),
    "art-chat-apr7": Table4(8663, 540, 16.4, 21.5, 0.737, 5745, 7148, 20435, 0.879, 0.874),
}
#: The first few of every window, and two more that were picked without looking.
CASES = [*product(PAPER, range(5)), ("art-chat-apr5", 17), ("art-chat-apr7", 2026)]


def shape_of(name: str) -> UsersShape:
    shape = read_shape(shapes()[name])
    assert isinstance(shape, UsersShape)
    return shape


@lru_cache(maxsize=len(CASES))
def window(name: str, seed: int = 0) -> list[TraceRequest]:
    return generate_requests(replace(shape_of(name), seed=seed))


@pytest.fixture(scope="module")
def apr5() -> list[TraceRequest]:
    return window("art-chat-apr5")


@pytest.fixture(scope="module")
def by_user(apr5: list[TraceRequest]) -> dict[str, list[TraceRequest]]:
    users: dict[str, list[TraceRequest]] = {}
    for request in apr5:
        users.setdefault(str(request.user), []).append(request)
    return users


@pytest.mark.system
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_every_row_of_table_4_is_met_within_a_tenth(name: str, seed: int) -> None:
    figures = describe_trace(window(name, seed))
    for row, wanted in zip(Table4.__dataclass_fields__, astuple(PAPER[name]), strict=True):
        assert getattr(figures, row) == pytest.approx(wanted, rel=0.1), row


@pytest.mark.parametrize("name", PAPER)
def test_little_is_shared_between_users(name: str) -> None:
    figures = describe_trace(window(name))
    assert figures.block_reuse is not None
    assert figures.user_block_reuse is not None
    assert 0.001 <= figures.block_reuse - figures.user_block_reuse <= 0.006


@pytest.mark.parametrize("name", PAPER)
def test_load_is_there_from_the_start_and_to_the_end(name: str) -> None:
    """No tenth of the window has less than half or more than 1.6 times of its share, with any of a few seeds."""
    for seed in range(3):
        requests = window(name, seed)
        share = len(requests) / 10
        tenths = [sum(n * 180 <= r.timestamp_s < (n + 1) * 180 for r in requests) for n in range(10)]
        assert sum(tenths) == len(requests)
        assert min(tenths) > 0.5 * share
        assert max(tenths) < 1.6 * share


def test_a_surge_has_the_prompts_of_its_window_and_twice_the_load_at_its_peak() -> None:
    requests = window("art-chat-apr7-surge")
    assert sorted(r.input_tokens for r in requests) == sorted(r.input_tokens for r in window("art-chat-apr7"))
    share = len(requests) / 10
    tenths = [sum(n * 180 <= r.timestamp_s < (n + 1) * 180 for r in requests) for n in range(10)]
    assert 1.6 * share < max(tenths) < 2.2 * share
    assert 0.5 * share < min(tenths) < 0.8 * share


def test_no_prompt_exceeds_the_paper_s_filter(apr5: list[TraceRequest]) -> None:
    assert max(request.input_tokens for request in apr5) <= 24_000


def test_capped_outputs_have_about_a_hundred_tokens(apr5: list[TraceRequest]) -> None:
    assert 90 <= sum(min(128, request.output_tokens) for request in apr5) / len(apr5) <= 110


def test_a_user_does_not_ask_again_before_the_shortest_pause(by_user: dict[str, list[TraceRequest]]) -> None:
    """Squeezed, swung and rounded pauses are shorter than the least, but nobody sends in bursts."""
    for requests in by_user.values():
        pauses = [b.timestamp_s - a.timestamp_s for a, b in pairwise(requests)]
        assert min(pauses, default=9.0) > 1.0


def test_a_conversation_never_shrinks_or_changes_its_beginning() -> None:
    last: dict[tuple[str, int], tuple[int, int, int]] = {}
    for row in user_rows(shape_of("art-chat-apr5")):
        tokens, turn, shared = last.get(row.own, (0, 0, row.shared_tokens))
        assert row.input_tokens >= tokens
        assert (row.turn or 0) >= turn
        assert row.shared_tokens == shared
        last[row.own] = (row.input_tokens, row.turn or 0, shared)


def test_many_conversations_have_a_history_older_than_the_window(by_user: dict[str, list[TraceRequest]]) -> None:
    assert sum((requests[0].turns or 0) > 5 for requests in by_user.values()) > len(by_user) / 3


def test_a_retry_is_the_same_prompt_word_for_word(apr5: list[TraceRequest]) -> None:
    prompts = [(request.user, request.turns, request.hash_ids) for request in apr5 if (request.turns or 0) > 1]
    assert 0.15 < 1 - len(set(prompts)) / len(prompts) < 0.35


def test_an_id_stands_for_its_whole_prefix(apr5: list[TraceRequest]) -> None:
    before: dict[int, int | None] = {}
    for request in apr5:
        for previous, hash_id in zip((None, *request.hash_ids), request.hash_ids, strict=False):
            assert before.setdefault(hash_id, previous) == previous


def test_seeds_differ_in_who_and_when_but_not_in_how_many() -> None:
    one, other = window("art-chat-apr5", 1), window("art-chat-apr5", 2)
    assert [r.timestamp_s for r in one] != [r.timestamp_s for r in other]
    assert sorted(counts(one)) == sorted(counts(other))


def counts(requests: list[TraceRequest]) -> list[int]:
    return list(Counter(request.user for request in requests).values())


def test_a_small_window_has_its_users_and_requests_too() -> None:
    small = replace(shape_of("art-chat-apr5"), users=3, requests=3, duration_s=10.0, waves=0)
    requests = generate_requests(small)
    assert (len(requests), len({request.user for request in requests})) == (3, 3)
    assert all(0 <= request.timestamp_s < 10 for request in requests)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"users": 9000}, "expected at least 1 each"),
        ({"swing": 1.0}, "less than 1"),
        ({"applications": 0}, "at least 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change: dict[str, float], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        replace(shape_of("art-chat-apr5"), **change)  # type: ignore[arg-type]


def test_quantiles_are_joined_by_straight_lines() -> None:
    points = ((0.0, 100.0), (0.5, 200.0), (1.0, 1000.0))
    assert [quantile(points, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)] == [100, 150, 200, 600, 1000]


def test_shuffling_loses_nothing_and_ends_anywhere() -> None:
    draws = RandomDraws(3)
    ends = {tuple(draws.shuffled([1, 2, 3])) for _ in range(200)}
    assert len(ends) == 6
    assert all(sorted(end) == [1, 2, 3] for end in ends)
