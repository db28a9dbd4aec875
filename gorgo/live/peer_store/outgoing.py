"""The report on its way into the store: what a failed write had is part of the next one.

Owns nothing that grows: loads are whole states, so only the newest counts; prefixes and cache reports are appended up
to the bounds of a report, oldest dropped first.
"""

from __future__ import annotations

from dataclasses import replace

from gorgo.core.peers.records import MAX_CACHE_REPORTS, MAX_PREFIXES, PeerReport


class Outgoing:
    """Reports that are not known to be written."""

    def __init__(self) -> None:
        self._unwritten: PeerReport | None = None
        #: Prefixes and cache reports that were dropped at a bound.
        self.dropped = 0

    def __bool__(self) -> bool:
        return self._unwritten is not None

    def add(self, report: PeerReport) -> PeerReport:
        """Return the report to write: `report` with what those before it could not write."""
        before = self._unwritten
        if before is not None:
            prefixes = (*before.prefixes, *report.prefixes)
            samples = (*before.cache_reports, *report.cache_reports)
            self.dropped += max(0, len(prefixes) - MAX_PREFIXES) + max(0, len(samples) - MAX_CACHE_REPORTS)
            speeds = {speed.replica: speed for speed in (*before.speeds, *report.speeds)}
            report = replace(
                report,
                prefixes=prefixes[-MAX_PREFIXES:],
                cache_reports=samples[-MAX_CACHE_REPORTS:],
                speeds=tuple(speeds.values()),
            )
        self._unwritten = report
        return report

    def on_written(self) -> None:
        """Forget the last report: the store has it."""
        self._unwritten = None
