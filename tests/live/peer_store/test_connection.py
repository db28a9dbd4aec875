"""The store: the environment and TLS, the state of a link, entries as they are read, and what a failed write had."""

from __future__ import annotations

import logging
import random
import ssl
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from redis import exceptions
from redis.exceptions import AuthenticationError, ConnectionError
from redis.exceptions import TimeoutError as StoreTimeoutError

from gorgo.config.model import SharedConfig
from gorgo.core.peers.records import (
    MAX_PREFIXES,
    LearnedSpeed,
    PeerReport,
    PrefixMarks,
    ReplicaLoad,
    SharedAnswer,
    SharedCacheReport,
    StartedPrefill,
)
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.core.prompt.parse import Prompt
from gorgo.errors import InvalidValueError
from gorgo.live.peer_store import connection
from gorgo.live.peer_store import streams as store_streams
from gorgo.live.peer_store.connection import group_key, router_name, store_client, store_password, store_tls
from gorgo.live.peer_store.service import FIRST_BACKOFF_S, MAX_BACKOFF_S, StoreLink, fault_of
from gorgo.live.peer_store.streams import EntryId, Incoming, Outgoing, OutgoingReports, read_id
from gorgo.live.telemetry.counters import PeerCounts
from gorgo.live.telemetry.metric_table import StoreFault
from tests.live.peer_store.relay import relay
from tests.live.peer_store.server import RedisServer
from tests.proxy.authority import Authority, needs_openssl

# --- What the environment has for the store, and TLS to it.


SHARED = SharedConfig(url="redis://127.0.0.1:1", group="g", key_env="KEY")
KEY = "0123456789abcdef0123456789ABCDEF"


def test_key_of_the_group_is_read_from_the_environment() -> None:
    assert group_key(SHARED, {"KEY": f" {KEY}\n"}) == int(KEY, 16)


@pytest.mark.parametrize("held", [None, "", KEY[:-1], KEY[:-1] + "g", "0x" + KEY, KEY * 5])
def test_variable_without_a_key_is_named_and_its_content_is_not(held: str | None) -> None:
    with pytest.raises(InvalidValueError, match=r"shared: the environment variable KEY .*32 to 128 hex") as raised:
        group_key(SHARED, {} if held is None else {"KEY": held})
    assert not held or held not in str(raised.value)


def test_missing_password_is_named() -> None:
    with pytest.raises(InvalidValueError, match="the environment variable PASSWORD is not set"):
        store_password(replace(SHARED, password_env="PASSWORD"), {})
    assert store_password(SHARED, {}) is None


def test_router_is_named_like_its_host_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert router_name(replace(SHARED, router="eu-1")) == "eu-1"
    for host, name in {"gorgo-7f.example": "gorgo-7f.example", "-ä/b": "b", "": "router"}.items():
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        assert router_name(SHARED) == name


def test_fingerprints_under_one_key_have_one_id_and_no_other() -> None:
    keys = [Fingerprinter(key=key, block_bytes=size) for key, size in ((1, 64), (1, 64), (2, 64), (1, 128))]
    ids = [each.key_id for each in keys]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    prompt = Prompt(b"x" * 640, ())
    assert keys[0](prompt).blocks == keys[1](prompt).blocks != keys[2](prompt).blocks


def test_authorities_that_are_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "no.pem").write_text("no certificate")
    for name in ("no.pem", "missing.pem"):
        with pytest.raises(InvalidValueError, match=f"ca_file .*{name}.*; expected certificates of authorities"):
            store_tls(replace(SHARED, url="rediss://s", ca_file=str(tmp_path / name)))


def test_without_a_file_the_authorities_of_the_system_are_trusted() -> None:
    context = cast(ssl.SSLContext, store_tls(replace(SHARED, url="rediss://s")))
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert store_tls(SHARED) is None


