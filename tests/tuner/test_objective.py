"""Windows of samples, their figures, and which samples are new."""

from __future__ import annotations

import doctest
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.errors import TunerError
from tuner.objective import RollingWindow, SampleCursor, TunerSample, WindowStats, window_stats

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
