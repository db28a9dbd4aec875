"""A campaign at each of its forks, with traffic that is made for the fork."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.tuner.campaign.fleet import BOX, START, sentence
from tuner.campaign.actions import Action, Freeze, PutWeights, Record, RollBack, Stop, Wait
from tuner.campaign.machine import Campaign
from tuner.campaign.options import CampaignOptions
from tuner.objective import Sample
from tuner.optimizers.es import OnePlusOneES

#: Windows of four samples, no warm-up.
QUICK: dict[str, Any] = {"window": 4, "hop": 2, "warm_up_s": 0.0, "discard_s": 0.0, "rest_blocks": 0.0}
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
        self.do(self.campaign.begin(now=self.now))

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
            usual = Sample(self.seq, self.now, "ab"[self.seq % 2], self.version, ttft_ms, 2.0, 12.0, 200)
            samples.append(replace(usual, **changes))
        return self.do(self.campaign.on_samples(samples, boot_id=self.boot_id, now=self.now))

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.do(self.campaign.on_time(now=self.now))

    @property
    def phase(self) -> str:
        return self.campaign.phase

    @property
    def said(self) -> list[str]:
        return [sentence(action) for action in self.actions if not isinstance(action, Wait)]

    @property
    def puts(self) -> int:
        return sum(isinstance(action, PutWeights | RollBack) for action in self.actions)

    def reload(self) -> list[Action]:
        """Another process goes on from the saved state."""
        self.campaign = Campaign.from_state(BOX, self.options, self.campaign.state())
        return self.do(self.campaign.begin(now=self.now))


def comparing(**options: Any) -> Wire:
    wire = Wire(**options)
    wire.feed()
    assert wire.phase == "comparing"
    return wire


def until_offspring(wire: Wire) -> Wire:
    """A guarded campaign's offspring has the traffic."""
    wire.feed()
    assert wire.campaign.trial is not None
    assert wire.campaign.trial.arm == "offspring"
    return wire


def saved(wire: Wire, key: str) -> Any:
    return wire.campaign.state()[key]


# -- beginning and going on


def test_a_process_that_goes_on_puts_what_it_was_about() -> None:
    wire = Wire()
    assert wire.said[-1] == "puts 0.5 0.1: the start"
    wire.reload()
    assert wire.said[-1] == "puts 0.5 0.1: goes on"
    wire = until_offspring(comparing(mode="guarded"))
    wire.reload()
    assert wire.said[-1] == "puts 0.5 0.1: goes on with generation 1", "two windows are measured again"
    wire.do(wire.campaign.on_frozen(now=wire.now))
    wire.reload()
    assert (wire.said[-1], wire.phase) == ("puts 0.5 0.1: goes on", "warming")


def test_a_time_to_wait_for_is_said_once() -> None:
    wire = Wire(warm_up_s=60.0)
    waits = [action.until for action in wire.actions if isinstance(action, Wait)]
    assert waits == [], "samples are awaited first"
    assert wire.feed() == [Wait(1060.0)]
    assert wire.feed() == []
    wire.wait(60.0)
    assert wire.phase == "comparing"
    assert wire.actions[-1] == Wait(1060.0 + 120.0)


def test_the_warm_up_is_over_in_time_and_not_before() -> None:
    wire = Wire(warm_up_s=60.0)
    wire.feed()
    wire.wait(59.9)
    assert wire.phase == "warming"
    wire.wait(0.1)
    assert wire.phase == "comparing"


# -- what counts


def test_answers_are_heard_only_where_they_were_asked_for() -> None:
    wire = comparing()
    wire.do(wire.campaign.on_frozen(now=wire.now))
    ticket = max(action.ticket for action in wire.actions if isinstance(action, PutWeights | RollBack))
    assert wire.campaign.on_weights_applied(99, ticket=ticket, now=wire.now) == []
    assert wire.feed(weights_version=99) == []


def test_samples_move_nothing_while_weights_are_pinned_or_it_is_over() -> None:
    wire = comparing(mode="guarded")
    wire.do(wire.campaign.on_frozen(now=wire.now))
    assert wire.campaign.trial is None
    wire.feed(40)
    wire.wait(9999.0)
    assert wire.phase == "frozen"
    assert wire.puts == 2
    assert wire.campaign.next_timer() is None


def test_only_what_is_frozen_thaws_and_what_is_over_does_not_freeze() -> None:
    wire = comparing()
    assert wire.campaign.on_thawed(now=wire.now) == []
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


