"""SRV records from a name server on real sockets."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from gorgo.config.fleet.source import FleetSourceConfig, SourceReplicaConfig
from gorgo.fleet_sources.dns import HostPort
from gorgo.fleet_sources.fleet import FoundFleet
from gorgo.fleet_sources.srv import ResolverFile
from gorgo.live.fleet_sources import srv as lookups
from gorgo.live.fleet_sources.dns import DnsSource
from gorgo.live.fleet_sources.reports import Reports
from gorgo.live.fleet_sources.srv import SrvLookup, machine_resolver
from tests.live.fleet_sources.dns_server import CNAME, NameServer, encode_name, name_server, record, srv
from tests.proxy.conftest import until

NAME = "_http._tcp.engines.llm.svc.cluster.local"
HOST = "_http._tcp.engines"
DOMAINS = ("llm.svc.cluster.local", "svc.cluster.local")


def lookup(server: NameServer, *servers: str, domains: tuple[str, ...] = ()) -> SrvLookup:
    file = ResolverFile(servers or ("127.0.0.1",), domains, ndots=5 if domains else 1)
    return SrvLookup(lambda: file, server.port)


async def test_targets_have_the_port_of_their_record_and_the_shortest_time() -> None:
    async with name_server() as server:
        server.records[NAME] = [srv("a.engines", 30000, 20), record(CNAME, encode_name("x.y")), srv("b.engines", 31000)]
        found = await lookup(server)(NAME, 0)
    assert list(found.addresses) == [HostPort("a.engines", 30000), HostPort("b.engines", 31000)]
    assert found.ttl_s == 20.0


async def test_answer_that_does_not_fit_is_asked_for_over_tcp() -> None:
    async with name_server() as server:
        server.records[NAME] = [srv(f"engine-{number}.engines", 30000) for number in range(400)]
        server.truncate = True
        found = await lookup(server)(NAME, 0)
        assert server.questions == [("udp", NAME), ("tcp", NAME)]
    assert len(found.addresses) == 400


async def test_short_name_is_searched_in_the_domains_of_the_pod() -> None:
    async with name_server() as server:
        server.records[NAME] = [srv("a.engines", 30000)]
        found = await lookup(server, domains=DOMAINS)(HOST, 0)
        assert server.questions == [("udp", NAME)]
        server.records = {f"{HOST}.svc.cluster.local": [srv("b.engines", 1)]}
        again = await lookup(server, domains=DOMAINS)(HOST, 0)
    assert (found.addresses[0].host, again.addresses[0].host) == ("a.engines", "b.engines")


async def test_datagrams_that_answer_another_question_are_ignored() -> None:
    async with name_server() as server:
        server.records[NAME] = [srv("a.engines", 30000)]
        server.before = [b"", b"x" * 40, b"\0" * 12]
        found = await lookup(server)(NAME, 0)
    assert [address.host for address in found.addresses] == ["a.engines"]


async def test_lost_datagram_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "ANSWER_S", 0.05)
    async with name_server() as server:
        server.records[NAME] = [srv("a.engines", 30000)]
        server.drop = 1
        found = await lookup(server)(NAME, 0)
        assert len(server.questions) == 2
    assert len(found.addresses) == 1


async def test_second_name_server_is_used_if_the_first_refuses() -> None:
    async with name_server() as server:
        server.records[NAME] = [srv("a.engines", 30000)]
        found = await lookup(server, "127.0.0.2", "127.0.0.1")(NAME, 0)
    assert len(found.addresses) == 1


@pytest.mark.parametrize(
    ("records", "code", "reason"),
    [
        (None, 0, f"{NAME} has no SRV record"),
        ([], 0, f"{NAME} has no SRV record"),
        ([srv(".", 1)], 0, f"{NAME} has no SRV record"),
        ([srv("a", 1)], 2, "127.0.0.1: the name server answers SERVFAIL"),
        ([srv("a", 0)], 0, "127.0.0.1: a record with the target 'a' and port 0"),
        ([srv("a@b/c", 1)], 0, "127.0.0.1: a record with the target 'a@b/c' and port 1"),
        ([srv("a", 1)[:-3]], 0, "127.0.0.1: an answer that cannot be read"),
    ],
)
async def test_name_without_usable_records_says_why(records: list[bytes] | None, code: int, reason: str) -> None:
    async with name_server() as server:
        if records is not None:
            server.records[NAME] = records
        server.code = code
        with pytest.raises(OSError) as raised:  # noqa: PT011 - its text is compared
            await lookup(server)(NAME, 0)
    assert str(raised.value) == reason


async def test_source_without_a_port_follows_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    async with name_server() as server:
        server.records[NAME] = [srv("engine-0.engines.llm", 30000)]
        monkeypatch.setattr(lookups, "machine_resolver", ResolverFile)
        config = FleetSourceConfig(
            name="srv", kind="dns", host=NAME, replica=SourceReplicaConfig(region="here"), interval_s=1.0
        )
        fleet = FoundFleet([config])
        source = DnsSource(config, Reports("srv", fleet, lambda: 0.0), lookup(server))
        task = asyncio.create_task(source.run())
        try:
            await until(lambda: fleet.sources["srv"].up)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    assert {name: entry.url for name, entry in fleet.sources["srv"].entries.items()} == {
        "srv-engine-0.engines.llm-30000": "http://engine-0.engines.llm:30000"
    }


def test_resolver_is_that_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "resolv.conf"
    monkeypatch.setattr(lookups, "RESOLVER_FILE", file)
    assert machine_resolver() == ResolverFile()
    file.write_text("nameserver 10.96.0.10\n")
    assert machine_resolver().servers == ("10.96.0.10",)
