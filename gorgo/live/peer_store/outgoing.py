"""The report on its way into the store: what a failed write had is part of the next one.

Owns nothing that grows: loads are whole states, so only the newest counts; prefixes, cache reports and answers are
appended up to the bounds of a report, oldest dropped first, and prefills of a replica are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from gorgo.core.peers.records import (
    MAX_ANSWERS,
    MAX_CACHE_REPORTS,
    MAX_PREFILL_S,
    MAX_PREFIXES,
    PeerReport,
    StartedPrefill,
)

_Entry = TypeVar("_Entry")


class Outgoing:
    """Reports that are not known to be written."""

    def __init__(self) -> None:
        self._unwritten: PeerReport | None = None
        #: Prefixes, cache reports and answers that were dropped at a bound.
        self.dropped = 0

    def __bool__(self) -> bool:
        return self._unwritten is not None

    def add(self, report: PeerReport) -> PeerReport:
        """Return the report to write: `report` with what those before it could not write."""
        before = self._unwritten
        if before is not None:
            prefills: dict[str, float] = {}
            for prefill in (*before.prefills, *report.prefills):
                prefills[prefill.replica] = prefills.get(prefill.replica, 0.0) + prefill.prefill_s
            speeds = {speed.replica: speed for speed in (*before.speeds, *report.speeds)}
            report = replace(
                report,
                prefixes=self._newest(before.prefixes, report.prefixes, MAX_PREFIXES),
                cache_reports=self._newest(before.cache_reports, report.cache_reports, MAX_CACHE_REPORTS),
                answers=self._newest(before.answers, report.answers, MAX_ANSWERS),
                prefills=tuple(StartedPrefill(name, min(each, MAX_PREFILL_S)) for name, each in prefills.items()),
                speeds=tuple(speeds.values()),
            )
        self._unwritten = report
        return report

    def _newest(self, before: Sequence[_Entry], after: Sequence[_Entry], most: int) -> tuple[_Entry, ...]:
        entries = (*before, *after)
        self.dropped += max(0, len(entries) - most)
        return entries[-most:]

    def on_written(self) -> None:
        """Forget the last report: the store has it."""
        self._unwritten = None
