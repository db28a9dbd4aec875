"""A fleet and a window small enough that a whole campaign on it takes a second."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from experiments.fleets import unknown_paper_fleet
from gorgo.lab.datasets import load_requests
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.named_fleets import QWEN_L40S
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.simulate import SimJob
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.traces import TraceFilters


def fitted_fleet() -> SimFleet:
    """The paper's fleet, of whose speed the Router is told nothing."""
    return unknown_paper_fleet(find_profile(QWEN_L40S))


def small_fleet() -> SimFleet:
    """The paper's regions with faster engines: the fitted ones are beyond capacity at the trace's rate."""
    faster = find_profile("2xL40S-Qwen3.5-35B-A3B-FP8-estimate")
    return SimFleet(tuple(replace(one, profile=faster) for one in fitted_fleet().replicas))


@cache
def small_feed(limit: int) -> tuple[SimRequest, ...]:
    return tuple(feed_of(load_requests("chat-small", TraceFilters(limit=limit, max_output=32))))


def small_job(limit: int = 150, **more: Any) -> SimJob:
    """The first requests of the shipped trace."""
    given: dict[str, Any] = {"trace": "small", "policy": "gorgo", "fleet": small_fleet(), "feed": small_feed(limit)}
    return SimJob(**given | more)
