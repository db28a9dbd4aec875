"""The log-space box of weights, windows of samples with their figures, and fields of a saved state."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from math import inf, log, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.errors import TunerError, WeightsError
from tuner.objective import RollingWindow, SampleCursor, TunerSample, WindowStats, window_stats
from tuner.saved_fields import SavedFields
from tuner.space import LogBox, tuned_box

# --- The log-space box of a policy's weights.


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


# --- Windows of samples, their figures, and which samples are new.


SAMPLE = TunerSample(1, 10.0, "a", 3, 250.0, 1.5, 12.0, 200)
ROW: dict[str, Any] = {
    "seq": 7,
    "request_id": "r",
    "finished_s": 12.5,
    "replica": "a",
    "weights_version": 3,
    "ttft_ms": None,
    "e2e_s": 2.5,
    "itl_ms_p95": 11,
    "status": 200,
}


def numbered(*seqs: int) -> list[TunerSample]:
    return [replace(SAMPLE, seq=seq) for seq in seqs]


@pytest.mark.parametrize("module", ["objective", "space", "campaign.comparison"])
def test_examples_give_what_they_say(module: str) -> None:
    assert doctest.testmod(import_module(f"tuner.{module}")).failed == 0


def test_a_row_of_the_proxy_becomes_a_sample_with_its_arrival() -> None:
    assert TunerSample.from_json(ROW) == TunerSample(7, 10.0, "a", 3, None, 2.5, 11.0, 200)


@pytest.mark.parametrize(("key", "value"), [("seq", None), ("e2e_s", "long"), ("weights_version", None)])
def test_a_row_that_cannot_be_read_is_named(key: str, value: object) -> None:
    with pytest.raises(TunerError, match=r"sample .*expected|sample .*same version"):
        TunerSample.from_json({**ROW, key: value})
    with pytest.raises(TunerError, match=key):
        TunerSample.from_json({name: given for name, given in ROW.items() if name != key})


@pytest.mark.parametrize(
    ("status", "ttft_ms", "failed"),
    [(200, 1.0, False), (502, 1.0, True), (429, None, True), (400, None, False), (499, 1.0, False), (499, None, True)],
)
def test_the_fleet_s_failures_are_told_from_the_client_s(status: int, ttft_ms: float | None, failed: bool) -> None:
    assert replace(SAMPLE, status=status, ttft_ms=ttft_ms).failed is failed


def test_quantiles_are_numpy_s_and_failures_leave_e2e_alone() -> None:
    window = [replace(SAMPLE, ttft_ms=float(i), e2e_s=float(i)) for i in range(128)]
    found = window_stats([*window, replace(SAMPLE, ttft_ms=None, e2e_s=600.0, status=503)])
    assert found.ttft_ms_p95 == np.quantile(range(128), 0.95)
    assert found.e2e_s_p95 == np.quantile(range(128), 0.95)
    assert (found.n, found.errors, found.error_share) == (129, 1, 1 / 129)


def test_what_no_sample_has_is_unknown_and_not_zero() -> None:
    assert window_stats([]) == WindowStats(0, None, None, None, 0, None)
    assert window_stats([replace(SAMPLE, ttft_ms=None, itl_ms_p95=None)]).itl_ms_p95 is None


def test_the_largest_share_is_that_of_the_busiest_replica() -> None:
    assert window_stats([SAMPLE, SAMPLE, replace(SAMPLE, replica="b")]).max_share == pytest.approx(2 / 3)


def test_eighteen_scores_take_672_samples() -> None:
    window = RollingWindow()  # 128 and 32, the paper's
    assert sum(window.add(SAMPLE) for _ in range(672)) == 18


def test_a_cleared_window_has_to_fill_again() -> None:
    window = RollingWindow(4, 2)
    scored = [window.add(SAMPLE) for _ in range(5)]
    window.clear()
    assert not window.full
    assert scored + [window.add(SAMPLE) for _ in range(4)] == [False] * 3 + [True, False] + [False] * 3 + [True]


def test_a_first_token_that_never_came_is_slow() -> None:
    window = RollingWindow(4, 2)
    for ttft_ms in (None, 9000.0, 10.0, 20.0):
        window.add(replace(SAMPLE, ttft_ms=ttft_ms))
    assert window.share_slower_than(5000.0) == 0.5


def test_each_sample_is_taken_once_however_often_it_comes() -> None:
    inbox = SampleCursor()
    assert [s.seq for s in inbox.read("a", numbered(3, 1, 2, 2)).samples] == [1, 2, 3]
    taken = inbox.read("a", numbered(2, 3, 4))
    assert [s.seq for s in taken.samples] == [4]
    assert (taken.gap, taken.restarted) == (False, False)


def test_first_contact_is_no_gap_and_a_missing_number_is_one() -> None:
    inbox = SampleCursor()
    assert not inbox.read("a", numbered(100, 101)).gap
    assert not inbox.read("a", numbered(102)).gap
    assert inbox.read("a", numbered(104)).gap
    assert inbox.read("a", numbered(105, 107)).gap


def test_another_run_of_the_proxy_starts_from_its_first_sample() -> None:
    inbox = SampleCursor()
    inbox.read("a", numbered(1, 2))
    taken = inbox.read("b", numbered(1))
    assert [s.seq for s in taken.samples] == [1]
    assert (taken.restarted, taken.gap) == (True, False)


def test_a_tuner_that_was_away_sees_what_it_missed() -> None:
    assert not SampleCursor("a", 5).read("a", numbered(6)).gap
    assert SampleCursor("a", 5).read("a", numbered(9)).gap


@given(st.lists(st.lists(st.integers(1, 30), max_size=9), max_size=9))
def test_whatever_order_batches_come_in_nothing_is_taken_twice(batches: list[list[int]]) -> None:
    inbox, taken = SampleCursor(), list[int]()
    for batch in batches:
        taken += [sample.seq for sample in inbox.read("a", numbered(*batch)).samples]
    assert taken == sorted(set(taken))


# --- Fields of a saved state: what is taken, and what an error says of the rest.


def of(value: object) -> SavedFields:
    return SavedFields({"a": value}, "saved thing")


def test_values_of_their_kinds_are_returned() -> None:
    assert (of(1.5).number("a"), of(3).number("a"), of(3).count("a"), of(True).flag("a")) == (1.5, 3.0, 3, True)
    assert (of(None).optional("a"), of(2).optional("a"), of(None).short_text("a"), of("b").short_text("a")) == (
        None,
        2.0,
        None,
        "b",
    )
    assert (of([1]).items("a", most=1), of({"b": 1}).numbers("a")) == ([1], {"b": 1.0})


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (lambda f: f.number("a"), True, "saved thing.a is True; expected a finite number"),
        (lambda f: f.number("a"), float("nan"), "saved thing.a is nan; expected a finite number"),
        (lambda f: f.number("a"), 10**400, "expected a finite number"),
        (lambda f: f.number("a"), "1", "saved thing.a is '1'; expected a finite number"),
        (lambda f: f.number("a", least=0, most=1), 2, "saved thing.a is 2; expected a finite number from 0 to 1"),
        (lambda f: f.count("a"), True, "saved thing.a is True; expected a whole number from 0"),
        (lambda f: f.count("a"), 1.0, "saved thing.a is 1.0; expected a whole number"),
        (lambda f: f.count("a", most=5), 6, "saved thing.a is 6; expected a whole number from 0 to 5"),
        (lambda f: f.flag("a"), 1, "saved thing.a is 1; expected true or false"),
        (lambda f: f.short_text("a"), "x" * 4097, "expected null or a text of at most 4096 characters"),
        (lambda f: f.items("a", most=1), [1, 2], "expected a list of at most 1 values"),
        (lambda f: f.numbers("a"), {"b": None}, "saved thing.a.b is None; expected a finite number"),
        (lambda f: f.inner("a"), [], r"saved thing.a is \[\]; expected an object"),
        (lambda f: f.number("b"), 1, "saved thing has no 'b'; expected one"),
    ],
)
def test_another_value_is_an_error_with_its_place_and_what_is_expected(
    read: Callable[[SavedFields], Any], value: object, message: str
) -> None:
    with pytest.raises(TunerError, match=message) as caught:
        read(of(value))
    assert len(str(caught.value)) < 200
