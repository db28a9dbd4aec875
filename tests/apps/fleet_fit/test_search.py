from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log

import pytest

from gorgo.apps.fleet_fit.published import RunStats
from gorgo.apps.fleet_fit.search import Dimension, coordinate_search, log_ratios, mean_square

RATE = Dimension(name="rate", low=1.0, high=1000.0)
SHARE = Dimension(name="share", low=0.01, high=1.0)


def valley(values: Mapping[str, float]) -> float:
    """A narrow valley that is aligned with no axis: rate and share make up for each other in part."""
    rate, share = log(values["rate"] / 40.0), log(values["share"] / 0.2)
    return (rate + share) ** 2 + 0.2 * (rate - share) ** 2


def test_the_search_finds_the_constants_that_made_the_figures() -> None:
    found = coordinate_search(valley, {"rate": 10.0, "share": 0.8}, [RATE, SHARE], evaluations=200)
    assert found.best.values["rate"] == pytest.approx(40.0, rel=0.05)
    assert found.best.values["share"] == pytest.approx(0.2, rel=0.05)
    assert found.best.loss == min(one.loss for one in found.evaluations)


def test_the_search_keeps_its_budget_and_evaluates_nothing_twice() -> None:
    tried: list[tuple[float, float]] = []

    def loss(values: Mapping[str, float]) -> float:
        tried.append((values["rate"], values["share"]))
        return valley(values)

    for budget in (1, 7):
        tried.clear()
        found = coordinate_search(loss, {"rate": 10.0, "share": 0.8}, [RATE, SHARE], evaluations=budget)
        assert len(tried) == len(set(tried)) == len(found.evaluations) == budget


def test_no_value_leaves_its_bounds() -> None:
    bounded = replace(RATE, high=20.0)
    found = coordinate_search(valley, {"rate": 10.0, "share": 0.2}, [bounded, SHARE], evaluations=100)
    assert max(one.values["rate"] for one in found.evaluations) == 20.0
    assert found.best.values["rate"] == 20.0


def test_twice_and_half_as_much_weigh_the_same() -> None:
    measured = RunStats(500, 2000, 3000, 2, 4, 6, 10)
    twice, half = (RunStats(*(factor * value for value in measured.values())) for factor in (2.0, 0.5))
    assert mean_square(log_ratios(twice, measured)) == pytest.approx(mean_square(log_ratios(half, measured)))
    assert mean_square(log_ratios(twice, measured)) == pytest.approx(log(2) ** 2)
