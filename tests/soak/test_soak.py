"""The soak in small: real processes, every ledger back at zero, and verdicts on good records and bad ones."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.relay.wire import TOKEN_MARK
from tests.soak.engine import FIRST
from tests.soak.ledgers import OF_REQUESTS, Ledgers
from tests.soak.load import Client, Load
from tests.soak.run import Plan, soak
from tests.soak.verdict import Soak, violations

# --- The soak in small: real processes, every ledger back at zero, and clients that see what is wrong.


@pytest.mark.timeout(180)
@pytest.mark.system
def test_after_short_requests_beside_slow_streams_nothing_is_left(tmp_path: Path) -> None:
    # The index is full after the warm-up; samples, about 1 kB each, are not, and their growth is within the bound.
    found = soak(Plan(shorts=600, streams=20, warm_up=600, connections=8, replicas=2, leave=5), tmp_path)
    assert violations(found) == []
    assert found.end.clients == dict.fromkeys(("client-0", "client-1", "client-2", "client-3"), 5)
    assert (found.warm.samples, found.end.samples) == (600, 1200)
    assert found.end.index_blocks > 0
    # Tokens of fifteen streams that ended by themselves, each checked against its usage; five were left.
    assert found.streamed_tokens >= 15 * FIRST


@pytest.mark.timeout(180)
@pytest.mark.system
def test_two_processes_hold_nothing_when_everybody_has_left(tmp_path: Path) -> None:
    plan = Plan(shorts=600, streams=20, warm_up=600, connections=8, replicas=2, leave=5, processes=2)
    found = soak(plan, tmp_path)
    assert violations(found) == []
    assert found.end.clients == dict.fromkeys(("client-0", "client-1", "client-2", "client-3"), 5)
    assert found.streamed_tokens >= 15 * FIRST


def response(tokens: int, said: int, status: int = 200) -> bytes:
    body = b"data: {" + TOKEN_MARK + b"}\n\n"
    parts = [body] * tokens + [b'data: {"usage":{"completion_tokens":%d}}\n\n' % said]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 %d OK\r\ntransfer-encoding: chunked\r\n\r\n%s0\r\n\r\n" % (status, chunks)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (response(1, 1), None),
        (response(1, 1, 503), "status 503"),
        (response(0, 1), "0 tokens of 1"),
        (response(2, 2), "2 tokens of 2, 1 asked for"),
        (response(1, 1)[:-9], "the connection closed"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n{}", "unreadable response"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "an answer without its usage"),
    ],
)
async def test_a_client_sees_what_is_wrong(answer: bytes, problem: str | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):  # a connection for a next request, of which there is none
            await reader.readuntil(b"}}")  # of the options at the end of its body
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        load = Load("127.0.0.1", server.sockets[0].getsockname()[1], ["key"])
        await load.shorts(1, connections=1)
    if problem is None:
        assert (load.answered, load.problems) == (1, {})
    else:
        (found,) = load.problems
        assert found.startswith(problem)


async def test_a_proxy_that_is_gone_ends_the_load() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.close()
        writer.transport.abort()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    load = Load("127.0.0.1", server.sockets[0].getsockname()[1], ["key"])
    async with asyncio.timeout(20):
        await load.shorts(50, connections=1)
    assert load.problems["never sent, because no connection was left"] >= 48


async def test_what_there_is_no_time_for_is_counted_and_not_sent() -> None:
    load = Load("127.0.0.1", 1, ["key"])
    load.stop()
    assert await load.shorts(50, connections=1) == 0.0
    assert (load.unsent, load.answered, load.problems) == (50, 0, {})


async def test_a_connection_that_ends_before_its_request_costs_that_request_alone() -> None:
    lost: list[str] = []
    client = Client(lambda _: None, lambda _, why: lost.append(why))
    client.connection_lost(None)
    client.send(b"a", wanted=1, plain=False)
    assert lost == ["the connection closed before its request"]
    assert not client.busy


# --- What a soak is judged by: a good record passes, and every bad one is told.


MIB = 1 << 20


def ledgers(**options: Any) -> Ledgers:
    given: dict[str, Any] = dict.fromkeys(OF_REQUESTS, 0) | {
        "number": 1,
        "clients": {"a": 0},
        "retries_spent": 0,
        "hedges_spent": 0,
        "hedge_watch": 0,
        "drop_watch": 0,
        "tasks": 10,
        "fds": 20,
        "resident": 100 * MIB,
        "index_blocks": 500,
        "samples": 100,
    }
    return Ledgers(**given | options)


GOOD = Soak(
    fresh=ledgers(),
    warm=ledgers(in_flight=5, tasks=30, fds=40),
    end=ledgers(in_flight=5, tasks=30, fds=40, resident=104 * MIB),
    after=ledgers(fds=26),
    replicas=3,
    shorts=100,
    unsent=0,
    streams=5,
    answered=114,
    expected=114,
    streaming=5,
    streamed_tokens=50,
    wall_s=1.0,
    warm_up_s=0.1,
    cpu_s=0.1,
    exit_code=0,
)


def test_a_good_record_has_no_violation() -> None:
    assert violations(GOOD) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"problems": {"status 502": 3}}, "3 answers: status 502"),
        ({"answered": 113}, "113 whole answers of 114"),
        ({"unsent": 7}, "7 short requests were not sent in time"),
        ({"streaming": 4}, "4 of 5 slow streams"),
        ({"end": ledgers(in_flight=4)}, "the Router counted 4 in flight"),
        ({"end": ledgers(in_flight=5, retries_spent=1)}, "1 retries"),
        ({"end": ledgers(in_flight=5, resident=106 * MIB)}, "memory grew by 6.0%"),
        ({"end": ledgers(in_flight=5, faults="r0: 3 reserved")}, "r0: 3 reserved"),
        ({"after": ledgers(tasks=11)}, "11 tasks when everybody has left, 10 at most"),
        ({"after": ledgers(fds=27)}, "27 open files when everybody has left, 26 at most"),
        ({"after": ledgers(clients={"a": 0, "b": 2})}, "client b is 2"),
        ({"exit_code": 1}, "exit code 1"),
        *(({"after": ledgers(**{name: 1})}, f"{name} is 1") for name in OF_REQUESTS),
    ],
)
def test_each_fault_is_told(change: dict[str, Any], told: str) -> None:
    found = violations(replace(GOOD, **change))
    assert len(found) == 1
    assert found[0].startswith(told)


def test_a_page_or_two_of_a_small_process_is_no_growth() -> None:
    small = replace(GOOD, warm=ledgers(in_flight=5, resident=10 * MIB), end=ledgers(in_flight=5, resident=11 * MIB))
    assert violations(small) == []
