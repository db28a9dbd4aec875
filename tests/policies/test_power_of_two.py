from __future__ import annotations

import numpy as np
import pytest

from gorgo.core.policy.weights import Weights
from gorgo.policies.power_of_two import PowerOfTwo
from tests.policies.table import choose, request, rows_chosen, table


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
