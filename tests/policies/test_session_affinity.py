from __future__ import annotations

from gorgo.core.candidates import Candidates
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


def test_the_session_id_goes_before_the_head() -> None:
    policy, candidates = SimpleSessionAffinity(), table(8)
    rows = {choose(policy, candidates, asked=request(head=head, session_id="s")).row for head in range(50)}
    assert len(rows) == 1
