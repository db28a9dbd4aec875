"""FIFO and replay buffer, by each rule."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.training.outcomes import TrainingRows
from gorgo.core.training.spec import ReplayRule, TrainingSpec
from gorgo.learning.buffers import replay
from gorgo.learning.buffers.replay import FifoReplay
from tests.learning.outcomes import numbered, numbers


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
    monkeypatch.setattr(replay, "ALL_ROWS", 30)
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
    assert max(model.calls) <= replay.POOL
    assert len(subject) <= 5100


def test_random_rule_gives_every_row_that_left_the_same_chance() -> None:
    counts = np.zeros(60)
    for seed in range(400):
        found = after("random", 60, fifo=10, size=10, seed=seed)
        counts[found[:-10]] += 1
    expected = 400 * 10 / 50
    assert np.abs(counts[:50] - expected).max() < 5 * expected**0.5
    assert counts[50:].sum() == 0
