from __future__ import annotations

import numpy as np
import pytest

from gorgo.lab.sim.event_queue import EventQueue


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
