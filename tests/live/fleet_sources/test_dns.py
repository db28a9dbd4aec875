"""Sources in DNS: names with addresses and SRV records, from a name server on real sockets."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest
from dns.asyncresolver import Resolver
from dns.name import from_text

from gorgo.config.fleet import FleetSourceConfig, SourceReplicaConfig
from gorgo.errors import InvalidValueError, MissingExtra
from gorgo.fleet_sources.entries import HostPort, Resolved
from gorgo.fleet_sources.fleet import FoundFleet, SourceState
from gorgo.live import extras
from gorgo.live.fleet_sources import service
from gorgo.live.fleet_sources import srv as lookups
from gorgo.live.fleet_sources.reports import Reports
from gorgo.live.fleet_sources.service import DnsSource, Lookup, resolve_addresses
from gorgo.live.fleet_sources.srv import SrvLookup, machine_resolver, names_to_try
from tests.proxy.conftest import until

# --- A name server on real sockets of the loopback, over UDP and TCP, with the SRV records of a test.


SRV, CNAME = 33, 5


def encode_name(name: str) -> bytes:
    return b"".join(bytes((len(label),)) + label.encode() for label in name.split(".") if label) + b"\0"


def record(kind: int, data: bytes, ttl_s: int = 30) -> bytes:
    """A record of the name in the question, by a pointer to it."""
    return struct.pack("!HHHIH", 0xC00C, kind, 1, ttl_s, len(data)) + data


def srv(target: str, port: int, ttl_s: int = 30) -> bytes:
    return record(SRV, struct.pack("!HHH", 0, 5, port) + encode_name(target), ttl_s)


@dataclass
class NameServer:
    """Records by name; a name without an entry does not exist."""

    records: dict[str, list[bytes]] = field(default_factory=dict)
    #: Code of every answer while set.
    code: int = 0
    #: Requests over UDP that get no answer, or are answered as truncated.
    drop: int = 0
    truncate: bool = False
    #: Datagrams that come before each answer over UDP.
    before: list[bytes] = field(default_factory=list)
    questions: list[tuple[str, str]] = field(default_factory=list)
    port: int = 0

    def answer(self, message: bytes, over: str) -> bytes:
        name, at = "", 12
        while message[at]:
            name += message[at + 1 : at + 1 + message[at]].decode() + "."
            at += 1 + message[at]
        name = name.rstrip(".")
        self.questions.append((over, name))
        rows = self.records.get(name)
        truncated = over == "udp" and self.truncate
        code = self.code or (3 if rows is None else 0)
        flags = 0x8180 | (0x0200 if truncated else 0) | code
        shown = [] if rows is None or truncated else rows
        return message[:2] + struct.pack("!5H", flags, 1, len(shown), 0, 0) + message[12 : at + 5] + b"".join(shown)


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str | int, int]) -> None:
        answer = self._server.answer(data, "udp")
        if self._server.drop:
            self._server.drop -= 1
            return
        for other in self._server.before:
            self._transport.sendto(other, addr)
        self._transport.sendto(answer, addr)


@asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    """A server on one free port for both transports."""
    server = NameServer()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(2))
        answer = server.answer(await reader.readexactly(size), "tcp")
        writer.write(len(answer).to_bytes(2) + answer)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    streams = await asyncio.start_server(serve, "127.0.0.1", 0)
    server.port = streams.sockets[0].getsockname()[1]
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", server.port))
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: _Datagrams(server), sock=datagrams)
    try:
        yield server
    finally:
        transport.close()
        streams.close()
        await streams.wait_closed()


# --- A source in DNS, with a resolver of the test and with the machine's.


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

    monkeypatch.setattr(service, "asyncio", Hasty())
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
    monkeypatch.setattr(service, "LOOKUP_S", 0.01)
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


# --- SRV records from a name server on real sockets.


NAME = "_http._tcp.engines.llm.svc.cluster.local"
HOST = "_http._tcp.engines"
DOMAINS = ("llm.svc.cluster.local", "svc.cluster.local")


def lookup(server: NameServer, *servers: str, domains: tuple[str, ...] = ()) -> SrvLookup:
    return SrvLookup(lambda: resolver(server.port, *servers, domains=domains))


def resolver(port: int = 53, *servers: str, domains: tuple[str, ...] = (), ndots: int = 5) -> Resolver:
    found = Resolver(configure=False)
    found.nameservers = list(servers or ("127.0.0.1",))
    found.port = port
    found.search = [from_text(domain) for domain in domains]
    found.ndots = ndots if domains else 1
    return found


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


async def test_an_answer_of_64_kilobytes_is_read_beside_the_event_loop() -> None:
    """dnspython takes a quarter of a second for it."""
    threads = set()

    def caught() -> Resolver:
        threads.add(threading.current_thread())
        return resolver(server.port)

    async with name_server() as server:
        server.records[NAME] = [srv(f"engine-{number}.engines", 30000) for number in range(1200)]
        server.truncate = True
        found = await SrvLookup(caught)(NAME, 0)
    assert len(found.addresses) == 1200
    assert threading.main_thread() not in threads


async def test_a_look_up_that_is_cancelled_ends_in_its_thread_too() -> None:
    threads = []

    def caught() -> Resolver:
        threads.append(threading.current_thread())
        return resolver(server.port)

    async with name_server() as server:
        server.records[NAME], server.drop = [srv("a.engines", 30000)], 1_000
        running = asyncio.create_task(SrvLookup(caught)(NAME, 0))
        await until(lambda: bool(server.questions))
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await asyncio.get_running_loop().shutdown_default_executor()
        assert len(server.questions) == 1, "a lost question is repeated as long as a look-up goes on"
    assert threads != [threading.main_thread()]


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
        ([srv("a", 0)], 0, "a record with the target 'a' and port 0"),
        ([srv("a@b/c", 1)], 0, r"a record with the target 'a\\@b/c' and port 1"),
        ([srv("a", 1), srv("a b", 1)], 0, r"a record with the target 'a\\032b' and port 1"),
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


async def test_server_that_fails_is_named_with_its_code() -> None:
    async with name_server() as server:
        server.code = 2
        with pytest.raises(OSError, match=rf"{NAME}.*127\.0\.0\.1@{server.port} answered SERVFAIL"):
            await lookup(server)(NAME, 0)


async def test_answers_that_cannot_be_read_end_in_time_and_say_which_server_gave_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookups, "ANSWER_S", 0.05)
    monkeypatch.setattr(lookups, "NAME_S", 0.2)
    async with name_server() as server:
        server.records[NAME] = [srv("a", 1)[:-3]]
        with pytest.raises(OSError, match=rf"expired after .*127\.0\.0\.1@{server.port}"):
            await lookup(server)(NAME, 0)


@pytest.mark.parametrize("name", ["", ".", "a..b", "a b", "ä.b", "a" * 64, ".".join("a" * 60 for _ in range(5)), "-a"])
async def test_what_is_no_name_is_not_sent(name: str) -> None:
    async with name_server() as server:
        with pytest.raises(OSError, match="is no name"):
            await lookup(server)(name, 0)
        assert server.questions == []


async def test_name_that_exists_without_the_record_does_not_end_the_search() -> None:
    async with name_server() as server:
        server.records = {f"{HOST}.{DOMAINS[0]}": [], f"{HOST}.{DOMAINS[1]}": [srv("b.engines", 1)]}
        found = await lookup(server, domains=DOMAINS)(HOST, 0)
    assert [address.host for address in found.addresses] == ["b.engines"]


@pytest.mark.parametrize(
    ("name", "ndots", "expected"),
    [
        ("_h._tcp.x.", 5, ["_h._tcp.x"]),
        ("_h._tcp.x", 5, ["_h._tcp.x.a.b", "_h._tcp.x"]),
        ("_h._tcp.x", 1, ["_h._tcp.x", "_h._tcp.x.a.b"]),
    ],
)
def test_names_are_tried_in_the_order_of_resolvers(name: str, ndots: int, expected: list[str]) -> None:
    names = names_to_try(name, resolver(domains=("a.b.",), ndots=ndots))
    assert [each.to_text(omit_final_dot=True) for each in names] == expected


def test_without_dnspython_a_source_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    source = FleetSourceConfig(name="srv", kind="dns", host=NAME)
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    extras.check_extras([], [replace(source, port=30000)])
    with pytest.raises(InvalidValueError, match=r"fleet source 'srv', host: .*pip install 'gorgo-router\[dns\]'"):
        extras.check_extras([], [source])
    monkeypatch.setitem(sys.modules, "gorgo.live.fleet_sources.srv", None)
    DnsSource(replace(source, port=30000), Reports("srv", FoundFleet([source]), lambda: 0.0))
    monkeypatch.delitem(sys.modules, "gorgo.live.fleet_sources.srv")
    monkeypatch.setitem(sys.modules, "dns.exception", None)
    with pytest.raises(MissingExtra, match=r"pip install 'gorgo-router\[dns\]'"):
        DnsSource(source, Reports("srv", FoundFleet([source]), lambda: 0.0))


async def test_source_without_a_port_follows_the_records() -> None:
    async with name_server() as server:
        server.records[NAME] = [srv("engine-0.engines.llm", 30000)]
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
    assert machine_resolver().nameservers == ["127.0.0.1"]
    file.write_text("search a.b\n" + "".join(f"nameserver 10.96.0.{last}\n" for last in range(10, 15)))
    found = machine_resolver()
    assert found.nameservers == ["10.96.0.10", "10.96.0.11", "10.96.0.12"]
    assert found.search == [from_text("a.b")]
    file.write_text("nameserver nonsense\n")
    with pytest.raises(OSError, match=r"resolv\.conf: .*nonsense"):
        machine_resolver()
