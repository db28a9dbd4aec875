"""Views: what pages may say of results that are small enough to be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.figures.marked import Cell, View
from tests.figures.table import FIGURES


def view(name: str, *results: Any) -> View:
    return FIGURES[name].view(results)


def row(shown: View, *label: str) -> dict[str, Cell]:
    (found,) = [table.rows[label] for table in shown.tables if label in table.rows]
    return dict(found)


def one_run(load: float, *, held: bool, good: float, per_s: float, scale: float = 0.7) -> dict[str, Any]:
    goodput = {"good": good, "per_s": per_s, "rejected": 1 - good}
    return {
        "load": load,
        "held": held,
        "time_scale": scale / load,
        "goodput": goodput,
        "e2e_s": {"p95": 10 * load},
    }


def test_overload_shows_means_the_worst_seed_and_how_goodput_grows() -> None:
    def seed(good: float, scale: float) -> list[dict[str, Any]]:
        return [
            one_run(load, held=held, good=good if held else 0.5, per_s=2 * load if load < 3 else 4.0, scale=scale)
            for load in (0.7, 1.0, 1.3, 3.0)
            for held in (False, True)
        ]

    windows = [seed(0.9, 0.7), seed(0.6, 0.8), seed(0.9, 0.75)]
    shown = view("overload", *windows, *windows)
    held = row(shown, "ART-Chat-like windows", "1.3", "held")
    assert held["good"] == pytest.approx(80.0)
    assert held["seeds"] == 3
    assert held["worst seed"] == pytest.approx(60.0)
    assert held["turned away"] == pytest.approx(20.0)
    assert held["p95 E2E"] == pytest.approx(13.0)
    assert row(shown, "Mooncake conversations", "3", "at once")["good per s"] == 4.0
    assert shown.values["ART-Chat-like windows, least time scale"] == pytest.approx(0.7)
    assert shown.values["ART-Chat-like windows, most"] == pytest.approx(0.8)
    assert shown.values["Mooncake conversations, 3 over 1.3, least"] == pytest.approx(4 / 2.6)


def test_benches_are_read_from_what_they_print() -> None:
    late = view(
        "lateness",
        [
            "freezing   neither                  295    2004 (1.00)   10381 (1.00)   7.90 (1.00)   0.00%",
            "freezing   clock and hedging        287    1722 (0.86)    3034 (0.29)   7.42 (0.94)   2.50%",
        ],
    )
    assert row(late, "`freezing`", "neither")["p99, ms"] == 10381
    assert row(late, "`freezing`", "clock and hedging") == {
        "p50 TTFT, ms": 287,
        "p95, ms": [1722, 0.86],
        "p99, ms": [3034, 0.29],
        "p95 E2E, s": [7.42, 0.94],
        "hedged": 2.5,
    }
