"""The campaign event by event: what comes in, what it wants done, in sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from gorgo.errors import TunerError, WeightsError
from tests.tuner.campaign.fleet import BOX, START, Effect, Proxy, Run, bowl, nothing, sentence
from tuner.campaign.actions import Action, Freeze, PutWeights, RollBack, Stop
from tuner.campaign.options import CampaignOptions
from tuner.campaign.saved import campaign_state, load_campaign

#: Pairs follow one another without a rest.
QUICK = CampaignOptions(max_generations=2, rest_blocks=0.0)


def puts(actions: list[Action]) -> list[PutWeights | RollBack]:
    return [action for action in actions if isinstance(action, PutWeights | RollBack)]


def comparing(run: Run) -> Run:
    run.until(lambda: run.campaign.phase == "comparing")
    return run


def test_it_puts_the_start_and_proposes_nothing_before_a_warm_window_of_it_is_full() -> None:
    run = Run(Proxy(rate=1.0), QUICK)
    assert run.sentences() == ["puts 0.5 0.1: the start", "waits until 60"] or run.sentences() == [
        "puts 0.5 0.1: the start"
    ]
    while run.now < 125:  # 125 samples, 128 are needed
        run.step()
    assert len(puts(run.actions)) == 1
    run.step()
    assert run.sentences()[-3] == "records 0 accepted: the start"
    assert run.campaign.phase == "comparing"


def test_a_generation_alternates_between_two_weight_sets_in_blocks_of_two_minutes() -> None:
    run = comparing(Run(Proxy(), QUICK))
    begun, before = run.now, len(run.actions)
    while run.now < begun + 475:
        run.step()
    arms = [action.values for action in puts(run.actions[before - 3 :])]
    assert len(arms) == 4
    offspring = run.campaign.optimizer.ask()
    for pair in (arms[:2], arms[2:]):
        assert sorted(pair, key=lambda values: values == START) == [pytest.approx(offspring), START]


def test_the_incumbent_rests_on_all_traffic_before_each_pair() -> None:
    run = comparing(Run(Proxy(), CampaignOptions(max_generations=2)))
    begun, before = run.now, len(run.actions)
    while run.now < begun + 2 * (240 + 2 * 120) - 5:
        run.step()
    offspring = run.campaign.optimizer.ask()
    arms = [action.values == offspring for action in puts(run.actions[before:])]
    assert sum(arms) == 2
    assert arms.count(False) >= 3  # the second rest, and the incumbent of both pairs
    served = run.proxy.routed
    share = served[tuple(offspring.values())] / served.total()
    assert 0.15 < share < 0.3


def test_what_ends_a_generation_is_recorded_with_a_reason_and_figures() -> None:
    run = Run(Proxy(bowl), QUICK)
    run.until(lambda: len(run.rows) == 2)
    start, first = run.rows
    assert (start.number, start.accepted, start.weights) == (0, True, START)
    assert (first.number, first.mode, first.optimizer, first.sigma is not None) == (1, "switchback", "es", True)
    assert first.started_s < first.finished_s == run.now
    assert first.reason.startswith("p95 ")
    assert first.n > 500
    assert first.weights_version is not None
    assert None not in (first.objective_ms, first.incumbent_objective_ms, first.e2e_s_p95, first.itl_ms_p95)


def test_samples_of_weights_that_it_did_not_put_count_for_nothing() -> None:
    run = Run(Proxy(rate=1.0), QUICK)
    for now in range(5, 400, 5):
        old = [replace(sample, weights_version=1) for sample in run.proxy.serve(now, 5)]
        run.do(run.campaign.on_samples(old, boot_id="boot-1", now=now))
    assert run.campaign.phase == "warming"


def test_an_answer_to_an_older_order_is_ignored() -> None:
    run = comparing(Run(Proxy(), QUICK))
    state = campaign_state(run.campaign)
    assert run.campaign.on_weights_applied(99, ticket=1, now=run.now) == []
    assert campaign_state(run.campaign) == state


def test_frozen_weights_are_left_alone_until_they_are_unfrozen() -> None:
    run = comparing(Run(Proxy(), QUICK))
    candidate = run.campaign.optimizer.ask()
    run.do(run.campaign.on_frozen(now=run.now))
    before = len(run.actions)
    for _ in range(100):
        run.step()
    assert run.actions[before:] == []
    run.do(run.campaign.on_unfrozen(now=run.now))
    assert sentence(puts(run.actions)[-1]) == "puts 0.5 0.1: unfrozen"
    comparing(run)
    assert run.campaign.optimizer.ask() == candidate


def test_a_restarted_proxy_gets_its_weights_again_and_the_pairs_before_still_count() -> None:
    run = comparing(Run(Proxy(bowl), QUICK))
    run.until(lambda: run.campaign.trial and run.campaign.trial.state()["pairs"])
    kept = campaign_state(run.campaign)["trial"]["pairs"]
    run.proxy.restart()
    run.step()
    assert any(s.endswith("the proxy has restarted") for s in run.sentences()[-2:])
    assert run.proxy.version == 2
    assert campaign_state(run.campaign)["trial"]["pairs"] == kept
    run.until(lambda: run.stopped)


def test_a_restart_told_twice_is_one_restart() -> None:
    run = comparing(Run(Proxy(), QUICK))
    run.proxy.restart()
    run.do(run.campaign.on_samples((), boot_id=run.proxy.boot_id, now=run.now))
    before = len(puts(run.actions))
    run.step()
    assert len(puts(run.actions)) == before


def test_lost_samples_void_the_pair_under_way() -> None:
    run = comparing(Run(Proxy(), QUICK))
    for _ in range(40):
        run.step()
    run.proxy.seq += 7
    run.step()
    assert any(s.endswith("samples were lost") for s in run.sentences()[-2:])


def test_repeated_samples_change_nothing() -> None:
    once, twice = Run(Proxy(bowl), QUICK), Run(Proxy(bowl), QUICK)
    while not once.stopped:
        once.step()
        samples = twice.proxy.serve(twice.now, 5.0)
        twice.now += 5.0
        for batch in (samples[:9], samples, samples[3:]):
            twice.do(twice.campaign.on_samples(batch, boot_id="boot-1", now=twice.now))
        twice.do(twice.campaign.on_time(now=twice.now))
    assert [row.n for row in twice.rows] == [row.n for row in once.rows]
    assert twice.campaign.incumbent == once.campaign.incumbent


def test_an_operator_s_weights_become_the_incumbent() -> None:
    run = comparing(Run(Proxy(), QUICK))
    run.do(run.campaign.on_foreign_weights({"w_rtt": 1.0, "w_queue": 0.2}, now=run.now))
    assert sentence(puts(run.actions)[-1]) == "puts 1 0.2: weights set by another client"
    assert run.campaign.optimizer.incumbent == pytest.approx({"w_rtt": 1.0, "w_queue": 0.2})


def test_an_operator_s_weights_outside_the_box_end_the_campaign_without_another_put() -> None:
    run = comparing(Run(Proxy(), QUICK))
    before = len(puts(run.actions))
    run.do(run.campaign.on_foreign_weights({"w_rtt": 9.0, "w_queue": 0.2}, now=run.now))
    assert run.stopped
    assert "w_rtt" in run.stopped
    assert len(puts(run.actions)) == before


def test_nothing_is_proposed_while_the_fleet_is_saturated_and_defaults_give_up_in_the_end() -> None:
    run = Run(Proxy(ttft_ms=9000.0), QUICK)
    run.until(lambda: run.stopped)
    assert [s for s in run.sentences() if not s.startswith("waits")] == [
        "puts 0.5 0.1: the start",
        "puts 0.5 0.1: the end: the fleet stays saturated",
        "stops: the fleet stays saturated",
    ]
    assert 1800 <= run.now < 2000


def test_weights_under_which_the_fleet_stays_saturated_are_left_for_the_defaults() -> None:
    def slow(weights: Mapping[str, float]) -> Effect:
        return Effect(ttft=20.0 if weights["w_queue"] < 0.06 else 1.0)

    run = Run(Proxy(slow), QUICK, start={"w_rtt": 2.0, "w_queue": 0.05})
    run.until(lambda: len(puts(run.actions)) == 2)
    assert sentence(puts(run.actions)[-1]) == "rolls back to 0.5 0.1: the fleet stays saturated: back to the defaults"
    comparing(run)


def test_an_offspring_that_saturates_the_fleet_is_rolled_back_before_anything_is_written() -> None:
    def slow(weights: Mapping[str, float]) -> Effect:
        return Effect(ttft=1.0 if weights == START else 20.0, e2e=1.0 if weights == START else 5.0)

    run = Run(Proxy(slow), QUICK)
    run.until(lambda: len(run.rows) == 2)
    words = [s for s in run.sentences() if not s.startswith("waits")][-2:]
    assert words == ["rolls back to 0.5 0.1: the fleet is saturated", "records 1 rejected: the fleet is saturated"]
    assert run.campaign.phase == "warming"


def test_too_little_traffic_ends_in_waiting_not_in_a_verdict() -> None:
    run = comparing(Run(Proxy(rate=2.0), QUICK))
    run.proxy.rate = 0.2
    run.until(lambda: run.campaign.phase == "warming")
    assert "18 samples in a block, 30 are needed" in sentence(puts(run.actions)[-1])
    assert len(run.rows) == 1


def test_at_the_end_the_incumbent_is_put_and_then_frozen() -> None:
    run = Run(Proxy(bowl), CampaignOptions(max_generations=1, freeze_at_end=True, rest_blocks=0.0))
    run.until(lambda: run.stopped)
    last = [action for action in run.actions if isinstance(action, PutWeights | Freeze | Stop)][-3:]
    assert [type(action) for action in last] == [PutWeights, Freeze, Stop]
    assert isinstance(last[1], Freeze)
    assert last[1].values == run.proxy.weights
    assert run.stopped == "1 generations"


def test_it_stops_when_its_time_is_over_even_without_traffic() -> None:
    run = Run(Proxy(rate=0.0), CampaignOptions(budget_s=600.0))
    run.until(lambda: run.stopped)
    assert run.stopped == "budget of 600 s is spent"


def test_it_stops_when_the_optimizer_has_converged() -> None:
    run = Run(Proxy(), CampaignOptions(mode="paper", warm_up_s=0.0))
    run.until(lambda: run.stopped)
    assert run.stopped is not None
    assert run.stopped.startswith("es: converged")


def test_weights_that_do_not_move_are_put_with_those_that_do() -> None:
    run = Run(Proxy(), QUICK, start={**START, "delta": 3.0})
    comparing(run)
    assert all(action.values["delta"] == 3.0 for action in puts(run.actions))


@pytest.mark.parametrize("mode", ["switchback", "paper"])
def test_a_campaign_that_is_killed_at_any_moment_goes_on_and_counts_nothing_twice(mode: Any) -> None:
    options = CampaignOptions(mode=mode, max_generations=3, rest_blocks=0.5)
    run, step = Run(Proxy(bowl), options), 0
    while not run.stopped:
        run.step()
        step += 1
        if step % 101 == 0:
            saved = json.loads(json.dumps(campaign_state(run.campaign)))
            loaded = load_campaign(BOX, options, saved)
            again = campaign_state(loaded)
            assert {k: v for k, v in again.items() if k not in ("rng", "trial")} == {
                k: v for k, v in saved.items() if k not in ("rng", "trial")
            }
            if saved["trial"]:
                assert again["trial"] == saved["trial"]
            assert loaded.optimizer.ask() == run.campaign.optimizer.ask()
            run.campaign = loaded
            run.do(run.campaign.on_start(now=run.now))
    assert [row.number for row in run.rows] == [0, 1, 2, 3]
    assert all(row.n <= 20 * 90 * 3 for row in run.rows)  # at most twenty blocks of 90 s at 3 a second


def test_a_campaign_that_goes_on_with_fewer_pairs_than_it_has_scored_decides_on_those() -> None:
    patient = replace(QUICK, futility_pairs=20, margin=9.0)
    run = comparing(Run(Proxy(), patient))
    run.until(lambda: len(campaign_state(run.campaign)["trial"]["pairs"]) == 4)
    run.campaign = load_campaign(BOX, replace(patient, pairs=3), campaign_state(run.campaign))
    run.do(run.campaign.on_start(now=run.now))
    run.until(lambda: len(run.rows) == 2)
    assert run.rows[1].reason.endswith("in 5 pairs of blocks: not shown to be better")


def test_a_campaign_that_is_over_stays_over() -> None:
    run = Run(Proxy(), CampaignOptions(max_generations=1, rest_blocks=0.0))
    run.until(lambda: run.stopped)
    loaded = load_campaign(BOX, run.campaign.options, campaign_state(run.campaign))
    assert loaded.on_start(now=run.now) == [Stop("1 generations")]
    assert loaded.on_time(now=run.now + 9999) == []


def test_a_state_of_another_mode_or_a_damaged_one_is_refused() -> None:
    state = campaign_state(comparing(Run(Proxy(), QUICK)).campaign)
    with pytest.raises(TunerError, match="expected format 1, mode 'paper'"):
        load_campaign(BOX, CampaignOptions(mode="paper"), state)
    for key in ("start", "optimizer", "cursor", "trial", "phase", "rng"):
        with pytest.raises(TunerError, match=r"damaged|is in phase|optimizer 'None' is unknown|expected|has no"):
            load_campaign(BOX, QUICK, {**state, key: {}})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("anchor", float("nan"), r"saved campaign\.anchor is nan; expected a finite number from 0 to 1e\+300"),
        ("started_s", "soon", r"saved campaign\.started_s is 'soon'; expected a finite number from 0 to 1e\+11"),
        ("saturated_since", 1e12, r"saved campaign\.saturated_since is 1000000000000\.0"),
        ("audited", "no", r"saved campaign\.audited is 'no'; expected true or false"),
        ("number", -1, r"saved campaign\.number is -1; expected a whole number from 0"),
        ("number", 1.5, r"saved campaign\.number is 1\.5; expected a whole number"),
        ("stop_reason", "x" * 5000, r"expected null or a text of at most 4096 characters"),
        ("cursor", ["b"], r"saved campaign\.cursor is \['b'\]; expected a boot id and a number"),
        ("cursor", ["b", "1"], r"saved campaign\.cursor\.last_seq is '1'; expected a whole number"),
        ("incumbent", {"w_rtt": 1.0, "w_queue": float("inf")}, r"saved campaign\.incumbent\.w_queue is inf"),
        ("incumbent", {"w_rtt": 1e6, "w_queue": 0.05}, r"'w_rtt' is 1000000\.0; expected a number in"),
        ("reference", {"n": 1}, r"saved campaign\.reference has no 'ttft_ms_p95'; expected one"),
        ("trial", {"seed": 1, "pairs": [7]}, r"saved switchback\.pairs\.0 is 7; expected an object"),
        ("trial", {"seed": 1, "pairs": [0] * 10_001}, r"saved switchback\.pairs is \[0, .*expected a list of at most"),
        ("format", 2, r"saved campaign has format 2, mode 'switchback'; expected format 1"),
    ],
)
def test_an_edited_state_is_refused_with_the_field_and_what_is_expected(key: str, value: Any, message: str) -> None:
    state = campaign_state(comparing(Run(Proxy(), QUICK)).campaign)
    with pytest.raises((TunerError, WeightsError), match=message) as caught:
        load_campaign(BOX, QUICK, {**state, key: value})
    assert len(str(caught.value)) < 300


def test_a_start_in_the_future_counts_from_now() -> None:
    run = comparing(Run(Proxy(), QUICK))
    loaded = load_campaign(BOX, QUICK, {**campaign_state(run.campaign), "started_s": 9e10})
    loaded.on_start(now=run.now)
    assert loaded.ledger.started_s == run.now


@pytest.mark.parametrize("value", ["much", -1, True, 1e308, 10**400, float("inf"), float("nan"), None, [], {}])
def test_no_value_in_a_damaged_state_is_a_fault_of_ours(value: Any) -> None:
    """Every leaf in turn; what can be loaded in spite of it can be saved again."""
    state = campaign_state(comparing(Run(Proxy(), QUICK)).campaign)
    for path in leaves(state):
        damaged = json.loads(json.dumps(state))
        inner = damaged
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        try:
            loaded = load_campaign(BOX, QUICK, damaged)
        except (TunerError, WeightsError):
            continue
        loaded.on_start(now=1e6)
        loaded.on_weights_applied(7, ticket=1, now=1e6)
        loaded.on_time(now=1e6 + 60)
        json.dumps(campaign_state(loaded), allow_nan=False)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from leaves(inner, (*path, key))
    if not isinstance(value, dict | list):
        yield path


def test_a_start_outside_the_box_is_refused() -> None:
    with pytest.raises(WeightsError, match="w_queue"):
        Run(Proxy(nothing), start={"w_rtt": 0.5, "w_queue": 0.9})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "guarded"}, "mode is 'guarded'; expected one of switchback, paper"),
        ({"alpha": 1.5}, "alpha is 1.5; expected a share above 0, at most 1"),
        ({"block_s": 20.0}, "discard_s is 30 of blocks of 20 s"),
        ({"hop": 200}, "hop is 200 of a window of 128"),
        ({"pairs": 0}, "pairs is 0; expected a finite number above 0"),
        ({"margin": float("nan")}, "margin is nan; expected 0 or a finite number above 0"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TunerError, match=message):
        CampaignOptions(**options)
