"""The fleet: its columns, when a request is at its engine, and counters that went back."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.fleet.fleet import Fleet, FleetTimers, ewma, is_stale
from gorgo.core.fleet.replica import (
    PANIC_BACK_OFF_S,
    Columns,
    Replica,
    ReplicaSpec,
    RestartDetector,
    accelerator_code,
    arrival_s,
    one_way_s,
    record_connection,
)
from gorgo.core.latency.prefill import PrefillPrior
from gorgo.core.latency.ttft import Pacing, TcpWindows, paced_round_trips
from gorgo.core.limits import OutlierLimits
from gorgo.core.messages.request import EngineSample, OpenConnection
from gorgo.errors import ConfigError, UnknownReplica
from tests.core.routers import specs


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet(
        stale_after_s=90.0, rtt_ewma_alpha=0.3, panic_threshold=0.5, ejection=OutlierLimits(failures=1, base_s=5.0)
    )
    made.replace(specs("a", "b", "c"))
    return made


def eject(fleet: Fleet, *names: str, now: float = 0.0) -> None:
    for name in names:
        fleet.member(name).health.attempt_failed(dispatched_s=now, now=now)


def test_a_request_reaches_its_engine_after_the_round_trips_that_its_body_takes(fleet: Fleet) -> None:
    member = fleet.member("a")
    fleet.probed(member, 0.1, now=0.0)
    arrivals = []
    for windows in (None, TcpWindows(), TcpWindows(114_600.0, 131_070.0)):
        record_connection(fleet.columns, member.slot, None if windows is None else OpenConnection(windows, 9.9))
        arrivals.append(arrival_s(fleet.columns, member.slot, 100_000, now=10.0))
    assert arrivals == pytest.approx([10.35, 10.25, 10.05])


def test_a_sender_that_paces_is_slower_and_so_is_the_next_one_that_is_opened(fleet: Fleet) -> None:
    member = fleet.member("a")
    fleet.probed(member, 0.1, now=0.0)
    paced = OpenConnection(TcpWindows(200_000.0, 200_000.0), inf, Pacing(200_000.0, 0.0))
    plain = OpenConnection(TcpWindows(200_000.0, 200_000.0), 9.9)
    arrivals = []
    for connection in (paced, None, plain, None):
        record_connection(fleet.columns, member.slot, connection)
        arrivals.append(arrival_s(fleet.columns, member.slot, 100_000, now=10.0))
    new_s = 0.1 * (1.0 + paced_round_trips(100_000, TcpWindows(), Pacing()) - 0.5)
    assert arrivals == pytest.approx([10.10, 10.0 + new_s, 10.05, 10.35])


def test_all_replicas_are_candidates_and_their_columns_need_no_gathering(fleet: Fleet) -> None:
    eligible = fleet.eligibility.for_model(None)
    assert eligible.names == ("a", "b", "c")
    assert eligible.is_all
    assert eligible.excluded == {}


def test_who_is_eligible_is_worked_out_once_per_change(fleet: Fleet) -> None:
    assert fleet.eligibility.for_model(None) is fleet.eligibility.for_model(None)
    fleet.probed(fleet.member("a"), 0.1, now=0.0)
    before = fleet.eligibility.for_model(None)
    fleet.drain("b", True, now=0.0)
    assert fleet.eligibility.for_model(None) is not before


def test_names_that_clients_make_up_do_not_fill_the_cache(fleet: Fleet) -> None:
    answers = {id(fleet.eligibility.for_model(f"made-up-{index}")) for index in range(50)}
    assert len(answers) == 1


def test_draining_and_ejected_replicas_are_left_out_with_the_reason(fleet: Fleet) -> None:
    fleet.drain("a", True, now=0.0)
    eject(fleet, "b")
    eligible = fleet.eligibility.for_model(None)
    assert eligible.names == ("c",)
    assert eligible.excluded == {"a": "draining", "b": "ejected"}
    assert not eligible.is_all
    fleet.drain("a", False, now=0.0)
    assert fleet.eligibility.for_model(None).names == ("a", "c")


def test_a_replica_serves_the_models_that_it_lists_and_any_when_it_lists_none(fleet: Fleet) -> None:
    fleet.replace([ReplicaSpec("a", "x", ("m1",)), ReplicaSpec("b", "x", ("m1", "m2")), ReplicaSpec("c", "x")])
    assert fleet.eligibility.for_model("m1").names == ("a", "b", "c")
    assert fleet.eligibility.for_model("m2").names == ("b", "c")
    assert fleet.eligibility.for_model("other").names == ("c",)
    assert fleet.eligibility.for_model(None).names == ("a", "b", "c")
    assert fleet.eligibility.for_model("m2").excluded == {"a": "model"}
    assert fleet.eligibility.serves("other")
    fleet.replace([ReplicaSpec("a", "x", ("m1",))])
    assert fleet.eligibility.serves("m1")
    assert fleet.eligibility.serves(None)
    assert not fleet.eligibility.serves("m2")


def test_ejected_replicas_are_tried_again_soon_when_fewer_than_half_are_healthy(fleet: Fleet) -> None:
    eject(fleet, "a", now=1.0)
    assert fleet.timers.next_s == 6.0
    assert not fleet.eligibility.for_model(None).panic
    eject(fleet, "b", now=1.5)
    eligible = fleet.eligibility.for_model(None)
    assert eligible.names == ("c",)
    assert eligible.panic
    assert fleet.timers.next_s == 1.0 + PANIC_BACK_OFF_S
    fleet.handle_timer(now=1.5 + PANIC_BACK_OFF_S)
    assert fleet.eligibility.for_model(None).names == ("a", "b", "c")


@pytest.mark.parametrize("fewer", ["drained", "gone", "another threshold"])
def test_they_are_too_when_not_an_ejection_but_something_else_made_the_healthy_few(fleet: Fleet, fewer: str) -> None:
    fleet.replace(specs("a", "b", "c", "d"))
    eject(fleet, "a", now=1.0)
    assert fleet.timers.next_s == 6.0
    if fewer == "drained":
        for name in ("b", "c", "d"):
            fleet.drain(name, True, now=1.5)
    elif fewer == "gone":
        fleet.replace(specs("a"))
    else:
        fleet.set_limits(stale_after_s=90.0, rtt_ewma_alpha=0.3, panic_threshold=0.9, ejection=fleet.ejection)
    assert fleet.timers.next_s == 1.0 + PANIC_BACK_OFF_S


def test_other_limits_of_ejection_count_for_those_who_are_there(fleet: Fleet) -> None:
    fleet.set_limits(
        stale_after_s=90.0, rtt_ewma_alpha=0.3, panic_threshold=0.5, ejection=OutlierLimits(failures=1, base_s=20.0)
    )
    eject(fleet, "a", now=1.0)
    assert fleet.timers.next_s == 21.0


def test_reasons_are_in_one_order_whatever_the_order_of_a_set(fleet: Fleet) -> None:
    fleet.replace(specs(*"abcdefgh"))
    assert list(fleet.eligibility.for_model(None).excluding(set("hgfedcb")).excluded) == list("bcdefgh")


def test_a_replica_that_fails_its_trials_has_its_trials_in_a_panic_and_no_more(fleet: Fleet) -> None:
    eject(fleet, "a", now=0.0)
    eject(fleet, "b", now=0.0)
    for number in range(1, 10):
        fleet.handle_timer(now=number * PANIC_BACK_OFF_S)
        assert "a" in fleet.eligibility.for_model(None).names
        eject(fleet, "a", now=number * PANIC_BACK_OFF_S)
        assert "a" not in fleet.eligibility.for_model(None).names


def test_ejection_is_ignored_when_nobody_is_healthy(fleet: Fleet) -> None:
    for name in ("a", "b", "c"):
        eject(fleet, name)
    eligible = fleet.eligibility.for_model(None)
    assert eligible.names == ("a", "b", "c")
    assert eligible.panic


def test_half_healthy_is_no_panic(fleet: Fleet) -> None:
    fleet.replace(specs("a", "b"))
    eject(fleet, "a")
    assert fleet.eligibility.for_model(None).names == ("b",)


def test_draining_replicas_do_not_count_for_the_panic_threshold(fleet: Fleet) -> None:
    fleet.drain("a", True, now=0.0)
    fleet.drain("b", True, now=0.0)
    eject(fleet, "c")
    assert fleet.eligibility.for_model(None).names == ("c",)


def test_the_timer_ends_ejections(fleet: Fleet) -> None:
    eject(fleet, "a", now=1.0)
    assert fleet.timers.next_s == 6.0
    fleet.handle_timer(now=5.9)
    assert fleet.eligibility.for_model(None).names == ("b", "c")
    fleet.handle_timer(now=6.0)
    assert fleet.eligibility.for_model(None).names == ("a", "b", "c")
    assert fleet.timers.next_s is None


def test_round_trips_are_smoothed_and_go_stale(fleet: Fleet) -> None:
    member = fleet.member("b")
    fleet.probed(member, 0.1, now=0.0)
    fleet.probed(member, 0.2, now=10.0)
    assert fleet.columns.rtt_s[1] == pytest.approx(0.13)
    assert fleet.timers.next_s == 100.0
    fleet.handle_timer(now=99.0)
    assert not np.isnan(fleet.columns.rtt_s[1])
    fleet.handle_timer(now=100.0)
    assert np.isnan(fleet.columns.rtt_s[1])
    fleet.probed(member, 0.3, now=101.0)
    assert fleet.columns.rtt_s[1] == 0.3


def test_the_next_timer_follows_each_event(fleet: Fleet) -> None:
    a, b = fleet.member("a"), fleet.member("b")
    seen: list[float | None] = [fleet.timers.next_s]

    def note() -> None:
        seen.append(fleet.timers.next_s)

    fleet.probed(a, 0.1, now=1.0)
    note()
    fleet.scraped(b, EngineSample(), now=0.5)
    note()
    fleet.scraped(b, EngineSample(), now=2.0)
    note()
    fleet.probed(a, 0.1, now=10.0)
    note()
    fleet.probed(b, None, now=11.0)  # one failure ejects here, for five seconds
    note()
    fleet.handle_timer(now=16.0)
    note()
    fleet.replace(specs("a", "c"))
    note()
    fleet.set_limits(stale_after_s=5.0, rtt_ewma_alpha=0.3, panic_threshold=0.5, ejection=fleet.ejection)
    note()
    assert seen == [None, 91.0, 90.5, 91.0, 92.0, 16.0, 92.0, 100.0, 15.0]


def test_the_next_timer_is_the_earliest_of_all_after_any_events(fleet: Fleet) -> None:
    rng, members = np.random.default_rng(5), [fleet.member(name) for name in "abc"]
    for step in range(400):
        now, member = float(step), members[rng.integers(3)]
        match rng.integers(5):
            case 0 | 1:
                fleet.probed(member, 0.1, now=now)
            case 2:
                fleet.scraped(member, EngineSample(), now=now)
            case 3:
                fleet.probed(member, None, now=now)
            case _:
                fleet.handle_timer(now=now)
        observed = [at + 90.0 for each in members for at in (each.probed_s, each.scraped_s) if at is not None]
        backoffs = [at for each in members if (at := each.health.backoff_until_s) is not None]
        assert fleet.timers.next_s == min(observed + backoffs, default=None)


def test_a_replica_that_moves_to_tls_takes_a_round_trip_more_to_open(fleet: Fleet) -> None:
    fleet.replace([ReplicaSpec("a", "x"), ReplicaSpec("b", "x", tls=True)])
    assert fleet.columns.connect_round_trips[:2].tolist() == [1, 2]
    fleet.replace([ReplicaSpec("a", "x", tls=True), ReplicaSpec("b", "x")])
    assert fleet.columns.connect_round_trips[:2].tolist() == [2, 1]


def test_a_prior_that_changes_is_in_the_columns_and_what_was_learned_goes(fleet: Fleet) -> None:
    member = fleet.member("a")
    member.prefill_queue.set_speed_prior(3.0)
    fleet.replace([replace(member.spec, region="elsewhere")])
    assert fleet.columns.slowdown[0] == 3.0, "another region is no other prior"
    fleet.replace([replace(member.spec, prefill_base_s=0.5, prefill_tokens_per_s=2000.0, prefill_kappa_s=1e-6)])
    columns = fleet.columns
    cells = [columns.prefill_base_s[0], columns.prefill_token_s[0], columns.prefill_kappa_s[0], columns.slowdown[0]]
    assert cells == [0.5, 1 / 2000, 1e-6, 1.0]
    assert (member.spec.region, member.prior.known) == ("elsewhere", True)


def test_sizes_reported_by_an_engine_stand_until_the_configuration_changes(fleet: Fleet) -> None:
    fleet.replace([ReplicaSpec("a", "x", max_running_requests=8)])
    fleet.scraped(fleet.member("a"), EngineSample(max_running_requests=64.0), now=0.0)
    fleet.replace([ReplicaSpec("a", "y", max_running_requests=8)])
    assert fleet.columns.max_running_requests[0] == 64
    fleet.replace([ReplicaSpec("a", "y")])
    assert np.isnan(fleet.columns.max_running_requests[0])


def test_scraped_figures_go_stale_and_sizes_do_not(fleet: Fleet) -> None:
    fleet.scraped(fleet.member("a"), EngineSample(3, 2, 1000, 50_000, 64), now=0.0)
    fleet.handle_timer(now=90.0)
    columns = fleet.columns
    assert np.isnan([columns.running_requests[0], columns.queued_requests[0], columns.used_tokens[0]]).all()
    assert (columns.kv_capacity_tokens[0], columns.max_running_requests[0]) == (50_000, 64)


def test_what_an_engine_does_not_tell_is_unknown_and_its_prior_stays(fleet: Fleet) -> None:
    fleet.replace([ReplicaSpec("a", "x", kv_capacity_tokens=9000)])
    fleet.scraped(fleet.member("a"), EngineSample(running_requests=3, used_tokens=5), now=0.0)
    fleet.scraped(fleet.member("a"), EngineSample(running_requests=4), now=1.0)
    assert fleet.columns.running_requests[0] == 4
    assert np.isnan(fleet.columns.used_tokens[0])
    assert fleet.columns.kv_capacity_tokens[0] == 9000


def test_reloading_an_unchanged_prior_does_not_undo_what_the_engine_told(fleet: Fleet) -> None:
    spec = ReplicaSpec("a", "x", kv_capacity_tokens=9000)
    fleet.replace([spec])
    fleet.scraped(fleet.member("a"), EngineSample(kv_capacity_tokens=50_000), now=0.0)
    fleet.replace([spec])
    assert fleet.columns.kv_capacity_tokens[0] == 50_000
    fleet.replace([ReplicaSpec("a", "x", kv_capacity_tokens=8000)])
    assert fleet.columns.kv_capacity_tokens[0] == 8000


def test_who_stays_keeps_slot_load_marks_and_health(fleet: Fleet) -> None:
    fleet.reserve(fleet.member("c"), 100)
    fleet.drain("c", True, now=0.0)
    member = fleet.member("c")
    change = fleet.replace(specs("c", "d"))
    assert fleet.member("c") is member
    assert member.slot == 2
    assert member.draining
    assert fleet.columns.in_flight_tokens[2] == 100
    assert sorted(change.left_slots) == [0, 1]
    assert [joined.spec.name for joined in change.joined] == ["d"]


def test_a_free_slot_is_used_again_and_starts_empty(fleet: Fleet) -> None:
    old = fleet.member("b")
    fleet.reserve(old, 100)
    fleet.probed(old, 0.1, now=0.0)
    fleet.replace(specs("a", "d", "c"))
    assert fleet.member("d").slot == 1
    assert len(fleet.columns.rtt_s) == 3
    assert np.isnan(fleet.columns.rtt_s[1])
    assert fleet.columns.in_flight_tokens[1] == 0
    fleet.release_prefill(old, 100)
    fleet.release(old, 100)
    assert fleet.columns.in_flight_tokens[1] == 0
    assert fleet.columns.queued_prefill_tokens[1] == 0


def test_salt_depends_on_the_name_alone(fleet: Fleet) -> None:
    before = int(fleet.columns.salt[fleet.member("c").slot])
    fleet.replace([])
    fleet.replace(specs("z", "c"))
    assert int(fleet.columns.salt[fleet.member("c").slot]) == before


def test_two_replicas_of_one_name_are_refused_and_nothing_changes(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match="same name"):
        fleet.replace(specs("a", "d", "d"))
    assert list(fleet.replicas) == ["a", "b", "c"]


def test_an_unknown_name_is_answered_with_the_names_that_there_are(fleet: Fleet) -> None:
    with pytest.raises(UnknownReplica, match="'z'; the fleet has: a, b, c"):
        fleet.drain("z", True, now=0.0)


def counters(tokens: float, prior: PrefillPrior, *, slowdown: float) -> EngineSample:
    """Of an engine that has prefilled prompts of 2,000 new tokens behind 4,000 cached ones."""
    spent_s = tokens / 2000 * prior.seconds(2000, 4000) * slowdown
    return EngineSample(prefill_tokens_total=tokens, prefill_busy_s_total=spent_s)


@pytest.mark.parametrize("slowdown", [3.0, 1 / 3])
def test_an_engine_three_times_off_the_default_is_known_after_one_scrape(fleet: Fleet, slowdown: float) -> None:
    member = fleet.member("a")
    fleet.scraped(member, counters(1e6, member.prior, slowdown=slowdown), now=0.0)
    assert fleet.columns.slowdown[member.slot] == pytest.approx(slowdown, rel=0.05)
    assert fleet.columns.slowdown[fleet.member("b").slot] == 1.0


def test_what_first_tokens_show_too_does_not_count_twice(fleet: Fleet) -> None:
    """Scrapes and first tokens agree on three times slower; together they say so as well."""
    member = fleet.member("a")
    prior_s = member.prior.seconds(2000, 4000)
    for number in range(200):
        key, at_s = str(number), 10.0 * number
        member.prefill_queue.add(key, arrives_s=at_s, prior_s=prior_s, streamed=True)
        member.prefill_queue.on_first_token(key, engine_s=at_s + 3 * prior_s + 0.005)
        member.reported_speed.on_request(2000, prior_s)
        fleet.scraped(member, counters(2000.0 * number, member.prior, slowdown=3.0), now=at_s)
    assert fleet.columns.slowdown[member.slot] == pytest.approx(3.0, rel=0.03)


def test_a_rate_in_the_configuration_is_not_overruled_by_the_engine() -> None:
    made = Fleet(stale_after_s=90.0, rtt_ewma_alpha=0.3, panic_threshold=0.5, ejection=OutlierLimits())
    made.replace([ReplicaSpec("a", "here", prefill_tokens_per_s=20_000.0)])
    member = made.member("a")
    made.scraped(member, counters(1e6, member.prior, slowdown=3.0), now=0.0)
    assert made.columns.slowdown[member.slot] == 1.0
    assert member.reported_speed.factor == pytest.approx(3.0, rel=0.1)


def test_what_was_told_is_forgotten_with_the_prior_that_it_was_held_against(fleet: Fleet) -> None:
    member = fleet.member("a")
    fleet.scraped(member, counters(1e6, member.prior, slowdown=3.0), now=0.0)
    fleet.replace([ReplicaSpec("a", "region-of-a", prefill_tokens_per_s=4000.0)])
    assert fleet.columns.slowdown[member.slot] == 1.0


def test_a_scrape_has_an_age_until_it_is_stale(fleet: Fleet) -> None:
    member, columns = fleet.member("a"), fleet.columns
    fleet.scraped(member, EngineSample(running_requests=1.0), now=5.0)
    assert columns.sampled_s[member.slot] == 5.0
    fleet.handle_timer(now=5.0 + 91.0)
    assert np.isnan(columns.sampled_s[member.slot])


def test_an_accelerator_is_known_by_its_code_and_can_be_changed(fleet: Fleet) -> None:
    kinds = {"a": "A30", "b": "V100", "c": None}
    fleet.replace([replace(member.spec, accelerator=kinds[name]) for name, member in fleet.replicas.items()])
    codes = [fleet.columns.accelerator[fleet.member(name).slot] for name in kinds]
    assert codes == pytest.approx([accelerator_code("A30"), accelerator_code("V100"), np.nan], nan_ok=True)
    assert accelerator_code("A30") == int(accelerator_code("A30")) < 2**48


def test_first_sample_stands_for_itself() -> None:
    assert ewma(nan, 0.2, 0.3) == 0.2


def test_new_sample_counts_with_its_weight() -> None:
    assert ewma(0.1, 0.2, 0.3) == pytest.approx(0.13)
    assert ewma(0.1, 0.2, 1.0) == pytest.approx(0.2)


def test_a_figure_is_stale_at_its_age_limit_and_never_before_it_was_seen() -> None:
    assert not is_stale(10.0, now=99.9, after_s=90.0)
    assert is_stale(10.0, now=100.0, after_s=90.0)
    assert not is_stale(None, now=1e9, after_s=90.0)


COUNT = 5


def replicas() -> list[Replica]:
    columns = Columns.empty()
    columns.grow(COUNT)
    return [Replica.create(ReplicaSpec(f"r{slot}", "here"), slot, columns, OutlierLimits()) for slot in range(COUNT)]


moves = st.tuples(st.integers(0, COUNT - 1), st.none() | st.integers(0, 9).map(float)) | st.integers(0, 9).map(float)


@given(st.lists(moves, max_size=200))
def test_the_earliest_is_that_of_a_naive_twin(steps: list[tuple[int, float | None] | float]) -> None:
    fleet, timers = replicas(), FleetTimers()
    twin: dict[int, float] = {}
    for step in steps:
        if isinstance(step, tuple):
            slot, due_s = step
            timers.set(fleet[slot], due_s)
            twin.pop(slot, None)
            if due_s is not None:
                twin[slot] = due_s
        else:
            due = sorted(slot for slot, due_s in twin.items() if due_s <= step)
            assert [replica.slot for replica in timers.pop_due(now=step)] == due
            twin = {slot: due_s for slot, due_s in twin.items() if slot not in due}
        assert timers.next_s == min(twin.values(), default=None)


def test_times_that_were_replaced_take_no_memory() -> None:
    fleet, timers = replicas(), FleetTimers()
    for number in range(10_000):
        timers.set(fleet[number % COUNT], float(number))
    assert len(timers._heap) <= 64 + 2 * COUNT + 1
    assert timers.next_s == 9_995.0


# --- A counter that went back is another process, whichever counter it is.


TAKEN, COMPUTED = "prompt_tokens_total", "prefill_tokens_total"


@pytest.mark.parametrize(
    ("scrapes", "seen"),
    [
        ([{TAKEN: 900.0}, {TAKEN: 900.0}, {}, {TAKEN: 20.0}], [False, False, False, True]),
        ([{COMPUTED: 900.0}, {COMPUTED: 899.0}], [False, True]),
        ([{TAKEN: 900.0, COMPUTED: 500.0}, {TAKEN: 901.0, COMPUTED: 10.0}], [False, True]),
        ([{TAKEN: 900.0}, {COMPUTED: 10.0}, {TAKEN: 900.0, COMPUTED: 10.0}], [False, False, False]),
        ([{TAKEN: 900.0}, {TAKEN: 0.0}, {TAKEN: 5.0}, {TAKEN: 4.0}], [False, True, False, True]),
        ([{TAKEN: 0.0}, {TAKEN: 0.0}], [False, False]),
    ],
)
def test_counters_only_grow_while_a_process_lives(scrapes: list[dict[str, float]], seen: list[bool]) -> None:
    restarts = RestartDetector()
    assert [restarts.observe(EngineSample(**told)) for told in scrapes] == seen
    assert restarts.count == sum(seen)


# --- When a request is at its engine: half a round trip, and a whole one for each flight and handshake before it.


WARM, COLD = TcpWindows(114_600.0, 131_070.0), TcpWindows(14_600.0, 65_535.0)


def columns(rtt_s: float = 0.1, *, connect_round_trips: float = 1.0) -> Columns:
    made = Columns.empty()
    made.grow()
    made.rtt_s[0], made.connect_round_trips[0] = rtt_s, connect_round_trips
    return made


@pytest.mark.parametrize(("slot", "rtt_s", "expected_s"), [(0, 0.1, 0.05), (0, nan, 0.0), (-1, 0.1, 0.0)])
def test_one_way_is_half_a_round_trip_and_zero_where_that_is_unknown(
    slot: int, rtt_s: float, expected_s: float
) -> None:
    assert one_way_s(columns(rtt_s), slot) == expected_s
    assert arrival_s(columns(rtt_s), slot, 500, now=7.0) == 7.0 + expected_s


@pytest.mark.parametrize(
    ("connection", "body_bytes", "trips"),
    [
        # Where nobody tells of connections, one round trip, whatever the body.
        ("untold", 500, 1),
        ("untold", 1_000_000, 1),
        # A connection yet to be opened: two more trips with TLS, and the flights of a cold one.
        (None, 500, 1 + 2),
        (None, 100_000, 3 + 2),
        (OpenConnection(COLD, inf), 14_600, 1),
        (OpenConnection(COLD, inf), 14_601, 2),
        (OpenConnection(WARM, 9.9), 100_000, 1),
        (OpenConnection(WARM, inf), 100_000, 1),
        # Idle for four time-outs of 0.3 s each: four halvings leave the first window.
        (OpenConnection(WARM, 8.8), 100_000, 3),
        # Idle for one: 57,300 bytes leave, and the rest a trip later.
        (OpenConnection(WARM, 9.69), 100_000, 2),
        (OpenConnection(WARM, 9.71), 100_000, 1),
        # A sender that paces: 10,000 bytes leave at once, the rest at 40,000 a trip, also of what fits the window.
        (OpenConnection(WARM, inf, Pacing(40_000.0, 10_000.0)), 10_000, 1.0),
        (OpenConnection(WARM, inf, Pacing(40_000.0, 10_000.0)), 14_000, 1.1),
        (OpenConnection(WARM, inf, Pacing(40_000.0, 10_000.0)), 50_000, 2.0),
    ],
)
def test_a_request_arrives_half_a_trip_before_the_first_byte_of_an_answer_that_takes_no_time(
    connection: OpenConnection | str | None, body_bytes: int, trips: float
) -> None:
    made = columns(connect_round_trips=2.0)
    if not isinstance(connection, str):
        record_connection(made, 0, connection)
    assert arrival_s(made, 0, body_bytes, now=10.0) == pytest.approx(10.0 + 0.1 * (trips - 0.5))


def test_a_connection_s_windows_and_pace_stand_in_the_columns() -> None:
    made = columns()

    def shown() -> tuple[float, ...]:
        cells = (made.cwnd_bytes, made.rwnd_bytes, made.sent_s, made.pace_bytes, made.burst_bytes)
        return tuple(float(column[0]) for column in cells)

    record_connection(made, 0, OpenConnection(WARM, 9.9, Pacing(40_000.0, 10_000.0)))
    assert shown() == (114_600.0, 131_070.0, 9.9, 40_000.0, 10_000.0)
    record_connection(made, 0, None)
    assert shown() == (0.0, 65_535.0, inf, *Pacing()), "the next one will pace as the last one did"
    record_connection(made, 0, OpenConnection(COLD, 3.0))
    assert shown() == (14_600.0, 65_535.0, 3.0, inf, inf)
    record_connection(made, 0, None)
    assert shown() == (0.0, 65_535.0, inf, inf, inf)
