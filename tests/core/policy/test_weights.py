"""Values in their box, and outside it only on purpose."""

from __future__ import annotations

from math import inf, nan

import pytest

from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.errors import WeightsError

SPECS = (WeightSpec("w_rtt", 0.5, 0.05, 2.0, "per ms of RTT"), WeightSpec("w_queue", 0.1, 0.05, 0.5, "per token"))


@pytest.mark.parametrize("value", [0.04, 2.1, -1.0, nan, inf])
def test_value_outside_its_box_is_refused(value: float) -> None:
    with pytest.raises(WeightsError, match=r"'w_rtt' is .*; expected a number in \[0.05, 2\]"):
        Weights.of(SPECS, {"w_rtt": value})


def test_a_value_may_lie_on_either_edge_of_its_box() -> None:
    for value in (0.05, 2.0):
        weights = Weights.of(SPECS, {"w_rtt": value}, version=7)
        assert (weights["w_rtt"], weights.version, weights.out_of_range(SPECS)) == (value, 7, ())
    assert Weights.of(SPECS, {"w_rtt": 2.01}, allow_out_of_range=True).out_of_range(SPECS) == ("w_rtt",)
    assert Weights.of(SPECS).version == 0


def test_a_set_of_weights_is_a_mapping_of_its_values() -> None:
    weights = Weights.of(SPECS)
    assert (len(weights), list(weights), "w_rtt" in weights, weights.get("nope")) == (
        2,
        ["w_rtt", "w_queue"],
        True,
        None,
    )


def test_a_change_may_widen_the_box_too() -> None:
    assert Weights.of(SPECS).changed(SPECS, {"w_rtt": 9.0}, allow_out_of_range=True)["w_rtt"] == 9.0


def test_widened_box_takes_any_value_that_keeps_the_cost_positive() -> None:
    weights = Weights.of(SPECS, {"w_rtt": 0.0, "w_queue": 30.0}, allow_out_of_range=True)
    assert dict(weights) == {"w_rtt": 0.0, "w_queue": 30.0}
    assert weights.out_of_range(SPECS) == ("w_rtt", "w_queue")
    assert Weights.of(SPECS).out_of_range(SPECS) == ()


@pytest.mark.parametrize("value", [-1.0, nan, inf])
def test_widened_box_takes_no_value_that_is_no_cost(value: float) -> None:
    with pytest.raises(WeightsError, match="expected a number of 0 or more"):
        Weights.of(SPECS, {"w_rtt": value}, allow_out_of_range=True)


def test_unknown_weight_is_refused_whatever_the_box() -> None:
    with pytest.raises(WeightsError, match="it has: w_rtt, w_queue"):
        Weights.of(SPECS, {"w_rt": 1.0}, allow_out_of_range=True)


def test_change_leaves_what_it_does_not_name_even_outside_the_box() -> None:
    widened = Weights.of(SPECS, {"w_rtt": 9.0}, version=4, allow_out_of_range=True)
    changed = widened.changed(SPECS, {"w_queue": 0.2})
    assert (changed.version, dict(changed)) == (5, {"w_rtt": 9.0, "w_queue": 0.2})
    with pytest.raises(WeightsError):
        widened.changed(SPECS, {"w_rtt": 8.0})
