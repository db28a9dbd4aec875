"""One replica as the proxy reaches it: connections, dialect, key, and the number of attempts in progress.

By that number the connections of a removed replica are closed after its last stream.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gorgo.config.fleet import KvEventsConfig, ReplicaConfig
from gorgo.config.model import LimitsConfig
from gorgo.config.router_settings import Deadlines
from gorgo.config.values import AUTO, WARM_CONNECTIONS
from gorgo.core.limits import BufferBudget
from gorgo.engines.base import EngineDialect, ReportWatch
from gorgo.engines.discovery import FoundEngine
from gorgo.engines.registry import dialect
from gorgo.live.cache_push import PushSource
from gorgo.live.replica_secrets import ReplicaSecrets
from gorgo.live.upstream.client import UpstreamClient
from gorgo.live.upstream.transport import PlainTransport

#: Two rounds of pings on warm connections: one that is refused may be an engine that restarts.
UNREACHABLE_PINGS = 2 * WARM_CONNECTIONS


#: The reason of an answer that goes on elsewhere because its replica drains or has left.
MOVED = "moved"


class RunningStream(Protocol):
    """A stream of a replica that could go on at another one."""

    @property
    def last_s(self) -> float:
        """Return when its last event came (monotonic s)."""
        ...

    def move(self, reason: str) -> bool:
        """Ask another replica for the rest of its answer; return whether one was asked."""
        ...


@dataclass(slots=True, eq=False)
class Target:
    """One replica as the proxy reaches it."""

    name: str
    region: str
    upstream: UpstreamClient
    dialect: EngineDialect
    #: Reports that the engine does not make.
    reports: ReportWatch
    #: For attempts from now on; those in progress have theirs.
    deadlines: Deadlines
    request_usage: bool = False
    secrets: ReplicaSecrets = field(default_factory=ReplicaSecrets)
    #: What its engine pushes of its cache.
    pushes: PushSource = field(default_factory=PushSource, init=False, repr=False)
    #: Where its KV events come from, and whether that has changed.
    kv_events: KvEventsConfig | None = None
    kv_events_changed: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False)
    #: Why what it reports of its cache is not used, as last logged; `None` if it is.
    unused_reports: str | None = field(default=None, init=False)
    #: Whether the kind of engine is found by asking.
    detects_engine: bool = False
    #: Its streams that could go on elsewhere, the oldest first.
    streams: dict[RunningStream, None] = field(default_factory=dict, init=False)
    found_engine: FoundEngine | None = field(default=None, init=False)
    #: An attempt lost a connection, or had one refused, since the last scrape.
    connection_lost: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False)
    #: Why the last attempt or probe found no connection or no answer, for operators; `None` after a good probe.
    last_failure: str | None = field(default=None, init=False)
    #: Pings in a row, of probes and warm connections, that found no connection.
    unconnected_pings: int = field(default=0, init=False)
    #: Attempts in progress, counted by `acquire` and `release`.
    active: int = field(default=0, init=False)
    #: Attempts since the start.
    attempts: int = field(default=0, init=False)
    #: Its answers in a row whose streams broke off behind the finish reason.
    cut_ends: int = field(default=0, init=False)
    _drained: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False)

    @property
    def unreachable(self) -> bool:
        """Whether the last pings found no connection. Known in seconds; probes of long intervals eject later."""
        return self.unconnected_pings >= UNREACHABLE_PINGS

    def acquire(self) -> None:
        self.active += 1
        self.attempts += 1

    def release(self) -> None:
        self.active -= 1
        if not self.active:
            self._drained.set()

    async def wait_drained(self) -> None:
        """Return when no attempt is in progress."""
        while self.active:
            self._drained.clear()
            await self._drained.wait()

    @property
    def api_key(self) -> str | None:
        """The replica's own key."""
        return self.secrets.api_key

    @property
    def engine(self) -> Mapping[str, object]:
        """The kind of engine in use, its version if known, and whether both were found by asking."""
        found = self.found_engine
        known = found is not None or not self.detects_engine
        return {
            "name": self.dialect.name if known else None,
            "version": None if found is None else found.version,
            "found": self.detects_engine,
        }

    def use_engine(self, engine: FoundEngine) -> None:
        """Speak to the engine that was found; what another kind reports is no longer of interest."""
        if engine.name != self.dialect.name:
            self.dialect = dialect(engine.name)
            self.reports = ReportWatch(self.dialect)
        self.found_engine = engine

    def update(
        self, replica: ReplicaConfig, limits: LimitsConfig, deadlines: Deadlines, secrets: ReplicaSecrets
    ) -> None:
        """Update the settings of the same process; streams in progress go on."""
        self.region, self.request_usage, self.secrets = replica.region, replica.request_usage, secrets
        self.deadlines = deadlines
        if replica.kv_events != self.kv_events:
            self.kv_events = replica.kv_events
            self.kv_events_changed.set()
        self.upstream.set_limits(connections=limits.connections_per_replica, connect_timeout_s=deadlines.connect_s)
        self.upstream.refuse_addresses(replica.refuses)


def make_target(
    replica: ReplicaConfig,
    limits: LimitsConfig,
    deadlines: Deadlines,
    secrets: ReplicaSecrets,
    tls: ssl.SSLContext,
    buffers: BufferBudget,
    *,
    plain: bool = False,
) -> Target:
    """Return a target. Needs a running loop: connection pools belong to one. `plain`: requests by httpx."""
    engine = dialect(replica.engine)
    upstream = UpstreamClient(
        replica.url,
        connections=limits.connections_per_replica,
        connect_timeout_s=deadlines.connect_s,
        tls=tls,
        buffers=buffers,
        new_transport=PlainTransport if plain else None,
    )
    upstream.refuse_addresses(replica.refuses)
    return Target(
        name=replica.name,
        region=replica.region,
        upstream=upstream,
        dialect=engine,
        reports=ReportWatch(engine),
        deadlines=deadlines,
        request_usage=replica.request_usage,
        secrets=secrets,
        kv_events=replica.kv_events,
        detects_engine=replica.engine == AUTO,
    )
