"""A campaign at each of its forks, with traffic that is made for the fork."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gorgo.errors import WeightsError
from tests.tuner.campaign.fleet import BOX, START, sentence
from tuner.campaign.generation import Action, Freeze, Generation, PutWeights, RecordGeneration, RollBack, Stop, Wait
from tuner.campaign.machine import Campaign, campaign_state, load_campaign
from tuner.campaign.options import CampaignOptions
from tuner.objective import TunerSample
from tuner.optimizers.es import OnePlusOneES

#: Windows of four samples, no warm-up. One pair of blocks decides: half of all sign patterns reach a gain in one pair,
#: and six tenths of them may.
QUICK: dict[str, Any] = {
    "window": 4,
    "hop": 2,
    "warm_up_s": 0.0,
    "block_s": 10.0,
    "discard_s": 0.0,
    "rest_blocks": 0.0,
    "pairs": 1,
    "futility_pairs": 1,
    "alpha": 0.6,
    "min_block_samples": 2,
}
OTHER = {"w_rtt": 1.0, "w_queue": 0.2}


class Wire:
    """A campaign whose orders are carried out at once, each under the next version, unless `deaf`."""

    def __init__(self, *, start: Mapping[str, float] = START, budget: int = 200, **options: Any) -> None:
        self.options = CampaignOptions(**QUICK | options)
        self.optimizer = OnePlusOneES(BOX, start, np.random.default_rng(1), budget=budget)
        self.campaign = Campaign(BOX, self.optimizer, self.options, start=start, rng=np.random.default_rng(2))
        self.now, self.version, self.seq, self.boot_id = 1000.0, 10, 0, "boot-1"
        self.deaf = False
        self.actions: list[Action] = []
        self.values: dict[str, float] = {}
        self.do(self.campaign.on_start(now=self.now))

    def do(self, actions: list[Action]) -> list[Action]:
        self.actions += actions
        for action in actions:
            if isinstance(action, PutWeights | RollBack) and not self.deaf:
                self.version, self.values = self.version + 1, dict(action.values)
                self.do(self.campaign.on_weights_applied(self.version, ticket=action.ticket, now=self.now))
        return actions

    def feed(self, count: int = 4, *, ttft_ms: float | None = 400.0, **changes: Any) -> list[Action]:
        """Requests that arrive now, routed by what is in force."""
        samples = []
        for _ in range(count):
            self.seq += 1
            usual = TunerSample(self.seq, self.now, "ab"[self.seq % 2], self.version, ttft_ms, 2.0, 12.0, 200)
            samples.append(replace(usual, **changes))
        return self.do(self.campaign.on_samples(samples, boot_id=self.boot_id, now=self.now))

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.do(self.campaign.on_time(now=self.now))

    def pair(self, **offspring: Any) -> None:
        """A block of each arm, whichever comes first, and what is made of them."""
        for _ in range(2):
            self.feed(**(offspring if self.arm == "offspring" else {}))
            self.wait(10.0)
        self.wait(0.0)

    @property
    def arm(self) -> str:
        assert self.campaign.trial is not None
        return self.campaign.trial.arm

    @property
    def phase(self) -> str:
        return self.campaign.phase

    @property
    def said(self) -> list[str]:
        return [sentence(action) for action in self.actions if not isinstance(action, Wait)]

    @property
    def puts(self) -> int:
        return sum(isinstance(action, PutWeights | RollBack) for action in self.actions)

    @property
    def rows(self) -> list[Generation]:
        return [action.generation for action in self.actions if isinstance(action, RecordGeneration)]

    def saved(self, key: str) -> Any:
        return campaign_state(self.campaign)[key]

    def reload(self) -> list[Action]:
        """Another process goes on from the saved state."""
        self.campaign = load_campaign(BOX, self.options, campaign_state(self.campaign))
        return self.do(self.campaign.on_start(now=self.now))


def comparing(**options: Any) -> Wire:
    wire = Wire(**options)
    wire.feed()
    assert wire.phase == "comparing"
    return wire


def at(arm: str, **options: Any) -> Wire:
    """The arm's block has just begun."""
    wire = comparing(**options)
    if wire.arm != arm:
        wire.feed()
        wire.wait(10.0)
    assert wire.arm == arm
    return wire


# -- beginning and going on


