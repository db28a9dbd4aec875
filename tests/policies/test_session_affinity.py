from __future__ import annotations

import hashlib

import numpy as np

from gorgo.core.policy.candidates import Candidates
from gorgo.policies.base import _mix
from gorgo.policies.session_affinity import SimpleSessionAffinity
from tests.policies.table import choose, request, table

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