def test_a_shell_may_know_of_a_restart_before_a_sample_does() -> None:
    wire = Wire()
    wire.do(wire.campaign.on_proxy_restarted(boot_id="boot-1", now=wire.now))
    assert wire.puts == 1, "the first contact is no restart"
    wire.do(wire.campaign.on_proxy_restarted(boot_id="boot-2", now=wire.now))
    wire.do(wire.campaign.on_proxy_restarted(boot_id="boot-2", now=wire.now))
    assert wire.puts == 2


def test_a_restart_while_weights_are_pinned_puts_nothing_and_forgets_what_was() -> None:
    wire = comparing()
    wire.do(wire.campaign.on_frozen(now=wire.now))
    wire.do(wire.campaign.on_proxy_restarted(boot_id="boot-2", now=wire.now))
    assert wire.puts == 2


def test_lost_samples_begin_a_window_again_without_another_put() -> None:
    wire = Wire()
    wire.feed(3)
    wire.do(wire.campaign.on_gap(now=wire.now))
    assert wire.puts == 1
    wire.feed(3)
    assert wire.phase == "warming"
    wire.seq += 5
    wire.feed(3)
    assert wire.phase == "warming"
    wire.feed(1)
    assert wire.phase == "comparing"


# -- weights of somebody else


def test_somebody_s_weights_are_taken_over_whole_and_not_questioned() -> None:
    wire = comparing(mode="guarded", start={**START, "delta": 3.0})
    wire.campaign.ledger.anchor = 400.0
    wire.do(wire.campaign.on_foreign_weights({**OTHER, "delta": 7.0}, now=wire.now))
    assert wire.values == {**OTHER, "delta": 7.0}
    assert (saved(wire, "phase"), saved(wire, "trial"), saved(wire, "anchor")) == ("warming", None, None)
    assert (wire.campaign.incumbent, wire.campaign.audited) == (OTHER, True)
    assert wire.campaign.optimizer.incumbent == pytest.approx(OTHER)
    wire.feed()
    assert wire.said[-1].endswith("generation 1, incumbent"), "no audit of what an operator wanted"


def test_a_weight_that_somebody_left_out_stays_as_it_is() -> None:
    wire = comparing(start=OTHER, audit=False)
    wire.do(wire.campaign.on_foreign_weights({"w_rtt": 0.25}, now=wire.now))
    assert wire.campaign.incumbent == {"w_rtt": 0.25, "w_queue": 0.2}


def test_somebody_s_weights_move_nothing_while_they_are_pinned_or_it_is_over() -> None:
    wire = comparing()
    wire.do(wire.campaign.on_frozen(now=wire.now))
    assert wire.campaign.on_foreign_weights(OTHER, now=wire.now) == []
    assert wire.campaign.incumbent == START
    wire.do(wire.campaign.on_thawed(now=wire.now))
    wire.do(wire.campaign.on_foreign_weights({"w_rtt": 9.0}, now=wire.now))
    assert wire.said[-1].startswith("stops: somebody set weights outside the box: ")
    assert wire.campaign.on_foreign_weights(OTHER, now=wire.now) == []


# -- a start that is not the defaults


@pytest.mark.parametrize(
    ("options", "audited"),
    [
        ({"mode": "guarded"}, True),
        ({"mode": "switchback"}, True),
        ({"mode": "paper"}, False),
        ({"mode": "paper", "guard": True}, True),
        ({"mode": "guarded", "guard": False}, False),
        ({"mode": "guarded", "audit": False}, False),
    ],
)
def test_a_start_that_is_not_the_defaults_stands_against_them_first(options: dict[str, Any], audited: bool) -> None:
    wire = comparing(start=OTHER, **options)
    words = "the start against the defaults" if audited else "generation 1"
    assert words in wire.said[-1]
    assert wire.campaign.audited != audited
    assert "generation 1" in comparing(**options).said[-1], "defaults need no audit"


def audit(ttft_ms: float) -> Wire:
    """The defaults take 400 ms, and then the start takes `ttft_ms`."""
    wire = comparing(mode="guarded", start=OTHER)
    assert wire.values == START
    wire.feed()
    assert wire.values == OTHER
    wire.campaign.ledger.anchor = 300.0
    wire.feed(ttft_ms=ttft_ms)
    return wire


def test_a_start_that_stands_stays_and_the_search_goes_on_from_it() -> None:
    wire = audit(420.0)
    row = wire.said[-2]
    assert row == "records 1 accepted: p95 TTFT 5.0% higher in one window"
    assert (wire.campaign.incumbent, wire.campaign.audited) == (OTHER, True)
    assert wire.optimizer.told == 0, "the optimizer has proposed nothing yet"
    assert wire.campaign.ledger.anchor == 300.0
    assert "generation 2" in wire.said[-1]