async def test_password_of_a_user_is_sent(redis_server: RedisServer) -> None:
    async with store_client(redis_server.shared(), {}) as client:
        await client.acl_setuser("gorgo", enabled=True, passwords="+secret-password", keys="*", commands=["+@all"])
    with_user = replace(redis_server.shared(), username="gorgo", password_env="PASSWORD")
    async with store_client(with_user, {"PASSWORD": "secret-password"}) as client:
        assert await client.acl_whoami() == "gorgo"
    async with store_client(with_user, {"PASSWORD": "wrong"}) as client:
        with pytest.raises(AuthenticationError):
            await client.ping()


async def test_command_to_a_store_that_does_not_answer_ends(
    monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer
) -> None:
    monkeypatch.setattr(connection, "COMMAND_S", 0.05)
    async with relay(redis_server.port) as relayed:
        relayed.cut()
        async with store_client(replace(SHARED, url=f"redis://127.0.0.1:{relayed.port}"), {}) as client:
            with pytest.raises(StoreTimeoutError):
                await client.ping()


@needs_openssl
async def test_store_with_tls_is_trusted_by_its_own_authority_alone(tmp_path: Path, redis_server: RedisServer) -> None:
    """The server's own build has no TLS: a relay before it has."""
    theirs, foreign = tmp_path / "theirs", tmp_path / "foreign"
    theirs.mkdir()
    foreign.mkdir()
    authority, other = Authority(theirs), Authority(foreign)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.pair("store"))
    async with relay(redis_server.port, tls=context) as relayed:
        url = f"rediss://127.0.0.1:{relayed.port}"
        async with store_client(replace(SHARED, url=url, ca_file=authority.ca), {}) as client:
            assert await client.ping()
        for refusing in (replace(SHARED, url=url, ca_file=other.ca), replace(SHARED, url=url)):
            async with store_client(refusing, {}) as client:
                with pytest.raises(ConnectionError):
                    await client.ping()


# --- The state of a link: kinds of failure, one log line per change, pauses that grow and have chance in them.


BROKEN = exceptions.ConnectionError("Connection refused")


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "full"),
        (exceptions.ResponseError("MISCONF Redis is configured to save RDB snapshots"), "full"),
        (exceptions.AuthenticationError("WRONGPASS"), "refused"),
        (exceptions.NoPermissionError("this user has no permissions"), "refused"),
        (exceptions.BusyLoadingError("Redis is loading the dataset in memory"), "not_ready"),
        (exceptions.ReadOnlyError("You can't write against a read only replica."), "not_ready"),
        (exceptions.ClusterDownError("The cluster is down"), "not_ready"),
        (exceptions.TimeoutError("Timeout reading"), "slow"),
        (TimeoutError(), "slow"),
        (BROKEN, "unreachable"),
        (OSError("Network is unreachable"), "unreachable"),
        (exceptions.ResponseError("WRONGTYPE Operation against a key"), "error"),
        (ValueError("of this program"), "error"),
    ],
)
def test_failures_have_a_word(error: Exception, fault: StoreFault) -> None:
    assert fault_of(error) == fault


def test_a_link_is_joined_when_it_was_written_and_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gorgo")
    now, counts = [100.0], PeerCounts()
    link = StoreLink("redis://store", counts, lambda: now[0])
    assert [link.joined, link.fault] == [False, None]
    link.on_success("write")
    assert [link.joined] == [False]
    now[0] = 101.0
    link.on_success("read")
    assert [link.joined, link.since_s] == [True, 101.0]
    now[0] = 105.0
    for direction in ("write", "read", "write"):
        link.on_failure(direction, BROKEN, chance=0.0)
    assert [link.joined, link.fault, link.since_s] == [False, "unreachable", 105.0]
    assert link.error == "ConnectionError: Connection refused"
    link.on_success("write")
    assert [link.joined] == [False]
    link.on_success("read")
    assert [link.joined, link.error] == [True, None]
    assert [record.getMessage() for record in caplog.records] == [
        "peer_store_joined",
        "peer_store_lost",
        "peer_store_joined",
    ]
    assert counts.failures["unreachable"] == 3


