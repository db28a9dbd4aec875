"""The log-space box of a policy's weights."""

from __future__ import annotations

from math import inf, log, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.errors import WeightsError
from tuner.space import LogBox, tuned_box

SPECS = (
    WeightSpec("w_rtt", 0.5, 0.05, 2.0, "per ms of RTT"),
    WeightSpec("w_queue", 0.1, 0.05, 0.5, "per queued token"),
)
BOX = LogBox(SPECS)


def test_start_is_the_defaults() -> None:
    assert BOX.from_log(BOX.start()) == pytest.approx({"w_rtt": 0.5, "w_queue": 0.1})
    assert len(BOX) == 2


@given(st.floats(0.05, 2.0), st.floats(0.05, 0.5))
def test_way_there_and_back_changes_nothing(w_rtt: float, w_queue: float) -> None:
    weights = {"w_rtt": w_rtt, "w_queue": w_queue}
    assert BOX.from_log(BOX.to_log(weights)) == pytest.approx(weights)


@given(st.lists(st.floats(allow_nan=False), min_size=2, max_size=2))
def test_every_point_is_a_set_of_weights_that_the_policy_takes(point: list[float]) -> None:
    Weights.of(SPECS, BOX.from_log(point))


def test_points_outside_end_on_the_edge_exactly() -> None:
    assert BOX.from_log([inf, -inf]) == {"w_rtt": 2.0, "w_queue": 0.05}
    assert BOX.from_log(BOX.low) == {"w_rtt": 0.05, "w_queue": 0.05}
    assert BOX.from_log(BOX.high) == {"w_rtt": 2.0, "w_queue": 0.5}


def test_equal_steps_are_equal_factors() -> None:
    at, step = BOX.to_log({"w_rtt": 0.2}), log(2)
    assert BOX.from_log([at[0] + step, at[1]])["w_rtt"] == pytest.approx(0.4)


@pytest.mark.parametrize("value", [0.01, 3.0, nan, inf, 0.0, -1.0])
def test_value_outside_its_box_is_refused_not_moved(value: float) -> None:
    with pytest.raises(WeightsError, match=r"'w_rtt' is .*; expected a number in \[0.05, 2\]"):
        BOX.to_log({"w_rtt": value})


def test_weight_that_is_not_in_the_box_is_left_alone() -> None:
    assert LogBox(SPECS[:1]).to_log({"w_rtt": 1.0, "w_queue": 0.3}) == (0.0,)


@pytest.mark.parametrize(("low", "default", "high"), [(0.0, 0.5, 1.0), (-1.0, 0.5, 1.0), (0.6, 0.5, 1.0), (0.1, 2, 1)])
def test_box_that_has_no_logarithm_is_refused(low: float, default: float, high: float) -> None:
    with pytest.raises(WeightsError, match="a log space needs"):
        LogBox((WeightSpec("w", default, low, high, "-"),))


@pytest.mark.parametrize("default", [1.0, 2.0])
def test_a_default_may_lie_on_the_edge_of_its_box(default: float) -> None:
    box = LogBox((WeightSpec("w", default, 1.0, 2.0, "-"),))
    assert box.from_log(box.start()) == {"w": default}


PREFERENCES = (
    WeightSpec("m_rtt", 1.0, 0.25, 4.0, "factor"),
    WeightSpec("lambda", 0.2, 0.1, 1.0, "a preference", tunable="opt_in"),
    WeightSpec("delta", 0.0, 0.0, 100.0, "ms", tunable="no"),
)


def names(box: LogBox) -> list[str]:
    return [spec.name for spec in box.specs]


def test_a_preference_moves_only_when_asked_and_what_is_never_tuned_never() -> None:
    assert names(tuned_box(PREFERENCES)) == ["m_rtt"]
    assert names(tuned_box(PREFERENCES, tune_lambda=True)) == ["m_rtt", "lambda"]


def test_a_box_can_be_widened_by_name() -> None:
    box = tuned_box(PREFERENCES, tune_lambda=True, box={"lambda": (0.01, 2.0)})
    assert box.from_log(box.to_log({"lambda": 0.02}))["lambda"] == pytest.approx(0.02)
    assert box.specs[0].high == 4.0


@pytest.mark.parametrize(
    ("box", "message"),
    [
        ({"delta": (0.1, 1.0)}, "'delta': not a weight that is moved; expected one of m_rtt"),
        ({"m_rtt": (0.0, 4.0)}, "needs 0 < low"),
        ({"m_rtt": (2.0, 4.0)}, "around 1"),
    ],
)
def test_a_box_that_cannot_be_searched_is_refused(box: dict[str, tuple[float, float]], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        tuned_box(PREFERENCES, box=box)


def test_a_policy_with_nothing_to_move_is_refused() -> None:
    with pytest.raises(WeightsError, match="no weight that a tuner may move"):
        tuned_box(PREFERENCES[2:])