def test_a_process_that_goes_on_puts_what_it_was_about() -> None:
    wire = Wire()
    assert wire.said[-1] == "puts 0.5 0.1: the start"
    wire.reload()
    assert wire.said[-1] == "puts 0.5 0.1: resumed"
    wire.feed()
    wire.reload()
    assert wire.said[-1].endswith(": resumes generation 1")
    wire.do(wire.campaign.on_frozen(now=wire.now))
    wire.reload()
    assert (wire.said[-1], wire.phase) == ("puts 0.5 0.1: resumed", "warming")


def test_a_time_to_wait_for_is_said_once() -> None:
    wire = Wire(warm_up_s=60.0)
    assert not any(isinstance(action, Wait) for action in wire.actions), "samples are awaited first"
    assert wire.feed() == [Wait(1060.0)]
    assert wire.feed() == []
    wire.wait(60.0)
    assert wire.phase == "comparing"
    assert wire.actions[-1] == Wait(1060.0 + 10.0)


def test_the_warm_up_is_a_minute_unless_told_otherwise() -> None:
    wire = Wire(warm_up_s=CampaignOptions().warm_up_s)
    assert wire.feed() == [Wait(1000.0 + 60.0)]


def test_the_warm_up_is_over_in_time_and_not_before() -> None:
    wire = Wire(warm_up_s=60.0)
    wire.feed()
    wire.wait(59.9)
    assert wire.phase == "warming"
    wire.wait(0.1)
    assert wire.phase == "comparing"


def test_a_start_outside_the_box_is_refused_whatever_the_optimizer_begins_at() -> None:
    optimizer = OnePlusOneES(BOX, START, np.random.default_rng(1))
    with pytest.raises(WeightsError, match="w_queue"):
        Campaign(BOX, optimizer, CampaignOptions(), start={"w_queue": 0.9}, rng=np.random.default_rng(2))


def test_a_campaign_that_is_over_says_why_again() -> None:
    wire = Wire(budget_s=50.0)
    wire.wait(50.0)
    assert wire.reload() == [Stop("budget of 50 s is spent")]


# -- what counts


def test_answers_are_heard_only_where_they_were_asked_for() -> None:
    wire = comparing()
    wire.do(wire.campaign.on_frozen(now=wire.now))
    ticket = max(action.ticket for action in wire.actions if isinstance(action, PutWeights | RollBack))
    assert wire.campaign.on_weights_applied(99, ticket=ticket, now=wire.now) == []
    assert wire.feed(weights_version=99) == []


def test_a_late_answer_to_an_older_order_says_nothing_of_what_is_in_force() -> None:
    wire = comparing()
    wire.deaf = True
    first = wire.do(wire.campaign.on_foreign_weights(OTHER, now=wire.now))
    second = wire.do(wire.campaign.on_foreign_weights(START, now=wire.now))
    tickets = [action.ticket for action in (*first, *second) if isinstance(action, PutWeights)]
    assert wire.campaign.on_weights_applied(20, ticket=tickets[0], now=wire.now) == []
    wire.feed(9, weights_version=20)
    assert wire.phase == "warming"
    wire.do(wire.campaign.on_weights_applied(21, ticket=tickets[1], now=wire.now))
    wire.feed(9, weights_version=21)
    assert wire.phase == "comparing"


def test_samples_move_nothing_while_weights_are_pinned() -> None:
    wire = comparing()
    wire.do(wire.campaign.on_frozen(now=wire.now))
    assert wire.campaign.trial is None
    wire.feed(40)
    wire.wait(9999.0)
    assert (wire.phase, wire.puts) == ("frozen", 2)
    assert wire.campaign.next_timer() is None


def test_only_what_is_frozen_is_unfrozen_and_what_is_over_does_not_freeze() -> None:
    wire = comparing()
    assert wire.campaign.on_unfrozen(now=wire.now) == []
    assert wire.phase == "comparing"
    wire.do(wire.campaign.on_foreign_weights({"w_rtt": 9.0}, now=wire.now))
    wire.do(wire.campaign.on_frozen(now=wire.now))
    assert wire.phase == "stopped"


def test_a_restart_while_it_warms_is_answered_with_the_incumbent() -> None:
    wire = Wire()
    wire.feed(3)
    wire.boot_id, wire.seq, wire.version = "boot-2", 0, 1
    wire.feed(3, weights_version=1)
    assert wire.said[-1] == "puts 0.5 0.1: the proxy has restarted"
    wire.feed(3)
    assert wire.phase == "warming", "three before the restart count no more"
    wire.feed(1)
    assert wire.phase == "comparing"


