"""What the optimizer is told of candidates of different hours, and what is written down of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log

import numpy as np
import pytest

from gorgo.core.policy.weights import WeightSpec
from tuner.campaign.comparison import Verdict
from tuner.campaign.generation_log import GenerationLog
from tuner.campaign.options import CampaignOptions
from tuner.objective import WindowStats
from tuner.optimizers.registry import Fixed
from tuner.space import LogBox

BOX = LogBox((WeightSpec("w", 1.0, 0.1, 10.0, "any"),))
OURS = WindowStats(128, 300.0, 3.0, 10.0, 1, 0.5)
THEIRS = WindowStats(130, 400.0, 4.0, 11.0, 2, 0.4)
BEFORE = WindowStats(131, 500.0, 5.0, 12.0, 3, 0.3)


class Pupil(Fixed):
    """Remembers what it is told."""

    def __init__(self) -> None:
        super().__init__(BOX, {}, np.random.default_rng(0))
        self.heard: list[tuple[float, float, bool | None]] = []
        self.incumbents: list[float] = []

    def tell(self, weights: Mapping[str, float], value: float, *, accepted: bool | None = None) -> None:
        self.heard.append((weights["w"], value, accepted))

    def tell_incumbent(self, value: float) -> None:
        self.incumbents.append(value)


def ledger(
    *, anchor: float | None = None, reference: WindowStats | None = None, options: CampaignOptions | None = None
) -> tuple[GenerationLog, Pupil]:
    pupil = Pupil()
    made = GenerationLog(options or CampaignOptions(), pupil)
    made.anchor, made.reference = anchor, reference
    return made, pupil


def verdict(accepted: bool, ours: float | None, theirs: float | None, *, refused: bool = False) -> Verdict:
    return Verdict(accepted, "r", ours, theirs, OURS, THEIRS, refused)


@pytest.mark.parametrize(
    ("anchor", "reference", "found", "told", "anchor_after"),
    [
        # The first incumbent's objective is the scale, and a ratio of later hours is told on it.
        (None, None, verdict(True, 300.0, 400.0), (400.0, 300.0), 300.0),
        (None, None, verdict(False, 500.0, 400.0), (400.0, 500.0), 400.0),
        (300.0, None, verdict(False, 500.0, 600.0), (300.0, 250.0), 300.0),
        (300.0, None, verdict(True, 500.0, 600.0), (300.0, 250.0), 250.0),
        # What the guard refused is twice as slow at least, whatever it gained.
        (300.0, None, verdict(False, 200.0, 400.0, refused=True), (300.0, 600.0), 300.0),
        (300.0, None, verdict(False, 4000.0, 400.0, refused=True), (300.0, 3000.0), 300.0),
        # Without an objective of its own, or the incumbent's, or any.
        (300.0, None, verdict(False, None, 400.0), (300.0, 600.0), 300.0),
        (300.0, BEFORE, verdict(False, 250.0, None), (300.0, 150.0), 300.0),
        (None, BEFORE, verdict(False, 250.0, None), (500.0, 250.0), 500.0),
        (None, None, verdict(False, None, None), (1.0, 2.0), 1.0),
        (None, replace(BEFORE, ttft_ms_p95=None), verdict(False, None, None), (1.0, 2.0), 1.0),
    ],
)
def test_candidates_are_told_as_ratios_to_the_incumbent_beside_them(
    anchor: float | None, reference: WindowStats | None, found: Verdict, told: tuple[float, float], anchor_after: float
) -> None:
    made, pupil = ledger(anchor=anchor, reference=reference)
    made.on_verdict({"w": 2.0}, found)
    assert pupil.incumbents == [pytest.approx(told[0])]
    ((weights, value, accepted),) = pupil.heard
    assert (weights, accepted) == (2.0, found.accepted)
    assert value == pytest.approx(told[1])
    assert made.anchor == pytest.approx(anchor_after)
    assert made.reference == (OURS if found.accepted else THEIRS)


def test_an_incumbent_that_was_not_measured_keeps_its_figures() -> None:
    made, _ = ledger(reference=BEFORE)
    made.on_verdict({"w": 2.0}, Verdict(False, "harm", 300.0, None, OURS))
    assert made.reference == BEFORE


@pytest.mark.parametrize(("number", "spent"), [(3, None), (4, "3 generations"), (5, "3 generations")])
def test_the_start_does_not_count_as_a_generation(number: int, spent: str | None) -> None:
    made, _ = ledger(options=CampaignOptions(max_generations=3))
    made.number = number
    assert made.budget_spent(now=1e9) == spent


@pytest.mark.parametrize(("now", "spent"), [(159.9, None), (160.0, "budget of 60 s is spent")])
def test_time_is_spent_from_the_first_beginning_on(now: float, spent: str | None) -> None:
    made, _ = ledger(options=CampaignOptions(budget_s=60.0))
    assert made.budget_spent(now=now) is None, "it has not begun"
    made.on_start(100.0)
    made.on_start(150.0)
    assert (made.started_s, made.opened_s) == (100.0, 100.0)
    assert made.budget_spent(now=now) == spent


def test_without_a_budget_no_time_is_too_long() -> None:
    made, _ = ledger()
    made.on_start(100.0)
    assert made.budget_spent(now=1e12) is None


def test_a_generation_that_was_given_up_unmeasured_has_no_figures() -> None:
    made, _ = ledger()
    row = made.closed({"w": 2.0}, Verdict(False, "harm"), 7, 190.0).generation
    assert (row.n, row.e2e_s_p95, row.errors, row.max_share) == (0, None, 0, None)


@pytest.mark.parametrize(("mode", "after"), [("switchback", THEIRS), ("paper", BEFORE)])
def test_the_published_protocol_keeps_the_score_with_which_the_incumbent_won(mode: str, after: WindowStats) -> None:
    made, _ = ledger(options=CampaignOptions(mode=mode))  # type: ignore[arg-type]
    made.measured(BEFORE)
    assert made.reference == BEFORE
    made.measured(THEIRS)
    assert made.reference == after


def test_a_generation_s_row_says_what_was_tried_when_and_what_came_of_it() -> None:
    made, _ = ledger()
    made.on_start(100.0)
    made.opened(130.0)
    row = made.closed({"w": 2.0}, verdict(True, 310.0, 410.0), 7, 190.0).generation
    assert row.as_json() == {
        "number": 0,
        "started_s": 130.0,
        "finished_s": 190.0,
        "weights": {"w": 2.0},
        "weights_version": 7,
        "sigma": None,
        "mode": "switchback",
        "optimizer": "fixed",
        "n": 128,
        "objective_ms": 310.0,
        "incumbent_objective_ms": 410.0,
        "e2e_s_p95": 3.0,
        "itl_ms_p95": 10.0,
        "errors": 1,
        "max_share": 0.5,
        "accepted": True,
        "reason": "r",
    }
    assert made.closed({"w": 2.0}, verdict(True, 310.0, 410.0), 7, 190.0).generation.number == 1
    assert made.number == 2


def test_the_start_s_row_has_the_figures_with_which_it_was_found() -> None:
    made, _ = ledger(reference=BEFORE)
    row = made.started({"w": 1.0}, 5, 100.0).generation
    assert (row.number, row.accepted, row.reason) == (0, True, "the start")
    assert (row.objective_ms, row.incumbent_objective_ms, row.n) == (500.0, 500.0, 131)
    assert (row.started_s, row.weights_version) == (100.0, 5)
    row = ledger()[0].started({"w": 1.0}, None, 100.0).generation
    assert (row.objective_ms, row.n, row.errors) == (None, 0, 0)


def test_what_accepted_candidates_add_to_e2e_adds_up_and_gains_are_not_saved_for_later() -> None:
    made, _ = ledger()

    def after(accepted: bool, e2e: float) -> float:
        ours = replace(OURS, e2e_s_p95=4.0 * e2e)
        made.on_verdict({"w": 1.0}, Verdict(accepted, "r", 300.0, 400.0, ours, THEIRS))
        return made.e2e_lost

    assert after(True, 1.004) == pytest.approx(log(1.004))
    assert after(False, 1.5) == pytest.approx(log(1.004))
    assert after(True, 1.004) == pytest.approx(2 * log(1.004))
    assert after(True, 1 / 1.004) == pytest.approx(log(1.004))
    assert after(True, 0.9) == 0.0
    made.on_verdict({"w": 1.0}, Verdict(True, "r", 300.0, 400.0))
    assert made.e2e_lost == 0.0, "without figures nothing is known to be lost"
