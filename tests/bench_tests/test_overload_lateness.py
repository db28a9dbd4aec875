"""The benchmark of lateness: what it switches off is off, for that run alone, and rows are ratios to neither."""

from __future__ import annotations

from gorgo.core.latency import prefill
from tests.bench.overload_lateness import WAYS, line, one, ratio


def test_without_clock_and_hedging_a_freeze_is_not_minded_and_the_switch_is_back_afterwards() -> None:
    neither, clock, both = (one("freezing", way, 0, requests=700) for way in WAYS)
    assert prefill.STUCK_AFTER_S == 0.3
    assert neither.goodput is not None
    assert neither.goodput.hedged == 0.0
    assert neither.row.ttft_ms != clock.row.ttft_ms
    assert "freezing   clock and hedging" in line("freezing", WAYS[2], [both], [neither])
    assert "(1.00)" in line("freezing", WAYS[0], [neither], [neither])


def test_ratios_are_of_pairs_of_one_seed() -> None:
    assert round(ratio([1.0, 9.0], [2.0, 2.0]), 6) == 1.5