def test_pauses_double_up_to_a_bound_and_are_spread() -> None:
    link = StoreLink("redis://store", PeerCounts(), lambda: 0.0)
    pauses = [link.on_failure("read", BROKEN, chance=0.0) for _ in range(12)]
    assert pauses[:3] == [FIRST_BACKOFF_S / 2, FIRST_BACKOFF_S, FIRST_BACKOFF_S * 2]
    assert pauses[-1] == MAX_BACKOFF_S / 2
    assert link.on_failure("read", BROKEN, chance=0.999) < MAX_BACKOFF_S
    link.on_success("read")
    assert link.on_failure("read", BROKEN, chance=0.0) == FIRST_BACKOFF_S / 2


# --- Entries of several streams, in the order in which the store took them, whatever the size of pages.


Streams = dict[str, list[EntryId]]


def read(reader: Incoming, streams: Streams) -> list[tuple[EntryId, str]]:
    """Read once and return what is applied."""
    found = {}
    for member, position in reader.positions().items():
        newer = [entry_id for entry_id in streams[member] if entry_id > position]
        found[member] = [(entry_id, b"report") for entry_id in newer[: store_streams.PAGE]]
    reader.add(found)
    return [(entry.id, entry.member) for entry in reader.take_entries()]


@pytest.mark.parametrize("seed", range(20))
def test_history_of_all_streams_is_applied_in_one_order_and_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_streams, "PAGE", 3)
    rng = random.Random(seed)
    streams: Streams = {
        f"eu-{number}": sorted({EntryId(rng.randint(1, 60), rng.randint(0, 2)) for _ in range(rng.randint(0, 30))})
        for number in range(4)
    }
    reader = Incoming()
    reader.follow(streams, now_ms=100, since_ms=0)
    applied = read(reader, streams)
    for _ in range(200):
        if not reader.behind:
            break
        applied += read(reader, streams)
    assert not reader.behind
    assert applied == sorted((entry_id, member) for member, ids in streams.items() for entry_id in ids)


def test_a_new_member_is_read_from_the_history_and_one_that_left_no_more() -> None:
    reader = Incoming()
    streams: Streams = {"a": [EntryId(5, 0), EntryId(50, 0)], "b": [EntryId(60, 0)]}
    reader.follow(["a"], now_ms=100, since_ms=10)
    assert read(reader, streams) == [(EntryId(50, 0), "a")]
    reader.follow(["b"], now_ms=101, since_ms=11)
    assert read(reader, streams) == [(EntryId(60, 0), "b")]
    assert list(reader.positions()) == ["b"]


def test_a_position_ahead_of_the_stores_clock_starts_anew() -> None:
    """The store was replaced by one whose clock is behind."""
    reader = Incoming()
    streams: Streams = {"a": [EntryId(90_000, 0)]}
    reader.follow(["a"], now_ms=90_000, since_ms=0)
    assert len(read(reader, streams)) == 1
    streams["a"] = [EntryId(10_000, 0)]
    assert read(reader, streams) == []
    reader.follow(["a"], now_ms=89_500, since_ms=0)  # within what clocks differ by
    assert read(reader, streams) == []
    reader.follow(["a"], now_ms=10_000, since_ms=0)
    assert read(reader, streams) == [(EntryId(10_000, 0), "a")]


def test_at_most_a_page_of_each_stream_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_streams, "PAGE", 2)
    reader = Incoming()
    streams: Streams = {"busy": [EntryId(ms, 0) for ms in range(1, 9)], "late": [EntryId(100, 0), EntryId(101, 0)]}
    reader.follow(streams, now_ms=200, since_ms=0)
    assert [entry_id.ms for entry_id, _ in read(reader, streams)] == [1, 2]
    # The entries of the other stream wait, so that it is not read.
    assert list(reader.positions()) == ["busy"]


def test_id_without_a_number_is_the_first_of_its_time() -> None:
    assert read_id(b"7") == EntryId(7, 0)


# --- What a failed write had is part of the next report, within the bounds of one.


