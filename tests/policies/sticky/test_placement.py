from __future__ import annotations

import numpy as np
import pytest

from gorgo.policies.base import rendezvous_scores
from gorgo.policies.sticky.placement import bounded_load, jump_hash, two_choices

SALT = np.arange(1, 6, dtype=np.uint64) * np.uint64(7919)
KEYS = range(200)


def order(key: int) -> list[int]:
    return [int(row) for row in np.argsort(rendezvous_scores(SALT, key))[::-1]]


def test_a_bounded_load_hash_is_the_plain_hash_while_loads_are_equal() -> None:
    assert [bounded_load(SALT, key, np.zeros(5), factor=1.25) for key in KEYS] == [order(key)[0] for key in KEYS]


def test_a_bounded_load_hash_skips_the_replicas_at_the_bound() -> None:
    """Nine in flight and this one are two per replica: the bound is ceil(2.5)."""
    for key in KEYS:
        first, second, *others = order(key)
        load = np.zeros(5)
        load[[first, second, others[0]]] = (3, 3, 3)
        assert bounded_load(SALT, key, load, factor=1.25) == others[1]
        load[[first, second, others[0]]] = (4, 2, 3)
        assert bounded_load(SALT, key, load, factor=1.25) == second


def test_no_load_puts_every_replica_at_the_bound() -> None:
    rng = np.random.default_rng(0)
    for key in KEYS:
        load = rng.integers(0, 20, 5).astype(float)
        row = bounded_load(SALT, key, load, factor=1.0)
        assert load[row] < np.ceil((load.sum() + 1.0) / 5)


@pytest.mark.parametrize(("lead", "place"), [(2, 0), (3, 1)])
def test_the_second_choice_serves_where_it_is_better_by_more_than_the_bias(lead: int, place: int) -> None:
    for key in KEYS:
        load = np.full(5, 1.0)
        load[order(key)[0]] += lead
        assert two_choices(SALT, key, load, bias=2.0) == order(key)[place]


def test_one_replica_is_both_choices() -> None:
    assert two_choices(SALT[:1], 9, np.full(1, 50.0), bias=2.0) == 0


def test_jump_hash_moves_keys_to_the_new_bucket_alone() -> None:
    keys = [number * 0x9E37_79B9_7F4A_7C15 % 2**64 for number in range(2000)]
    for buckets in (1, 2, 5, 10):
        before, after = [jump_hash(key, buckets) for key in keys], [jump_hash(key, buckets + 1) for key in keys]
        moved = [new for old, new in zip(before, after, strict=True) if new != old]
        assert set(moved) == {buckets}
        assert len(moved) == pytest.approx(2000 / (buckets + 1), rel=0.15)


def test_jump_hash_gives_the_buckets_of_other_implementations() -> None:
    """Those in Guava's tests."""
    assert [jump_hash(key, 100) for key in range(10)] == [0, 55, 62, 8, 45, 59, 86, 97, 82, 59]
    assert jump_hash(10863919174838991, 11) == 6
    assert jump_hash(2016238256797177309, 11) == 3
    assert jump_hash(1673758223894951030, 11) == 5
