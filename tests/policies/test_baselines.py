"""Common rules: round robin, random, nearest, session affinity, least load, and sticky sessions."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.policy.interface import Candidates, Policy
from gorgo.core.policy.weights import Weights
from gorgo.policies.base import _mix
from gorgo.policies.baselines import Nearest, Random, RoundRobin, SimpleSessionAffinity
from gorgo.policies.least_load import LeastLoad, LeastLoadFirstToken, LeastRequest, LeastRequestInFlight, PowerOfTwo
from gorgo.policies.registry import make_policy
from tests.core.routers import a_request, blocks_of, dispatched, finished, make_router, submitted
from tests.policies.table import choose, request, rows_chosen, table


def test_takes_the_least_round_trip_whatever_the_load() -> None:
    assert choose(Nearest(), table(3, rtt_s=[0.09, 0.002, 0.18], in_flight_requests=[0, 99, 0])).row == 1


def test_its_cost_is_the_round_trip_in_milliseconds() -> None:
    choice = choose(Nearest(), table(3, rtt_s=[0.09, 0.002, np.nan]))
    np.testing.assert_allclose(choice.terms["rtt"], [90.0, 2.0, 90.0])


def test_equal_distances_go_to_the_fewest_in_flight() -> None:
    assert choose(Nearest(), table(2, rtt_s=[0.01, 0.01], in_flight_requests=[2, 1])).row == 1


def test_unknown_distance_is_not_near() -> None:
    assert rows_chosen(Nearest(), table(3, rtt_s=[np.nan, 0.1, 0.2])) == {1}


def test_reaches_every_replica_whatever_its_load() -> None:
    assert rows_chosen(Random(), table(4, in_flight_requests=[9, 0, 0, 500])) == {0, 1, 2, 3}


def named(*names: str) -> Candidates:
    return table(len(names), names=names)


def turns(policy: RoundRobin, candidates: Candidates, count: int) -> list[str]:
    return [candidates.names[choose(policy, candidates).row] for _ in range(count)]


def test_goes_round_in_order_of_name_not_of_slot() -> None:
    assert turns(RoundRobin(), named("c", "a", "b"), 5) == ["a", "b", "c", "a", "b"]


def test_a_replica_that_leaves_or_joins_does_not_shift_the_turn_of_others() -> None:
    policy = RoundRobin()
    assert turns(policy, named("a", "b", "c"), 2) == ["a", "b"]
    assert turns(policy, named("c", "a"), 1) == ["c"]
    assert turns(policy, named("a", "b", "c", "aa"), 3) == ["a", "aa", "b"]


def test_two_instances_do_not_share_a_cursor() -> None:
    assert turns(RoundRobin(), named("a", "b"), 1) == turns(RoundRobin(), named("a", "b"), 1) == ["a"]


SESSIONS = [f"session-{index}" for index in range(500)]


def homes(candidates: Candidates) -> dict[str, str]:
    policy = SimpleSessionAffinity()
    return {
        session: candidates.names[choose(policy, candidates, asked=request(session_id=session)).row]
        for session in SESSIONS
    }


def test_same_session_goes_to_the_same_replica_whatever_the_load_and_the_seed() -> None:
    asked = request(session_id="s")
    idle, busy = table(5), table(5, in_flight_requests=[9, 8, 7, 6, 5])
    rows = {choose(SimpleSessionAffinity(), one, seed=seed, asked=asked).row for one in (idle, busy) for seed in (1, 2)}
    assert len(rows) == 1


def test_when_a_replica_leaves_only_its_sessions_move() -> None:
    before = homes(table(5))
    after = homes(table(4, slots=[0, 1, 3, 4]))
    moved = {session for session in SESSIONS if before[session] != after[session]}
    assert moved == {session for session in SESSIONS if before[session] == "replica-2"}


def test_sessions_spread_over_all_replicas() -> None:
    found = list(homes(table(5)).values())
    assert min(found.count(name) for name in set(found)) > 60
    assert len(set(found)) == 5


def test_without_a_session_id_the_head_of_the_prompt_decides() -> None:
    policy, candidates = SimpleSessionAffinity(), table(8)
    rows = [choose(policy, candidates, asked=request(head=head)).row for head in range(50)]
    again = [choose(policy, candidates, asked=request(head=head)).row for head in range(50)]
    assert rows == again
    assert len(set(rows)) == 8


def test_the_mixer_is_that_of_splitmix64() -> None:
    """The first three numbers of that generator from seed 0, as its authors publish them."""
    steps = np.array([1, 2, 3], dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    published = [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4, 0x06C4_5D18_8009_454F]
    assert _mix(steps).tolist() == published


def test_the_replica_of_the_highest_mixed_number_wins() -> None:
    """So that a session goes to the same replica whichever version of the proxy decides."""
    candidates = table(5)
    for head in range(30):
        key = int(_mix(np.array([head], dtype=np.uint64))[0])
        scores = [int(_mix(np.array([int(salt) ^ key], dtype=np.uint64))[0]) for salt in candidates.columns.salt]
        row = choose(SimpleSessionAffinity(), candidates, asked=request(head=head)).row
        assert scores[row] == max(scores)


def test_a_session_id_is_known_by_the_first_64_bits_of_its_digest() -> None:
    digest = hashlib.blake2b(b"s", digest_size=8).digest()
    candidates = table(8)
    by_id = choose(SimpleSessionAffinity(), candidates, asked=request(session_id="s")).row
    by_head = choose(SimpleSessionAffinity(), candidates, asked=request(head=int.from_bytes(digest, "little"))).row
    assert by_id == by_head


def test_a_head_of_more_than_64_bits_counts_by_its_last_64() -> None:
    policy, candidates = SimpleSessionAffinity(), table(8)
    for head in range(20):
        rows = {choose(policy, candidates, asked=request(head=number)).row for number in (head, head + 2**64)}
        assert len(rows) == 1


def test_the_session_id_goes_before_the_head() -> None:
    policy, candidates = SimpleSessionAffinity(), table(8)
    rows = {choose(policy, candidates, asked=request(head=head, session_id="s")).row for head in range(50)}
    assert len(rows) == 1


both = pytest.mark.parametrize("policy", [LeastLoad(), LeastLoadFirstToken()], ids=lambda policy: policy.name)


@pytest.mark.parametrize(
    ("policy", "cost", "row"), [(LeastLoad(), [8105, 6001], 1), (LeastLoadFirstToken(), [5105, 6001], 0)]
)
def test_a_prompt_counts_until_it_ends_or_until_its_first_token(policy: Policy, cost: list[float], row: int) -> None:
    """The first replica decodes three requests of 1,000 tokens and has 100 tokens before their first token."""
    candidates = table(
        2,
        in_flight_requests=[4, 0],
        in_flight_tokens=[3100, 0],
        queued_prefill_tokens=[100, 0],
        running_requests=[3, 1],
        queued_requests=[2, 0],
        used_tokens=[5000, 6000],
    )
    choice = choose(policy, candidates)
    assert choice.cost is not None
    np.testing.assert_allclose(choice.cost, cost)
    assert choice.row == row


@both
def test_unknown_figure_counts_as_the_worst_known_one(policy: Policy) -> None:
    choice = choose(policy, table(3, used_tokens=[np.nan, 100, 900]))
    assert choice.terms["used"][0] == 900
    assert choice.row == 1


@both
def test_own_count_decides_when_no_engine_tells_anything(policy: Policy) -> None:
    waiting = [50, 40, 60]
    assert choose(policy, table(3, queued_prefill_tokens=waiting, in_flight_tokens=waiting)).row == 1


def test_equal_loads_fall_at_random_as_released_whatever_the_requests_in_flight() -> None:
    candidates = table(3, in_flight_tokens=[100, 100, 200], in_flight_requests=[2, 1, 1])
    assert rows_chosen(LeastLoad(), candidates) == {0, 1}


both_kinds = pytest.mark.parametrize("policy", [LeastRequest(), LeastRequestInFlight()], ids=lambda policy: policy.name)


@both_kinds
def test_takes_the_fewest_in_flight(policy: Policy) -> None:
    assert choose(policy, table(3, in_flight_requests=[4, 1, 2])).row == 1


@both_kinds
def test_ties_fall_at_random(policy: Policy) -> None:
    assert rows_chosen(policy, table(3, in_flight_requests=[0, 1, 0])) == {0, 2}


def test_the_larger_of_reported_and_own_count_decides_as_released() -> None:
    """Another proxy's requests are in the report alone; those dispatched since the scrape in the own count alone."""
    candidates = table(3, in_flight_requests=[0, 5, 2], running_requests=[6, 1, 4])
    choice = choose(LeastRequest(), candidates)
    assert choice.cost is not None
    assert choice.cost.tolist() == [6, 5, 4]
    assert choice.row == 2
    assert choose(LeastRequestInFlight(), candidates).row == 0