def test_an_empty_batch_of_another_run_is_a_restart() -> None:
    wire = Wire()
    wire.do(wire.campaign.on_samples((), boot_id="boot-1", now=wire.now))
    assert wire.puts == 1, "the first contact is no restart"
    wire.do(wire.campaign.on_samples((), boot_id="boot-2", now=wire.now))
    wire.do(wire.campaign.on_samples((), boot_id="boot-2", now=wire.now))
    assert wire.puts == 2


def test_a_restart_while_weights_are_pinned_puts_nothing() -> None:
    wire = comparing()
    wire.do(wire.campaign.on_frozen(now=wire.now))
    wire.do(wire.campaign.on_samples((), boot_id="boot-2", now=wire.now))
    assert wire.puts == 2


@pytest.mark.parametrize("loss", ["restart", "gap"])
def test_a_pair_under_way_is_void_after_a_loss(loss: str) -> None:
    wire = comparing()
    wire.feed()
    wire.wait(10.0)
    second = wire.puts
    if loss == "restart":
        wire.do(wire.campaign.on_samples((), boot_id="boot-2", now=wire.now))
        wire.boot_id, wire.seq = "boot-2", 0
        reason = "the proxy has restarted"
    else:
        wire.seq += 5
        wire.feed(1)
        reason = "samples were lost"
    assert wire.puts == second + 1
    assert wire.said[-1].endswith(reason)
    wire.pair(ttft_ms=1000.0)
    assert wire.rows[1].n == 4, "of the pair that was drawn anew"


def test_lost_samples_begin_a_window_again_without_another_put() -> None:
    wire = Wire()
    wire.feed(3)
    wire.seq += 5
    wire.feed(3)
    assert wire.phase == "warming"
    wire.feed(1)
    assert wire.phase == "comparing"


# -- weights of somebody else


def test_somebody_s_weights_are_taken_over_whole_and_not_questioned() -> None:
    wire = comparing(start={**START, "delta": 3.0})
    wire.campaign.ledger.anchor, wire.campaign.ledger.e2e_lost = 400.0, 0.005
    wire.do(wire.campaign.on_foreign_weights({**OTHER, "delta": 7.0}, now=wire.now))
    assert wire.values == {**OTHER, "delta": 7.0}
    assert (wire.saved("phase"), wire.saved("trial"), wire.saved("anchor")) == ("warming", None, None)
    assert wire.saved("e2e_lost") == 0.0
    assert (wire.campaign.incumbent, wire.campaign.audited) == (OTHER, True)
    assert wire.campaign.optimizer.incumbent == pytest.approx(OTHER)
    wire.feed()
    assert "generation 1, " in wire.said[-1], "no audit of what an operator wanted"


def test_a_weight_that_somebody_left_out_stays_as_it_is() -> None:
    wire = comparing(start=OTHER, audit=False)
    wire.do(wire.campaign.on_foreign_weights({"w_rtt": 0.25}, now=wire.now))
    assert wire.campaign.incumbent == {"w_rtt": 0.25, "w_queue": 0.2}


def test_somebody_s_weights_move_nothing_while_they_are_pinned_or_it_is_over() -> None:
    wire = comparing()
    wire.do(wire.campaign.on_frozen(now=wire.now))
    assert wire.campaign.on_foreign_weights(OTHER, now=wire.now) == []
    assert wire.campaign.incumbent == START
    wire.do(wire.campaign.on_unfrozen(now=wire.now))
    wire.do(wire.campaign.on_foreign_weights({"w_rtt": 9.0}, now=wire.now))
    assert wire.said[-1].startswith("stops: weights outside the box were set: ")
    assert wire.campaign.on_foreign_weights(OTHER, now=wire.now) == []


# -- a start that is not the defaults


@pytest.mark.parametrize(
    ("options", "audited"),
    [({}, True), ({"guard": False}, False), ({"audit": False}, False), ({"mode": "paper"}, False)],
)
def test_a_start_that_is_not_the_defaults_stands_against_them_first(options: dict[str, Any], audited: bool) -> None:
    wire = comparing(start=OTHER, **options)
    assert ("the start against the defaults" if audited else "generation 1, ") in wire.said[-1]
    assert wire.campaign.audited != audited
    assert "generation 1, " in comparing(**options).said[-1], "defaults need no audit"


