"""Greedy k-centre against its definition."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.training.model import ReplayRule, TrainingSpec
from gorgo.core.training.outcomes import TrainingRows
from gorgo.learning import trainer
from gorgo.learning.trainer import RING_ROWS, STRATA, FifoReplay, RowRing, StratifiedStore, k_centre, strata
from tests.learning.outcomes import numbered, numbers, rows_of


def plain(points: np.ndarray, count: int) -> list[int]:
    """Every distance anew for every pick."""
    picked = [int(np.argmax((points**2).sum(axis=1)))]
    while len(picked) < min(count, len(points)):
        nearest = [
            -1.0 if row in picked else min(((points[row] - points[other]) ** 2).sum() for other in picked)
            for row in range(len(points))
        ]
        picked.append(int(np.argmax(nearest)))
    return picked


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 12))
def test_picks_are_those_of_the_definition(seed: int, rows: int, count: int) -> None:
    # Small whole numbers: sums are exact, and ties are frequent.
    points = np.random.default_rng(seed).integers(-3, 4, (rows, 3)).astype(np.float32)
    assert k_centre(points, count).tolist() == plain(points, count)


def test_no_row_is_picked_twice_where_all_are_alike() -> None:
    assert sorted(k_centre(np.ones((6, 2), dtype=np.float32), 6).tolist()) == list(range(6))


def test_nothing_is_picked_out_of_nothing() -> None:
    assert k_centre(np.empty((0, 3), dtype=np.float32), 3).tolist() == []
    assert k_centre(np.ones((3, 3), dtype=np.float32), 0).tolist() == []


def test_rows_that_a_model_predicts_well_count_as_one() -> None:
    rng = np.random.default_rng(0)
    well = rng.normal(size=(90, 8)) * 1e-4
    badly = rng.normal(size=(10, 8))
    picked = k_centre(np.concatenate([well, badly]).astype(np.float32), 11)
    assert len(set(picked.tolist()) & set(range(90, 100))) == 10


def test_errors_of_both_signs_are_far_apart() -> None:
    points = np.array([[2.0, 1.0], [1.9, 1.0], [-1.9, -1.0]], dtype=np.float32)
    assert k_centre(points, 2).tolist() == [0, 2]


class ByNumber:
    """A model by which rows are as far apart as their numbers."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.calls: list[int] = []

    def gradients(self, rows: TrainingRows, cap_s: float) -> np.ndarray:
        self.calls.append(len(rows))
        return rows.features * np.float32(self.factor)


def store(rule: ReplayRule, fifo: int = 10, size: int = 10, seed: int = 0) -> FifoReplay:
    spec = TrainingSpec("mlp", ("prompt_tokens",), fifo=fifo, replay=size, replay_rule=rule)
    return FifoReplay(spec, np.random.default_rng(seed))


def after(rule: ReplayRule, rows: int, model: object = None, batch: int = 5, **sizes: Any) -> list[int]:
    subject = store(rule, **sizes)
    for first in range(0, rows, batch):
        subject.add(numbered(min(batch, rows - first), first))
        subject.fill_replay(model)
    return numbers(subject.stored())


@pytest.mark.parametrize("rule", get_args(ReplayRule))
def test_newest_rows_are_always_there_and_no_row_twice(rule: ReplayRule) -> None:
    found = after(rule, 57, ByNumber())
    assert found[-10:] == list(range(47, 57))
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("rule", get_args(ReplayRule))
def test_same_seed_has_the_same_rows(rule: ReplayRule) -> None:
    assert after(rule, 200) == after(rule, 200)


def test_rule_none_has_the_fifo_alone() -> None:
    assert after("none", 57) == list(range(47, 57))


def test_rule_all_has_every_row_up_to_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "ALL_ROWS", 30)
    assert after("all", 35) == list(range(35))
    assert after("all", 100) == list(range(60, 100))


def test_replay_buffer_starts_to_fill_when_the_fifo_is_full() -> None:
    assert after("coreset", 10, ByNumber()) == list(range(10))
    assert after("coreset", 18, ByNumber()) == list(range(18))


@given(st.lists(st.integers(0, 30), max_size=20), st.sampled_from(get_args(ReplayRule)), st.booleans())
def test_buffers_never_exceed_their_bounds(batches: list[int], rule: ReplayRule, admits: bool) -> None:
    subject, first = store(rule), 0
    for count in batches:
        subject.add(numbered(count, first))
        first += count
        if admits:
            subject.fill_replay(ByNumber())
        assert len(subject.stored()) == len(subject) <= (first if rule == "all" else 20)


def test_coreset_has_the_rows_that_are_farthest_apart() -> None:
    # One far row among rows that are alike: it stays, however old it is.
    subject = store("coreset", fifo=2, size=3)
    subject.add(numbered(1, 1000))
    for first in range(0, 50, 5):
        subject.add(numbered(5, first))
        subject.fill_replay(ByNumber())
    assert 1000 in numbers(subject.stored())


def test_model_without_gradients_leaves_the_choice_to_chance() -> None:
    first, second = after("coreset", 300, None), after("coreset", 300, None, seed=1)
    assert first != second


def test_pool_of_a_round_is_bounded_and_so_are_the_rows_that_wait() -> None:
    subject, model = store("coreset", fifo=100, size=5000), ByNumber()
    subject.add(numbered(5100))
    subject.fill_replay(model)
    subject.add(numbered(5100, 5100))
    subject.fill_replay(model)
    subject.add(numbered(20_000, 20_000))
    subject.fill_replay(model)
    assert model.calls
    assert max(model.calls) <= trainer.POOL
    assert len(subject) <= 5100


def test_random_rule_gives_every_row_that_left_the_same_chance() -> None:
    counts = np.zeros(60)
    for seed in range(400):
        found = after("random", 60, fifo=10, size=10, seed=seed)
        counts[found[:-10]] += 1
    expected = 400 * 10 / 50
    assert np.abs(counts[:50] - expected).max() < 5 * expected**0.5
    assert counts[50:].sum() == 0


@given(st.integers(1, 100), st.lists(st.integers(0, 150), max_size=12))
def test_ring_is_the_end_of_a_list(capacity: int, batches: list[int]) -> None:
    ring, twin, first = RowRing(("prompt_tokens",), capacity), list[int](), 0
    for count in batches:
        left = ring.append(numbered(count, first))
        twin += range(first, first + count)
        assert numbers(left) == twin[: max(0, len(twin) - capacity)]
        twin, first = twin[-capacity:], first + count
        assert numbers(ring.stored()) == twin
        assert len(ring) == len(twin)
        assert ring.allocated <= capacity


def test_memory_grows_with_the_rows() -> None:
    ring = RowRing(("prompt_tokens",), 5000)
    ring.append(numbered(10))
    assert ring.allocated <= 64
    ring.append(numbered(10_000))
    assert ring.allocated == 5000


def test_rows_returned_are_copies() -> None:
    ring = RowRing(("prompt_tokens",), 5)
    ring.append(numbered(3))
    ring.stored().features[:] = 9.0
    assert numbers(ring.stored()) == [0, 1, 2]


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
