"""The streams of a group: the reports of the other members as they are read, and this router's own as they are written.

Owns the position in each stream (`Incoming`), the clock of the store (`StoreClock`), the reads (`ReportReader`), the
writes (`ReportWriter`), and what is not known to be written (`Outgoing`). Leaves applying a report to the service.

Reads resume where they ended, up to what the store retains, so that a router that joins or comes back has the history
of the others. What is malformed or foreign is counted and skipped. A report is made when it can be written, at
intervals and at once for an urgent dispatch. While the store is slow or gone, loads are not queued: the next report has
the present ones, and the prefixes since.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gorgo.core.fleet.peer_loads import MAX_PEERS
from gorgo.core.messages.actions import Dispatch
from gorgo.core.peers.codec import MAX_BYTES, decode_report, encode_report
from gorgo.core.peers.exchange import PeerExchange, is_urgent
from gorgo.core.peers.records import (
    MAX_ANSWERS,
    MAX_CACHE_REPORTS,
    MAX_PREFILL_S,
    MAX_PREFIXES,
    PeerReport,
    StartedPrefill,
)
from gorgo.errors import BadReport, OtherFormat
from gorgo.live.event_loop import Clock
from gorgo.live.logs import log
from gorgo.live.peer_store.connection import FIELD, MEMBERS_S, RETAIN_S, TAG_BYTES, StoreNames, execute
from gorgo.live.telemetry.counters import PeerCounts

if TYPE_CHECKING:
    from redis.asyncio import Redis


# Entries of all members' streams, in the order in which the store took them.
#
# Theory of operation. Marks of prefixes are ordered by their use, so a router that joins applies the entries of all
# streams in one order. A read returns at most `PAGE` entries of a stream. Beyond the last entry of a full page there
# may be more, so entries are applied up to the earliest such end; those after it wait. A stream with waiting entries
# is not read, so at most one page of each is in memory.


#: Entries of one stream in a read: some seconds of a router. Fewer where the last read had larger ones, so that a read
#: takes about as many bytes; a first read takes few, as their size is not known.
PAGE, FIRST_PAGE = 64, 4
PAGE_BYTES = 4 * 2**20
#: A position so far after the store's clock is of another store: it was replaced, or its clock was set back.
_AHEAD_MS = 1000


class EntryId(NamedTuple):
    """Time by the store, in ms, and the number within it."""

    ms: int
    number: int

    def __str__(self) -> str:
        return f"{self.ms}-{self.number}"


class Entry(NamedTuple):
    """One report as it is in the store."""

    id: EntryId
    member: str
    report: bytes | None


@dataclass(slots=True)
class _Stream:
    position: EntryId
    waiting: deque[Entry] = field(default_factory=deque)
    full: bool = False


class Incoming:
    """Streams of the members."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        #: Entries of a stream in the next read.
        self.page = min(FIRST_PAGE, PAGE)

    def __len__(self) -> int:
        return len(self._streams)

    def follow(self, members: Iterable[str], *, now_ms: int, since_ms: int) -> None:
        """Follow these members alone: new ones from `since_ms` on, the others from where they are."""
        start = EntryId(since_ms, 0)
        streams = {}
        for member in members:
            stream = self._streams.get(member)
            if stream is None or stream.position.ms > now_ms + _AHEAD_MS:
                stream = _Stream(start)
            streams[member] = stream
        self._streams = streams

    def positions(self) -> dict[str, EntryId]:
        """Return where to read on, by member."""
        return {member: stream.position for member, stream in self._streams.items() if not stream.waiting}

    @property
    def behind(self) -> bool:
        """Whether streams have more than was read: a read may not block then."""
        return any(stream.full or stream.waiting for stream in self._streams.values())

    def add(self, entries_by_member: Mapping[str, Sequence[tuple[EntryId, bytes | None]]]) -> None:
        """Add what a read found, by member; members without anything new included."""
        page, size, count = self.page, 0, 0
        for entries in entries_by_member.values():
            size += sum(len(report or b"") for _, report in entries)
            count += len(entries)
        if count:
            self.page = max(1, min(PAGE, PAGE_BYTES * count // max(1, size)))
        for member, entries in entries_by_member.items():
            stream = self._streams.get(member)
            if stream is None:
                continue
            stream.full = len(entries) >= page
            if entries:
                stream.waiting.extend(Entry(entry_id, member, report) for entry_id, report in entries)
                stream.position = entries[-1][0]

    def take_entries(self) -> list[Entry]:
        """Return the entries that no unread one comes before, in order."""
        ends = [stream.waiting[-1].id for stream in self._streams.values() if stream.full and stream.waiting]
        end = min(ends, default=None)
        taken: list[Entry] = []
        for stream in self._streams.values():
            while stream.waiting and (end is None or stream.waiting[0].id <= end):
                taken.append(stream.waiting.popleft())
        taken.sort(key=lambda entry: (entry.id, entry.member))
        return taken


def read_id(text: bytes) -> EntryId:
    """Return the id of an entry.

    >>> read_id(b"1700000000000-3").ms
    1700000000000
    """
    ms, _, number = text.partition(b"-")
    return EntryId(int(ms), int(number or 0))


# The store's clock, by which reports have an age: clocks of hosts may differ by any time.


class StoreClock:
    """Seconds by the store, carried on by a local clock since the last answer of the store.

    >>> clock = StoreClock(iter([10.0, 10.0, 12.0]).__next__)
    >>> clock.set_time(500.0, requested_s=clock.local())
    >>> clock.now()
    502.0
    """

    def __init__(self, local: Clock) -> None:
        self.local = local
        self._offset_s: float | None = None

    def set_time(self, store_s: float, *, requested_s: float) -> None:
        """Take the store's time, which it read between `requested_s` and now."""
        self._offset_s = store_s - (requested_s + self.local()) / 2.0

    def now(self) -> float | None:
        """Return the store's time; `None` before its first answer."""
        return None if self._offset_s is None else self.local() + self._offset_s

    def age_s(self, written_ms: int) -> float:
        """Return the age of what the store took at `written_ms`; 0 for what it took after this clock's time."""
        now = self.now()
        return 0.0 if now is None else max(0.0, now - written_ms / 1e3)


#: Names of the list of members that are looked at: forged ones, if there are so many, are removed from it.
MAX_LISTED = 4 * MAX_PEERS
#: Between two lines of the log on entries without the group's tag, s.
FORGED_LOG_S = 60.0
#: Longest wait of a read, s: a new member is read after it. Shorter than the time-out of a command.
BLOCK_S = 0.5
#: After a read, per stream and at most, s: with many members, reads of several reports at once cost less.
PAUSE_PER_STREAM_S, MAX_PAUSE_S = 0.0005, 0.02
#: Reports are applied for so long before other events have their turn, s.
SLICE_S = 0.002


class ReportReader:
    """Reads the reports of all other members of a group.

    Parameters
    ----------
    member:
        The own one.
    apply:
        Takes a report and its age in s.
    """

    def __init__(
        self,
        client: Redis,
        names: StoreNames,
        member: str,
        counts: PeerCounts,
        clock: Clock,
        apply: Callable[[PeerReport, float], None],
    ) -> None:
        self._client = client
        self._names = names
        self._member = member
        self._counts = counts
        self._clock = clock
        self._apply = apply
        #: Members whose last report has records of another version, with its time by the local clock.
        self.unreadable: dict[str, float] = {}
        #: Set when the history of all members was read.
        self.caught_up = asyncio.Event()
        self._store_clock = StoreClock(clock)
        self._incoming = Incoming()
        self._last_seq: dict[str, int] = {}
        self._members_due_s = float("-inf")
        #: Members by the time, in ms of the store, at which the list had them last. Forged ones push none out.
        self._listed: dict[str, int] = {}
        self._forged_logged_s = float("-inf")

    async def read(self) -> None:
        """Read once, waiting for `BLOCK_S` at most, and apply what is in order. Raises what the client raises."""
        if self._clock() >= self._members_due_s:
            await self._find_members()
            self._members_due_s = self._clock() + MEMBERS_S
        positions = self._incoming.positions()
        if positions:
            await self._read_streams({member: str(position) for member, position in positions.items()})
        await self._apply_all(self._incoming.take_entries())
        if not self._incoming.behind:
            self.caught_up.set()
            if not positions:
                await asyncio.sleep(BLOCK_S)
        await asyncio.sleep(min(MAX_PAUSE_S, PAUSE_PER_STREAM_S * len(positions)))

    async def _read_streams(self, positions: dict[str, str]) -> None:
        waits = self.caught_up.is_set() and not self._incoming.behind
        members = {self._names.stream(member): member for member in positions}
        answer: Any = await self._client.xread(
            {stream: positions[member] for stream, member in members.items()},
            count=self._incoming.page,
            block=int(BLOCK_S * 1e3) if waits else None,
        )
        streams: dict[str, list[tuple[bytes, dict[bytes, bytes]]]] = {
            members[name.decode()]: rows for name, rows in answer
        }
        self._incoming.add(
            {
                member: [(read_id(number), fields.get(FIELD)) for number, fields in streams.get(member, ())]
                for member in positions
            }
        )

    async def _find_members(self) -> None:
        requested_s = self._clock()
        pipeline = self._client.pipeline(transaction=False)
        pipeline.time()
        pipeline.zrevrangebyscore(self._names.members, "+inf", "-inf", start=0, num=MAX_LISTED)
        (seconds, microseconds), listed = await execute(pipeline)
        self._store_clock.set_time(seconds + microseconds / 1e6, requested_s=requested_s)
        now_ms = seconds * 1000 + microseconds // 1000
        opened = {name: self._names.read_listed(name) for name in listed}
        self._listed |= {member: now_ms for member in opened.values() if member is not None}
        newest = sorted(self._listed.items(), key=lambda item: -item[1])[:MAX_PEERS]
        self._listed = {member: ms for member, ms in newest if ms >= now_ms - RETAIN_S * 1e3}
        forged = [name for name, member in opened.items() if member is None]
        if forged:
            self._report_forged(forged[0])
        if len(listed) >= MAX_LISTED and forged:
            await self._client.zrem(self._names.members, *forged)  # they would hide a new member
        members = set(self._listed) - {self._member}
        self._incoming.follow(members, now_ms=now_ms, since_ms=max(0, now_ms - int(RETAIN_S * 1e3)))
        self.unreadable = {member: at_s for member, at_s in self.unreadable.items() if member in members}
        self._last_seq = {member: seq for member, seq in self._last_seq.items() if member in members}

    def _report_forged(self, name: bytes) -> None:
        """Log that somebody without the group's key writes there."""
        if self._clock() >= self._forged_logged_s + FORGED_LOG_S:
            self._forged_logged_s = self._clock()
            log("peer_entry_forged", level=logging.WARNING, router=repr(name[:80])[2:-1])

    async def _apply_all(self, entries: list[Entry]) -> None:
        """Apply entries in order, in slices."""
        slice_end_s = self._clock() + SLICE_S
        for entry in entries:
            self._take(entry)
            if self._clock() >= slice_end_s:
                await asyncio.sleep(0)
                slice_end_s = self._clock() + SLICE_S

    def _take(self, entry: Entry) -> None:
        """Apply one report; count and skip one that cannot be used."""
        reports = self._counts.reports
        self._counts.read_bytes += len(entry.report or b"")
        age_s = self._store_clock.age_s(entry.id.ms)
        try:
            if entry.report is None:
                raise BadReport("an entry has no report")
            if len(entry.report) > MAX_BYTES + TAG_BYTES:
                raise BadReport(f"an entry of {len(entry.report)} bytes")
            text = self._names.opened(entry.member, entry.report)
            if text is None:
                reports["forged"] += 1
                self._report_forged(entry.member.encode())
                return
            report = decode_report(text)
        except OtherFormat as error:
            reports["other_format"] += 1
            if entry.member not in self.unreadable:
                log("peer_report_unreadable", level=logging.WARNING, router=entry.member, error=str(error))
            self.unreadable[entry.member] = self._clock() - age_s
            return
        except BadReport as error:
            reports["malformed"] += 1
            log("peer_report_refused", level=logging.DEBUG, router=entry.member, error=str(error))
            return
        if report.router != entry.member:
            reports["foreign"] += 1
            return
        reports["read"] += 1
        self.unreadable.pop(entry.member, None)
        self._count_missed(report)
        self._apply(report, age_s)

    def _count_missed(self, report: PeerReport) -> None:
        last = self._last_seq.get(report.router)
        if last is not None and report.seq > last + 1:
            self._counts.reports["missed"] += report.seq - last - 1
        self._last_seq[report.router] = max(report.seq, last or 0)


# The report on its way into the store: what a failed write had is part of the next one. Nothing grows: loads are whole
# states, so only the newest counts; prefixes, cache reports and answers are appended up to the bounds of a report,
# oldest dropped first, and prefills of a replica are added up.


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
