"""What is handed to the `cma` package and taken from it: box, start, population, values."""

from __future__ import annotations

from math import log

import numpy as np
import pytest

from gorgo.core.policy.weights import WeightSpec
from tuner.optimizers.cma_es import CmaEs
from tuner.space import LogBox

WIDE = LogBox(tuple(WeightSpec(name, 1.0, 1e-6, 1e6, "any") for name in ("a", "b")))
NARROW = LogBox((WeightSpec("a", 1.0, 0.9, 1.1, "any"), WeightSpec("b", 1.0, 0.5, 2.0, "any")))
FAR = {"a": 1000.0, "b": 0.001}


def cma(box: LogBox = WIDE, *, seed: int = 0, **options: float) -> CmaEs:
    return CmaEs(box, {}, np.random.default_rng(seed), **options)  # type: ignore[arg-type]


def generation(optimizer: CmaEs, centre: dict[str, float], *, size: int = 6) -> list[dict[str, float]]:
    """A population's proposals, told so that the search is drawn to `centre`."""
    asked = []
    for _ in range(size):
        weights = optimizer.ask()
        asked.append(weights)
        optimizer.tell(weights, sum(log(weights[name] / centre[name]) ** 2 for name in centre), accepted=False)
    return asked


def away(asked: list[dict[str, float]], centre: dict[str, float]) -> float:
    """Mean distance of the proposals from a point, in steps of one e-fold."""
    return float(np.mean([sum(log(one[name] / centre[name]) ** 2 for name in centre) ** 0.5 for one in asked]))


def test_proposals_lie_around_the_start() -> None:
    assert away(generation(cma(), {"a": 1.0, "b": 1.0}), {"a": 1.0, "b": 1.0}) < 3 * 0.5


def test_it_begins_again_around_the_new_centre_with_its_first_step() -> None:
    optimizer = cma(sigma0=0.4)
    for _ in range(4):
        generation(optimizer, {"a": 1.0, "b": 1.0})
    assert optimizer.sigma != 0.4
    optimizer.ask()
    optimizer.recentre(FAR)
    assert optimizer.sigma == pytest.approx(0.4)
    assert away(generation(optimizer, FAR), FAR) < 3 * 0.4
    assert optimizer.observed == 4 * 6 + 6, "the budget goes on"


def test_values_of_a_population_that_was_left_half_way_are_not_told_to_the_next() -> None:
    optimizer = cma()
    weights = optimizer.ask()
    optimizer.tell(weights, 1.0)
    optimizer.recentre(FAR)
    generation(optimizer, FAR)
    assert len(optimizer.state()["values"]) == 6
    assert optimizer.state()["origin"] == pytest.approx([log(1000.0), log(0.001)])


def test_no_raw_proposal_leaves_the_box() -> None:
    # The box clips what comes out, so the search would learn from points that it has not tried.
    low, high = np.array(NARROW.low), np.array(NARROW.high)
    optimizer = cma(NARROW, sigma0=2.0)
    for _ in range(30):
        weights = optimizer.ask()
        raw = np.array(optimizer.state()["asked"])
        assert ((low - 1e-12 <= raw) & (raw <= high + 1e-12)).all(), raw
        optimizer.tell(weights, 1.0 + weights["a"])


def test_proposals_that_lie_outside_a_box_are_no_sixfold_edge() -> None:
    asked = [one["a"] for one in generation(cma(NARROW, sigma0=2.0), {"a": 1.0, "b": 1.0})]
    assert len(set(asked)) == 6, "mirrored into the box, not put on its edge"


def test_the_search_goes_where_values_are_low() -> None:
    optimizer, bottom = cma(), {"a": 20.0, "b": 0.05}
    first = away(generation(optimizer, bottom), bottom)
    for _ in range(15):
        last = generation(optimizer, bottom)
    assert away(last, bottom) < first / 4


@pytest.mark.parametrize("population", [4, 9])
def test_a_population_is_as_large_as_it_is_asked_to_be(population: int) -> None:
    optimizer = cma(population=population)
    before = optimizer.sigma
    for told in range(1, population + 1):
        optimizer.tell(optimizer.ask(), float(told))
        assert (optimizer.sigma != before) == (told == population)
    assert optimizer.state()["population"] == population


def test_steps_below_the_smallest_end_the_search() -> None:
    optimizer = cma(sigma_min=0.499)
    assert optimizer.stop() is None
    for _ in range(20):
        generation(optimizer, {"a": 1.0, "b": 1.0})
        if reason := optimizer.stop():
            break
    assert reason == f"converged: steps of {optimizer.sigma:.1%} are below 49.9%"


def test_what_cma_itself_says_ends_the_search() -> None:
    optimizer = cma(sigma_min=1e-300, budget=2000)
    while (reason := optimizer.stop()) is None:
        generation(optimizer, {"a": 1.0, "b": 1.0})
    assert reason.startswith("cma: tol")


def test_a_budget_ends_the_search_in_the_midst_of_a_population() -> None:
    optimizer = cma(budget=4)
    generation(optimizer, {"a": 1.0, "b": 1.0}, size=4)
    assert optimizer.stop() == "budget of 4 evaluations is spent"


def test_it_starts_with_half_and_ends_below_a_twentieth_unless_said() -> None:
    state = cma().state()
    assert (state["sigma0"], state["sigma_min"], state["population"]) == (0.5, 0.05, None)
    assert cma(sigma0=0.3, sigma_min=0.3).stop() is None, "the smallest is not below itself"
