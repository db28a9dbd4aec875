"""A worker among those of its router: reports in shared memory, 10 ms after a change.

Owns the intervals and the form of a report there (`LocalPeers`). Leaves the memory to `workers.reports`, and the
meaning of reports to `core.peers`. It is the second transport of reports, beside the store of several routers.

Theory of operation. Both ends are this program's and of one machine: a report is not parsed as a stranger's would be,
and its age is a difference of the machine's monotonic clock. A report wakes nobody: each worker reads those of the
others before a decision and in its own turns. One without events sleeps until its heartbeat.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

import msgspec

from gorgo.core.peers.exchange import HEARTBEAT_S
from gorgo.core.peers.records import PeerReport
from gorgo.core.router import Router
from gorgo.live.event_loop import Clock, RouterGateway
from gorgo.live.logs import log_failure
from gorgo.live.peer_store.service import PeerRow, PeerStoreService, peer_measures, peer_rows
from gorgo.live.peer_store.streams import OutgoingReports
from gorgo.live.telemetry.counters import PeerCounts, PeerMeasures
from gorgo.live.workers.link import WorkerLink
from gorgo.live.workers.reports import SharedReports

#: From a change to its report, and the next ones with it, s.
INTERVAL_S = 0.01
#: More than there are workers, and than start within the seconds in which a report in the store counts.
_MAX_SIBLINGS = 256
#: When a report was written, by the machine's monotonic clock, s.
_WRITTEN = struct.Struct("!d")
_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(PeerReport).decode


class LocalPeers:
    """One worker among those of its router.

    Parameters
    ----------
    link, reports:
        To the other workers.
    router, gateway, clock:
        Of the process.
    key_id:
        Of the fingerprints.
    store:
        Of the group of routers that this one is in; `None`: in none.
    """

    def __init__(
        self,
        link: WorkerLink,
        reports: SharedReports,
        router: Router,
        gateway: RouterGateway,
        clock: Clock,
        *,
        key_id: str,
        store: PeerStoreService | None = None,
    ) -> None:
        #: Members of the other workers; of those that have ended too, whose last reports the store may still have.
        self._siblings: deque[str] = deque(maxlen=_MAX_SIBLINGS)
        if store is None:
            name = f"worker-{link.number}/{router.boot_id[:8]}"
            self._reports, self.counts = OutgoingReports(router.peers.join(name, key_id=key_id)), PeerCounts()
        else:
            self._reports, self.counts = store.reports, store.counts
            store.heard_otherwise = self._siblings
        self.peers = self._reports.peers
        #: Probes a replica now; set by the process.
        self.probe: Callable[[str], None] = lambda _: None
        self._link = link
        self._memory = reports
        self._router = router
        self._gateway = gateway
        self._clock = clock
        self._outgoing = self._reports.new_transport()
        self._woken = asyncio.Event()
        #: Member by worker.
        self._members: dict[int, str] = {}
        gateway.before_decision, gateway.after_event = self.read_reports, self._woken.set
        link.on_ended.append(self._forget)

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            # What is queued may have a place by the next report of another one.
            if not (self._woken.is_set() or self._router.queued or self._outgoing):
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._woken.wait()
            self._woken.clear()
            await asyncio.sleep(INTERVAL_S)
            self.read_reports()
            if self._outgoing or self.peers.has_news(now=self._clock()):
                self.write_report()

    def write_report(self) -> None:
        """Write a report of now; one beyond the memory's bound is part of the next one."""
        report = self._reports.make_report(self._outgoing, now=self._clock())
        content = _ENCODE(report)
        self.counts.dropped = self._outgoing.dropped + self.peers.outbox.dropped
        if self._memory.write(_WRITTEN.pack(monotonic()) + content):
            self._outgoing.on_written()
            self.counts.reports["written"] += 1
            self.counts.written_bytes += len(content)

    def read_reports(self) -> None:
        """Take in what the others have written since the last call."""
        for worker, content in self._memory.read():
            try:
                self._take(worker, content)
            except Exception as failure:  # noqa: BLE001 - a fault in a report must not fail the request that reads it
                log_failure("worker_event_failed", failure, topic="report")

    def known_peers(self) -> list[PeerRow]:
        """Return the other workers, the last one heard of first; an idle worker reads their reports here too."""
        self.read_reports()
        return peer_rows(self.peers, {}, now=self._clock())

    def measures(self) -> PeerMeasures:
        """Return what a scrape shows."""
        joined = not self._link.ended.is_set()
        return peer_measures(self.known_peers(), self.counts, self._router, joined=joined)

    def _take(self, worker: int, content: bytes) -> None:
        (written_s,) = _WRITTEN.unpack_from(content)
        report = _DECODE(memoryview(content)[_WRITTEN.size :])
        self.counts.reports["read"] += 1
        self.counts.read_bytes += len(content)
        if self._members.get(worker) != report.router:
            self._members[worker] = report.router
            self._siblings.append(report.router)
        age_s = max(0.0, monotonic() - written_s)
        self._gateway.apply(self._router.peers.on_report(report, now=self._clock(), age_s=age_s))
        hints = self.peers.probe_hints
        while hints:
            self.probe(hints.popleft())

    def _forget(self, worker: int) -> None:
        """Count nothing of a worker that has ended: its requests have ended with it."""
        self._memory.skip(worker)
        member = self._members.pop(worker, None)
        if member is not None:
            self.peers.drop_router(member)