def test_the_arms_of_an_audit_are_the_start_and_the_defaults() -> None:
    assert at("offspring", start=OTHER).values == OTHER
    assert at("incumbent", start=OTHER).values == START


def test_a_start_that_stands_stays_and_the_search_goes_on_from_it() -> None:
    wire = comparing(start=OTHER)
    wire.campaign.ledger.anchor = 300.0
    wire.pair()
    row = wire.rows[1]
    assert (row.accepted, row.reason) == (True, "the start is not behind the defaults in 1 pairs of blocks")
    assert row.weights == OTHER
    assert (wire.campaign.incumbent, wire.campaign.audited) == (OTHER, True)
    assert wire.optimizer.observed == 0, "the optimizer has proposed nothing yet"
    assert wire.saved("anchor") == 300.0
    assert "generation 2, " in wire.said[-1]


def test_a_start_that_is_worse_gives_way_to_the_defaults_and_the_search_begins_there() -> None:
    wire = comparing(start=OTHER)
    wire.campaign.ledger.anchor = 300.0
    wire.pair(replica="a")
    row = wire.rows[1]
    assert (row.accepted, row.weights) == (False, OTHER)
    assert row.reason.startswith("the start is worse than the defaults: one replica takes 100%")
    assert (wire.campaign.incumbent, wire.campaign.audited) == (START, True)
    assert wire.campaign.optimizer.incumbent == pytest.approx(START)
    assert wire.saved("anchor") is None
    assert wire.optimizer.observed == 0


def test_an_audit_under_way_outlives_the_process() -> None:
    wire = comparing(start=OTHER)
    assert wire.saved("audited") is False
    wire.reload()
    assert wire.said[-1].endswith("resumes generation 1")
    assert not wire.campaign.audited
    wire.pair()
    assert wire.rows[1].reason == "the start is not behind the defaults in 1 pairs of blocks"


# -- a saturated fleet


def test_an_offspring_that_saturates_the_fleet_is_to_blame() -> None:
    wire = at("offspring")
    wire.feed(4, ttft_ms=9000.0)
    assert wire.said[-2:] == [
        "rolls back to 0.5 0.1: the fleet is saturated",
        "records 1 rejected: the fleet is saturated",
    ]
    assert wire.phase == "warming"
    assert (wire.rows[1].n, wire.rows[1].objective_ms) == (4, None)


@pytest.mark.parametrize(("arm", "guard"), [("offspring", False), ("incumbent", True)])
def test_otherwise_it_is_the_traffic_and_the_candidate_is_measured_later(arm: str, guard: bool) -> None:
    wire = at(arm, guard=guard)
    candidate = wire.campaign.optimizer.ask()
    wire.feed(4, ttft_ms=9000.0)
    assert wire.said[-1] == "puts 0.5 0.1: the fleet is saturated: generation 1 is measured later"
    assert (wire.phase, wire.campaign.ledger.number) == ("warming", 1)
    wire.feed(4)
    assert wire.campaign.optimizer.ask() == candidate


def test_a_verdict_stands_whatever_the_fleet_is_like_by_then() -> None:
    wire = comparing(saturated_share=0.5, discard_s=5.0)
    for _ in range(2):
        wire.feed(1)
        wire.now += 5.0
        wire.feed(2)
        wire.wait(5.0)
    wire.now += 5.0  # the pair is scored together with slow answers of the next block
    wire.feed(4, ttft_ms=9000.0)
    assert wire.rows[1].reason.endswith("not ahead")


def test_the_published_protocol_minds_no_saturation() -> None:
    wire = Wire(mode="paper")
    wire.feed(4, ttft_ms=9000.0)
    assert wire.phase == "comparing"
    wire.feed(1, ttft_ms=8000.0)
    assert wire.phase == "comparing"
    wire.feed(1, ttft_ms=8000.0)
    assert wire.campaign.ledger.number == 2


def test_patience_begins_anew_after_a_fleet_has_recovered() -> None:
    wire = Wire(patience_s=100.0)
    wire.feed(4, ttft_ms=9000.0)
    assert (wire.saved("saturated_since"), wire.campaign.next_timer()) == (1000.0, None)
    wire.wait(99.0)
    wire.feed(4)
    assert wire.saved("saturated_since") is None
    wire.do(wire.campaign.on_frozen(now=wire.now))
    wire.do(wire.campaign.on_unfrozen(now=wire.now))
    wire.feed(4, ttft_ms=9000.0)
    assert wire.saved("saturated_since") == 1099.0
    wire.wait(99.0)
    assert wire.campaign.stop_reason is None
    wire.wait(1.0)
    assert wire.campaign.stop_reason == "the fleet stays saturated"


