"""`gorgo check --live`: one cheap request to every replica, with its key; the first result of every fleet source."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self
from urllib.parse import urlsplit

import httpx

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config
from gorgo.config.replica_advice import remedy
from gorgo.config.values import AUTO
from gorgo.engines.base import is_well, probe_paths
from gorgo.engines.registry import dialect
from gorgo.errors import ConfigError
from gorgo.fleet_sources.entries import Found
from gorgo.fleet_sources.fleet import FoundFleet
from gorgo.live.fleet_sources.reports import Reports
from gorgo.live.fleet_sources.service import follow_source
from gorgo.live.http.tls import shared_tls, upstream_tls
from gorgo.live.monitor.discovery import discover
from gorgo.live.replica_secrets import api_key
from gorgo.live.upstream.address import connect_cause

#: Until the first result or failure of a source; a look-up and a page of a list have shorter limits each.
FIRST_RESULT_S = 15.0
#: Replicas that are reached at once: a source may have thousands.
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Reached:
    """Answer of one replica; `error` is None without one, `rtt_ms` includes the connection set-up."""

    name: str
    region: str
    url: str
    rtt_ms: float | None = None
    status: int | None = None
    error: str | None = None
    #: Kind of engine and version, as found for `engine: auto`; None if unknown.
    engine: str | None = None
    #: Models that the replica lists.
    models: tuple[str, ...] = ()
    #: What the host name of its URL has in DNS; empty without an answer.
    addresses: tuple[str, ...] = ()


def find_all(config: Config, *, environ: Mapping[str, str]) -> FoundFleet:
    """Return the fleet sources after the first result or failure of each."""
    return asyncio.run(find_sources(config, environ))


async def find_sources(config: Config, environ: Mapping[str, str]) -> FoundFleet:
    """As `find_all`."""
    fleet = FoundFleet(config.fleet_sources, now=time.monotonic())
    await asyncio.gather(*(_find(fleet, name, environ) for name in fleet.sources))
    return fleet


async def _find(fleet: FoundFleet, name: str, environ: Mapping[str, str]) -> None:
    reports = _FirstReport(name, fleet)
    task = asyncio.create_task(follow_source(fleet.sources[name].config, reports, environ))
    first = asyncio.create_task(reports.finished.wait())
    done, _ = await asyncio.wait((task, first), timeout=FIRST_RESULT_S, return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    first.cancel()
    (ended, _) = await asyncio.gather(task, first, return_exceptions=True)
    if isinstance(ended, ConfigError):
        reports.fail(str(ended))
    elif isinstance(ended, Exception):
        raise ended
    elif not done:
        reports.fail(f"no result within {FIRST_RESULT_S:g} s")


class _FirstReport(Reports):
    """The reports of a source until its first result or failure; nothing is logged."""

    def __init__(self, name: str, fleet: FoundFleet) -> None:
        super().__init__(name, fleet, time.monotonic, lambda *_, **__: None)
        self.finished = asyncio.Event()

    def report_result(self, found: Found) -> None:
        super().report_result(found)
        self.finished.set()

    def fail(self, reason: str) -> None:
        super().fail(reason)
        self.finished.set()


def reach_all(replicas: Sequence[ReplicaConfig], *, environ: Mapping[str, str], timeout_s: float) -> list[Reached]:
    """Return the answer of every replica, in the order of the file."""
    return asyncio.run(_reach_all(replicas, environ, timeout_s))


async def _reach_all(replicas: Sequence[ReplicaConfig], environ: Mapping[str, str], timeout_s: float) -> list[Reached]:
    async with ReplicaClients(timeout_s) as clients:
        return await clients.reach_all(replicas, environ)


class ReplicaClients:
    """An HTTP client for each set of TLS files that replicas have; closed at the end of the block."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._tls = shared_tls(ssl.create_default_context())
        self._clients: dict[tuple[str | None, ...], httpx.AsyncClient] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.aclose()

    def of(self, replica: ReplicaConfig) -> httpx.AsyncClient:
        """Return the client for a replica. Raises `ConfigError` for a file that cannot be used."""
        files = replica.ca_file, replica.client_cert, replica.client_key
        if files not in self._clients:
            tls = upstream_tls(replica, self._tls) if any(files) else self._tls()
            self._clients[files] = httpx.AsyncClient(timeout=self._timeout_s, trust_env=False, verify=tls)
        return self._clients[files]

    async def reach_all(self, replicas: Sequence[ReplicaConfig], environ: Mapping[str, str]) -> list[Reached]:
        """Return the answer of every replica, in their order."""
        turns = asyncio.Semaphore(_AT_ONCE)

        async def reach(replica: ReplicaConfig) -> Reached:
            async with turns:
                addresses = await _addresses_of(replica.url, timeout_s=self._timeout_s)
                return replace(await _reach(self, replica, environ), addresses=addresses)

        return await asyncio.gather(*map(reach, replicas))


async def _addresses_of(url: str, *, timeout_s: float) -> tuple[str, ...]:
    """Return the addresses of a URL's host; none if it has none or DNS does not answer, which the request says too."""
    try:
        parts = urlsplit(url)
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            infos = await loop.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in infos))


async def _reach(clients: ReplicaClients, replica: ReplicaConfig, environ: Mapping[str, str]) -> Reached:
    base = Reached(replica.name, replica.region, replica.url)
    if replica.api_key_env is not None and not environ.get(replica.api_key_env):
        return _failed(base, f"the environment variable {replica.api_key_env} is not set")
    try:
        # Checked as in the proxy: httpx would print an invalid key in its error.
        key, client = api_key(replica, environ), clients.of(replica)
    except ConfigError as error:
        return _failed(base, str(error))
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        first, second = (replica.url.rstrip("/") + path for path in probe_paths(dialect(replica.engine)))
        started_s = time.perf_counter()
        response = await client.get(first, headers=headers)
        if response.status_code in (404, 405):
            started_s = time.perf_counter()
            other = await client.get(second, headers=headers)
            response = other if other.status_code not in (404, 405) else response
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # the last for an invalid host name
        return _failed(base, connect_cause(error) or f"{type(error).__name__}: {error}".rstrip(": "))
    rtt_ms = (time.perf_counter() - started_s) * 1e3
    bad = None if is_well(response.status_code) else _refusal(replica, response.status_code)
    reached = Reached(replica.name, replica.region, replica.url, rtt_ms, response.status_code, bad)
    return reached if bad else await _described(client, reached, replica, headers)


async def _described(
    client: httpx.AsyncClient, reached: Reached, replica: ReplicaConfig, headers: Mapping[str, str]
) -> Reached:
    """Return the row with what the replica says of its engine and models."""

    async def answer(path: str) -> object:
        try:
            response = await client.get(replica.url.rstrip("/") + path, headers=headers)
            return response.json() if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError, RecursionError):
            return None

    discovered = await discover(answer, identify=replica.engine == AUTO)
    engine = (
        None
        if discovered.engine is None
        else " ".join(filter(None, (discovered.engine.name, discovered.engine.version)))
    )
    models = tuple(model.name for model in discovered.models or ())
    return replace(reached, engine=engine if replica.engine == AUTO else replica.engine, models=models)


def _refusal(replica: ReplicaConfig, status: int) -> str:
    advice = remedy(status, url=replica.url, api_key_env=replica.api_key_env)
    return f"answered {status}" + (f": {advice}" if advice else "")


def _failed(base: Reached, error: str) -> Reached:
    return Reached(base.name, base.region, base.url, error=error)
