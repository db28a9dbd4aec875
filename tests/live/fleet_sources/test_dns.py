"""A source in DNS, with a resolver of the test and with the machine's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from gorgo.config.fleet import FleetSourceConfig, SourceReplicaConfig
from gorgo.fleet_sources.entries import HostPort, Resolved
from gorgo.fleet_sources.fleet import FoundFleet, SourceState
from gorgo.live.fleet_sources import dns
from gorgo.live.fleet_sources.dns import DnsSource, Lookup, resolve_addresses
from gorgo.live.fleet_sources.reports import Reports
from tests.proxy.conftest import until

CONFIG = FleetSourceConfig(
    name="dns", kind="dns", host="engines.llm", port=30000, replica=SourceReplicaConfig(region="here"), interval_s=10.0
)


@asynccontextmanager
async def following(lookup: Lookup, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[SourceState, list[float]]]:
    """A source whose pauses are recorded instead of waited for."""
    pauses: list[float] = []

    class Hasty:
        """asyncio, but for `sleep`."""

        def __getattr__(self, name: str) -> object:
            return getattr(asyncio, name)

        @staticmethod
        async def sleep(seconds: float) -> None:
            pauses.append(seconds)
            await asyncio.sleep(0.001)

    monkeypatch.setattr(dns, "asyncio", Hasty())
    fleet = FoundFleet([CONFIG])
    task = asyncio.create_task(DnsSource(CONFIG, Reports("dns", fleet, lambda: 0.0), lookup).run())
    try:
        yield fleet.sources["dns"], pauses
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_addresses_are_replicas_and_follow_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ["10.0.0.1", "10.0.0.2"]
    requests: list[tuple[str, int]] = []

    async def lookup(host: str, port: int) -> Resolved:
        requests.append((host, port))
        return Resolved([HostPort(address, port) for address in answer])

    async with following(lookup, monkeypatch) as (state, _):
        await until(lambda: state.synced)
        assert [entry.url for entry in state.entries.values()] == ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]
        answer[:] = ["10.0.0.2", "10.0.0.3"]
        await until(lambda: set(state.entries) == {"dns-10.0.0.2-30000", "dns-10.0.0.3-30000"})
    assert set(requests) == {("engines.llm", 30000)}


@pytest.mark.parametrize(("ttl_s", "pause"), [(None, 10.0), (0.0, 1.0), (3.0, 3.0), (300.0, 10.0)])
async def test_answer_is_used_for_its_time_and_no_longer_than_the_interval(
    ttl_s: float | None, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lookup(host: str, port: int) -> Resolved:
        return Resolved([HostPort("10.0.0.1", port)], ttl_s)

    async with following(lookup, monkeypatch) as (_, pauses):
        await until(lambda: len(pauses) > 2)
    assert set(pauses) == {pause}


@pytest.mark.parametrize("failure", ["error", "empty"])
async def test_name_without_an_answer_leaves_the_last_fleet(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    down = False

    async def lookup(host: str, port: int) -> Resolved:
        if down and failure == "error":
            raise OSError(-2, "Name or service not known")
        return Resolved([] if down else [HostPort("10.0.0.1", port)])

    async with following(lookup, monkeypatch) as (state, _):
        await until(lambda: state.up)
        down = True
        await until(lambda: not state.up)
        reason = "Name or service not known" if failure == "error" else "an answer without an address"
        assert (state.error, list(state.entries)) == (reason, ["dns-10.0.0.1-30000"])
        down = False
        await until(lambda: state.up)


async def test_resolver_that_hangs_is_named_and_no_second_look_up_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns, "LOOKUP_S", 0.01)
    release = asyncio.Event()
    running = 0

    async def lookup(host: str, port: int) -> Resolved:
        nonlocal running
        running += 1
        await release.wait()
        return Resolved([HostPort("10.0.0.1", port)])

    async with following(lookup, monkeypatch) as (state, _):
        await until(lambda: state.error == "no answer within 0.01 s")
        assert running == 1
        release.set()
        await until(lambda: state.up)


async def test_machine_resolves_its_own_name() -> None:
    found = await resolve_addresses("localhost", 30000)
    assert {address.port for address in found.addresses} == {30000}
    assert {address.host for address in found.addresses} <= {"127.0.0.1", "::1"}
    assert found.ttl_s is None


async def test_name_that_is_none_is_an_error() -> None:
    with pytest.raises(OSError, match=r"is no name|not known|failed"):
        await resolve_addresses("a" * 70 + ".invalid", 1)
