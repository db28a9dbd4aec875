"""`gorgo check --live`: one cheap request to every replica at once, with its key, and the result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import httpx

from gorgo.config.engine_names import AUTO
from gorgo.config.model import ReplicaConfig
from gorgo.config.replica_advice import remedy
from gorgo.engines.probe import is_well, probe_paths
from gorgo.engines.registry import dialect
from gorgo.errors import ConfigError
from gorgo.live.monitor.discovery import discover
from gorgo.live.upstream.connect_cause import connect_cause
from gorgo.live.upstream.target import api_key


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


def reach_all(replicas: Sequence[ReplicaConfig], *, environ: Mapping[str, str], timeout_s: float) -> list[Reached]:
    """Return the answer of every replica, in the order of the file."""
    return asyncio.run(_reach_all(replicas, environ, timeout_s))


async def _reach_all(replicas: Sequence[ReplicaConfig], environ: Mapping[str, str], timeout_s: float) -> list[Reached]:
    async with httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client:
        return await asyncio.gather(*(_reach(client, replica, environ) for replica in replicas))


async def _reach(client: httpx.AsyncClient, replica: ReplicaConfig, environ: Mapping[str, str]) -> Reached:
    base = Reached(replica.name, replica.region, replica.url)
    if replica.api_key_env is not None and not environ.get(replica.api_key_env):
        return _failed(base, f"the environment variable {replica.api_key_env} is not set")
    try:
        # Checked as in the proxy: httpx would print an invalid key in its error.
        key = api_key(replica, environ)
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

    found = await discover(answer, identify=replica.engine == AUTO)
    engine = None if found.engine is None else " ".join(filter(None, (found.engine.name, found.engine.version)))
    models = tuple(model.name for model in found.models or ())
    return replace(reached, engine=engine if replica.engine == AUTO else replica.engine, models=models)


def _refusal(replica: ReplicaConfig, status: int) -> str:
    advice = remedy(status, url=replica.url, api_key_env=replica.api_key_env)
    return f"answered {status}" + (f": {advice}" if advice else "")


def _failed(base: Reached, error: str) -> Reached:
    return Reached(base.name, base.region, base.url, error=error)
