"""Pings and scrapes of one replica a tenth of a second away, without jitter: when they are told, and what they say."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from gorgo.config.values import PROBE_TIMEOUT_S
from gorgo.core.messages.request import EngineSample
from gorgo.lab.sim.engine.model import EngineModel
from gorgo.lab.sim.engine.request import EngineRequest
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.network import ConnectionPool, Link, RandomTable, TripDelays
from gorgo.lab.sim.port import Monitor, background_trips, out_s
from tests.lab.sim.profiles import round_profile

DRAWS = RandomTable(0)


@dataclass
class Replica:
    link: Link = field(default_factory=lambda: Link(rtt_s=0.1, jitter=0.0, spike_probability=0.0))
    alive: bool = True
    model: EngineModel[EngineRequest] = field(default_factory=lambda: EngineModel(round_profile(), item_bytes=1))

    @property
    def models(self) -> list[EngineModel[EngineRequest]]:
        return [self.model]


class Lab:
    """A background on a heap of its own, and a line per thing told."""

    def __init__(self) -> None:
        self.kernel = EventQueue()
        self.replica = Replica()
        self.probes: list[tuple[float, float | None]] = []
        self.samples: list[tuple[float, EngineSample | None]] = []
        self.pool = ConnectionPool(self.replica, lambda _: None)
        trips = background_trips(DRAWS, 0)
        self.background = Monitor(self.kernel, self, self.replica, self.pool, name="a", trips=trips)

    def on_probe(self, replica: str, rtt_s: float | None) -> None:
        assert replica == "a"
        self.probes.append((round(self.kernel.now, 9), None if rtt_s is None else round(rtt_s, 9)))

    def on_sample(self, replica: str, sample: EngineSample | None) -> None:
        assert replica == "a"
        self.samples.append((round(self.kernel.now, 9), sample))

    def run(self) -> None:
        self.kernel.run()

    def idle_connections(self) -> int:
        """How many requests at once would find one."""
        taken = [self.pool.acquire(0, now=self.kernel.now)[0] for _ in range(9)]
        for kept in taken:
            self.pool.release(kept, now=self.kernel.now)
        return sum(kept.used for kept in taken)


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_the_second_ping_is_told_because_the_first_may_have_to_connect(lab: Lab) -> None:
    """A handshake, a ping and another one: 0.1 s each."""
    lab.background.probe()
    lab.run()
    assert lab.probes == [(0.3, 0.1)]
    lab.background.probe()
    lab.run()
    assert lab.probes == [(0.3, 0.1), (0.5, 0.1)], "the connection is kept"
    assert lab.idle_connections() == 1


def test_a_dead_replica_refuses_after_a_round_trip_and_a_silent_one_never_answers(lab: Lab) -> None:
    lab.replica.alive = False
    lab.background.probe()
    lab.run()
    lab.replica.alive = True
    lab.background.reports_probes = False
    lab.background.probe()
    lab.run()
    assert lab.probes == [(0.1, None), (0.1 + PROBE_TIMEOUT_S, None)]


def test_a_replica_that_goes_between_two_pings_has_failed(lab: Lab) -> None:
    lab.background.probe()
    lab.kernel.at(0.15, lambda: setattr(lab.replica, "alive", False))
    lab.run()
    assert lab.probes == [(0.2, None)]


@pytest.mark.parametrize(("lost_s", "told"), [(0.25, (0.3, None)), (0.1, (0.4, 0.2))])
def test_a_ping_on_a_connection_that_was_reset_has_failed_and_the_next_one_connects(
    lab: Lab, lost_s: float, told: tuple[float, float | None]
) -> None:
    lab.background.probe()
    lab.kernel.at(lost_s, lab.pool.lose_all)
    lab.run()
    assert lab.probes == [told]


def test_a_scrape_tells_the_figures_of_the_time_at_which_its_question_arrives(lab: Lab) -> None:
    """There after a handshake and half a trip, at 0.15; its answer, and the second question and answer, by 0.3."""

    def start() -> None:
        lab.replica.model.start_step(now=0.14)

    lab.replica.model.submit(EngineRequest(b"a" * 50, prompt_tokens=50, output_tokens=5), now=0.0)
    lab.background.scrape()
    lab.kernel.at(0.14, start)
    lab.kernel.at(
        0.16, lambda: lab.replica.model.submit(EngineRequest(b"b", prompt_tokens=1, output_tokens=1), now=0.16)
    )
    lab.run()
    ((told_s, sample),) = lab.samples
    assert sample is not None
    assert (told_s, sample.prefill_busy_s_total) == pytest.approx((0.3, 0.06))
    assert replace(sample, prefill_busy_s_total=None) == EngineSample(
        running_requests=1.0,
        queued_requests=0.0,
        used_tokens=50.0,
        kv_capacity_tokens=10_000.0,
        max_running_requests=8.0,
        prefill_tokens_total=50.0,
        prompt_tokens_total=50.0,
    )
    assert lab.idle_connections() == 1


@pytest.mark.parametrize("why", ["gone", "silent"])
def test_a_scrape_without_an_answer_is_told_at_once(lab: Lab, why: str) -> None:
    lab.replica.alive = why != "gone"
    lab.background.reports_metrics = why != "silent"
    lab.background.scrape()
    lab.run()
    assert lab.samples == [(0.0, None)]
    assert lab.probes == []


@pytest.mark.parametrize("lost_s", [0.1, 0.2])
def test_a_scrape_on_a_connection_that_was_reset_has_failed(lab: Lab, lost_s: float) -> None:
    lab.background.scrape()
    lab.kernel.at(lost_s, lab.pool.lose_all)
    lab.run()
    assert [sample for _, sample in lab.samples] == [None]


def test_silence_to_pings_is_none_to_scrapes_and_the_other_way_round(lab: Lab) -> None:
    lab.background.reports_probes = False
    lab.background.scrape()
    lab.run()
    assert lab.samples[0][1] is not None
    lab.background.reports_probes, lab.background.reports_metrics = True, False
    lab.background.probe()
    lab.run()
    assert lab.probes[0][1] == 0.1


def test_a_first_look_is_answered_at_once_and_leaves_two_warm_connections(lab: Lab) -> None:
    lab.background.probe_first()
    assert lab.probes == [(0.0, 0.1)]
    (told_s, sample), *_ = lab.samples
    assert (told_s, len(lab.samples)) == (0.0, 1)
    assert sample is not None
    assert sample.kv_capacity_tokens == 10_000.0
    assert lab.idle_connections() == 2


def test_two_connections_are_kept_warm_while_the_replica_answers(lab: Lab) -> None:
    lab.background.warm()
    lab.run()
    assert (lab.idle_connections(), lab.probes, lab.samples) == (2, [], [])
    silent = Lab()
    silent.background.reports_probes = False
    silent.background.probe()
    silent.run()
    silent.background.warm()
    silent.run()
    assert silent.idle_connections() == 0, "the last ping had no answer"
    gone = Lab()
    gone.replica.alive = False
    gone.background.warm()
    gone.run()
    assert gone.idle_connections() == 0


def test_a_replica_that_answers_again_is_kept_warm_again(lab: Lab) -> None:
    lab.background.reports_probes = False
    lab.background.probe()
    lab.run()
    lab.background.reports_probes = True
    lab.background.probe()
    lab.run()
    lab.background.warm()
    lab.run()
    assert lab.idle_connections() == 2


@pytest.mark.parametrize(("waits", "seconds"), [(0, 0.05), (1, 0.15), (3, 0.35)])
def test_a_question_leaves_after_as_many_round_trips_as_it_waits(waits: int, seconds: float) -> None:
    link = Link(rtt_s=0.1, jitter=0.0, spike_probability=0.0)
    assert out_s(TripDelays(DRAWS, 0), link, waits) == pytest.approx(seconds)


def test_each_replica_s_pings_have_a_chance_of_their_own() -> None:
    link = Link(rtt_s=0.1)
    first, second, again = (background_trips(DRAWS, number).one_way_s(link) for number in (0, 1, 1))
    assert first != second == again