@pytest.mark.parametrize(("waited_s", "stopped"), [(99.9, False), (100.0, True)])
def test_defaults_in_a_saturated_fleet_stop_the_campaign_when_patience_is_over(waited_s: float, stopped: bool) -> None:
    wire = Wire(patience_s=100.0)
    wire.feed(4, ttft_ms=9000.0)
    wire.wait(waited_s)
    assert (wire.campaign.stop_reason == "the fleet stays saturated") == stopped


def test_other_weights_in_a_saturated_fleet_are_left_for_the_defaults_without_an_audit() -> None:
    wire = Wire(patience_s=100.0, start=OTHER)
    wire.feed(4, ttft_ms=9000.0)
    wire.wait(100.0)
    assert wire.said[-1] == "rolls back to 0.5 0.1: the fleet stays saturated: back to the defaults"
    assert (wire.campaign.incumbent, wire.campaign.audited, wire.campaign.saturated_since) == (START, True, None)
    assert wire.campaign.optimizer.incumbent == pytest.approx(START)
    wire.feed(4)
    assert "generation 1" in wire.said[-1]


def test_without_the_guard_other_weights_stop_it_too() -> None:
    wire = Wire(patience_s=100.0, start=OTHER, guard=False)
    wire.feed(4, ttft_ms=9000.0)
    wire.wait(100.0)
    assert wire.campaign.stop_reason == "the fleet stays saturated"
    assert wire.values == OTHER


def test_a_window_without_a_first_token_is_measured_again() -> None:
    wire = Wire(mode="paper")
    wire.feed(4, ttft_ms=None)
    assert wire.phase == "warming"
    wire.feed(3)
    assert wire.phase == "warming", "a whole window of others"
    wire.feed(1)
    assert wire.phase == "comparing"


# -- generations


def test_what_is_accepted_is_the_incumbent_from_then_on() -> None:
    wire = comparing()
    candidate = wire.campaign.optimizer.ask()
    wire.pair(ttft_ms=300.0)
    row = wire.rows[1]
    assert (row.accepted, row.weights, row.number) == (True, candidate, 1)
    assert row.weights_version in (12, 13), "that of the offspring's block"
    assert wire.campaign.incumbent == candidate
    assert wire.campaign.optimizer.incumbent == pytest.approx(candidate)
    assert wire.saved("anchor") == pytest.approx(300.0)
    assert wire.campaign.optimizer.ask() != candidate


def test_what_is_rejected_leaves_the_incumbent() -> None:
    wire = comparing()
    wire.pair(ttft_ms=500.0)
    assert (wire.rows[1].accepted, wire.campaign.incumbent) == (False, START)
    assert wire.optimizer.observed == 1
    assert wire.saved("anchor") == pytest.approx(400.0)


def test_a_generation_runs_from_its_first_block_to_its_verdict() -> None:
    wire = Wire()
    wire.wait(5.0)
    wire.feed()
    wire.pair(ttft_ms=500.0)
    start, first = wire.rows
    assert (start.started_s, start.finished_s) == (1000.0, 1005.0)
    assert (first.started_s, first.finished_s) == (1005.0, 1025.0)


def test_the_start_is_recorded_once_with_the_figures_of_its_window() -> None:
    wire = comparing()
    wire.do(wire.campaign.on_frozen(now=wire.now))
    wire.do(wire.campaign.on_unfrozen(now=wire.now))
    wire.feed()
    (start,) = wire.rows
    assert (start.n, start.objective_ms, start.e2e_s_p95, start.weights_version) == (4, 400.0, 2.0, 11)
    assert start.reason == "the start"


def test_what_is_usual_is_known_from_the_warm_up_except_in_an_audit() -> None:
    wire = comparing(futility_pairs=9)
    while wire.arm != "offspring":
        wire.wait(10.0)
    wire.feed(2, e2e_s=6.5)
    assert wire.rows[1].reason == "running p95 E2E is 6.50 s, 3.2 times the usual 2.00 s"
    wire = at("offspring", start=OTHER)
    wire.feed(2, e2e_s=6.5)
    assert wire.phase == "comparing", "the start's own figures are no measure of the start"


