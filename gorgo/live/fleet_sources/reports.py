"""What one source reports: its results, successes and failures, with their lines in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gorgo.fleet_sources.entries import Found
from gorgo.fleet_sources.fleet import FoundFleet
from gorgo.live.event_loop import Clock
from gorgo.live.logs import log

#: Rejected objects in the log per result; all are counted.
_LOGGED = 20


class Reports:
    """The reports of one source to the fleet of one proxy.

    Parameters
    ----------
    write:
        Writes a line of the log.
    """

    def __init__(self, name: str, fleet: FoundFleet, clock: Clock, write: Callable[..., None] = log) -> None:
        self._name = name
        self._fleet = fleet
        self._clock = clock
        self._write = write

    def report_result(self, found: Found) -> None:
        """Take a whole result."""
        source = self._fleet.sources.get(self._name)
        before = {} if source is None else dict(source.rejected)
        first = source is not None and not source.synced
        changed = self._fleet.apply_result(self._name, found, now=self._clock())
        if changed is None:
            return
        if first:
            self._write("fleet_source_synced", source=self._name, replicas=len(changed.entries))
        new = {name: why for name, why in changed.rejected.items() if before.get(name) != why}
        for name, why in list(new.items())[:_LOGGED]:
            self._write("fleet_source_rejected", level=logging.WARNING, source=self._name, replica=name, error=why)
        if len(new) > _LOGGED:
            self._write("fleet_source_rejected", level=logging.WARNING, source=self._name, more=len(new) - _LOGGED)

    def succeed(self) -> None:
        """Record a request that succeeded."""
        if self._fleet.succeed(self._name, now=self._clock()):
            self._write("fleet_source_up", source=self._name)

    def fail(self, reason: str) -> None:
        """Record a request that failed."""
        if self._fleet.fail(self._name, reason, now=self._clock()):
            source = self._fleet.sources[self._name]
            replicas = len(source.entries)
            self._write("fleet_source_down", level=logging.WARNING, source=self._name, error=reason, replicas=replicas)
