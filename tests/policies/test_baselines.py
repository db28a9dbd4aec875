""""""

from __future__ import annotations

import hashlib

import numpy as np

from gorgo.core.policy.interface import Candidates
from gorgo.policies.base import _mix
from gorgo.policies.baselines import Nearest, Random, RoundRobin, SimpleSessionAffinity
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
