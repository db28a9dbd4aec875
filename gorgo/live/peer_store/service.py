"""A router among those of its group: reports to the store and from it, and what is known of the others.

Theory of operation. Two tasks with a connection each do all that waits for the store. A decision never does: the Router
has what was read last, and a silent peer fades. Whatever fails is tried again after a pause that grows. `DESIGN.md`
has why streams are read and nothing is published.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gorgo.config.model import SharedConfig
from gorgo.core.peers.records import PeerReport
from gorgo.core.router import Router
from gorgo.live.clock import Clock
from gorgo.live.logs import log_failure
from gorgo.live.peer_store.connection import router_name, store_client
from gorgo.live.peer_store.link import Direction, StoreLink
from gorgo.live.peer_store.names import StoreNames, member_name
from gorgo.live.peer_store.peer_rows import PeerRow, peer_rows
from gorgo.live.peer_store.reader import ReportReader
from gorgo.live.peer_store.writer import ReportWriter
from gorgo.live.router_gateway import RouterGateway
from gorgo.live.telemetry.peer_table import Subject
from gorgo.live.telemetry.peers import PeerCounts, PeerMeasures

if TYPE_CHECKING:
    from redis.asyncio import Redis

#: A start waits so long for the history of the others, s: caches of replicas are known with the first request.
JOIN_S = 1.0


class PeerStoreService:
    """One router among those of its group.

    Parameters
    ----------
    shared:
        Store and group.
    client:
        Of the store; closed by the service.
    router, gateway, clock:
        Of the process.
    key_id:
        Of the fingerprints.
    """

    def __init__(
        self,
        shared: SharedConfig,
        client: Redis,
        router: Router,
        gateway: RouterGateway,
        clock: Clock,
        *,
        key_id: str,
    ) -> None:
        names, member = StoreNames(shared.group), member_name(router_name(shared), router.boot_id)
        self.member = member
        self.shared = shared
        self.peers = router.peers.join(member, key_id=key_id)
        self.counts = PeerCounts()
        self.link = StoreLink(shared.url, self.counts, clock)
        #: Probes a replica now; set by the process.
        self.probe: Callable[[str], None] = lambda _: None
        self._client = client
        self._router = router
        self._gateway = gateway
        self._clock = clock
        self._writer = ReportWriter(client, names, self.peers, self.counts, clock)
        self._reader = ReportReader(client, names, member, self.counts, clock, self._apply)
        gateway.on_dispatch = self._writer.on_dispatch

    @classmethod
    def connecting(
        cls,
        shared: SharedConfig,
        environ: Mapping[str, str],
        router: Router,
        gateway: RouterGateway,
        clock: Clock,
        *,
        key_id: str,
    ) -> PeerStoreService:
        """Return the service with a client of its own. Raises `ConfigError` or `MissingExtra`."""
        return cls(shared, store_client(shared, environ), router, gateway, clock, key_id=key_id)

    async def run(self) -> None:
        """Write and read until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._repeat("write", self._write))
            tasks.create_task(self._repeat("read", self._read))

    async def wait_joined(self, limit_s: float = JOIN_S) -> None:
        """Wait until the history of the others was read, for `limit_s` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._reader.caught_up.wait()

    async def aclose(self) -> None:
        self._gateway.on_dispatch = None
        await self._client.aclose()

    def known_peers(self) -> list[PeerRow]:
        """Return the other routers, the last one heard of first."""
        return peer_rows(self.peers, self._reader.unreadable, now=self._clock())

    def measures(self) -> PeerMeasures:
        """Return what a scrape shows."""
        differing: dict[Subject, int] = {}
        rows = self.known_peers()
        for row in rows:
            for subject in row.differences:
                differing[subject] = differing.get(subject, 0) + 1
        evicted = self._router.peers.evicted_prefixes()
        return PeerMeasures(self.counts, self.link.joined, sum(row.counts for row in rows), differing, evicted)

    def as_dict(self) -> dict[str, Any]:
        """Return what operators read of the store and of the others."""
        link = self.link
        return {
            "router": self.member,
            "group": self.shared.group,
            "url": self.shared.url,
            "joined": link.joined,
            "fault": link.fault,
            "error": link.error,
            "for_s": self._clock() - link.since_s,
            "peers": [row.as_dict() for row in self.known_peers()],
        }

    # -- steps

    async def _repeat(self, direction: Direction, step: Callable[[], Awaitable[None]]) -> None:
        """Take one step after another. A failure of the store, or of this service, delays the next one."""
        from redis.exceptions import RedisError

        own = asyncio.current_task()
        # The client sends under `asyncio.wait_for`, which may lose a cancellation in Python 3.11.
        while own is not None and not own.cancelling():
            try:
                await step()
            except (RedisError, OSError, TimeoutError) as error:
                await asyncio.sleep(self.link.on_failure(direction, error, chance=random.random()))
            except Exception as failure:  # noqa: BLE001 - a fault here ends neither the other direction nor the process
                log_failure("peer_store_failed", failure, direction=direction)
                await asyncio.sleep(self.link.on_failure(direction, failure, chance=random.random()))

    async def _write(self) -> None:
        if self.link.fails("write"):
            await self._writer.write()
        elif not await self._writer.write_in_turn():
            return
        self.link.on_success("write")

    async def _read(self) -> None:
        await self._reader.read()
        self.link.on_success("read")

    def _apply(self, report: PeerReport, age_s: float) -> None:
        self._gateway.apply(self._router.peers.on_report(report, now=self._clock(), age_s=age_s))
        hints = self.peers.probe_hints
        while hints:
            self.probe(hints.popleft())