def test_the_published_protocol_compares_with_the_score_of_before() -> None:
    wire = comparing(mode="paper")
    wire.feed(2, ttft_ms=300.0)
    wire.feed(2, ttft_ms=300.0)
    first, second = wire.rows[1:]
    assert (first.incumbent_objective_ms, first.objective_ms, first.accepted) == (400.0, 400.0, False)
    assert (second.incumbent_objective_ms, second.objective_ms, second.accepted) == (400.0, 300.0, True)
    wire.feed(2, ttft_ms=200.0)
    assert wire.rows[3].incumbent_objective_ms == 300.0


def test_harm_is_rolled_back_before_the_row_and_nothing_is_proposed_in_the_same_breath() -> None:
    wire = at("offspring")
    wire.feed(2, e2e_s=90.0)
    assert [type(action) for action in wire.actions[-2:]] == [RollBack, RecordGeneration]
    assert wire.values == START
    assert (wire.phase, wire.campaign.trial, wire.campaign.ledger.number) == ("warming", None, 2)


def test_blocks_without_traffic_are_waited_for_with_the_incumbent() -> None:
    wire = comparing(max_voids=1)
    wire.wait(10.0)
    wire.wait(10.0)
    wire.wait(0.0)
    assert wire.said[-1] == "puts 0.5 0.1: 0 samples in a block, 2 are needed: generation 1 is measured later"
    assert wire.phase == "warming"


@pytest.mark.parametrize("freeze", [False, True])
def test_an_end_puts_the_incumbent_and_pins_it_only_if_wanted(freeze: bool) -> None:
    wire = comparing(max_generations=1, freeze_at_end=freeze, start={**START, "delta": 3.0})
    wire.pair(ttft_ms=500.0)
    assert wire.values == {**START, "delta": 3.0}
    end = [Freeze({**START, "delta": 3.0}, "1 generations")] if freeze else []
    assert [a for a in wire.actions if isinstance(a, Freeze | Stop)] == [*end, Stop("1 generations")]
    assert wire.said[-2 - freeze] == "puts 0.5 0.1 3: the end: 1 generations"
    assert (wire.campaign.trial, wire.campaign.next_timer()) == (None, None)


def test_an_optimizer_with_nothing_more_to_ask_ends_it_by_name() -> None:
    wire = comparing(budget=1)
    wire.pair(ttft_ms=500.0)
    assert wire.campaign.stop_reason == "es: budget of 1 evaluations is spent"


def test_time_that_is_over_ends_it_before_the_warm_up_does() -> None:
    wire = Wire(budget_s=50.0, warm_up_s=60.0)
    wire.wait(49.9)
    assert wire.phase == "warming"
    wire.wait(0.1)
    assert wire.campaign.stop_reason == "budget of 50 s is spent"


def test_everything_that_was_decided_outlives_the_process() -> None:
    wire = comparing(start=OTHER, audit=False)
    wire.pair(ttft_ms=300.0)
    wire.do(wire.campaign.on_frozen(now=wire.now))
    kept = wire.campaign
    kept.saturated_since, kept.stop_reason, kept.ledger.e2e_lost = 7.0, "r", 0.004
    loaded = load_campaign(BOX, wire.options, campaign_state(kept))
    assert campaign_state(loaded) == campaign_state(kept)
    assert (loaded.phase, loaded.stop_reason, loaded.audited) == ("frozen", "r", True)
    assert (loaded.start, loaded.incumbent, loaded.saturated_since) == (kept.start, kept.incumbent, 7.0)
    assert (loaded.cursor.boot_id, loaded.cursor.last_seq) == ("boot-1", wire.seq)
    assert (loaded.ledger.number, loaded.ledger.anchor, loaded.ledger.reference) == (
        2,
        kept.ledger.anchor,
        kept.ledger.reference,
    )
    assert (loaded.ledger.started_s, loaded.ledger.opened_s) == (1000.0, 1020.0)
    assert loaded.ledger.e2e_lost == 0.004
    older = {name: value for name, value in campaign_state(kept).items() if name != "e2e_lost"}
    assert load_campaign(BOX, wire.options, older).ledger.e2e_lost == 0.0, "of a version without it"
    assert loaded.rng.random() == kept.rng.random()
