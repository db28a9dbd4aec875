"""One replica as the proxy meets it, a tenth of a second away and without jitter: what is told, and when.

A prefill takes 10 ms and 1 ms a token, a decode iteration 21 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gorgo.config.values import CONNECTIONS_PER_REPLICA
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.messages.request import AttemptResult, EngineSample, OpenConnection, Outcome
from gorgo.lab.sim.engine.driver import SimAttempt
from gorgo.lab.sim.engine.itl import ItlHistogram
from gorgo.lab.sim.engine.request import Stage
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.fleet import SimReplica
from gorgo.lab.sim.network import Link, RandomTable, TripDelays
from gorgo.lab.sim.remote_replica import RemoteReplica
from tests.lab.sim.profiles import round_profile

DRAWS = RandomTable(0)
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


class Lab:
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
def lab() -> Lab:
    return Lab()


def test_tokens_come_half_a_round_trip_after_they_were_made(lab: Lab) -> None:
    """There at 0.15 after a handshake, its first token made at 0.2, the third 42 ms later."""
    lab.send("r")
    assert lab.lines() == [(0.25, "first", "r"), (0.292, "completed", "r", None)]
    (outcome,) = lab.shell.outcomes
    assert outcome.itl_s_p95 == pytest.approx(0.021)
    assert replace(outcome, itl_s_p95=None) == Outcome(
        AttemptResult.COMPLETED, 200, prompt_tokens=40, cached_tokens=0, output_tokens=3
    )
    assert (lab.gaps.count, round(lab.gaps.mean_s, 6)) == (2, 0.021)


def test_the_next_request_pays_no_handshake_and_finds_its_prefix(lab: Lab) -> None:
    lab.send("one")
    lab.send("two", at_s=1.0)
    assert lab.lines()[2:] == [(1.118, "first", "two"), (1.16, "completed", "two", None)]
    assert [outcome.cached_tokens for outcome in lab.shell.outcomes] == [0, 32]


def test_a_large_body_waits_for_its_flights(lab: Lab) -> None:
    lab.send("r", body=20_000, output_tokens=1)
    assert lab.lines() == [(0.35, "first", "r"), (0.35, "completed", "r", None)]


def test_a_request_on_its_way_is_seen_until_it_arrives(lab: Lab) -> None:
    sending = lab.send("r")
    seen: list[list[tuple[float, object]]] = []
    for at_s in (0.1, 0.149, 0.151):
        lab.at(at_s, lambda: seen.append([(round(when, 6), one) for when, one in lab.site.in_transit]))
    lab.lines()
    assert seen == [[(0.15, sending)], [(0.15, sending)], []]


def test_a_dead_replica_refuses_after_a_round_trip_and_leaves_no_connection(
    lab: Lab,
) -> None:
    lab.at(0.0, lab.site.kill)
    lab.send("refused", at_s=1.0)
    lab.at(2.0, lab.site.revive)
    lab.send("later", at_s=3.0, output_tokens=1)
    assert lab.lines() == [
        (1.1, "failed_before_content", "refused", "connect_failed"),
        (3.25, "first", "later"),
        (3.25, "completed", "later", None),
    ]
    assert lab.shell.outcomes[0].status is None


@pytest.mark.parametrize("how", ["kill", "cut"])
def test_open_requests_of_a_dead_replica_fail_half_a_round_trip_later(lab: Lab, how: str) -> None:
    """One has its first token on the way, one is in line behind it, one has not arrived; none was on a kept one."""
    lab.send("first-token-made", at_s=0.0)
    lab.send("in-line", at_s=0.06, tokens=100)
    lab.send("travels", at_s=0.1)
    lab.at(0.205, lab.site.kill if how == "kill" else lambda: lab.site.set_reachable(False))
    assert lab.lines() == [
        (0.25, "first", "first-token-made"),
        (0.255, "failed_after_content", "first-token-made", "disconnected"),
        (0.255, "failed_before_content", "in-line", "disconnected"),
        (0.255, "failed_before_content", "travels", "disconnected"),
    ]
    assert [outcome.status for outcome in lab.shell.outcomes] == [200, None, None]
    assert lab.site.in_transit == []
    assert lab.site.model.idle


def test_a_kept_connection_that_breaks_before_an_answer_is_tried_again_and_refused(lab: Lab) -> None:
    lab.send("before", output_tokens=1)
    lab.send("r", at_s=1.0, tokens=100)
    lab.at(1.1, lab.site.kill)
    assert lab.lines()[2:] == [(1.25, "failed_before_content", "r", "connect_failed")]


def test_an_answer_that_was_whole_when_its_replica_went_still_arrives(lab: Lab) -> None:
    lab.send("r", output_tokens=1)
    lab.at(0.21, lab.site.kill)
    assert lab.lines() == [(0.25, "first", "r"), (0.25, "completed", "r", None)]


def test_a_first_token_on_the_way_arrives_before_the_news_of_the_end(lab: Lab) -> None:
    """Made at 0.2 on a way of 50 ms, which is 5 ms from then on: the end is heard of no sooner than the token."""
    lab.send("r")
    lab.at(0.2005, lambda: lab.site.set_rtt(0.01))
    lab.at(0.201, lab.site.kill)
    assert lab.lines() == [(0.25, "first", "r"), (0.25, "failed_after_content", "r", "disconnected")]


@pytest.mark.parametrize(("how", "cached"), [("cut", 32), ("kill", 0)])
def test_a_replica_that_was_cut_off_keeps_its_cache_and_one_that_died_does_not(lab: Lab, how: str, cached: int) -> None:
    site = lab.site
    lab.send("warm")
    lab.at(1.0, site.kill if how == "kill" else lambda: site.set_reachable(False))
    lab.at(2.0, site.revive if how == "kill" else lambda: site.set_reachable(True))
    alive: list[bool] = []
    for at_s in (0.9, 1.1, 2.1):
        lab.at(at_s, lambda: alive.append(site.alive))
    lab.send("again", at_s=3.0)
    lab.lines()
    assert (alive, lab.shell.outcomes[-1].cached_tokens) == ([True, False, True], cached)


def test_an_engine_that_comes_back_is_as_slow_as_it_was(lab: Lab) -> None:
    lab.site.set_slowdown(3.0)
    lab.at(0.0, lab.site.kill)
    lab.at(0.1, lab.site.revive)
    lab.send("r", at_s=1.0, output_tokens=1)
    assert lab.lines()[0] == (1.35, "first", "r")


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
    lab: Lab, at_s: float, stage: Stage, first_s: float
) -> None:
    """Its connection is closed, so that the next request has its handshake to pay."""
    sending = lab.send("r")
    lab.at(at_s, lambda: lab.site.time_out(sending))
    assert lab.lines() == [(at_s, "failed_before_content", "r", "timeout")]
    assert sending.stage is stage
    assert lab.site.model.idle
    lab.send("next", at_s=1.0, output_tokens=1)
    assert lab.lines()[1] == (first_s, "first", "next")


def test_a_cancelled_attempt_is_superseded_and_a_second_word_of_it_ignored(lab: Lab) -> None:
    sending = lab.send("r")
    lab.at(0.16, lambda: lab.site.cancel(sending))
    lab.at(0.17, lambda: lab.site.cancel(sending))
    lab.at(0.18, lambda: lab.site.time_out(sending))
    assert lab.lines() == [(0.16, "superseded", "r", None)]


def test_an_attempt_abandoned_before_a_death_is_not_aborted_in_the_next_engine(lab: Lab) -> None:
    sending = lab.send("r")
    lab.at(0.16, lambda: lab.site.time_out(sending))
    lab.at(0.18, lab.site.kill)
    lab.at(0.19, lab.site.revive)
    lab.lines()
    assert lab.site.model.totals.aborted == 0


def test_a_prompt_that_no_engine_takes_is_refused_half_a_round_trip_after_its_arrival(lab: Lab) -> None:
    lab.send("r", tokens=4_000)
    ((at_s, ending, _, error),) = lab.lines()
    assert (at_s, ending) == (0.2, "upstream_4xx")
    assert "context length" in str(error)
    assert lab.shell.outcomes[0].status == 400


def test_a_connection_is_given_back_before_the_end_is_told(lab: Lab) -> None:
    """Who waited for this end takes it, and pays no handshake."""

    def send_another() -> None:
        lab.shell.after_end = lambda: None
        lab.send("two", at_s=lab.kernel.now, output_tokens=1)

    lab.send("one", output_tokens=1)
    lab.shell.after_end = send_another
    assert lab.lines()[2:] == [(0.368, "first", "two"), (0.368, "completed", "two", None)]


def test_one_attempt_more_than_there_are_connections_is_turned_away(lab: Lab) -> None:
    for number in range(CONNECTIONS_PER_REPLICA + 1):
        lab.send(str(number), tokens=1, output_tokens=1)
    lines = lab.lines()
    assert lines[0] == (0.0, "busy", str(CONNECTIONS_PER_REPLICA), "connections_exhausted")
    assert [line[1] for line in lines[1:]].count("completed") == CONNECTIONS_PER_REPLICA


@pytest.mark.parametrize(("share", "late"), [(1.0, True), (0.0, False)])
def test_a_delayed_request_is_late_by_a_time_between_the_two(lab: Lab, share: float, late: bool) -> None:
    lab.site.set_path_delay(share, 2.0, 3.0)
    lab.send("r", output_tokens=1)
    ((at_s, *_), _) = lab.lines()
    assert isinstance(at_s, float)
    assert 2.25 < at_s < 3.25 if late else at_s == 0.25


def test_a_new_round_trip_counts_for_requests_sent_from_then_on(lab: Lab) -> None:
    lab.site.set_rtt(0.2)
    assert (lab.site.rtt_s, lab.site.link.jitter) == (0.2, 0.0)
    lab.send("r", output_tokens=1)
    assert lab.lines()[0] == (0.45, "first", "r")


def test_a_run_of_decode_iterations_is_one_event_with_ahead_and_many_without() -> None:
    handled = []
    for ahead in (True, False):
        lab = Lab(ahead=ahead)
        lab.send("r", output_tokens=100)
        assert [line[1:] for line in lab.lines()] == [("first", "r"), ("completed", "r", None)]
        handled.append(lab.kernel.handled)
    assert handled[0] < 10 < 100 <= handled[1]
