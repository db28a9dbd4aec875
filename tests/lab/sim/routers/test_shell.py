"""How long an attempt may be without content, and that those are given up alone that have none."""

from __future__ import annotations

from typing import cast

from gorgo.lab.sim.engine.driver import SimAttempt
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.network import RandomTable, TripDelays
from gorgo.lab.sim.remote_replica import RemoteReplica
from gorgo.lab.sim.routers.shell import FirstTokenTimeouts

DRAWS = RandomTable(0)


class Giver:
    """A site that notes what it is to give up, and when."""

    def __init__(self, kernel: EventQueue) -> None:
        self.kernel = kernel
        self.given_up: list[tuple[float, str]] = []

    def time_out(self, sending: SimAttempt) -> None:
        self.given_up.append((self.kernel.now, sending.request_id))
        sending.done = True


def sending(name: str) -> SimAttempt:
    trips = TripDelays(DRAWS, 0)
    return SimAttempt(name, f"{name}/1", b"", prompt_tokens=1, output_tokens=1, body_bytes=0, trips=trips)


class Lab:
    def __init__(self) -> None:
        self.kernel = EventQueue()
        self.site = Giver(self.kernel)
        self.deadlines = FirstTokenTimeouts(self.kernel)

    def watch(self, name: str, *, at_s: float) -> SimAttempt:
        one = sending(name)
        self.kernel.at(at_s, lambda: self.deadlines.watch(one, cast(RemoteReplica, self.site)))
        return one


def test_an_attempt_is_given_up_two_minutes_after_it_was_sent() -> None:
    lab = Lab()
    for name, at_s in (("one", 0.0), ("two", 0.0), ("three", 50.0)):
        lab.watch(name, at_s=at_s)
    lab.kernel.run()
    assert lab.site.given_up == [(120.0, "one"), (120.0, "two"), (170.0, "three")]


def test_an_attempt_with_content_or_an_end_is_not_given_up_and_holds_up_no_other() -> None:
    lab = Lab()
    content, over = lab.watch("content", at_s=0.0), lab.watch("over", at_s=1.0)
    lab.watch("late", at_s=2.0)
    lab.kernel.at(100.0, lambda: setattr(content, "has_first_token", True))
    lab.kernel.at(100.0, lambda: setattr(over, "done", True))
    lab.kernel.run()
    assert lab.site.given_up == [(122.0, "late")]


def test_a_pause_in_the_traffic_ends_no_watch() -> None:
    lab = Lab()
    lab.watch("one", at_s=0.0)
    lab.watch("two", at_s=500.0)
    lab.kernel.run()
    assert lab.site.given_up == [(120.0, "one"), (620.0, "two")]
    assert lab.kernel.handled == 4, "and asks for no event in between"
