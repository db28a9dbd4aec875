"""The gate: bytes pass as they are, and each way of cutting is what it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tests.chaos.failing import FastFailure
from tests.chaos.gate import HOST, Gate


class Echo:
    """An engine that answers every piece with itself, and has figures."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                self.heard.append(data)
                figures = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n%02d" % len(self.heard)
                writer.write(figures if data.startswith(b"GET ") else data)
        with suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()
        self.open -= 1


@pytest.fixture
async def echo() -> Echo:
    return Echo()


@pytest.fixture
async def gate(echo: Echo) -> AsyncIterator[Gate]:
    server = await asyncio.start_server(echo.serve, HOST, 0)
    gate = Gate("a", server.sockets[0].getsockname()[1])
    await gate.open()
    yield gate
    await gate.close()
    server.close()
    async with asyncio.timeout(5):
        while gate.ends or echo.open:
            await asyncio.sleep(0.001)


async def said(gate: Gate, data: bytes, door: int = 0) -> bytes:
    """What comes back on a connection of its own."""
    async with asyncio.timeout(5), connected(gate, door) as (reader, writer):
        writer.write(data)
        return await reader.read(65536)


@asynccontextmanager
async def connected(gate: Gate, door: int = 0) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(HOST, gate.ports[door])
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("door", [0, 1])
async def test_bytes_pass_and_requests_are_noted(gate: Gate, door: int) -> None:
    asked = b"POST /v1/completions HTTP/1.1\r\nX-Request-Id: r-1\r\n\r\nbody"
    assert await said(gate, asked, door) == asked
    assert [name for name, _ in gate.passed] == ["r-1"]


async def test_refused_resets_what_is_open_and_takes_nothing_until_it_is_mended(gate: Gate) -> None:
    async with connected(gate) as (reader, writer):
        writer.write(b"hello")
        assert await reader.read(5) == b"hello"
        gate.cut("refused")
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
    with pytest.raises(ConnectionRefusedError):
        await said(gate, b"hello")
    await gate.mend("refused")
    assert await said(gate, b"hello") == b"hello"


async def test_silent_delays_what_is_sent_and_loses_nothing(gate: Gate, echo: Echo) -> None:
    gate.cut("silent")
    waiting = asyncio.create_task(said(gate, b"hello"))
    done, _ = await asyncio.wait((waiting,), timeout=0.1)
    assert not done
    assert echo.heard == []
    await gate.mend("silent")
    assert await waiting == b"hello"


async def test_dark_does_not_even_answer_a_syn(gate: Gate) -> None:
    gate.cut("dark")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await asyncio.open_connection(HOST, gate.ports[0])
    await gate.mend("dark")
    assert await said(gate, b"hello") == b"hello"


async def test_figures_hang_or_stand_still_while_requests_pass(gate: Gate) -> None:
    assert (await said(gate, b"GET /metrics HTTP/1.1\r\n\r\n"))[-2:] == b"01"
    await gate.freeze_figures()
    assert (await said(gate, b"GET /metrics HTTP/1.1\r\n\r\n"))[-2:] == b"02"
    assert (await said(gate, b"GET /metrics HTTP/1.1\r\n\r\n"))[-2:] == b"02"
    gate.figures = "hang"
    waiting = asyncio.create_task(said(gate, b"GET /metrics HTTP/1.1\r\n\r\n"))
    assert await said(gate, b"hello") == b"hello"
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait((waiting,))


async def test_an_engine_that_is_gone_resets(gate: Gate) -> None:
    gate.engine_port = 1
    with pytest.raises(ConnectionResetError):
        await said(gate, b"hello")


ASKED = b'POST /generate HTTP/1.1\r\nx-request-id: r-1\r\ncontent-length: 15\r\n\r\n{"stream":true}'


async def test_a_failing_replica_answers_requests_in_pieces_and_leaves_probes_to_the_engine(
    gate: Gate, echo: Echo
) -> None:
    gate.failure = FastFailure.TOO_MANY
    async with asyncio.timeout(5), connected(gate) as (reader, writer):
        for _ in range(2):
            for piece in (ASKED[:30], ASKED[30:-4], ASKED[-4:]):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429 ")
            await reader.readexactly(int(head.rsplit(b" ", 1)[1]))
        assert echo.heard == []
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        assert (await reader.read(65536))[-2:] == b"01"


async def test_a_replica_that_refuses_everything_refuses_probes_and_is_well_again_afterwards(gate: Gate) -> None:
    gate.failure = FastFailure.UNAUTHORIZED
    async with asyncio.timeout(5), connected(gate) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401 ")
    gate.failure = None
    assert await said(gate, ASKED) == ASKED


async def test_a_truncated_answer_ends_the_connection(gate: Gate) -> None:
    gate.failure = FastFailure.TRUNCATED
    async with asyncio.timeout(5), connected(gate) as (reader, writer):
        writer.write(ASKED.replace(b'{"stream":true}', b'{"text":"a   "}'))
        data = await reader.read()
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert 0 < len(body) < int(head.rsplit(b" ", 1)[1])
