"""An engine that costs next to nothing, a process of its own: short answers at once, and streams that stay open.

The simulated engine would be the bottleneck: it takes more of a core for a request than the proxy does, and its five
hundred streams would be decoded at their model's speed. This one reads no prompt. A request for `HELD` tokens is a slow
stream: a token every `seed` milliseconds to all of them in one step, until SIGUSR1 ends them, each with its usage.
Says where it listens, and serves until SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from functools import partial
from typing import cast

import uvloop

from tests.bench.relay.wire import MODEL, TOKEN_MARK, number_in

#: Asked-for tokens that mean: until told otherwise.
HELD = 1_000_000
#: Tokens with which a slow stream begins: 40 kB, more than a relay keeps of a stream to find its usage in. That would
#: else be filled in the first minutes, and look like a leak.
FIRST = 250
#: Kept of a request that is not whole yet; the soak's largest is a few kilobytes.
MAX_REQUEST_BYTES = 1 << 20

_CHUNK = b'{"id":"soak","object":"chat.completion.chunk","created":1700000000,"model":"bench","choices":[%s]%s}'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_USAGE = b'"usage":{"prompt_tokens":100,"completion_tokens":%d,"total_tokens":%d}'


def _event(data: bytes) -> bytes:
    line = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(line), line)


def _choice(delta: bytes, finish: bytes = b"null") -> bytes:
    return _event(_CHUNK % (b'{"index":0,%s,"finish_reason":%s}' % (delta, finish), b""))


_ROLE = _choice(b'"delta":{"role":"assistant","content":""}')
_TOKEN = _choice(TOKEN_MARK + b"}")
_STOP = _choice(b'"delta":{"content":""}', b'"stop"')


def _end(tokens: int) -> bytes:
    usage = _event(_CHUNK % (b"", b"," + _USAGE % (tokens, 100 + tokens)))
    return _STOP + usage + _event(b"[DONE]") + b"0\r\n\r\n"


def _page(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


_MODELS = _page(json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode())
_OTHER = _page(b"{}")


def _answer(tokens: int) -> bytes:
    message = b'{"index":0,"message":{"role":"assistant","content":"%s"},"finish_reason":"stop"}' % (b" token" * tokens)
    return _page(
        b'{"id":"soak","object":"chat.completion","created":1700000000,"model":"bench","choices":[%s],%s}'
        % (message, _USAGE % (tokens, 100 + tokens))
    )


class SlowStreams:
    """All streams that are held, fed in one step."""

    def __init__(self) -> None:
        self._open: dict[asyncio.WriteTransport, int] = {}
        self._due: asyncio.TimerHandle | None = None
        self._gap_s = 0.0

    def add(self, transport: asyncio.WriteTransport, gap_ms: int) -> None:
        """The first tokens go out with the head."""
        transport.write(_HEAD + _ROLE + _TOKEN * FIRST)
        self._open[transport] = FIRST
        self._gap_s = gap_ms / 1e3
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(self._gap_s, self._step)

    def forget(self, transport: asyncio.WriteTransport) -> None:
        """Its client is gone."""
        self._open.pop(transport, None)

    def finish(self) -> None:
        """The last of every stream."""
        for transport, tokens in self._open.items():
            transport.write(_end(tokens))
        self._open.clear()

    def _step(self) -> None:
        for transport in self._open:
            transport.write(_TOKEN)
            self._open[transport] += 1
        self._due = asyncio.get_running_loop().call_later(self._gap_s, self._step) if self._open else None


class _Connection(asyncio.Protocol):
    def __init__(self, slow: SlowStreams) -> None:
        self._slow = slow
        self._buffer = b""
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's own class

    def connection_lost(self, exc: Exception | None) -> None:
        self._slow.forget(self._transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            whole = end + 4 + _content_length(head)
            if len(self._buffer) < whole:
                break
            body, self._buffer = self._buffer[end + 4 : whole], self._buffer[whole:]
            self._respond(head, body)
        if len(self._buffer) > MAX_REQUEST_BYTES:
            raise ValueError("the soak sends no such request")

    def _respond(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"POST "):
            self._transport.write(_MODELS if b" /v1/models " in head[:40] else _OTHER)
            return
        tokens = number_in(body, b"max_completion_tokens", 1)
        if tokens >= HELD:
            self._slow.add(self._transport, number_in(body, b"seed", 1000))
        elif b'"stream":true' in body:
            self._transport.write(_HEAD + _ROLE + _TOKEN * tokens + _end(tokens))
        else:
            self._transport.write(_answer(tokens))


def _content_length(head: bytes) -> int:
    """A relay that re-frames bodies would fail the run, which is what it should do."""
    lower = head.lower()
    if b"\r\ntransfer-encoding:" in lower:
        raise ValueError("the soak's engine reads bodies with a content length only")
    _, found, rest = lower.partition(b"\r\ncontent-length:")
    return int(rest.split(b"\r\n", 1)[0]) if found else 0


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    slow = SlowStreams()
    loop.add_signal_handler(signal.SIGUSR1, slow.finish)
    server = await loop.create_server(partial(_Connection, slow), "127.0.0.1", 0, backlog=2048)
    sys.stdout.write(f"listening on http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await loop.create_future()


if __name__ == "__main__":
    sys.exit(uvloop.run(_serve()))
