"""The streams of the other members: who they are, their reports in order, and those that cannot be read.

Reads resume where they ended, up to what the store retains, so that a router that joins or comes back has the history
of the others. What is malformed or foreign is counted and skipped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gorgo.core.fleet.peer_loads import MAX_PEERS
from gorgo.core.peers.codec import decode_report
from gorgo.core.peers.records import PeerReport
from gorgo.errors import BadReport, OtherFormat
from gorgo.live.clock import Clock
from gorgo.live.logs import log
from gorgo.live.peer_store.incoming import PAGE, Entry, Incoming, read_id
from gorgo.live.peer_store.names import FIELD, MEMBERS_S, RETAIN_S, StoreNames, read_member
from gorgo.live.peer_store.pipeline import execute
from gorgo.live.peer_store.store_clock import StoreClock
from gorgo.live.telemetry.peers import PeerCounts

if TYPE_CHECKING:
    from redis.asyncio import Redis

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
            count=PAGE,
            block=int(BLOCK_S * 1e3) if waits else None,
        )
        found: dict[str, list[tuple[bytes, dict[bytes, bytes]]]] = {
            members[name.decode()]: rows for name, rows in answer
        }
        self._incoming.add(
            {
                member: [(read_id(number), fields.get(FIELD)) for number, fields in found.get(member, ())]
                for member in positions
            }
        )

    async def _find_members(self) -> None:
        requested_s = self._clock()
        pipeline = self._client.pipeline(transaction=False)
        pipeline.time()
        pipeline.zrevrangebyscore(self._names.members, "+inf", "-inf", start=0, num=MAX_PEERS)
        (seconds, microseconds), found = await execute(pipeline)
        self._store_clock.set_time(seconds + microseconds / 1e6, requested_s=requested_s)
        now_ms = seconds * 1000 + microseconds // 1000
        members = {member for member in map(read_member, found) if member is not None} - {self._member}
        self._incoming.follow(members, now_ms=now_ms, since_ms=max(0, now_ms - int(RETAIN_S * 1e3)))
        self.unreadable = {member: at_s for member, at_s in self.unreadable.items() if member in members}
        self._last_seq = {member: seq for member, seq in self._last_seq.items() if member in members}

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
            report = decode_report(entry.report)
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
