from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from gorgo.config.model import LimitsConfig
from gorgo.config.values import FIRST_TOKEN_TIMEOUT_S
from gorgo.core.continuation import MOST_PAUSE_S, MOVE_INTERVAL_S, STALL_S
from gorgo.core.limits import OverloadLimits, RouterLimits
from gorgo.core.router import Router
from gorgo.errors import ConfigError, UnknownReplica
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.faults import FaultInjector
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.records import SimResult
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.sim.workload import SimRequest, scaled
from gorgo.policies.registry import POLICIES, make_policy
from tests.lab.sim.fleets import conversations, three_regions

#: A broken answer ends in an error.
BROKEN = RouterLimits(block_tokens=512.0, continuations=0)
NEAR, MIDDLE, FAR = "us-ashburn-0", "eu-frankfurt-0", "ap-seoul-0"


def simulation(policy: str = "gorgo-ms", fleet: SimFleet | None = None, **options: object) -> Simulation:
    return Simulation(fleet or three_regions(), make_policy(policy), **{"seed": 0, **options})  # type: ignore[arg-type]


def killing(name: str) -> Callable[[FaultInjector], None]:
    return lambda world: world.kill(name)


def reachable(name: str, back: bool) -> Callable[[FaultInjector], None]:
    return lambda world: world.set_reachable(name, back)


def slowed(name: str, factor: float) -> Callable[[FaultInjector], None]:
    return lambda world: world.set_slowdown(name, factor)


@dataclass
class At:
    """A fault: something done at a time."""

    at_s: float
    act: Callable[[FaultInjector], None]

    def start(self, world: FaultInjector) -> None:
        world.kernel.at(self.at_s, lambda: self.act(world))


