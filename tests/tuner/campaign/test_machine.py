"""The campaign event by event: what comes in, what it wants done, in sentences."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gorgo.errors import TunerError, WeightsError
from tests.tuner.campaign.fleet import BOX, START, Effect, Proxy, Run, bowl, nothing, sentence
from tuner.campaign.comparison import Outcome, Verdict
from tuner.campaign.generation import Action, Freeze, PutWeights, RollBack, Stop
from tuner.campaign.machine import AppliedWeights, Paper, campaign_state, compared, load_campaign
from tuner.campaign.options import CampaignOptions
from tuner.objective import RollingWindow, TunerSample, WindowStats

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


SAMPLE = TunerSample(1, 0.0, "a", 5, 400.0, 2.0, 12.0, 200)


def footing(*, version: int | None = 5, **options: float) -> AppliedWeights:
    """Windows of four samples; `version` came into force at 100 s."""
    made = AppliedWeights(CampaignOptions(window=4, hop=2, **options))  # type: ignore[arg-type]
    made.requested()
    if version is not None:
        made.on_applied(version, now=100.0)
    return made


def of(*versions: int) -> list[TunerSample]:
    return [replace(SAMPLE, weights_version=version) for version in versions]


def test_every_order_has_a_ticket_of_its_own_and_leaves_what_is_in_force_unknown() -> None:
    made = footing()
    assert (made.ticket, made.version) == (1, 5)
    assert made.requested() == made.ticket == 2
    assert made.version is None
    made.warm(of(5, 5, 5, 5))
    assert not made.ready(now=1e9)


def test_samples_count_from_the_first_version_that_was_put() -> None:
    assert not footing(version=None).known
    assert footing(version=None).counted(of(5, 6)) == []
    made = footing()
    made.requested()
    assert made.known, "what was put before is in force still"
    made.on_applied(8, now=200.0)
    assert made.counted(of(4, 5, 6, 8)) == of(5, 6, 8)


def test_only_what_is_in_force_is_warmed_by() -> None:
    made = footing()
    made.warm(of(4, 5, 5, 6))
    assert len(made.recent) == 2


def test_another_run_of_the_proxy_leaves_nothing_known() -> None:
    made = footing()
    made.warm(of(5, 5))
    made.restarted()
    assert (made.known, len(made.recent), made.counted(of(5))) == (False, 0, [])
    made.requested()
    made.on_applied(2, now=300.0)
    assert made.counted(of(1, 2, 3)) == of(2, 3)


@pytest.mark.parametrize(
    ("samples", "now", "ready", "ready_s"),
    [(4, 159.9, False, 160.0), (4, 160.0, True, 160.0), (3, 160.0, False, None), (5, 170.0, True, 160.0)],
)
def test_it_is_ready_after_the_warm_up_with_a_full_window(
    samples: int, now: float, ready: bool, ready_s: float | None
) -> None:
    made = footing(warm_up_s=60.0)
    made.warm(of(*[5] * samples))
    assert (made.ready(now), made.ready_s()) == (ready, ready_s)


def test_nothing_is_ready_while_an_answer_is_awaited() -> None:
    made = footing()
    made.warm(of(5, 5, 5, 5))
    made.requested()
    assert (made.ready(now=1e9), made.ready_s()) == (False, None)


@pytest.mark.parametrize(
    ("ttft_ms", "saturated"),
    [
        ([100.0, 100.0, 100.0, 5001.0], False),  # a quarter is not more than a quarter
        ([100.0, 100.0, 5001.0, 5001.0], True),
        ([100.0, 100.0, 5000.0, 5000.0], False),
        ([100.0, 100.0, None, None], True),
        ([5001.0, 5001.0, 5001.0], False),  # a window that is not full says nothing
    ],
)
def test_a_fleet_is_saturated_when_too_many_first_tokens_take_too_long(
    ttft_ms: list[float | None], saturated: bool
) -> None:
    made = footing()
    made.warm(replace(SAMPLE, ttft_ms=one) for one in ttft_ms)
    assert made.saturated() == saturated


USUAL = WindowStats(4, 400.0, 4.0, 12.0, 0, 0.5)
BASE = TunerSample(1, 0.0, "a", 1, 400.0, 4.0, 12.0, 200)


def window(version: int, *, began_s: float = 0.0, count: int = 4, **changes: Any) -> list[TunerSample]:
    """A request a second, on two replicas in turn."""
    alike = [replace(BASE, weights_version=version, arrived_s=began_s + i, replica="ab"[i % 2]) for i in range(count)]
    return [replace(sample, **changes) for sample in alike]


def verdict_of(outcome: Outcome) -> Verdict:
    assert isinstance(outcome, Verdict)
    return outcome


def test_nothing_of_a_window_outlives_the_process() -> None:
    assert paper([])[0].state() == {}


# -- paper


def paper(
    before: Sequence[TunerSample], *, reference: WindowStats = USUAL, **options: Any
) -> tuple[Paper, RollingWindow]:
    """A window of four that was filled with `before`, scored every two samples."""
    published: dict[str, Any] = {"mode": "paper", "window": 4, "hop": 2}
    given = CampaignOptions(**published | options)
    shared = RollingWindow(given.window, given.hop)
    for sample in before:
        shared.add(sample)
    return Paper(given, shared, reference), shared


def routed(trial: Paper, shared: RollingWindow, samples: Sequence[TunerSample]) -> Outcome:
    """As the campaign does: into the window first."""
    for sample in samples:
        shared.add(sample)
    return trial.on_samples(samples, now=0.0)


def test_a_full_window_is_compared_after_a_hop_whatever_it_was_routed_under() -> None:
    trial, shared = paper(window(5), reference=replace(USUAL, ttft_ms_p95=500.0))
    assert (trial.arm, trial.turn, trial.next_time()) == ("offspring", 1, None)
    assert routed(trial, shared, window(6, count=2)) is None, "nothing is in force yet"
    trial.on_applied(6, now=0.0)
    assert trial.offspring_version == 6
    assert routed(trial, shared, window(6, count=1, ttft_ms=200.0)) is None
    verdict = verdict_of(routed(trial, shared, window(5, count=1, ttft_ms=380.0)))
    assert verdict.accepted
    assert verdict.objective_ms == pytest.approx(400.0), "two of the window are of before"
    assert trial.on_time(now=9999.0) is None


@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_window_that_is_not_full_is_not_judged(before: int) -> None:
    # After a restart the proxy's samples of before are not there.
    trial, shared = paper(window(5, count=before))
    trial.on_applied(6, now=0.0)
    verdicts = [routed(trial, shared, window(6, count=1)) for _ in range(4)]
    needed = max(2, 4 - before)
    assert [verdict is not None for verdict in verdicts[:needed]] == [False] * (needed - 1) + [True]


def test_a_hop_begins_with_the_weights() -> None:
    trial, shared = paper(window(5))
    trial.on_applied(6, now=0.0)
    routed(trial, shared, window(6, count=1))
    trial.void()
    assert (trial.turn, trial.offspring_version) == (2, None)
    assert routed(trial, shared, window(6, count=9)) is None
    trial.on_applied(7, now=0.0)
    assert routed(trial, shared, window(7, count=1)) is None
    assert isinstance(routed(trial, shared, window(7, count=1)), Verdict)


@pytest.mark.parametrize(("ttft_ms", "accepted"), [(399.0, True), (400.0, False), (300.0, True)])
def test_the_published_protocol_evaluates_ttft_alone(ttft_ms: float, accepted: bool) -> None:
    trial, shared = paper([])
    trial.on_applied(6, now=0.0)
    verdict = verdict_of(routed(trial, shared, window(6, ttft_ms=ttft_ms, e2e_s=9.0)))
    assert (verdict.accepted, verdict.refused) == (accepted, False)
    assert (verdict.objective_ms, verdict.incumbent_objective_ms) == (ttft_ms, 400.0)
    assert (verdict.stats, verdict.incumbent_stats) == (shared.stats(), USUAL)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (300.0, 400.0, (True, "p95 TTFT 25.0% lower in one window")),
        (400.0, 400.0, (False, "p95 TTFT 0.0% higher in one window")),
        (500.0, 400.0, (False, "p95 TTFT 25.0% higher in one window")),
        (None, 400.0, (False, "no first tokens in a window")),
        (400.0, None, (False, "no first tokens in a window")),
    ],
)
def test_a_lower_p95_wins(ours: float | None, theirs: float | None, expected: tuple[bool, str]) -> None:
    assert compared(replace(USUAL, ttft_ms_p95=ours), replace(USUAL, ttft_ms_p95=theirs)) == expected


@pytest.mark.parametrize(("ours", "accepted"), [(400.0, True), (401.9, True), (402.0, False)])
def test_a_tolerance_accepts_equal_and_slightly_worse_candidates_as_released(ours: float, accepted: bool) -> None:
    """The reference is 400 ms."""
    assert compared(replace(USUAL, ttft_ms_p95=ours), USUAL, tolerance=0.005)[0] == accepted
    assert not compared(replace(USUAL, ttft_ms_p95=ours), USUAL)[0]


def test_a_trial_has_the_tolerance_that_it_is_given() -> None:
    shared = RollingWindow(4, 2)
    trial = Paper(CampaignOptions(mode="paper", window=4, hop=2), shared, USUAL, tolerance=0.005)
    trial.on_applied(6, now=0.0)
    assert verdict_of(routed(trial, shared, window(6, ttft_ms=401.0))).accepted


# --- A log of decisions as the first filter: what it refutes touches no traffic.


def filtered(refutes: Callable[[Mapping[str, float], Mapping[str, float]], str | None], **more: Any) -> Run:
    run = Run(Proxy(bowl), CampaignOptions(max_generations=4, rest_blocks=0.0), optimizer="es-probes", **more)
    run.campaign.refutes = refutes
    return run


def test_a_candidate_that_the_log_refutes_is_rejected_without_a_request() -> None:
    asked: list[tuple[dict[str, float], dict[str, float]]] = []

    def refutes(ours: Mapping[str, float], theirs: Mapping[str, float]) -> str | None:
        asked.append((dict(ours), dict(theirs)))
        return "the log refutes it: it is worse"

    run = filtered(refutes)
    run.until(lambda: run.stopped)
    assert [row.reason for row in run.rows[1:]] == ["the log refutes it: it is worse"] * 4
    assert {row.n for row in run.rows[1:]} == {0}
    assert [theirs for _, theirs in asked] == [START] * 4
    assert len({tuple(ours.values()) for ours, _ in asked}) == 4
    assert set(run.proxy.routed) == {tuple(START.values())}
    assert run.now < 300.0, "no block was waited for"


def test_a_candidate_that_the_log_does_not_refute_is_measured_in_blocks() -> None:
    """The log refutes every other one, so that the ends of trials and the warm-up both lead to a refusal."""
    answers = iter([None, "refuted", None, "refuted"])
    run = filtered(lambda _ours, _theirs: next(answers))
    run.until(lambda: run.stopped)
    assert [row.n > 0 for row in run.rows[1:]] == [True, False, True, False]
    refused = [row for row in run.rows if row.reason == "refuted"]
    assert not any(row.accepted for row in refused)
    served = {tuple(row.weights.values()) for row in refused}
    assert not served & set(run.proxy.routed)


def test_an_audit_of_the_start_is_not_the_log_s() -> None:
    run = filtered(lambda _ours, _theirs: "refuted", start={"w_rtt": 1.9, "w_queue": 0.1})
    run.until(lambda: len(run.rows) > 1)
    assert run.rows[1].n > 0
