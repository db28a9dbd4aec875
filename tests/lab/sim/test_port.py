"""One replica as the proxy meets it, a tenth of a second away and without jitter: pings, scrapes, requests, and
when what is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from gorgo.config.values import CONNECTIONS_PER_REPLICA, PROBE_TIMEOUT_S
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.messages.request import AttemptResult, EngineSample, OpenConnection, Outcome
from gorgo.lab.sim.engine.driver import SimAttempt
from gorgo.lab.sim.engine.itl import ItlHistogram
from gorgo.lab.sim.engine.model import EngineModel
from gorgo.lab.sim.engine.request import EngineRequest, Stage
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.fleet import SimReplica
from gorgo.lab.sim.network import ConnectionPool, Link, RandomTable, TripDelays
from gorgo.lab.sim.port import Monitor, background_trips
from gorgo.lab.sim.remote_replica import RemoteReplica
from tests.lab.sim.fleets import round_profile

# --- Pings and scrapes of one replica a tenth of a second away, without jitter: when they are told, and what they say.


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
    assert TripDelays(DRAWS, 0).out_s(link, waits) == pytest.approx(seconds)


def test_each_replica_s_pings_have_a_chance_of_their_own() -> None:
    link = Link(rtt_s=0.1)
    first, second, again = (background_trips(DRAWS, number).one_way_s(link) for number in (0, 1, 1))
    assert first != second == again


# --- One replica as the proxy meets it, a tenth of a second away and without jitter: what is told, and when.
#
# A prefill takes 10 ms and 1 ms a token, a decode iteration 21 ms.


LINK = Link(rtt_s=0.1, jitter=0.0, spike_probability=0.0)


class Shell:
    """Writes down what it is told."""

    def __init__(self, kernel: EventQueue) -> None:
        self.kernel = kernel
        self.lines: list[tuple[object, ...]] = []
        self.outcomes: list[Outcome] = []
        self.after_end: Callable[[], None] = lambda: None

    def _note(self, *line: object) -> None:
        self.lines.append((round(self.kernel.now, 6), *line))

    def on_probe(self, replica: str, rtt_s: float | None) -> None: ...

    def on_sample(self, replica: str, sample: EngineSample | None) -> None: ...

    def on_connection(self, replica: str, connection: OpenConnection | None) -> None: ...

    def on_first_token(self, sending: SimAttempt) -> None:
        self._note("first", sending.request_id)

    def on_stalled(self, sending: SimAttempt) -> bool:
        return False

    def on_end(self, sending: SimAttempt, outcome: Outcome) -> None:
        self._note(outcome.result.value, sending.request_id, outcome.error)
        self.outcomes.append(outcome)
        self.after_end()


class LabRemoteReplica:
    def __init__(self, *, ahead: bool = True) -> None:
        self.kernel = EventQueue()
        self.shell = Shell(self.kernel)
        self.gaps = ItlHistogram()
        replica = SimReplica(ReplicaSpec("a", "here"), round_profile(), LINK)
        self.site = RemoteReplica(
            self.kernel, self.shell, replica, number=0, draws=DRAWS, block_tokens=16, gaps=self.gaps, ahead=ahead
        )

    def send(
        self, name: str, *, at_s: float = 0.0, tokens: int = 40, output_tokens: int = 3, body: int = 0
    ) -> SimAttempt:
        sending = SimAttempt(
            name,
            f"{name}/1",
            bytes(8) * (tokens // 16),
            prompt_tokens=tokens,
            output_tokens=output_tokens,
            body_bytes=body,
            trips=TripDelays(DRAWS, 7),
        )
        self.kernel.at(at_s, lambda: self.site.send(sending))
        return sending

    def at(self, at_s: float, act: Callable[[], object]) -> None:
        def handler() -> None:
            act()

        self.kernel.at(at_s, handler)

    def lines(self) -> list[tuple[object, ...]]:
        self.kernel.run()
        return self.shell.lines


@pytest.fixture
def lab_remote_replica() -> LabRemoteReplica:
    return LabRemoteReplica()


def test_tokens_come_half_a_round_trip_after_they_were_made(lab_remote_replica: LabRemoteReplica) -> None:
    """There at 0.15 after a handshake, its first token made at 0.2, the third 42 ms later."""
    lab_remote_replica.send("r")
    assert lab_remote_replica.lines() == [(0.25, "first", "r"), (0.292, "completed", "r", None)]
    (outcome,) = lab_remote_replica.shell.outcomes
    assert outcome.itl_s_p95 == pytest.approx(0.021)
    assert replace(outcome, itl_s_p95=None) == Outcome(
        AttemptResult.COMPLETED, 200, prompt_tokens=40, cached_tokens=0, output_tokens=3
    )
    assert (lab_remote_replica.gaps.count, round(lab_remote_replica.gaps.mean_s, 6)) == (2, 0.021)


def test_the_next_request_pays_no_handshake_and_finds_its_prefix(lab_remote_replica: LabRemoteReplica) -> None:
    lab_remote_replica.send("one")
    lab_remote_replica.send("two", at_s=1.0)
    assert lab_remote_replica.lines()[2:] == [(1.118, "first", "two"), (1.16, "completed", "two", None)]
    assert [outcome.cached_tokens for outcome in lab_remote_replica.shell.outcomes] == [0, 32]


def test_a_large_body_waits_for_its_flights(lab_remote_replica: LabRemoteReplica) -> None:
    lab_remote_replica.send("r", body=20_000, output_tokens=1)
    assert lab_remote_replica.lines() == [(0.35, "first", "r"), (0.35, "completed", "r", None)]


def test_a_request_on_its_way_is_seen_until_it_arrives(lab_remote_replica: LabRemoteReplica) -> None:
    sending = lab_remote_replica.send("r")
    seen: list[list[tuple[float, object]]] = []
    for at_s in (0.1, 0.149, 0.151):
        lab_remote_replica.at(
            at_s, lambda: seen.append([(round(when, 6), one) for when, one in lab_remote_replica.site.in_transit])
        )
    lab_remote_replica.lines()
    assert seen == [[(0.15, sending)], [(0.15, sending)], []]


def test_a_dead_replica_refuses_after_a_round_trip_and_leaves_no_connection(
    lab_remote_replica: LabRemoteReplica,
) -> None:
    lab_remote_replica.at(0.0, lab_remote_replica.site.kill)
    lab_remote_replica.send("refused", at_s=1.0)
    lab_remote_replica.at(2.0, lab_remote_replica.site.revive)
    lab_remote_replica.send("later", at_s=3.0, output_tokens=1)
    assert lab_remote_replica.lines() == [
        (1.1, "failed_before_content", "refused", "connect_failed"),
        (3.25, "first", "later"),
        (3.25, "completed", "later", None),
    ]
    assert lab_remote_replica.shell.outcomes[0].status is None


@pytest.mark.parametrize("how", ["kill", "cut"])
def test_open_requests_of_a_dead_replica_fail_half_a_round_trip_later(
    lab_remote_replica: LabRemoteReplica, how: str
) -> None:
    """One has its first token on the way, one is in line behind it, one has not arrived; none was on a kept one."""
    lab_remote_replica.send("first-token-made", at_s=0.0)
    lab_remote_replica.send("in-line", at_s=0.06, tokens=100)
    lab_remote_replica.send("travels", at_s=0.1)
    lab_remote_replica.at(
        0.205, lab_remote_replica.site.kill if how == "kill" else lambda: lab_remote_replica.site.set_reachable(False)
    )
    assert lab_remote_replica.lines() == [
        (0.25, "first", "first-token-made"),
        (0.255, "failed_after_content", "first-token-made", "disconnected"),
        (0.255, "failed_before_content", "in-line", "disconnected"),
        (0.255, "failed_before_content", "travels", "disconnected"),
    ]
    assert [outcome.status for outcome in lab_remote_replica.shell.outcomes] == [200, None, None]
    assert lab_remote_replica.site.in_transit == []
    assert lab_remote_replica.site.model.idle


def test_a_kept_connection_that_breaks_before_an_answer_is_tried_again_and_refused(
    lab_remote_replica: LabRemoteReplica,
) -> None:
    lab_remote_replica.send("before", output_tokens=1)
    lab_remote_replica.send("r", at_s=1.0, tokens=100)
    lab_remote_replica.at(1.1, lab_remote_replica.site.kill)
    assert lab_remote_replica.lines()[2:] == [(1.25, "failed_before_content", "r", "connect_failed")]


def test_an_answer_that_was_whole_when_its_replica_went_still_arrives(lab_remote_replica: LabRemoteReplica) -> None:
    lab_remote_replica.send("r", output_tokens=1)
    lab_remote_replica.at(0.21, lab_remote_replica.site.kill)
    assert lab_remote_replica.lines() == [(0.25, "first", "r"), (0.25, "completed", "r", None)]


def test_a_first_token_on_the_way_arrives_before_the_news_of_the_end(lab_remote_replica: LabRemoteReplica) -> None:
    """Made at 0.2 on a way of 50 ms, which is 5 ms from then on: the end is heard of no sooner than the token."""
    lab_remote_replica.send("r")
    lab_remote_replica.at(0.2005, lambda: lab_remote_replica.site.set_rtt(0.01))
    lab_remote_replica.at(0.201, lab_remote_replica.site.kill)
    assert lab_remote_replica.lines() == [(0.25, "first", "r"), (0.25, "failed_after_content", "r", "disconnected")]


@pytest.mark.parametrize(("how", "cached"), [("cut", 32), ("kill", 0)])
def test_a_replica_that_was_cut_off_keeps_its_cache_and_one_that_died_does_not(
    lab_remote_replica: LabRemoteReplica, how: str, cached: int
) -> None:
    site = lab_remote_replica.site
    lab_remote_replica.send("warm")
    lab_remote_replica.at(1.0, site.kill if how == "kill" else lambda: site.set_reachable(False))
    lab_remote_replica.at(2.0, site.revive if how == "kill" else lambda: site.set_reachable(True))
    alive: list[bool] = []
    for at_s in (0.9, 1.1, 2.1):
        lab_remote_replica.at(at_s, lambda: alive.append(site.alive))
    lab_remote_replica.send("again", at_s=3.0)
    lab_remote_replica.lines()
    assert (alive, lab_remote_replica.shell.outcomes[-1].cached_tokens) == ([True, False, True], cached)


def test_an_engine_that_comes_back_is_as_slow_as_it_was(lab_remote_replica: LabRemoteReplica) -> None:
    lab_remote_replica.site.set_slowdown(3.0)
    lab_remote_replica.at(0.0, lab_remote_replica.site.kill)
    lab_remote_replica.at(0.1, lab_remote_replica.site.revive)
    lab_remote_replica.send("r", at_s=1.0, output_tokens=1)
    assert lab_remote_replica.lines()[0] == (1.35, "first", "r")


@pytest.mark.parametrize(
    ("at_s", "stage", "first_s"),
    [
        (0.05, Stage.NEW, 1.25),  # on its way
        (0.12, Stage.ABORTED, 1.25),  # in its prefill by the time at which the engine hears of it
        (0.18, Stage.ABORTED, 1.218),  # in its answer: 32 tokens of its prompt are cached
        (0.21, Stage.FINISHED, 1.218),  # over
    ],
)
def test_an_abandoned_attempt_ends_at_once_here_and_half_a_round_trip_later_there(
    lab_remote_replica: LabRemoteReplica, at_s: float, stage: Stage, first_s: float
) -> None:
    """Its connection is closed, so that the next request has its handshake to pay."""
    sending = lab_remote_replica.send("r")
    lab_remote_replica.at(at_s, lambda: lab_remote_replica.site.time_out(sending))
    assert lab_remote_replica.lines() == [(at_s, "failed_before_content", "r", "timeout")]
    assert sending.stage is stage
    assert lab_remote_replica.site.model.idle
    lab_remote_replica.send("next", at_s=1.0, output_tokens=1)
    assert lab_remote_replica.lines()[1] == (first_s, "first", "next")


def test_a_cancelled_attempt_is_superseded_and_a_second_word_of_it_ignored(
    lab_remote_replica: LabRemoteReplica,
) -> None:
    sending = lab_remote_replica.send("r")
    lab_remote_replica.at(0.16, lambda: lab_remote_replica.site.cancel(sending))
    lab_remote_replica.at(0.17, lambda: lab_remote_replica.site.cancel(sending))
    lab_remote_replica.at(0.18, lambda: lab_remote_replica.site.time_out(sending))
    assert lab_remote_replica.lines() == [(0.16, "superseded", "r", None)]


def test_an_attempt_abandoned_before_a_death_is_not_aborted_in_the_next_engine(
    lab_remote_replica: LabRemoteReplica,
) -> None:
    sending = lab_remote_replica.send("r")
    lab_remote_replica.at(0.16, lambda: lab_remote_replica.site.time_out(sending))
    lab_remote_replica.at(0.18, lab_remote_replica.site.kill)
    lab_remote_replica.at(0.19, lab_remote_replica.site.revive)
    lab_remote_replica.lines()
    assert lab_remote_replica.site.model.totals.aborted == 0


def test_a_prompt_that_no_engine_takes_is_refused_half_a_round_trip_after_its_arrival(
    lab_remote_replica: LabRemoteReplica,
) -> None:
    lab_remote_replica.send("r", tokens=4_000)
    ((at_s, ending, _, error),) = lab_remote_replica.lines()
    assert (at_s, ending) == (0.2, "upstream_4xx")
    assert "context length" in str(error)
    assert lab_remote_replica.shell.outcomes[0].status == 400


def test_a_connection_is_given_back_before_the_end_is_told(lab_remote_replica: LabRemoteReplica) -> None:
    """Who waited for this end takes it, and pays no handshake."""

    def send_another() -> None:
        lab_remote_replica.shell.after_end = lambda: None
        lab_remote_replica.send("two", at_s=lab_remote_replica.kernel.now, output_tokens=1)

    lab_remote_replica.send("one", output_tokens=1)
    lab_remote_replica.shell.after_end = send_another
    assert lab_remote_replica.lines()[2:] == [(0.368, "first", "two"), (0.368, "completed", "two", None)]


def test_one_attempt_more_than_there_are_connections_is_turned_away(lab_remote_replica: LabRemoteReplica) -> None:
    for number in range(CONNECTIONS_PER_REPLICA + 1):
        lab_remote_replica.send(str(number), tokens=1, output_tokens=1)
    lines = lab_remote_replica.lines()
    assert lines[0] == (0.0, "busy", str(CONNECTIONS_PER_REPLICA), "connections_exhausted")
    assert [line[1] for line in lines[1:]].count("completed") == CONNECTIONS_PER_REPLICA


@pytest.mark.parametrize(("share", "late"), [(1.0, True), (0.0, False)])
def test_a_delayed_request_is_late_by_a_time_between_the_two(
    lab_remote_replica: LabRemoteReplica, share: float, late: bool
) -> None:
    lab_remote_replica.site.set_path_delay(share, 2.0, 3.0)
    lab_remote_replica.send("r", output_tokens=1)
    ((at_s, *_), _) = lab_remote_replica.lines()
    assert isinstance(at_s, float)
    assert 2.25 < at_s < 3.25 if late else at_s == 0.25


def test_a_new_round_trip_counts_for_requests_sent_from_then_on(lab_remote_replica: LabRemoteReplica) -> None:
    lab_remote_replica.site.set_rtt(0.2)
    assert (lab_remote_replica.site.rtt_s, lab_remote_replica.site.link.jitter) == (0.2, 0.0)
    lab_remote_replica.send("r", output_tokens=1)
    assert lab_remote_replica.lines()[0] == (0.45, "first", "r")


def test_a_run_of_decode_iterations_is_one_event_with_ahead_and_many_without() -> None:
    handled = []
    for ahead in (True, False):
        lab = LabRemoteReplica(ahead=ahead)
        lab.send("r", output_tokens=100)
        assert [line[1:] for line in lab.lines()] == [("first", "r"), ("completed", "r", None)]
        handled.append(lab.kernel.handled)
    assert handled[0] < 10 < 100 <= handled[1]
