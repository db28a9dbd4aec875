"""A router among those of its group: reports to the store and from it, and what is known of the others.

Owns the tasks and their retries (`PeerStoreService`), the state of the link (`StoreLink`), and the rows of peers for an
operator (`PeerRow`). Leaves reading and writing to `reader` and `writer`, and the meaning of reports to `core.peers`.

Theory of operation. Two tasks with a connection each do all that waits for the store. A decision never does: the Router
has what was read last, and a silent peer fades. Whatever fails is tried again after a pause that grows. `DESIGN.md`
has why streams are read and nothing is published.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gorgo.config.model import SharedConfig
from gorgo.core.backoff import backoff_s
from gorgo.core.peers.exchange import PeerExchange
from gorgo.core.peers.records import PeerReport, PeerStatus
from gorgo.core.router import Router
from gorgo.live.event_loop import Clock, RouterGateway
from gorgo.live.logs import log, log_failure
from gorgo.live.peer_store.connection import StoreNames, member_name, router_name, seal_key, store_client
from gorgo.live.peer_store.streams import OutgoingReports, ReportReader, ReportWriter
from gorgo.live.telemetry.counters import PeerCounts, PeerMeasures
from gorgo.live.telemetry.metric_table import StoreFault, Subject

if TYPE_CHECKING:
    from redis.asyncio import Redis


# The other routers as an operator reads them, and where each differs from this one.


#: A router that was silent for longer is left out, s: it has been stopped.
SHOWN_S = 60.0
#: Names of drained or ejected replicas in a row.
_NAMES = 20


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One peer."""

    router: str
    #: Since its last report, s.
    age_s: float
    #: Whether its load counts.
    counts: bool
    status: PeerStatus
    #: What is different here, with words for an operator.
    differences: Mapping[Subject, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        names = {"draining": self.status.draining[:_NAMES], "ejected": self.status.ejected[:_NAMES]}
        shown = {"router": self.router, "age_s": self.age_s, "counts": self.counts} | asdict(self.status) | names
        return shown | {"differences": dict(self.differences)}


def peer_rows(peers: PeerExchange, unreadable: Mapping[str, float], *, now: float) -> list[PeerRow]:
    """Return a row per peer, the last one heard of first; `unreadable` has times of reports of another version."""
    rows = []
    for view in peers.views(now=now):
        differences = _differences(view.status, peers.status(), same_key=view.same_key)
        rows.append(PeerRow(view.router, now - view.received_s, view.counts, view.status, differences))
    for router, at_s in unreadable.items():
        rows.append(
            PeerRow(router, now - at_s, False, PeerStatus(), {"format": "its reports have records of another version"})
        )
    return sorted((peer for peer in rows if peer.age_s < SHOWN_S), key=lambda peer: peer.age_s)


def peer_measures(peers: Sequence[PeerRow], counts: PeerCounts, router: Router, *, joined: bool) -> PeerMeasures:
    """Return what a scrape shows of these peers."""
    differing = Counter(subject for peer in peers for subject in peer.differences)
    heard = sum(peer.counts for peer in peers)
    return PeerMeasures(counts, joined, heard, dict(differing), router.peers.evicted_prefixes())


def _differences(theirs: PeerStatus, ours: PeerStatus, *, same_key: bool) -> dict[Subject, str]:
    differences: dict[Subject, str] = {}
    if theirs.policy != ours.policy:
        differences["policy"] = f"policy {theirs.policy}, here {ours.policy}"
    elif theirs.weights_version != ours.weights_version:
        differences["weights"] = f"weights version {theirs.weights_version}, here {ours.weights_version}"
    if theirs.frozen != ours.frozen:
        differences["freeze"] = "frozen, not here" if theirs.frozen else "not frozen, here frozen"
    if theirs.model != ours.model:
        differences["model"] = f"model {theirs.model or 'none'}, here {ours.model or 'none'}"
    if not same_key:
        differences["key"] = "another fingerprint key: its prefixes are ignored"
    return differences


# What a failed command says about the store, in one of a few words.


def fault_of(error: Exception) -> StoreFault:
    """Return the kind of a failure."""
    from redis import exceptions

    # Before `ConnectionError`, of which some of them are.
    if isinstance(error, exceptions.OutOfMemoryError) or str(error).startswith("MISCONF"):
        return "full"
    refusals = exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError
    if isinstance(error, (*refusals, exceptions.AuthenticationWrongNumberOfArgsError)):
        return "refused"
    if isinstance(error, exceptions.BusyLoadingError | exceptions.ReadOnlyError | exceptions.ClusterDownError):
        return "not_ready"
    if isinstance(error, exceptions.TimeoutError | TimeoutError):
        return "slow"
    if isinstance(error, exceptions.ConnectionError | OSError):
        return "unreachable"
    return "error"


# The state of a router's link to its store: joined or alone, and why; one log line per change.


#: Between a failure and the next try: short, because knowledge is to be back soon; longer while the store is gone.
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0

Direction = Literal["write", "read"]


class StoreLink:
    """Whether reports are written and read.

    Parameters
    ----------
    url:
        The store's, for the log.
    """

    def __init__(self, url: str, counts: PeerCounts, clock: Clock) -> None:
        self._url = url
        self._counts = counts
        self._clock = clock
        self._faults: dict[Direction, StoreFault] = {}
        #: Directions without a command that has succeeded yet.
        self._untried: set[Direction] = {"write", "read"}
        self._failures: dict[Direction, int] = {"write": 0, "read": 0}
        #: Text of the last failure.
        self.error: str | None = None
        self.since_s = clock()

    @property
    def joined(self) -> bool:
        return not self._faults and not self._untried

    @property
    def fault(self) -> StoreFault | None:
        """Return why the router is alone; `None` if it is not, or has not tried yet."""
        return next(iter(self._faults.values()), None)

    def fails(self, direction: Direction) -> bool:
        return direction in self._faults

    def on_success(self, direction: Direction) -> None:
        before = self.joined
        self._faults.pop(direction, None)
        self._untried.discard(direction)
        self._failures[direction] = 0
        if self.joined and not before:
            log("peer_store_joined", store=self._url, after_s=round(self._clock() - self.since_s, 1))
            self.since_s, self.error = self._clock(), None

    def on_failure(self, direction: Direction, error: Exception, *, chance: float) -> float:
        """Return after how many seconds to try again; `chance` is in [0, 1)."""
        fault, alone = fault_of(error), bool(self._faults)
        if self.joined:
            self.since_s = self._clock()
        self._counts.failures[fault] += 1
        self._faults[direction], self.error = fault, f"{type(error).__name__}: {error}"[:300]
        if not alone:
            log("peer_store_lost", level=logging.WARNING, store=self._url, reason=fault, error=self.error)
        self._failures[direction] += 1
        return backoff_s(self._failures[direction], first_s=FIRST_BACKOFF_S, longest_s=MAX_BACKOFF_S, chance=chance)


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
    key:
        Of the tags of entries.
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
        key: bytes,
        key_id: str,
    ) -> None:
        names, member = StoreNames(shared.group, key), member_name(router_name(shared), router.boot_id)
        self.member = member
        self.shared = shared
        self.peers = router.peers.join(member, key_id=key_id)
        self.reports = OutgoingReports(self.peers)
        #: Members that are heard of in another way: the other workers of this router, where it has some.
        self.heard_otherwise: Container[str] = ()
        self.counts = PeerCounts()
        self.link = StoreLink(shared.url, self.counts, clock)
        #: Probes a replica now; set by the process.
        self.probe: Callable[[str], None] = lambda _: None
        self._client = client
        self._router = router
        self._gateway = gateway
        self._clock = clock
        self._writer = ReportWriter(client, names, self.reports, self.counts, clock)
        self._reader = ReportReader(client, names, member, self.counts, clock, self._apply)
        gateway.on_dispatch.append(self._writer.on_dispatch)

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
        key = seal_key(shared, environ)
        return cls(shared, store_client(shared, environ), router, gateway, clock, key=key, key_id=key_id)

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
        self._gateway.on_dispatch.clear()
        await self._client.aclose()

    def known_peers(self) -> list[PeerRow]:
        """Return the other routers, the last one heard of first."""
        return peer_rows(self.peers, self._reader.unreadable, now=self._clock())

    def measures(self) -> PeerMeasures:
        """Return what a scrape shows."""
        return peer_measures(self.known_peers(), self.counts, self._router, joined=self.link.joined)

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
            "peers": [peer.as_dict() for peer in self.known_peers()],
        }

    # -- steps

    async def _repeat(self, direction: Direction, step: Callable[[], Awaitable[None]]) -> None:
        """Take one step after another. A failure of the store, or of this service, delays the next one."""
        from redis.exceptions import RedisError

        task = asyncio.current_task()
        # The client sends under `asyncio.wait_for`, which may lose a cancellation in Python 3.11.
        while task is not None and not task.cancelling():
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
        if report.router in self.heard_otherwise:
            return
        self._gateway.apply(self._router.peers.on_report(report, now=self._clock(), age_s=age_s))
        hints = self.peers.probe_hints
        while hints:
            self.probe(hints.popleft())
