"""Whole campaigns on a noisy fleet, their options, their log of generations, and mode `paper` by the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import pytest

from gorgo.core.policy.weights import WeightSpec
from gorgo.errors import TunerError
from tests.tuner.campaign.fleet import START, Effect, Proxy, Run, bowl, driven, nothing
from tuner.campaign.comparison import Verdict
from tuner.campaign.generation import GenerationLog
from tuner.campaign.options import CampaignOptions, Mode
from tuner.objective import WindowStats
from tuner.optimizers.registry import Fixed
from tuner.space import LogBox

# --- Whole campaigns on a noisy fleet: what each mode finds, what it costs, and what nobody talks it into.
#
# Noise as on a real fleet: the p95 of a 128-sample window varies by some 15 % with fixed weights, half of it common to
# all requests for a minute.


#: A look at each statement; the figures over 20 seeds and on simulated engines are those of `experiments`.
SEEDS = range(8)
HACK = LogBox((WeightSpec("w_rtt", 0.5, 0.05, 2.0, "per ms"), WeightSpec("w_queue", 0.1, 0.001, 0.5, "per token")))


def plateau(weights: Mapping[str, float]) -> Effect:
    """The defaults are as good as it gets: 4 % for every squared factor of e away, in TTFT and E2E."""
    away = sum(log(weights[name] / START[name]) ** 2 for name in START)
    return Effect(ttft=1 + 0.04 * away, e2e=1 + 0.04 * away)


def next_door(weights: Mapping[str, float]) -> Effect:
    """Without a price on queues all goes to the nearest replica: first tokens fast, answers several times slower."""
    hacked = 1 / (1 + (weights["w_queue"] / 0.02) ** 2)
    return Effect(ttft=1 - 0.5 * hacked, e2e=1 + 3 * hacked, share=0.4 + 0.58 * hacked)


def finished(
    seed: int, effect: object, mode: Mode, *, generations: int = 6, start: Mapping[str, float] = START, **more: object
) -> Run:
    options = CampaignOptions(**{"mode": mode, "max_generations": generations, "rest_blocks": 0.0} | more)  # type: ignore[arg-type]
    box = {"box": HACK} if effect is next_door else {}
    run = Run(Proxy(effect, seed=seed, rate=1.5), options, seed=seed, start=start, **box)  # type: ignore[arg-type]
    while not run.stopped:
        run.step(15.0)
    return run


def test_window_noise_is_what_the_docstring_says() -> None:
    proxy = Proxy()
    windows = [proxy.serve(43.0 * i, 43.0) for i in range(200)]
    p95 = [np.quantile([s.ttft_ms for s in window if s.ttft_ms], 0.95) for window in windows]
    assert 0.1 < np.std(np.log(p95)) < 0.2


def test_weights_that_make_no_difference_are_accepted_as_rarely_as_stated() -> None:
    rows = [row for seed in SEEDS for row in finished(seed, nothing, "switchback", generations=5).rows[1:]]
    accepted = sum(row.accepted for row in rows)
    assert len(rows) == 40
    assert accepted <= 5  # 2 expected at alpha; 5 or fewer in 98 of 100


def test_default_mode_ends_where_it_began_or_better_and_costs_little_on_the_way() -> None:
    ends, ways = [], []
    for seed in SEEDS[:4]:
        run = finished(seed, plateau, "switchback", rest_blocks=2.0)
        ends.append(plateau(run.campaign.incumbent).ttft)
        routed = run.proxy.routed
        ways.append(sum(n * plateau(dict(zip(START, w, strict=True))).ttft for w, n in routed.items()) / routed.total())
    assert np.mean(ends) < 1.005
    assert max(ends) < 1.05  # one candidate in twenty is accepted by chance; one that is much worse is not
    assert np.mean(ways) < 1.01


def test_default_mode_finds_a_large_gain_and_is_never_talked_into_a_loss() -> None:
    ends = [bowl(finished(seed, bowl, "switchback", generations=6).campaign.incumbent).ttft for seed in SEEDS]
    on_start = bowl(START).ttft  # 1.61
    assert max(ends) <= on_start
    assert np.median(ends) < 0.85 * on_start


def test_the_published_protocol_moves_on_noise_alone() -> None:
    runs = [finished(seed, nothing, "paper", generations=17) for seed in SEEDS]
    assert sum(any(row.accepted for row in run.rows[1:]) for run in runs) >= 7
    assert all(row.n == 128 for run in runs for row in run.rows)


def test_the_guard_never_settles_next_door() -> None:
    for seed in SEEDS:
        run = finished(seed, next_door, "switchback", generations=4, start={"w_rtt": 0.5, "w_queue": 0.002})
        assert next_door(run.campaign.incumbent).e2e < 1.5, run.sentences()  # 3.97 there
        assert run.rows[1].accepted is False


def test_without_the_guard_next_door_is_where_it_ends() -> None:
    ends = [
        next_door(
            finished(
                seed, next_door, "switchback", guard=False, generations=4, start={"w_rtt": 0.5, "w_queue": 0.002}
            ).campaign.incumbent
        )
        for seed in SEEDS
    ]
    assert np.median([end.share for end in ends]) > 0.9
    assert np.median([end.e2e for end in ends]) > 3


def test_a_good_start_that_is_not_the_default_is_kept() -> None:
    start = {"w_rtt": 0.3, "w_queue": 0.2}
    kept = [finished(seed, nothing, "switchback", generations=1, start=start).rows[1].accepted for seed in SEEDS]
    assert sum(kept) >= 7


@pytest.mark.parametrize("optimizer", ["cma", "random"])
def test_every_optimizer_can_be_driven(optimizer: str) -> None:
    run = Run(Proxy(bowl), CampaignOptions(max_generations=9, rest_blocks=0.0), optimizer=optimizer)
    while not run.stopped:
        run.step(15.0)
    assert [row.number for row in run.rows] == list(range(10))
    assert bowl(run.campaign.incumbent).ttft <= bowl(START).ttft


# --- What the optimizer is told of candidates of different hours, and what is written down of each.


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


# --- Which numbers a campaign takes.


EVERY_NUMBER = [
    "window",
    "hop",
    "warm_up_s",
    "block_s",
    "discard_s",
    "rest_blocks",
    "pairs",
    "harm_pairs",
    "futility_pairs",
    "alpha",
    "min_block_samples",
    "max_voids",
    "margin",
    "e2e_margin",
    "max_share",
    "hard_e2e_factor",
    "hard_e2e_s",
    "hard_errors",
    "saturated_ttft_ms",
    "saturated_share",
    "patience_s",
    "max_generations",
    "budget_s",
]


@pytest.mark.parametrize("name", EVERY_NUMBER)
def test_no_number_may_be_negative_endless_or_none_and_few_may_be_nothing(name: str) -> None:
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(TunerError, match=f"^{name} is"):
            CampaignOptions(**{name: value})  # type: ignore[arg-type]
    nothing: dict[str, Any] = {name: 0}
    if name in ("warm_up_s", "discard_s", "rest_blocks", "margin", "e2e_margin"):
        CampaignOptions(**nothing)
    else:
        with pytest.raises(TunerError, match=rf"^{name} is 0; expected a (finite number|share) above 0"):
            CampaignOptions(**nothing)


@pytest.mark.parametrize("name", ["alpha", "max_share", "hard_errors", "saturated_share"])
def test_a_share_is_at_most_all(name: str) -> None:
    CampaignOptions(**{name: 1.0})  # type: ignore[arg-type]
    with pytest.raises(TunerError, match=f"{name} is 1.01; expected a share above 0, at most 1"):
        CampaignOptions(**{name: 1.01})  # type: ignore[arg-type]


def test_what_is_discarded_is_less_than_a_block_and_a_hop_at_most_a_window() -> None:
    CampaignOptions(block_s=20.0, discard_s=19.9)
    with pytest.raises(TunerError, match="discard_s is 20 of blocks of 20 s; expected less"):
        CampaignOptions(block_s=20.0, discard_s=20.0)
    CampaignOptions(window=8, hop=8)
    with pytest.raises(TunerError, match="hop is 9 of a window of 8; expected no more"):
        CampaignOptions(window=8, hop=9)


@pytest.mark.parametrize(
    ("mode", "guard", "guarded"),
    [
        ("switchback", True, True),
        ("paper", True, False),
        ("switchback", False, False),
    ],
)
def test_the_guard_belongs_to_the_switchback_alone(mode: str, guard: bool, guarded: bool) -> None:
    assert CampaignOptions(mode=mode, guard=guard).guarded == guarded  # type: ignore[arg-type]


def test_the_default_mode_probes_and_the_published_one_does_not() -> None:
    assert (CampaignOptions().algorithm, CampaignOptions(mode="paper").algorithm) == ("es-probes", "es-published")


# --- Mode `paper` by the optimizer: what it accepts of windows that are all alike, and when it ends.


@pytest.mark.parametrize(("algorithm", "accepted"), [("es", False), ("es-released", True)])
def test_candidates_without_any_difference_are_accepted_as_released_alone(algorithm: str, accepted: bool) -> None:
    generations = driven(algorithm, [0.4] * 900).generations
    assert len(generations) > 10
    assert {one.accepted for _, one in generations[1:]} == {accepted}


def test_the_released_search_ends_after_16_candidates_and_512_samples() -> None:
    found = driven("es-released", [0.4] * 900)
    numbers = [number for number, _ in found.generations]
    assert len(numbers) == 17
    assert numbers[-1] - numbers[0] == 512
    assert found.stopped == "es-released: 16 candidates, as released"