def report(seq: int, *, prefixes: int = 1) -> PeerReport:
    return PeerReport(
        "eu-1/run1",
        seq,
        loads=(ReplicaLoad("a", seq),),
        prefixes=tuple(PrefixMarks(f"{seq}-{number}", None, (), b"") for number in range(prefixes)),
        cache_reports=(SharedCacheReport("a", None, 1.0 + seq, 0.0),),
        answers=(SharedAnswer("a", b"12345678", seq, 1),),
        prefills=(StartedPrefill("a", 25.0), StartedPrefill(f"r{seq}", 0.5)),
        speeds=(LearnedSpeed("a", float(seq), 1.0), LearnedSpeed(f"r{seq}", 1.0, 1.0)),
    )


def test_a_written_report_is_forgotten() -> None:
    outgoing = Outgoing()
    assert outgoing.next_report(report(1)) == report(1)
    assert outgoing
    outgoing.on_written()
    assert not outgoing
    assert outgoing.next_report(report(2)) == report(2)


def test_the_next_report_has_its_own_load_and_all_prefixes_since_the_last_written_one() -> None:
    outgoing = Outgoing()
    outgoing.next_report(report(1))
    outgoing.next_report(report(2))
    merged = outgoing.next_report(report(3))
    assert merged.loads == (ReplicaLoad("a", 3),)
    assert [marks.replica for marks in merged.prefixes] == ["1-0", "2-0", "3-0"]
    assert [sample.confirmed_tokens for sample in merged.cache_reports] == [2.0, 3.0, 4.0]
    assert {speed.replica: speed.spent_s for speed in merged.speeds} == {"a": 3.0, "r1": 1.0, "r2": 1.0, "r3": 1.0}
    assert [answer.prompt_tokens for answer in merged.answers] == [1, 2, 3]
    assert {each.replica: each.prefill_s for each in merged.prefills} == {"a": 60.0, "r1": 0.5, "r2": 0.5, "r3": 0.5}
    assert outgoing.dropped == 0


def test_the_oldest_prefixes_are_dropped_beyond_the_bound_and_counted() -> None:
    outgoing = Outgoing()
    outgoing.next_report(report(1, prefixes=MAX_PREFIXES))
    merged = outgoing.next_report(report(2, prefixes=3))
    assert len(merged.prefixes) == MAX_PREFIXES
    assert [merged.prefixes[0].replica, merged.prefixes[-1].replica] == ["1-3", "2-2"]
    assert outgoing.dropped == 3


class Numbered:
    """In place of an exchange: each report has a prefix of its own."""

    def __init__(self) -> None:
        self.seq = 0

    def report(self, *, now: float) -> PeerReport:
        self.seq += 1
        return report(self.seq)


def test_each_of_two_transports_reports_everything_since_its_own_last_report() -> None:
    reports = OutgoingReports(Numbered())  # type: ignore[arg-type]  # the part of an exchange that is used
    often, seldom = reports.new_transport(), reports.new_transport()

    def prefixes(outgoing: Outgoing) -> list[str]:
        found = reports.make_report(outgoing, now=0.0)
        outgoing.on_written()
        return [marks.replica for marks in found.prefixes]

    assert [prefixes(often), prefixes(often)] == [["1-0"], ["2-0"]]
    assert seldom, "what the other one has written is not written here"
    assert prefixes(seldom) == ["1-0", "2-0", "3-0"]
    assert prefixes(often) == ["3-0", "4-0"]
    assert prefixes(seldom) == ["4-0", "5-0"]


def test_what_another_transport_reports_while_one_writes_is_part_of_its_next_report() -> None:
    reports = OutgoingReports(Numbered())  # type: ignore[arg-type]
    often, seldom = reports.new_transport(), reports.new_transport()

    def prefixes(outgoing: Outgoing) -> list[str]:
        return [marks.replica for marks in reports.make_report(outgoing, now=0.0).prefixes]

    assert prefixes(seldom) == ["1-0"]
    assert prefixes(often) == ["1-0", "2-0"]
    seldom.on_written()
    assert prefixes(seldom) == ["2-0", "3-0"]
    often.on_written()
    assert prefixes(often) == ["3-0", "4-0"]
    assert prefixes(seldom) == ["2-0", "3-0", "4-0", "5-0"], "the last one was not written"
