"""What a run takes beside its fleet and its requests: faults, and controllers such as a tuner.

Owns the two interfaces.
"""

from __future__ import annotations

from typing import Protocol

from gorgo.core.router import Router
from gorgo.sim.faults.injector import FaultInjector


class Startable(Protocol):
    """A fault, which puts itself into the event queue (`faults`)."""

    def start(self, world: FaultInjector) -> None: ...


class Controller(Protocol):
    """Something that acts on the Router now and then: a tuner, an operator."""

    @property
    def next_s(self) -> float | None:
        """When it acts next; None: never again."""

    def act(self, router: Router, now: float) -> None: ...
