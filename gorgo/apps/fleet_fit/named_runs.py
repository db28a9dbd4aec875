"""Which runs the paper's tables need, by name: what a run is on, and its policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from gorgo.apps.demo.options import PAPER
from gorgo.apps.fleet_fit.fit import task_of
from gorgo.apps.fleet_fit.measure import FitTask
from gorgo.apps.fleet_fit.published import (
    HACKED,
    HACKED_WEIGHTS,
    HALF_LOAD,
    HALF_LOAD_TIME_SCALE,
    LOAD_SWEEP,
    WILDCHAT,
    WILDCHAT_TIME_SCALE,
    WILDCHAT_WEIGHTS,
    WINDOWS,
)
from gorgo.sim.engine.profiles import EngineProfile

RunName: TypeAlias = tuple[str, str]
ON_HACKED, ON_WILDCHAT = "queue weight 0", "WildChat"
#: April 7 with its load in one wave.
SURGE = "art-chat-apr7-surge"


def named_tasks(profile: EngineProfile, h100: EngineProfile, seed: int) -> Iterator[tuple[RunName, FitTask]]:
    """Yield every run of one seed; `h100` is the profile of the fleet for WildChat."""
    for window in WINDOWS:
        for policy in window.stats:
            yield (window.name, policy), task_of(window, policy, profile, seed=seed)
    yield from _loads(profile, seed)
    for policy in HACKED:  # on the window whose load is nearest to that of April 2
        yield (ON_HACKED, policy), task_of(WINDOWS[1], policy, profile, seed=seed, weights=HACKED_WEIGHTS)
    for policy in WILDCHAT:
        yield (
            (ON_WILDCHAT, policy),
            FitTask(
                trace="wildchat-like",
                time_scale=WILDCHAT_TIME_SCALE,
                policy=policy,
                weights=tuple(WILDCHAT_WEIGHTS.items()) if policy == PAPER else (),
                profile=h100,
                seed=seed,
            ),
        )


def _loads(profile: EngineProfile, seed: int) -> Iterator[tuple[RunName, FitTask]]:
    """Yield April 7 at every load, as it is and with a surge."""
    last = WINDOWS[-1]
    loads = [(policy, time_scale) for policy, loads in LOAD_SWEEP.items() for time_scale in loads]
    loads += [(policy, HALF_LOAD_TIME_SCALE) for policy in HALF_LOAD]
    loads += [(policy, last.time_scale) for policy in last.stats]
    for policy, time_scale in dict.fromkeys(loads):
        for surge in (False, True):
            window = replace(last, trace=SURGE) if surge else last
            task = task_of(window, policy, profile, seed=seed, time_scale=time_scale)
            yield (load_name(time_scale, surge=surge), policy), task


def load_name(time_scale: float, *, surge: bool = False) -> str:
    """Return what a run of April 7 is on.

    Example
    -------
    >>> load_name(2.0, surge=True)
    'April 7, time scale 2, surge'
    """
    return f"{WINDOWS[-1].name}, time scale {time_scale:g}{', surge' if surge else ''}"