def test_a_start_that_is_worse_gives_way_to_the_defaults_and_the_search_begins_there() -> None:
    wire = audit(600.0)
    assert wire.said[-2] == "records 1 rejected: p95 TTFT 50.0% higher in one window"
    assert (wire.campaign.incumbent, wire.campaign.audited) == (START, True)
    assert wire.campaign.optimizer.incumbent == pytest.approx(START)
    assert wire.campaign.ledger.anchor is None
    assert wire.said[-1].startswith("puts 0.5 0.1: generation 2, incumbent")
    recorded = next(a.generation for a in reversed(wire.actions) if isinstance(a, Record))
    assert recorded.weights == OTHER


# -- a saturated fleet


def test_an_offspring_that_saturates_the_fleet_is_to_blame() -> None:
    wire = saturating(mode="guarded")
    assert [word.split(":")[0] for word in wire.said[-2:]] == ["rolls back to 0.5 0.1", "records 1 rejected"]
    assert wire.said[-1] == "records 1 rejected: the fleet is saturated"
    assert wire.phase == "warming"
    row = next(a.generation for a in reversed(wire.actions) if isinstance(a, Record))
    assert (row.n, row.objective_ms) == (4, None)


def saturating(**options: Any) -> Wire:
    """First tokens are slow as soon as the offspring has the traffic: a window of them, before the trial counts any."""
    wire = comparing(discard_s=1.0, block_s=9.0, **options)
    wire.feed(1)
    wire.wait(1.0)
    until_offspring(wire).feed(4, ttft_ms=9000.0)
    return wire


def test_without_the_guard_it_is_the_traffic() -> None:
    wire = saturating(mode="guarded", guard=False)
    assert wire.said[-1] == "puts 0.5 0.1: the fleet is saturated: generation 1 is measured later"
    assert wire.phase == "warming"
    assert wire.campaign.ledger.number == 1


def test_an_incumbent_in_a_saturated_fleet_is_measured_later() -> None:
    wire = comparing(mode="guarded", discard_s=1.0, block_s=9.0)
    wire.feed(4, ttft_ms=9000.0)
    assert wire.said[-1] == "puts 0.5 0.1: the fleet is saturated: generation 1 is measured later"
    candidate = wire.campaign.optimizer.ask()
    wire.feed(4)
    assert wire.campaign.optimizer.ask() == candidate, "the same one"


def test_the_published_protocol_minds_no_saturation() -> None:
    wire = Wire(mode="paper")
    wire.feed(4, ttft_ms=9000.0)
    assert wire.phase == "comparing"
    wire.feed(2, ttft_ms=8000.0)
    assert wire.campaign.ledger.number == 2


def test_patience_begins_anew_after_a_fleet_has_recovered() -> None:
    wire = Wire(mode="guarded", patience_s=100.0, discard_s=1.0, block_s=9.0)
    wire.feed(4, ttft_ms=9000.0)
    assert (saved(wire, "saturated_since"), wire.campaign.next_timer()) == (1000.0, None)
    wire.wait(99.0)
    wire.feed(4)
    assert saved(wire, "saturated_since") is None
    wire.feed(4, ttft_ms=9000.0)  # the trial is given up
    wire.feed(4, ttft_ms=9000.0)
    assert saved(wire, "saturated_since") == 1099.0
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
    wire = until_offspring(comparing(mode="guarded"))
    candidate = wire.campaign.optimizer.ask()
    wire.feed(ttft_ms=300.0)
    assert wire.said[-2] == "records 1 accepted: p95 TTFT 25.0% lower in one window"
    assert wire.campaign.incumbent == candidate
    assert wire.campaign.optimizer.incumbent == pytest.approx(candidate)
    assert wire.campaign.ledger.anchor == 300.0
    assert wire.values == candidate, "measured again, beside the next one"
    row = next(a.generation for a in reversed(wire.actions) if isinstance(a, Record))
    assert (row.weights, row.weights_version, row.number) == (candidate, wire.version - 1, 1)


def test_what_is_rejected_leaves_the_incumbent() -> None:
    wire = until_offspring(comparing(mode="guarded"))
    wire.feed(ttft_ms=500.0)
    assert (wire.campaign.incumbent, wire.values) == (START, START)
    assert wire.optimizer.told == 1


