"""How many streams one core carries: the largest count at which events come in time, found by trying counts.

A count is carried if 97 of 100 events come that the engine itself delivers to the same load, and the p99 of gaps is
under twice the engine's own of the same round. A round begins where the one before it ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.bench.relay import scenarios

NAME = "carries"
#: Streams of 100 events a second.
COUNTS = (64, 128, 256, 400, 600, 800, 1000, 1200, 1600)
#: Not compared at its limit, which is far above that of the others.
_NOT_SEARCHED = ("nginx",)
_FIRST = COUNTS.index(256)
_EVENTS_PER_S = 100
#: Of what the engine delivers to the load; and of what it should, below which the machine is the limit.
_SHARE, _ENGINE_SHARE = 0.97, 0.95
_GAPS = 2.0
#: Time in which a relay ends the streams of a count that it does not carry.
_REST_S = 1.0

Figures = Mapping[str, Any]


class Search:
    """Searches of all relays; `measure(relay, scenario)` runs a job, with None for the engine itself."""

    def __init__(self, plan: scenarios.Plan) -> None:
        self._plan = plan
        self._found: dict[str, int] = {}

    def takes(self, relay: str) -> bool:
        """Whether the relay's limit is searched for."""
        searched = self._plan.searched
        return self._plan.takes(NAME) and (relay in searched if searched else relay not in _NOT_SEARCHED)

    def run(self, relay: str, measure: Callable[[str | None, scenarios.Scenario], Figures]) -> Figures:
        """Return `streams`, the count, and `limited`: whether the machine ended the search and not the relay."""
        direct: dict[int, Figures] = {}
        limited = False

        def carried(place: int) -> bool:
            nonlocal limited
            job = scenarios.streams_at(COUNTS[place], self._plan.scale)
            if place not in direct:
                direct[place] = measure(None, job)
            if not delivered(direct[place], COUNTS[place]):
                limited = True
                return False
            good = carries(measure(relay, job), direct[place])
            if not good:
                time.sleep(_REST_S)
            return good

        place = largest(self._found.get(relay, _FIRST), len(COUNTS), carried)
        self._found[relay] = max(place, 0)
        streams = COUNTS[place] if place >= 0 else 0
        return {"streams": streams, "limited": limited, "requests": 1, "bad": 0, "problem": ""}


def largest(start: int, count: int, carried: Callable[[int], bool]) -> int:
    """Return the last place that is carried, tried upwards from `start`, or downwards if that is not; -1 if none is.

    >>> largest(2, 5, lambda place: place < 4), largest(4, 5, lambda place: place < 1), largest(1, 5, lambda _: False)
    (3, 0, -1)
    """
    if carried(start):
        while start + 1 < count and carried(start + 1):
            start += 1
        return start
    start -= 1
    while start >= 0 and not carried(start):
        start -= 1
    return start


def delivered(direct: Figures, streams: int) -> bool:
    """Whether engine and load did what they should without a relay."""
    expected = streams * _EVENTS_PER_S * direct["wall_s"]
    return not direct["bad"] and bool(direct["gap_s"]) and bool(direct["tokens"] >= _ENGINE_SHARE * expected)


def carries(relay: Figures, direct: Figures) -> bool:
    """Whether a relay delivered nearly as many events as the engine does, and without long gaps."""
    if relay["bad"] or not relay["gap_s"]:
        return False
    rates = [figures["tokens"] / figures["wall_s"] for figures in (relay, direct)]
    return bool(rates[0] >= _SHARE * rates[1] and relay["gap_s"][1] < _GAPS * direct["gap_s"][1])


def limits(runs: Mapping[tuple[str, str, int], Figures]) -> Sequence[str]:
    """Return a line for each relay whose search the machine ended."""
    return [
        f"{relay}, round {number + 1}: more than {run['streams']} streams are beyond the engine and the load here"
        for (relay, scenario, number), run in runs.items()
        if scenario == NAME and run["limited"]
    ]
