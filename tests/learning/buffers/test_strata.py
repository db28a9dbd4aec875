"""The stratified store against a plain dictionary of lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.learning.buffers.strata import RING_ROWS, STRATA, StratifiedStore, strata
from tests.learning.outcomes import rows_of

NAMES = ("queued_requests", "kv_usage", "hit_share")


def loads(queued: list[float], kv: list[float], hits: list[float], first: int = 0):  # type: ignore[no-untyped-def]
    table = np.column_stack([queued, kv, hits]).astype(np.float32).reshape(-1, 3)
    return rows_of(NAMES, table, np.arange(first, first + len(queued), dtype=np.float64), first_seq=first)


def plain_class(queued: float, kv: float, hit: float) -> tuple[int, int, int]:
    queue = 0 if queued == 0 else 1 if queued <= 2 else 2 if queued <= 5 else 3 if queued <= 10 else 4
    return queue, min(19, int(kv * 20)), min(3, int(hit * 4))


def test_there_are_400_classes() -> None:
    assert STRATA == 400
    queued, kv, hits = np.meshgrid([0, 1, 3, 6, 11], (np.arange(20) + 0.5) / 20, (np.arange(4) + 0.5) / 4)
    rows = loads(queued.ravel().tolist(), kv.ravel().tolist(), hits.ravel().tolist())
    assert sorted(strata(rows).tolist()) == list(range(400))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 64), st.integers(0, 64)), min_size=1, max_size=50))
def test_rows_of_a_class_agree_in_queue_kv_and_prefix(cells: list[tuple[int, int, int]]) -> None:
    queued, kv, hits = ([float(cell[at]) for cell in cells] for at in range(3))
    found = strata(loads(queued, [each / 64 for each in kv], [each / 64 for each in hits])).tolist()
    expected = [plain_class(q, k / 64, h / 64) for q, k, h in zip(queued, kv, hits, strict=True)]
    assert all((found[i] == found[j]) == (expected[i] == expected[j]) for i in range(len(found)) for j in range(i))


@pytest.mark.parametrize(("queued", "same"), [((1, 2), True), ((2, 3), False), ((5, 6), False), ((10, 11), False)])
def test_borders_of_the_queue(queued: tuple[int, int], same: bool) -> None:
    first, second = strata(loads(list(queued), [0.5, 0.5], [0.5, 0.5])).tolist()
    assert (first == second) is same


def test_share_outside_0_to_1_belongs_to_the_nearest_class() -> None:
    assert strata(loads([0, 0], [-0.1, 0.0], [1.7, 1.0])).tolist() == [3, 3]


def test_rare_state_outlives_any_number_of_common_ones() -> None:
    store = StratifiedStore(NAMES)
    store.add(loads([12.0], [0.97], [0.1]))
    for first in range(1, 5001, 1000):
        store.add(loads([0.0] * 1000, [0.1] * 1000, [0.1] * 1000, first))
    rows = store.stored()
    assert rows.ttft_s.tolist() == [0.0, *range(5001 - RING_ROWS, 5001)]
    assert len(store) == 1 + RING_ROWS


def test_store_is_bounded_and_its_memory_follows_its_rows() -> None:
    store = StratifiedStore(NAMES)
    rng = np.random.default_rng(0)
    for first in range(0, 50_000, 5000):
        queued, kv, hits = rng.integers(0, 15, 5000), rng.random(5000), rng.random(5000)
        store.add(loads(queued.tolist(), kv.tolist(), hits.tolist(), first))
    assert len(store) <= STRATA * RING_ROWS
    assert len(store) <= store.allocated <= 2 * len(store) + 64 * STRATA


def test_features_without_a_class_are_one_class() -> None:
    table = np.arange(6, dtype=np.float32)[:, None]
    assert strata(rows_of(("prompt_tokens",), table, np.arange(6.0))).tolist() == [0] * 6
