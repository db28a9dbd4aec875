"""A router's own stream: its reports, at intervals and at once for an urgent dispatch.

Owns the writes (`ReportWriter`), and what is not known to be written (`Outgoing`). A report is made when it can be
written. While the store is slow or gone, loads are not queued: the next report has the present ones, and the prefixes
since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from gorgo.core.messages.actions import Dispatch
from gorgo.core.peers.codec import encode_report
from gorgo.core.peers.exchange import PeerExchange, is_urgent
from gorgo.core.peers.records import (
    MAX_ANSWERS,
    MAX_CACHE_REPORTS,
    MAX_PREFILL_S,
    MAX_PREFIXES,
    PeerReport,
    StartedPrefill,
)
from gorgo.live.event_loop import Clock
from gorgo.live.peer_store.connection import FIELD, MEMBERS_S, RETAIN_S, StoreNames, execute
from gorgo.live.peer_store.reader import read_id
from gorgo.live.telemetry.peers import PeerCounts

if TYPE_CHECKING:
    from redis.asyncio import Redis


# The report on its way into the store: what a failed write had is part of the next one.
#
# Owns nothing that grows: loads are whole states, so only the newest counts; prefixes, cache reports and answers are
# appended up to the bounds of a report, oldest dropped first, and prefills of a replica are added up.


_Entry = TypeVar("_Entry")


class Outgoing:
    """Reports that are not known to be written."""

    def __init__(self) -> None:
        self._unwritten: PeerReport | None = None
        #: Whether one is being written, and what was added since it was begun.
        self._writes = False
        self._added: PeerReport | None = None
        #: Prefixes, cache reports and answers that were dropped at a bound.
        self.dropped = 0

    def __bool__(self) -> bool:
        return self._unwritten is not None

    def next_report(self, report: PeerReport) -> PeerReport:
        """Return the report to write: `report` with what those before it could not write."""
        self._writes, self._added = True, None
        self._unwritten = self._joined(self._unwritten, report)
        return self._unwritten

    def add(self, report: PeerReport) -> None:
        """Add what another transport reports. It is part of the next report here, also if one is being written now."""
        if self._writes:
            dropped = self.dropped
            self._added = self._joined(self._added, report)
            self.dropped = dropped
        self._unwritten = self._joined(self._unwritten, report)

    def _joined(self, before: PeerReport | None, report: PeerReport) -> PeerReport:
        """Return `report` with what happened before it."""
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
        return report

    def _newest(self, before: Sequence[_Entry], after: Sequence[_Entry], most: int) -> tuple[_Entry, ...]:
        entries = (*before, *after)
        self.dropped += max(0, len(entries) - most)
        return entries[-most:]

    def on_written(self) -> None:
        """Forget the last report that was begun: the store has it."""
        self._unwritten, self._added, self._writes = self._added, None, False


class OutgoingReports:
    """The reports of one router over several transports: each gets what happened since its own last one.

    A report that one of them makes is part of the next one of each other. So a peer that hears of this router in two
    ways has all of it from the one whose reports are newer.
    """

    def __init__(self, peers: PeerExchange) -> None:
        self.peers = peers
        self._transports: list[Outgoing] = []

    def new_transport(self) -> Outgoing:
        """Return what one more transport has not written yet."""
        outgoing = Outgoing()
        self._transports.append(outgoing)
        return outgoing

    def make_report(self, outgoing: Outgoing, *, now: float) -> PeerReport:
        """Return the report of now for one transport."""
        report = self.peers.report(now=now)
        for each in self._transports:
            if each is not outgoing:
                each.add(report)
        return outgoing.next_report(report)


#: Between two reports, s, if there is news.
INTERVAL_S = 0.1
#: Between two reports of urgent dispatches, s: others cannot use more.
URGENT_INTERVAL_S = 0.01
#: Reports of `RETAIN_S` at one per `INTERVAL_S`; about 3 MB of a router with usual reports.
MAX_ENTRIES = 6000


class ReportWriter:
    """Writes the reports of one router.

    Parameters
    ----------
    reports:
        Of the Router's exchange.
    """

    def __init__(
        self, client: Redis, names: StoreNames, reports: OutgoingReports, counts: PeerCounts, clock: Clock
    ) -> None:
        self._client = client
        self._names = names
        self._reports = reports
        self._peers = reports.peers
        self._counts = counts
        self._clock = clock
        self._outgoing = reports.new_transport()
        self._urgent = asyncio.Event()
        self._enlist_due_s = float("-inf")

    def on_dispatch(self, dispatch: Dispatch) -> None:
        """Report an urgent dispatch at once."""
        if is_urgent(dispatch):
            self._urgent.set()

    async def write_in_turn(self) -> bool:
        """Wait for the turn and write if there is news; return whether there was."""
        await asyncio.sleep(URGENT_INTERVAL_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(INTERVAL_S - URGENT_INTERVAL_S):
                await self._urgent.wait()
        if not (self._urgent.is_set() or self._outgoing or self._peers.has_news(now=self._clock())):
            return False
        await self.write()
        return True

    async def write(self) -> None:
        """Write a report of now, and once a second that this member is there. Raises what the client raises."""
        self._urgent.clear()
        started_s = self._clock()
        report = self._reports.make_report(self._outgoing, now=started_s)
        self._counts.dropped = self._outgoing.dropped + self._peers.outbox.dropped
        text = encode_report(report)
        stream = self._names.stream(self._peers.name)
        enlists = started_s >= self._enlist_due_s
        pipeline = self._client.pipeline(transaction=False)
        pipeline.xadd(stream, {FIELD: self._names.sealed(self._peers.name, text)}, maxlen=MAX_ENTRIES, approximate=True)
        if enlists:
            pipeline.expire(stream, int(RETAIN_S))
        written = (await execute(pipeline))[0]
        self._outgoing.on_written()
        self._counts.reports["written"] += 1
        self._counts.written_bytes += len(text)
        self._counts.write_s += self._clock() - started_s
        if enlists:
            await self._enlist(read_id(written).ms)
            self._enlist_due_s = started_s + MEMBERS_S

    async def _enlist(self, now_ms: int) -> None:
        """List this member at the store's time, and drop those that are gone."""
        members = self._names.members
        pipeline = self._client.pipeline(transaction=False)
        pipeline.zadd(members, {self._names.listed(self._peers.name): now_ms})
        pipeline.zremrangebyscore(members, "-inf", now_ms - RETAIN_S * 1e3)
        pipeline.expire(members, int(RETAIN_S))
        await execute(pipeline)
