"""Building bodies before they are due: in order, and so many at most."""

from __future__ import annotations

import json

from gorgo.lab.replay.bodies import LOOK_AHEAD, BodiesAhead
from gorgo.lab.traces import TraceRequest


def trace(count: int) -> list[TraceRequest]:
    return [TraceRequest(number, 0.0, 8, 2, (number,)) for number in range(count)]


def drained(bodies: BodiesAhead) -> list[int]:
    found = []
    while (item := bodies.next()) is not None:
        request, body = item
        assert json.loads(body)["model"] == "m"
        found.append(request.index)
    return found


def test_so_many_bodies_are_built_ahead() -> None:
    bodies = BodiesAhead(trace(5), "m", look_ahead=2)
    assert [bodies.build_one() for _ in range(3)] == [True, True, False]
    assert bodies.next() is not None
    assert [bodies.build_one() for _ in range(2)] == [True, False]
    assert drained(bodies) == [1, 2, 3, 4]
    assert (bodies.next(), bodies.build_one()) == (None, False)


def test_the_largest_burst_of_a_trace_is_built_ahead() -> None:
    bodies = BodiesAhead(trace(40), "m")
    assert sum(bodies.build_one() for _ in range(40)) == LOOK_AHEAD == 32
    assert drained(bodies) == list(range(40))


def test_nothing_built_ahead_is_built_when_it_is_asked_for() -> None:
    assert drained(BodiesAhead(trace(3), "m")) == [0, 1, 2]
