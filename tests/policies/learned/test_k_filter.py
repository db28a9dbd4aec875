from __future__ import annotations

import numpy as np

from gorgo.policies.learned.k_filter import is_saturated, replicas_of_group

SALTS = np.random.default_rng(0).integers(0, 2**63, 8).astype(np.uint64)


def saturated(usage: list[float], cached: list[float]) -> bool:
    return is_saturated(np.array(usage), np.array(cached), saturation=0.8, min_hit_tokens=100)


def test_pools_are_full_by_their_mean_and_a_short_match_is_not_worth_the_filter() -> None:
    assert saturated([0.9, 0.8], [0, 101])
    assert not saturated([0.9, 0.7], [0, 101])
    assert not saturated([0.9, 0.8], [0, 100])


def test_an_unknown_usage_counts_as_the_worst_known_and_as_none_if_none_is_known() -> None:
    assert saturated([0.9, np.nan], [0, 200])
    assert not saturated([np.nan, np.nan], [0, 200])


def test_a_group_has_k_replicas_and_always_the_same() -> None:
    rows = replicas_of_group(SALTS, 77, 2)
    assert len(set(rows.tolist())) == 2
    assert rows.tolist() == replicas_of_group(SALTS, 77, 2).tolist()
    assert replicas_of_group(SALTS, 77, 8).tolist() == list(range(8))


def test_groups_spread_over_the_fleet() -> None:
    counts = np.bincount(np.concatenate([replicas_of_group(SALTS, group, 2) for group in range(-400, 400)]))
    assert counts.min() > 150


def test_when_a_replica_leaves_only_its_groups_change_and_keep_their_other_replica() -> None:
    remaining = np.delete(np.arange(8), 3)
    for group in range(200):
        before = set(replicas_of_group(SALTS, group, 2).tolist())
        after = {int(remaining[row]) for row in replicas_of_group(SALTS[remaining], group, 2)}
        assert before - {3} <= after
