"""Shares of one process: requests, buffers, processor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from gorgo.core.buffer_budget import BufferBudget
from gorgo.live.telemetry.saturation import MIN_WINDOW_S, Saturation


@dataclass
class Limits:
    max_in_flight: int = 200


@dataclass
class Settings:
    limits: Limits = field(default_factory=Limits)


@dataclass
class Load:
    in_flight: int = 0
    settings: Settings = field(default_factory=Settings)


def saturation(load: Load, times: list[float]) -> Saturation:
    """One whose clocks are the two numbers of `times`."""
    return Saturation(cast(Any, load), BufferBudget(1000), wall=lambda: times[0], processor=lambda: times[1])


def test_requests_are_a_share_of_the_limit() -> None:
    load = Load()
    found = saturation(load, [0.0, 0.0])
    assert dict(found.shares())["requests"] == 0.0
    load.in_flight = 50
    assert dict(found.shares())["requests"] == 0.25
    load.in_flight = 500
    assert dict(found.shares())["requests"] == 1.0


def test_processor_is_the_share_of_the_last_window() -> None:
    times = [0.0, 0.0]
    found = saturation(Load(), times)
    assert dict(found.shares())["processor"] == 0.0
    times[:] = [2 * MIN_WINDOW_S, 1.5 * MIN_WINDOW_S]
    assert dict(found.shares())["processor"] == 0.75
    times[:] = [2 * MIN_WINDOW_S + 0.1, 1.5 * MIN_WINDOW_S]
    assert dict(found.shares())["processor"] == 0.75, "a second server scrapes a moment later"
    times[:] = [4 * MIN_WINDOW_S, 1.5 * MIN_WINDOW_S]
    assert dict(found.shares())["processor"] == 0.0


def test_threads_do_not_make_more_than_all_of_it() -> None:
    times = [0.0, 0.0]
    found = saturation(Load(), times)
    times[:] = [10.0, 30.0]
    assert dict(found.shares())["processor"] == 1.0
