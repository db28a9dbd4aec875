"""The hot loop: chunks go from the source to the client in one step, and the task of the request sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from gorgo.core.limits import BufferBudget
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.live.http.body import ResettableTimeout
from gorgo.live.http.headers import Header
from gorgo.live.upstream.client import UpstreamError
from gorgo.proxy.exchange.relay import ResponseWriter, relay
from tests.proxy.fakes import DONE, ROLE, USAGE, delta
from tests.proxy.passages import passage_to


class PushedSource:
    """An answer whose reads are pushed by the test, as a connection pushes them."""

    status = 200

    def __init__(self) -> None:
        self.headers: Sequence[Header] = [(b"Content-Type", b"text/event-stream")]
        self.waiting: list[bytes] = []
        self._sink: Callable[[bytes], bool] | None = None
        self._done: asyncio.Future[bool] | None = None
        self._ended = False

    def is_paused(self) -> bool:
        return self._sink is None

    def push(self, *chunks: bytes, end: bool = False) -> None:
        """Receive chunks in the current step."""
        self.waiting += chunks
        self._ended = end
        self._flush()

    async def pipe(self, sink: Callable[[bytes], bool]) -> bool:
        self._sink, self._done = sink, asyncio.get_running_loop().create_future()
        self._flush()
        return await self._done

    def take_whole(self, limit: int) -> bytes | None:
        return None

    def chunks(self) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        raise AssertionError("every part of an answer is piped")

    async def aclose(self) -> None:
        """Close nothing."""

    def _flush(self) -> None:
        while self._sink is not None and self.waiting:
            if not self._sink(self.waiting.pop(0)):
                self._end(False)
        if self._sink is not None and self._ended:
            self._end(True)

    def _end(self, ended: bool) -> None:
        assert self._done is not None
        self._sink = None
        self._done.set_result(ended)


class Client:
    """A client's connection: `room` chunks are written at once, the others when `read` is set."""

    def __init__(self, room: int = 1000) -> None:
        self.got: list[bytes] = []
        self.room = room
        self.read = asyncio.Event()
        self.closed = False

    async def send(self, message: Any) -> None:
        if message.get("body"):
            await self.read.wait()
            self.got.append(message["body"])

    def try_write(self, chunk: bytes) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.got.append(chunk)
        return True


class Writer(ResponseWriter):
    """Writes to a `Client`."""

    __slots__ = ("_client",)

    def __init__(self, client: Client) -> None:
        super().__init__(client.send)
        self._client = client

    async def start(self, status: int, headers: Any, **options: bool) -> None:
        await super().start(status, headers, **options)
        self.try_write = self._client.try_write


def begin(
    source: PushedSource, client: Client, *, strip: bool = False, on_content: Callable[[], None] = lambda: None
) -> asyncio.Task[Outcome]:
    """Relay `source` to `client` in a task."""

    async def run() -> Outcome:
        with ResettableTimeout(60.0) as timeout:
            passage = passage_to(Writer(client), timeout, chunk_limit_s=60.0, strip_usage=strip, on_content=on_content)
            return await relay(passage, source)

    return asyncio.create_task(run())


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("strip", [False, True])
async def test_an_event_is_written_in_the_step_in_which_it_was_received(strip: bool) -> None:
    source, client = PushedSource(), Client()
    client.read.set()
    relaying = begin(source, client, strip=strip)
    await turns()
    source.push(ROLE, delta("a"))
    await turns()
    assert client.got == [ROLE + delta("a")]
    for number in range(100):
        source.push(delta(str(number)))
        assert client.got[-1] == delta(str(number))
        assert not source.is_paused(), "the task of the request was not woken"
    source.push(USAGE, DONE, end=True)
    await turns()
    outcome = await relaying
    assert (outcome.result, outcome.output_tokens) == (AttemptResult.COMPLETED, 2)
    assert b"".join(client.got).endswith(DONE)
    assert (USAGE in client.got) is not strip


async def test_the_first_token_is_written_before_it_is_recorded() -> None:
    source, client = PushedSource(), Client()
    written: list[list[bytes]] = []
    relaying = begin(source, client, on_content=lambda: written.append([*client.got]))
    await turns()
    source.push(ROLE, delta("a"))
    await turns()
    assert written == [[ROLE + delta("a")]]
    source.push(DONE, end=True)
    await relaying


async def test_a_first_token_is_recorded_before_a_wait_for_its_client() -> None:
    source, client = PushedSource(), Client(room=0)
    written: list[list[bytes]] = []
    relaying = begin(source, client, on_content=lambda: written.append([*client.got]))
    await turns()
    source.push(delta("a"))
    await turns()
    assert (written, client.got) == ([[]], [])
    client.room = 1000
    client.read.set()
    source.push(DONE, end=True)
    await relaying
    assert (len(written), client.got) == (1, [delta("a"), DONE])


async def test_a_client_that_is_behind_pauses_the_replica_and_loses_no_byte() -> None:
    source, client = PushedSource(), Client(room=3)
    relaying = begin(source, client)
    await turns()
    events = [delta(str(number)) for number in range(6)]
    source.push(ROLE, *events)
    await turns()
    assert client.got == [ROLE + events[0], *events[1:3]]
    assert source.is_paused(), "reading waits for the client"
    client.room = 1000
    client.read.set()
    await turns()
    assert client.got == [ROLE + events[0], *events[1:]]
    assert not source.is_paused()
    source.push(DONE, end=True)
    assert (await relaying).result is AttemptResult.COMPLETED


async def test_a_client_that_stopped_reading_is_waited_for_as_its_own_stall() -> None:
    source, client = PushedSource(), Client(room=1)
    writer = Writer(client)
    budget = BufferBudget(1 << 40)

    async def run() -> None:
        with ResettableTimeout(60.0) as timeout:
            await relay(passage_to(writer, timeout, chunk_limit_s=0.05, budget=budget), source)

    relaying = asyncio.create_task(run())
    await turns()
    source.push(delta("a"))
    await turns()
    source.push(delta("b"))
    await turns()
    assert (writer.sending, budget.used_bytes > 0) == (True, True)
    with pytest.raises(TimeoutError):
        await relaying
    assert budget.used_bytes == 0, "the buffers of both connections are released"


async def test_a_stream_without_an_end_fails_after_its_last_byte_was_passed() -> None:
    source, client = PushedSource(), Client()
    client.read.set()
    relaying = begin(source, client)
    await turns()
    source.push(delta("a"))
    await turns()
    source.push(delta("b"), end=True)
    with pytest.raises(UpstreamError, match="truncated"):
        await relaying
    assert client.got == [delta("a"), delta("b")]
