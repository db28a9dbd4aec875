from __future__ import annotations

from gorgo.core.policy.candidates import Candidates
from gorgo.policies.round_robin import RoundRobin
from tests.policies.table import choose, table


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
