"""The clients of the soak: many short requests one after another on a few connections, beside streams that stay open.

Owns what is sent and whether what came back is whole: the status, the number of tokens and the usage that the engine
said at the end. Clients have names by their keys, connections are given up after so many requests, and every prompt is
another one, as in life.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from tests.bench.relay.wire import MODEL, NUMBER_BYTES, ResponseReader
from tests.soak.engine import HELD

#: Bytes of prompts, and tokens of short answers.
SIZES, TOKENS = (200, 900, 2200, 6000), (1, 4, 12)
#: Prompts of this size begin alike; the others have no block in common.
SHARED = 2200
#: One answer in so many is not a stream.
PLAIN_EVERY = 4
#: Requests of a connection before its client opens another one.
PER_CONNECTION = 200
#: A stream's tokens come so far apart, ms.
GAP_MS = 1000
#: Slow streams that start together: a brisk ramp, not a storm of connects.
RAMP = 25
#: Of an answer's end, to find its usage in.
_TAIL_BYTES = 600
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
#: Problems told by name; the rest are counted.
MAX_PROBLEMS = 32


class Client(asyncio.Protocol):
    """One connection, and the request that is open on it."""

    def __init__(self, done: Callable[[Client], None], lost: Callable[[Client, str], None]) -> None:
        self.reader = ResponseReader()
        self.busy = False
        self.sent = 0
        self.wanted: int | None = None
        self.plain = False
        self.transport: asyncio.Transport | None = None
        self._tail = b""
        self._done, self._lost = done, lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class

    def send(self, data: bytes, *, wanted: int | None, plain: bool) -> None:
        """`wanted` is how many tokens there have to be; None is as many as the engine says."""
        self.reader.start()
        self.busy, self.wanted, self.plain, self._tail = True, wanted, plain, b""
        self.sent += 1
        if self.transport is None:
            self._fail("the connection closed before its request")
        else:
            self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        try:
            complete = self.reader.feed(data)
        except (ValueError, KeyError) as error:
            self._fail(f"unreadable response: {error!r}")
            return
        if complete:
            self.busy = False
            self._done(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.busy:
            self._fail("the connection closed in the middle of a response")

    def leave(self) -> None:
        """Go away, whatever is open."""
        self.busy = False
        if self.transport is not None:
            self.transport.abort()

    def problem(self) -> str | None:
        """What is wrong with a complete response."""
        if self.reader.status != 200:
            return f"status {self.reader.status}"
        said = _USAGE.findall(self._tail)
        if not said:
            return "an answer without its usage"
        counted = int(said[-1]) if self.plain else self.reader.tokens
        if counted != int(said[-1]) or self.wanted not in (None, counted):
            return f"{counted} tokens of {said[-1].decode()}, {self.wanted} asked for"
        return None

    def _fail(self, why: str) -> None:
        self.leave()
        self._lost(self, why)


class Load:
    """All clients, against one address.

    Parameters
    ----------
    host, port:
        Of the proxy.
    keys:
        One client each; requests take turns.
    """

    def __init__(self, host: str, port: int, keys: Sequence[str]) -> None:
        self._address = host, port
        self._keys = [f"authorization: Bearer {key}\r\n".encode() for key in keys]
        self._kinds = [
            (_request(size, tokens, stream=stream, shared=size == SHARED), tokens, not stream)
            for size in SIZES
            for tokens in TOKENS
            for stream in (True,) * (PLAIN_EVERY - 1) + (False,)
        ]
        self._number = time.time_ns() // 1_000_000 % 10**NUMBER_BYTES
        self._left = 0
        self._clients: set[Client] = set()
        self._idle = asyncio.Event()
        self._moved = asyncio.Event()
        self._opening: set[asyncio.Task[None]] = set()
        self.answered = 0
        #: Short requests that `stop` left.
        self.unsent = 0
        self._stopped = False
        self.problems: Counter[str] = Counter()
        self.streams: list[Client] = []
        #: Tokens of slow streams that ended whole.
        self.streamed = 0

    async def shorts(self, count: int, *, connections: int) -> float:
        """`count` requests, `connections` at a time; how long that took, s."""
        begun_s = time.perf_counter()
        if self._stopped:
            self.unsent += count
            return 0.0
        self._left = count
        self._idle.clear()
        for _ in range(connections):
            await self._next()
        await self._idle.wait()
        for client in self._clients:
            client.leave()
        self._clients.clear()
        if self._left:
            self.problems["never sent, because no connection was left"] += self._left
        return time.perf_counter() - begun_s

    def stop(self) -> None:
        """Send no more short requests; those that are open end."""
        self._stopped = True
        self.unsent += self._left
        self._left = 0

    async def open_streams(self, count: int, *, gap_ms: int = GAP_MS) -> None:
        """Slow streams; each has its first token when this is over, or is among the problems."""
        body = _request(SIZES[0], HELD, stream=True, gap_ms=gap_ms)
        for begun in range(0, count, RAMP):
            ramp = [await self._connect(self._stream_done) for _ in range(min(RAMP, count - begun))]
            for client in ramp:
                client.send(self._numbered(*body), wanted=None, plain=False)
            self.streams += ramp
            await self._until(partial(_begun, ramp))

    @property
    def streaming(self) -> int:
        """Slow streams that are open."""
        return sum(client.busy for client in self.streams)

    async def streams_end(self) -> None:
        """Wait for the end of all that are open."""
        await self._until(lambda: not self.streaming)

    def leave(self, streams: Sequence[Client]) -> None:
        """Their clients go away in the middle of them."""
        for client in streams:
            client.leave()

    def close(self) -> None:
        """Nobody is there any more."""
        for client in (*self._clients, *self.streams):
            client.leave()

    async def _next(self) -> None:
        """Another connection, and the next request on it."""
        client = await self._connect(self._short_done)
        self._clients.add(client)
        self._send(client)

    def _send(self, client: Client) -> None:
        if not self._left:
            client.leave()
            self._clients.discard(client)
            if not any(other.busy for other in self._clients) and not self._opening:
                self._idle.set()
            return
        self._left -= 1
        parts, tokens, plain = self._kinds[self._left % len(self._kinds)]
        client.send(self._numbered(*parts), wanted=tokens, plain=plain)

    def _short_done(self, client: Client) -> None:
        self._judge(client)
        if client.sent < PER_CONNECTION or not self._left:
            self._send(client)
            return
        client.leave()
        self._clients.discard(client)
        self._open_another()

    def _stream_done(self, client: Client) -> None:
        self._judge(client)
        self.streamed += client.reader.tokens
        self._moved.set()

    def _judge(self, client: Client) -> None:
        self.answered += 1
        if problem := client.problem():
            self._problem(problem)

    def _lost(self, client: Client, why: str) -> None:
        self._problem(why)
        self._moved.set()
        if client in self._clients:
            self._clients.discard(client)
            self._open_another()

    def _problem(self, why: str) -> None:
        self.problems[why if why in self.problems or len(self.problems) < MAX_PROBLEMS else "others"] += 1

    def _open_another(self) -> None:
        task = asyncio.get_running_loop().create_task(self._next())
        self._opening.add(task)
        task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._problem(f"no connection: {error!r}")
        if not self._opening and not any(client.busy for client in self._clients):
            self._idle.set()

    async def _connect(self, done: Callable[[Client], None]) -> Client:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: Client(done, self._lost), *self._address)
        return client

    def _numbered(self, before: bytes, after: bytes) -> bytes:
        self._number = (self._number + 1) % 10**NUMBER_BYTES
        line, end, rest = before.partition(b"\r\n")
        key = self._keys[self._number % len(self._keys)]
        return b"".join((line, end, key, rest, b"%0*d" % (NUMBER_BYTES, self._number), after))

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Looks whenever a stream has ended or a twentieth of a second is over: tokens are not told one by one."""
        while not reached():
            self._moved.clear()
            try:
                async with asyncio.timeout(0.05):
                    await self._moved.wait()
            except TimeoutError:
                continue


def _begun(streams: Sequence[Client]) -> bool:
    return all(client.reader.tokens or not client.busy for client in streams)


def _request(size: int, tokens: int, *, stream: bool, shared: bool = False, gap_ms: int = 0) -> tuple[bytes, bytes]:
    """A chat in two parts, between which its number goes: at the end of what is shared, else before all of the text."""
    number, text = "@" * NUMBER_BYTES, ("a prompt of the soak is plain text, " * (size // 36 + 1))[:size]
    messages = [{"role": "user", "content": text + number if shared else number + text}]
    body = {"model": MODEL, "messages": messages, "stream": stream, "max_completion_tokens": tokens, "seed": gap_ms}
    if stream:
        body["stream_options"] = {"include_usage": True}
    whole = json.dumps(body, separators=(",", ":")).encode()
    before, _, after = whole.partition(number.encode())
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(whole)}\r\n\r\n".encode() + before, after