def test_an_unknown_report_counts_as_the_worst_known_one() -> None:
    candidates = table(3, in_flight_requests=[0, 1, 1], running_requests=[np.nan, 3, 2])
    assert choose(LeastRequest(), candidates).row == 2


def test_never_takes_the_most_loaded_when_another_is_less_loaded() -> None:
    assert rows_chosen(PowerOfTwo(), table(3, in_flight_requests=[1, 2, 3])) == {0, 1}


def test_takes_the_less_loaded_of_two() -> None:
    assert rows_chosen(PowerOfTwo(), table(2, in_flight_requests=[5, 4])) == {1}


def test_each_pair_is_drawn_as_often_and_a_tie_falls_on_either() -> None:
    """Of three, each pair is a third of the draws; the least loaded is in two of them."""
    rows = [choose(PowerOfTwo(), table(3, in_flight_requests=[1, 2, 3]), seed=seed).row for seed in range(600)]
    assert rows.count(0) / 600 == pytest.approx(2 / 3, abs=0.06)
    assert rows.count(1) / 600 == pytest.approx(1 / 3, abs=0.06)
    equal = [choose(PowerOfTwo(), table(3), seed=seed).row for seed in range(600)]
    assert [equal.count(row) / 600 for row in range(3)] == pytest.approx([1 / 3] * 3, abs=0.06)


def test_one_replica_is_no_choice_and_takes_no_draw() -> None:
    rng = np.random.default_rng(0)
    policy, candidates = PowerOfTwo(), table(1)
    assert policy.choose(request(), candidates, Weights.of(()), rng).row == 0
    assert rng.random() == np.random.default_rng(0).random()


def test_reaches_all_when_they_are_equal() -> None:
    assert rows_chosen(PowerOfTwo(), table(4)) == {0, 1, 2, 3}


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