def one(prompt_tokens: int = 1000, output_tokens: int = 10, *, at_s: float = 0.0, index: int = 0) -> SimRequest:
    return SimRequest(
        index=index,
        arrival_s=at_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        blocks=index.to_bytes(8, "little") * (prompt_tokens // 512),
        prefix_hash=index,
        body_bytes=4 * prompt_tokens,
    )


@pytest.mark.parametrize(("caches_output", "cached"), [(True, 1024), (False, 512)])
def test_a_next_turn_hits_the_answer_before_it_if_its_engine_caches_output(caches_output: bool, cached: int) -> None:
    near = replace(three_regions(**{"us-ashburn": 0.002}).replicas[0])
    fleet = SimFleet((replace(near, profile=replace(near.profile, caches_output=caches_output)),))
    first, second = b"prompt..", b"prompt..answer..turn...."
    feed = [
        replace(one(600, 500), blocks=first, output_blocks=b"answer.."),
        replace(one(1600, at_s=60.0, index=1), blocks=second),
    ]
    assert [record.cached_tokens for record in simulation(fleet=fleet).run(feed).records] == [0, cached]


def test_a_client_with_one_slot_sends_each_request_when_the_one_before_has_ended() -> None:
    feed = [one(at_s=0.1 * index, index=index) for index in range(3)] + [one(at_s=60.0, index=3)]
    alone = simulation(client_concurrency=1).run(feed).records
    assert all(record.error is None and record.e2e_s is not None for record in alone)
    ends = [record.sent_s + (record.e2e_s or 0.0) for record in alone]
    assert [record.sent_s for record in alone[1:3]] == pytest.approx(ends[:2]), "the wait is not measured"
    assert (alone[0].sent_s, alone[3].sent_s) == (0.0, 60.0)
    together = simulation(client_concurrency=3).run(feed).records
    assert [record.sent_s for record in together] == [request.arrival_s for request in feed]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_and_leaves_nothing_reserved(policy: str) -> None:
    feed = conversations(120, every_s=0.3)
    simulated = simulation(policy)
    result = simulated.run(feed)
    assert [record.id for record in result.records] == [str(request.index) for request in feed]
    assert all(record.status == 200 and record.error is None for record in result.records)
    assert all(
        record.output_tokens == request.output_tokens for record, request in zip(result.records, feed, strict=True)
    )
    assert all(record.ttft_ms is not None and record.e2e_s is not None for record in result.records)
    assert simulated.router.in_flight == 0
    for view in simulated.router.view.snapshots(now=result.ended_s):
        assert (view.in_flight_requests, view.in_flight_tokens, view.queued_prefill_tokens) == (0, 0, 0)
    for site in simulated.engines.values():
        site.model.check()
        assert site.model.idle
    assert len(simulated.router.samples) == len(feed)
    assert result.gaps.count == sum(request.output_tokens - 1 for request in feed)


@pytest.mark.parametrize("policy", ["gorgo-ms", "random"])
def test_a_seed_gives_one_run_and_another_seed_another(policy: str) -> None:
    feed = conversations(80, every_s=0.3)
    runs = [simulation(policy, seed=seed).run(feed).records for seed in (5, 5, 6)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_running_ahead_changes_no_record() -> None:
    feed = conversations(150, every_s=0.15)
    ahead, single = (simulation(ahead=ahead).run(feed) for ahead in (True, False))
    assert ahead.events < single.events / 2
    for mine, theirs in zip(ahead.records, single.records, strict=True):
        assert mine.replica == theirs.replica
        assert mine.cached_tokens == theirs.cached_tokens
        assert mine.ttft_ms == pytest.approx(theirs.ttft_ms, abs=1e-5)
        assert mine.e2e_s == pytest.approx(theirs.e2e_s, abs=1e-8)


def test_jitter_of_a_request_does_not_depend_on_what_was_sent_where_before_it() -> None:
    alone = simulation("nearest").run([one(index=3, at_s=50.0)])
    others = [one(index=index, at_s=10.0 * index, prompt_tokens=100) for index in range(3)]
    after = simulation("nearest").run([*others, one(index=3, at_s=50.0)])
    assert after.records[-1].ttft_ms == alone.records[0].ttft_ms
    assert simulation("nearest").run([one(index=4, at_s=50.0)]).records[0].ttft_ms != alone.records[0].ttft_ms


def test_half_the_load_is_served_sooner() -> None:
    feed = conversations(200, every_s=0.12)
    waits = [sum(record.ttft_ms or 0.0 for record in simulation().run(scaled(feed, scale)).records) for scale in (1, 4)]
    assert waits[1] < 0.6 * waits[0]


# -- replicas that die
def test_a_killed_replica_loses_nothing_that_could_be_retried() -> None:
    feed = conversations(200, every_s=0.1)
    killed = At(6.0, lambda world: world.kill(NEAR))
    simulated = simulation(faults=[killed, At(12.0, lambda world: world.revive(NEAR))], limits=BROKEN)
    result = simulated.run(feed)
    assert simulated.router.in_flight == 0
    failed = [record for record in result.records if record.error is not None]
    assert failed, "somebody was in the middle of an answer"
    assert all(record.ttft_ms is not None for record in failed), "whoever had no content went elsewhere"
    assert all(record.replica == NEAR and record.scheduled_s < 6.0 for record in failed)
    assert any(record.attempts > 1 and record.error is None for record in result.records)
    for site in simulated.engines.values():
        site.model.check()
        assert site.model.idle


def test_an_answer_whose_replica_dies_goes_on_elsewhere_with_every_token() -> None:
    feed = conversations(200, every_s=0.1)
    faults = [At(6.0, killing(NEAR)), At(12.0, lambda world: world.revive(NEAR))]
    broken = {
        record.id: record for record in simulation(faults=faults, limits=BROKEN).run(feed).records if record.error
    }
    simulated = simulation(faults=faults)
    result = simulated.run(feed)
    assert all(record.error is None and record.status == 200 for record in result.records)
    assert [record.output_tokens for record in result.records] == [request.output_tokens for request in feed]
    continued = {record.id: record for record in result.records if record.continued}
    assert continued.keys() == broken.keys(), "the runs are the same until the replica dies"
    for request_id, record in continued.items():
        assert (record.continued, record.replica == NEAR) == (1, False)
        assert record.ttft_ms == broken[request_id].ttft_ms, "the client had its first token from the first replica"
        assert (record.e2e_s or 0.0) > (broken[request_id].e2e_s or 0.0)
        assert (record.cached_tokens or 0) <= record.input_tokens
    assert result.gaps.count == sum(request.output_tokens - 1 for request in feed), "a gap for each seam too"
    assert {sample.request_id for sample in simulated.router.samples if sample.continued} == continued.keys()
    assert simulated.router.in_flight == 0
    for site in simulated.engines.values():
        site.model.check()
        assert site.model.idle


def test_the_pause_at_a_seam_is_a_gap_and_the_rest_of_the_prompt_is_found_where_it_is_cached() -> None:
    warm, asked = one(2000, 1, index=7), one(2000, 400, at_s=5.0, index=7)
    feed = [replace(warm, index=0), replace(asked, index=1)]
    fleet = SimFleet(three_regions(**{"us-ashburn": 0.002, "us-west": 0.030}).replicas)

    def served(act: Callable[[FaultInjector], None]) -> tuple[SimResult, Simulation]:
        simulated = simulation("round-robin", fleet=fleet, faults=[At(8.0, act)])
        return simulated.run(feed), simulated

    (whole, _), (broken, simulated) = served(lambda _: None), served(lambda world: world.kill("us-west-0"))
    record = broken.records[1]
    assert (record.continued, record.attempts, record.error, record.output_tokens) == (1, 2, None, 400)
    assert record.cached_tokens == 1536, "the other replica had the prompt, without its last part"
    (decision,) = [each for each in simulated.router.view.decisions("1") if each.attempt == 2]
    pause_s = broken.gaps.quantile_s(1.0)
    assert pause_s > 3 * whole.gaps.quantile_s(1.0)
    # The trip of the news, of the request with its answer so far, and back; the prefill of what is not cached.
    assert decision.decided_s == pytest.approx(8.0 + 0.015, abs=0.01)
    assert pause_s < 0.5


def test_a_second_death_breaks_the_answer_again_and_its_parts_add_up() -> None:
    feed = [one(2000, 900)]
    faults = [At(3.0, killing(NEAR)), At(6.0, killing(MIDDLE))]
    for most, ended in ((2, (2, None, 900)), (1, (1, "disconnected", None))):
        simulated = simulation("nearest", faults=faults, limits=replace(BROKEN, continuations=most))
        result = simulated.run(feed)
        (record,) = result.records
        assert (record.continued, record.error, record.output_tokens) == ended
        assert result.gaps.count == (899 if most == 2 else 0)
        assert [sample.output_tokens for sample in simulated.router.samples] == [ended[2]]


def test_streams_of_a_replica_that_hangs_go_on_elsewhere_after_the_time_of_a_stall() -> None:
    feed = [one(2000, 900), one(2000, 900, at_s=3.0, index=1)]
    hung = At(3.01, lambda world: world.hang(NEAR))
    simulated = simulation("nearest", faults=[hung, At(60.0, killing(NEAR))])
    result = simulated.run([*feed, one(at_s=61.0, index=2)])
    stream, unanswered, _ = result.records
    assert (stream.continued, stream.error, stream.output_tokens) == (1, None, 900)
    (decision,) = [each for each in simulated.router.view.decisions("0") if each.attempt == 2]
    assert decision.decided_s == pytest.approx(3.01 + STALL_S, abs=0.1), "the last token came just before"
    assert result.gaps.quantile_s(1.0) > STALL_S, "the pause counts as a gap"
    assert (unanswered.continued, unanswered.error) == (0, None), "what had no token was tried again"
    assert unanswered.attempts > 1
    for site in simulated.engines.values():
        site.model.check()


def test_a_drained_replica_loses_its_streams_to_others_oldest_first_and_no_token_is_lost() -> None:
    feed = [one(500, 900, at_s=0.1 * index, index=index) for index in range(5)]
    drained = At(3.0, lambda world: world.set_draining(NEAR, True))
    simulated = simulation("nearest", faults=[drained])
    result = simulated.run([*feed, one(at_s=20.0, index=5)])
    assert all(record.error is None for record in result.records)
    assert [record.output_tokens for record in result.records] == [900] * 5 + [10]
    assert [record.continued for record in result.records] == [1] * 5 + [0]
    assert NEAR not in {record.replica for record in result.records}
    moved_s = [max(each.decided_s for each in simulated.router.view.decisions(str(index))) for index in range(5)]
    assert moved_s[0] == pytest.approx(3.0)
    assert all(later - earlier >= MOVE_INTERVAL_S - 1e-9 for earlier, later in pairwise(moved_s))
    assert result.gaps.count == 5 * 899 + 9
    near = simulated.engines[NEAR].model
    near.check()
    assert near.idle
    assert all(sample.retries == 0 and sample.status == 200 for sample in simulated.router.samples)


def test_a_stream_that_ends_before_its_rest_begins_elsewhere_has_not_been_moved() -> None:
    (undisturbed,) = simulation("nearest").run([one(500, 900)]).records
    assert undisturbed.e2e_s is not None
    drained = At(undisturbed.e2e_s - 0.02, lambda world: world.set_draining(NEAR, True))
    simulated = simulation("nearest", faults=[drained])
    result = simulated.run([one(500, 900)])
    (record,) = result.records
    assert (record.continued, record.replica, record.attempts) == (0, NEAR, 2)
    assert (record.error, record.output_tokens, record.e2e_s) == (None, 900, undisturbed.e2e_s)
    (sample,) = simulated.router.samples
    assert (sample.retries, sample.continued, sample.output_tokens) == (0, 0, 900)
    assert result.gaps.count == 899
    for site in simulated.engines.values():
        site.model.check()
        assert site.model.idle


def test_an_answer_whose_hung_replica_dies_while_its_rest_is_asked_for_is_that_replica_s() -> None:
    faults = [At(3.01, lambda world: world.hang(NEAR)), At(3.01 + STALL_S + 0.02, killing(NEAR))]
    simulated = simulation("nearest", faults=faults)
    result = simulated.run([one(2000, 900)])
    (record,) = result.records
    (decision,) = [each for each in simulated.router.view.decisions("0") if each.attempt == 2]
    assert decision.decided_s < 3.01 + STALL_S + 0.02, "before it died"
    assert (record.continued, record.attempts, record.error, record.output_tokens) == (1, 2, None, 900)
    assert result.gaps.count == 899
    assert simulated.router.in_flight == 0


def test_a_stream_that_stands_still_without_another_replica_ends_with_the_bound_of_silence() -> None:
    fleet = SimFleet(three_regions().replicas[:1])
    hung = At(3.0, lambda world: world.hang(NEAR))
    simulated = simulation("nearest", fleet, faults=[hung, At(100.0, killing(NEAR))])
    (record,) = simulated.run([one(2000, 900)]).records
    assert (record.continued, record.error) == (0, "timeout")
    assert record.e2e_s == pytest.approx(3.0 + LimitsConfig().stream_idle_timeout_s, abs=0.2)


def test_a_move_that_takes_too_long_leaves_the_stream_where_it_is() -> None:
    faults = [
        *(At(2.9, slowed(name, 1e4)) for name in (MIDDLE, FAR)),
        At(3.0, lambda world: world.set_draining(NEAR, True)),
    ]
    simulated = simulation("nearest", faults=faults)
    result = simulated.run([one(500, 3000)])
    (record,) = result.records
    assert (record.continued, record.error, record.output_tokens, record.attempts) == (0, None, 3000, 2)
    assert (record.e2e_s or 0.0) > 3.0 + MOST_PAUSE_S
    (sample,) = simulated.router.samples
    assert (sample.replica, sample.retries) == (NEAR, 0)


def test_a_drain_that_is_undone_leaves_the_other_streams_where_they_are() -> None:
    feed = [one(500, 900, at_s=0.1 * index, index=index) for index in range(5)]
    faults = [
        At(3.0, lambda world: world.set_draining(NEAR, True)),
        At(3.04, lambda world: world.set_draining(NEAR, False)),
    ]
    records = simulation("nearest", faults=faults).run(feed).records
    assert [record.continued for record in records] == [1, 0, 0, 0, 0]
    assert all(record.error is None and record.output_tokens == 900 for record in records)


def test_a_revived_replica_is_cold() -> None:
    feed = [one(index=7, at_s=at_s) for at_s in (0.0, 5.0, 20.0)]
    feed = [replace(request, index=index) for index, request in enumerate(feed)]
    faults = [At(8.0, lambda world: world.kill(NEAR)), At(9.0, lambda world: world.revive(NEAR))]
    fleet = SimFleet(three_regions().replicas[:1])
    records = simulation(fleet=fleet, faults=faults).run(feed).records
    assert [record.cached_tokens for record in records] == [0, 512, 0]


def test_a_replica_that_was_cut_off_still_holds_its_cache() -> None:
    feed = [replace(one(index=7, at_s=at_s), index=index) for index, at_s in enumerate((0.0, 5.0, 20.0))]
    faults = [At(8.0, reachable(NEAR, False)), At(9.0, reachable(NEAR, True))]
    fleet = SimFleet(three_regions().replicas[:1])
    records = simulation(fleet=fleet, faults=faults).run(feed).records
    assert [record.cached_tokens for record in records] == [0, 512, 512]


def test_when_all_are_dead_a_request_is_refused_after_as_many_tries_as_the_proxy_makes() -> None:
    dead = [At(0.5, killing(name)) for name in (NEAR, MIDDLE, FAR)]
    simulated = simulation(faults=dead)
    (record,) = simulated.run([one(at_s=1.0)]).records
    assert (record.status, record.error, record.attempts, record.ttft_ms) == (503, "no_replica", 3, None)
    assert simulated.router.in_flight == 0


def test_an_attempt_without_content_is_given_up_and_goes_elsewhere() -> None:
    frozen = At(0.0, lambda world: world.set_slowdown(NEAR, 1e4))
    simulated = simulation("nearest", faults=[frozen])
    (record,) = simulated.run([one()]).records
    assert (record.replica, record.attempts, record.error) == (MIDDLE, 2, None)
    assert record.ttft_ms == pytest.approx(FIRST_TOKEN_TIMEOUT_S * 1e3 + 200, rel=0.01)
    assert simulated.engines[NEAR].model.totals.aborted == 1


def test_a_prompt_that_no_engine_takes_is_refused_as_the_engine_says() -> None:
    (record,) = simulation().run([one(prompt_tokens=40_000)]).records
    assert record.status == 400
    assert record.error is not None
    assert "context length" in record.error


# -- other faults
def test_a_slow_replica_takes_so_many_times_as_long_and_recovers() -> None:
    fleet = SimFleet(three_regions().replicas[:1])
    slow = [At(5.0, slowed(NEAR, 3.0)), At(15.0, slowed(NEAR, 1.0))]
    feed = [one(4000, 20, at_s=10.0 * index, index=index) for index in range(3)]
    ttft = [record.ttft_ms or 0.0 for record in simulation(fleet=fleet, faults=slow).run(feed).records]
    assert ttft[1] == pytest.approx(3 * ttft[0], rel=0.05)
    assert ttft[2] == pytest.approx(ttft[0], rel=0.05)


def test_a_longer_way_is_measured_by_the_next_probes() -> None:
    seen: list[float | None] = []
    shift = At(10.0, lambda world: world.set_rtt("eu-frankfurt", 0.320))
    simulated = simulation(faults=[shift])

    def look() -> None:
        views = simulated.router.view.snapshots(now=simulated.kernel.now)
        seen.append(next(view.rtt_ms for view in views if view.name == MIDDLE))

    simulated.kernel.every(35.0, look)
    simulated.run([one(at_s=0.0), one(at_s=150.0, index=1)])
    assert seen[0] == pytest.approx(0.3 * 320 + 0.7 * 95, rel=0.1)
    assert seen[3] is not None
    assert seen[3] > 250


def test_figures_that_are_not_told_go_stale_and_come_back() -> None:
    seen: dict[float, float | None] = {}
    faults = [
        At(1.0, lambda world: world.set_metrics(NEAR, False)),
        At(200.0, lambda world: world.set_metrics(NEAR, True)),
    ]
    simulated = simulation(faults=faults)

    def look() -> None:
        now = simulated.kernel.now
        seen[now] = simulated.router.view.snapshots(now=now)[0].running_requests

    simulated.kernel.every(40.0, look)
    simulated.run([one(at_s=0.0), one(at_s=250.0, index=1)])
    assert [seen[at_s] for at_s in (40.0, 80.0, 120.0, 160.0, 240.0)] == [0.0, 0.0, None, None, 0.0]


def test_a_replica_that_answers_no_pings_is_left_out() -> None:
    simulated = simulation("nearest", faults=[At(1.0, lambda world: world.set_probes(NEAR, False))])
    records = simulated.run([one(at_s=0.0), one(at_s=100.0, index=1)]).records
    assert [record.replica for record in records] == [NEAR, MIDDLE]


def test_a_share_of_requests_is_late_on_the_way() -> None:
    fleet = SimFleet(three_regions().replicas[:1])
    late = At(0.0, lambda world: world.set_path_delay("us-ashburn", 0.25, 1.0, 3.0))
    feed = [one(100, 1, at_s=0.5 * index, index=index) for index in range(400)]
    records = simulation(fleet=fleet, faults=[late]).run(feed).records
    delayed = [record.ttft_ms for record in records if record.ttft_ms is not None and record.ttft_ms > 900]
    assert 60 < len(delayed) < 140
    assert all(1000 < ttft_ms < 3200 for ttft_ms in delayed)


def test_an_unknown_replica_is_named() -> None:
    with pytest.raises(UnknownReplica, match="nobody"):
        simulation().injector.kill("nobody")


# -- who acts in a run
@dataclass
class Tuner:
    """Sets a weight at two times."""

    times: list[float]
    acted: list[float] = field(default_factory=list)

    @property
    def next_s(self) -> float | None:
        return self.times[len(self.acted)] if len(self.acted) < len(self.times) else None

    def act(self, router: Router, now: float) -> None:
        self.acted.append(now)
        values = {"m_rtt": 1.0 + len(self.acted) / 10}
        router.settings.set_weights(
            router.settings.weights.changed(router.settings.policy.weight_specs, values), now=now
        )


def test_a_controller_acts_when_it_says_and_records_tell_under_which_weights() -> None:
    tuner = Tuner([5.0, 10.0])
    feed = [one(at_s=at_s, index=index) for index, at_s in enumerate((0.0, 7.0, 12.0))]
    records = simulation(controllers=[tuner]).run(feed).records
    assert tuner.acted == [5.0, 10.0]
    versions = [record.weights_version or 0 for record in records]
    assert [version - versions[0] for version in versions] == [0, 1, 2]


@pytest.mark.parametrize(
    ("intervals", "stale_after_s"), [({}, 90.0), ({"probe_interval_s": 10.0, "scrape_interval_s": 20.0}, 60.0)]
)
def test_figures_are_stale_after_three_of_the_longer_interval(intervals: dict[str, Any], stale_after_s: float) -> None:
    limits = simulation(**intervals).router.settings.limits
    assert (limits.stale_after_s, limits.block_tokens) == (stale_after_s, 512.0)
    assert simulation(block_tokens=64).router.settings.limits.block_tokens == 64.0


def test_a_controller_whose_time_is_past_acts_at_once() -> None:
    tuner = Tuner([-5.0])
    simulation(controllers=[tuner]).run([one(at_s=1.0)])
    assert tuner.acted == [0.0]


def test_probes_and_scrapes_come_at_their_own_intervals() -> None:
    simulated = simulation(probe_interval_s=10.0, scrape_interval_s=25.0, fleet=SimFleet(three_regions().replicas[:1]))
    ages: list[tuple[float, float]] = []

    def look() -> None:
        (view,) = simulated.router.view.snapshots(now=simulated.kernel.now)
        ages.append((round(view.probe_age_s or 0.0), round(view.scrape_age_s or 0.0)))

    for at_s in (9.0, 19.0, 24.0, 29.0, 49.0, 54.0):
        simulated.kernel.at(at_s, look)
    simulated.run([one(at_s=60.0)])
    assert ages == [(9, 9), (9, 19), (4, 24), (9, 4), (9, 24), (4, 4)]


def test_a_deadline_of_a_run_is_that_of_each_request() -> None:
    limits = RouterLimits(overload=OverloadLimits(queue_enabled=True), block_tokens=512.0)
    fleet = SimFleet(three_regions().replicas[:1])
    feed = [one(8000, 5, at_s=0.001 * index, index=index) for index in range(12)]
    statuses = [
        [record.status for record in simulation(fleet=fleet, limits=limits, slo_ttft_s=slo_s).run(feed).records]
        for slo_s in (None, 3.0)
    ]
    assert set(statuses[0]) == {200}
    assert 3 <= statuses[1].count(200) <= 4, "0.8 s each"
    assert statuses[1].count(429) == 12 - statuses[1].count(200)


def test_each_attempt_of_each_request_has_a_chance_of_its_own() -> None:
    """The same request to the same replica, as the first and as the second attempt, and as another request."""
    fleet = SimFleet(three_regions().replicas[1:2])
    ttfts = {
        simulation("nearest", fleet=fleet).run([one(at_s=50.0, index=index)]).records[0].ttft_ms for index in range(5)
    }
    assert len(ttfts) == 5


def test_a_run_ends_with_its_last_request_whatever_else_is_in_the_heap() -> None:
    result = simulation().run([one()])
    assert result.ended_s < 1.0
    assert simulation().run([]).records == []


# -- what the Router is told of connections
def test_an_idle_fleet_keeps_connections_warm_so_that_a_request_pays_no_handshake() -> None:
    fleet = SimFleet([three_regions().replicas[2]])
    (record,) = simulation(fleet=fleet).run([one(100, 1, at_s=60.0)]).records
    assert record.ttft_ms == pytest.approx(180 + 12 + 9, rel=0.08)


def test_a_large_body_pays_for_its_flights_and_the_prediction_knows_it() -> None:
    fleet = SimFleet([three_regions().replicas[2]])
    (record,) = simulation(fleet=fleet).run([one(20_000, 1, at_s=60.0)]).records
    alone_ms = fleet.replicas[0].profile.prefill_s(20_000, 2e8) * 1e3
    assert record.ttft_ms is not None
    assert record.ttft_ms > alone_ms + 3 * 180
    assert record.predicted_ttft_ms == pytest.approx(record.ttft_ms, rel=0.1)


def test_what_is_sent_takes_memory_of_what_is_open_only() -> None:
    feed = conversations(400, every_s=0.5)
    simulated = simulation()
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, len(simulated.kernel))

    simulated.kernel.every(1.0, look)
    simulated.run(feed)
    assert most < 120, "events of what is in flight, of the background, and of runs that were left"


class Undrains:
    """An operator who takes the mark off again."""

    def __init__(self, at_s: float) -> None:
        self.next_s: float | None = at_s

    def act(self, router: Router, now: float) -> None:
        router.replicas.drain(NEAR, False, now=now)
        self.next_s = None


def test_who_waits_goes_as_soon_as_an_operator_has_made_room() -> None:
    limits = RouterLimits(overload=OverloadLimits(no_replica_wait_s=30.0))
    near = SimFleet([replica for replica in three_regions().replicas if replica.name == NEAR])
    simulated = simulation(fleet=near, limits=limits, controllers=[Undrains(2.5)])
    simulated.router.replicas.drain(NEAR, now=0.0)
    (record,) = simulated.run([one(at_s=1.0)]).records
    assert (record.status, record.queued_s) == (200, 1.5)


@pytest.mark.parametrize(
    ("policy", "given", "interval_s"), [("load-prefix", None, 1.0), ("gorgo-ms", None, 30.0), ("load-prefix", 7.0, 7.0)]
)
def test_scrapes_are_as_frequent_as_the_policy_needs_as_in_the_proxy(
    policy: str, given: float | None, interval_s: float
) -> None:
    simulated = Simulation(three_regions(), make_policy(policy), seed=0, scrape_interval_s=given)
    asked: list[float] = []
    every = simulated.kernel.every

    def asked_every(interval_s: float, handler: Callable[[], None]) -> None:
        asked.append(interval_s)
        every(interval_s, handler)

    simulated.kernel.every = asked_every  # type: ignore[method-assign]
    simulated.run([])
    assert interval_s in asked
    assert simulated.router.settings.limits.stale_after_s == 90.0


def test_events_run_by_time_and_those_of_one_time_as_they_were_asked_for() -> None:
    rng = np.random.default_rng(3)
    times = rng.integers(0, 10, 200).tolist()
    kernel = EventQueue()
    seen: list[tuple[float, int]] = []
    for number, time_s in enumerate(times):
        kernel.at(time_s, lambda number=number: seen.append((kernel.now, number)))  # type: ignore[misc]
    kernel.run()
    assert seen == sorted((time_s, number) for number, time_s in enumerate(times))
    assert kernel.handled == 200


def test_a_handler_can_ask_for_more_at_once_and_later() -> None:
    kernel = EventQueue()
    seen: list[tuple[str, float]] = []

    def first() -> None:
        kernel.at(kernel.now, lambda: seen.append(("at once", kernel.now)))
        kernel.at(kernel.now + 1.0, lambda: seen.append(("later", kernel.now)))

    kernel.at(1.0, first)
    kernel.at(1.5, lambda: seen.append(("between", kernel.now)))
    kernel.run()
    assert seen == [("at once", 1.0), ("between", 1.5), ("later", 2.0)]


def test_a_run_ends_where_it_is_told_and_goes_on_from_there() -> None:
    kernel = EventQueue()
    seen: list[float] = []
    for time_s in (1.0, 2.0, 3.0):
        kernel.at(time_s, lambda: seen.append(kernel.now))
    kernel.run(until_s=2.0)
    assert (seen, len(kernel)) == ([1.0, 2.0], 1)
    kernel.run()
    assert seen == [1.0, 2.0, 3.0]


def test_a_stop_leaves_the_rest_of_the_heap() -> None:
    kernel = EventQueue()
    kernel.at(1.0, kernel.stop)
    kernel.at(2.0, lambda: pytest.fail("after the end"))
    kernel.run()
    assert (kernel.now, len(kernel)) == (1.0, 1)


def test_a_repeated_event_comes_after_each_interval() -> None:
    kernel = EventQueue()
    seen: list[float] = []
    kernel.at(1.0, lambda: kernel.every(2.0, lambda: seen.append(kernel.now)))
    kernel.run(until_s=7.5)
    assert seen == [3.0, 5.0, 7.0]


def test_a_run_that_was_stopped_goes_on_when_it_is_run_again() -> None:
    kernel = EventQueue()
    seen: list[float] = []
    kernel.at(1.0, kernel.stop)
    kernel.at(2.0, lambda: seen.append(kernel.now))
    kernel.run()
    kernel.run()
    assert seen == [2.0]


def test_nothing_can_be_asked_for_in_the_past() -> None:
    kernel = EventQueue()
    kernel.at(2.0, lambda: kernel.at(1.0, kernel.stop))
    with pytest.raises(AssertionError, match="backwards"):
        kernel.run()


# A closed loop: turns that follow the end of the answer before them.


def turns(count: int, *, think_s: float, tokens: int = 10) -> list[SimRequest]:
    """One session, stamped a second apart."""
    made = [one(output_tokens=tokens, at_s=float(n), index=n) for n in range(count)]
    return [replace(each, after=n - 1, think_s=think_s) if n else each for n, each in enumerate(made)]


@pytest.mark.parametrize("think_s", [0.0, 2.5])
def test_in_a_closed_loop_a_turn_comes_a_think_time_after_the_answer_before_it(think_s: float) -> None:
    records = simulation().run(turns(4, think_s=think_s, tokens=400)).records
    assert [record.id for record in records] == ["0", "1", "2", "3"]
    for before, record in pairwise(records):
        assert before.e2e_s is not None
        assert record.scheduled_s == pytest.approx(before.scheduled_s + before.e2e_s + think_s)
    assert all(record.error is None for record in records)


def test_a_slower_fleet_gets_a_closed_loop_later_and_an_open_one_at_the_same_times() -> None:
    slow = At(0.0, slowed(NEAR, 4.0)), At(0.0, slowed(MIDDLE, 4.0)), At(0.0, slowed(FAR, 4.0))
    feed = turns(5, think_s=1.0, tokens=200)
    last = [simulation(faults=faults).run(feed).records[-1].scheduled_s for faults in ((), slow)]
    assert last[1] > last[0] + 4
    opened = [replace(each, after=None) for each in feed]
    assert [simulation(faults=faults).run(opened).records[-1].scheduled_s for faults in ((), slow)] == [4.0, 4.0]


def test_a_turn_that_fails_is_followed_by_the_next() -> None:
    feed = turns(3, think_s=1.0)
    feed[1] = replace(feed[1], prompt_tokens=400_000, body_bytes=1_600_000)
    records = simulation().run(feed).records
    assert [record.error is None for record in records] == [True, False, True]


def test_sessions_of_a_closed_loop_and_requests_without_one_are_all_served() -> None:
    single = [one(at_s=0.5 * n, index=100 + n) for n in range(6)]
    feed = sorted([*turns(5, think_s=0.1), *single], key=lambda request: request.arrival_s)
    records = simulation().run(feed).records
    assert sorted(int(record.id) for record in records) == [0, 1, 2, 3, 4, *range(100, 106)]


def test_a_bound_on_open_requests_and_a_closed_loop_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="closed loop; expected one of the two"):
        simulation(client_concurrency=2).run(turns(2, think_s=1.0))