def test_a_generation_runs_from_its_first_block_to_its_verdict() -> None:
    wire = comparing(mode="guarded")
    wire.now += 50.0
    until_offspring(wire)
    wire.now += 50.0
    wire.feed(ttft_ms=300.0)
    start, first = (a.generation for a in wire.actions if isinstance(a, Record))
    assert (start.started_s, start.finished_s) == (1000.0, 1000.0)
    assert (first.started_s, first.finished_s) == (1000.0, 1100.0)


def test_the_start_is_recorded_once() -> None:
    wire = comparing(mode="guarded")
    wire.do(wire.campaign.on_frozen(now=wire.now))
    wire.do(wire.campaign.on_thawed(now=wire.now))
    wire.feed()
    assert [word for word in wire.said if word.startswith("records")] == ["records 0 accepted: the start"]


def test_harm_is_rolled_back_before_the_row_and_nothing_is_proposed_in_the_same_breath() -> None:
    wire = until_offspring(comparing(mode="guarded"))
    wire.feed(2, e2e_s=90.0)
    assert [type(action) for action in wire.actions[-2:]] == [RollBack, Record]
    assert wire.values == START
    assert wire.phase == "warming"
    assert (wire.campaign.trial, wire.campaign.ledger.number) == (None, 2)


def test_a_window_that_does_not_fill_is_waited_for_with_the_incumbent() -> None:
    wire = until_offspring(comparing(mode="guarded", window_timeout_s=60.0))
    wire.wait(60.0)
    assert wire.said[-1] == "puts 0.5 0.1: 0 samples in 60 s: generation 1 is measured later"
    assert wire.phase == "warming"


def test_an_end_puts_the_incumbent_and_pins_it_only_if_wanted() -> None:
    for freeze in (False, True):
        wire = until_offspring(
            comparing(mode="guarded", max_generations=1, freeze_at_end=freeze, start={**START, "delta": 3.0})
        )
        wire.feed(ttft_ms=500.0)
        assert wire.values == {**START, "delta": 3.0}
        end = [Freeze({**START, "delta": 3.0}, "1 generations")] if freeze else []
        last = [a for a in wire.actions if isinstance(a, Freeze | Stop)]
        assert last == [*end, Stop("1 generations")]
        assert wire.said[-2 - freeze] == "puts 0.5 0.1 3: the end: 1 generations"
        assert (wire.campaign.trial, wire.campaign.next_timer()) == (None, None)


def test_an_optimizer_with_nothing_more_to_ask_ends_it_by_name() -> None:
    wire = until_offspring(comparing(mode="guarded", budget=1))
    wire.feed(ttft_ms=500.0)
    assert wire.campaign.stop_reason == "es: budget of 1 evaluations is spent"


def test_time_that_is_over_ends_it_before_the_warm_up_does() -> None:
    wire = Wire(budget_s=50.0, warm_up_s=60.0)
    wire.wait(49.9)
    assert wire.phase == "warming"
    wire.wait(0.1)
    assert wire.campaign.stop_reason == "budget of 50 s is spent"


# -- what outlives the process


def test_everything_that_was_decided_outlives_the_process() -> None:
    wire = until_offspring(comparing(mode="guarded", start=OTHER, audit=False))
    wire.feed(ttft_ms=300.0)
    wire.do(wire.campaign.on_frozen(now=wire.now))
    wire.campaign.saturated_since, wire.campaign.stop_reason = 7.0, "r"
    kept = wire.campaign
    loaded = Campaign.from_state(BOX, wire.options, kept.state())
    assert loaded.state() == kept.state()
    assert (loaded.phase, loaded.stop_reason, loaded.audited) == ("frozen", "r", True)
    assert (loaded.start, loaded.incumbent, loaded.saturated_since) == (kept.start, kept.incumbent, 7.0)
    assert (loaded.inbox.boot_id, loaded.inbox.last_seq) == ("boot-1", wire.seq)
    assert (loaded.ledger.number, loaded.ledger.anchor, loaded.ledger.reference) == (2, 300.0, kept.ledger.reference)
    assert (loaded.ledger.started_s, loaded.ledger.opened_s) == (1000.0, 1000.0)
    assert loaded.rng.random() == kept.rng.random()


def test_a_candidate_s_audit_outlives_the_process_too() -> None:
    wire = comparing(mode="switchback", start=OTHER)
    assert wire.campaign.state()["audited"] is False
    wire.reload()
    assert wire.said[-1].endswith("goes on with generation 1")
    assert wire.values in (OTHER, START)
    assert not wire.campaign.audited
