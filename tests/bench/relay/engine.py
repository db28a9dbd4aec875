"""A very cheap engine, a process of its own: it reads little and answers at once, so that relays are what is measured.

All running streams of a replica get their next token in the same step, as in an engine with continuous batching. The
first token comes with the head. Prints its ports on one line, then serves until its standard input closes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from functools import partial
from typing import cast

import uvloop

from tests.bench.relay.wire import MODEL, TOKEN_MARK, number_in

_EVENT = b'{"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1700000000,"model":"bench","choices":[%s]}'


def _event(data: bytes) -> bytes:
    line = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(line), line)


def _choice(delta: bytes, finish: bytes = b"null") -> bytes:
    return _event(_EVENT % (b'{"index":0,%s,"logprobs":null,"finish_reason":%s}' % (delta, finish)))


_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_ROLE = _choice(b'"delta":{"role":"assistant","content":""}')
_TOKEN = _choice(TOKEN_MARK + b"}")
_USAGE = b'{"prompt_tokens":100,"total_tokens":108,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":64}}'
_END = (
    _choice(b'"delta":{"content":""}', b'"stop"')
    + _event((_EVENT % b"")[:-1] + b',"usage":' + _USAGE + b"}")
    + _event(b"[DONE]")
    + b"0\r\n\r\n"
)
_ANSWER = json.dumps(
    {
        "id": "chatcmpl-bench",
        "object": "chat.completion",
        "created": 1700000000,
        "model": MODEL,
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": " token" * 128}, "finish_reason": "length"}
        ],
        "usage": json.loads(_USAGE),
    }
).encode()
_METRICS = (
    b'sglang:num_running_reqs{model_name="bench"} 1.0\nsglang:num_queue_reqs{model_name="bench"} 0.0\n'
    b'sglang:token_usage{model_name="bench"} 0.1\nsglang:num_used_tokens{model_name="bench"} 100000.0\n'
)
_INFO = {
    "model_path": MODEL,
    "served_model_name": MODEL,
    "is_generation": True,
    "max_total_num_tokens": 983549,
    "max_running_requests": 256,
}


def _page(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(body), body)


_JSON_REPLY = _page(_ANSWER)
#: What relays ask of a replica beside completions.
_PAGES: Mapping[bytes, bytes] = {
    b"/metrics": _page(_METRICS, b"text/plain; version=0.0.4"),
    b"/v1/models": _page(json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()),
    b"/v1/loads": _page(b'{"loads":[{"dp_rank":0,"num_running_reqs":1,"num_waiting_reqs":0,"num_total_tokens":1000}]}'),
}
_OTHER_PAGE = _page(json.dumps(_INFO).encode())


class _Steps:
    """Emits one token to each running stream of one replica, every `gap_ms`."""

    def __init__(self, gap_ms: int) -> None:
        self._gap_s = gap_ms / 1000
        self._running: list[_Stream] = []
        self._due = 0.0

    def add(self, stream: _Stream) -> None:
        if not self._running:
            loop = asyncio.get_running_loop()
            self._due = loop.time() + self._gap_s
            loop.call_at(self._due, self._step, loop)
        self._running.append(stream)

    def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        self._running = [stream for stream in self._running if stream.emit()]
        if self._running:
            # A late step does not make the next ones late, unless it was a whole gap late.
            self._due = max(self._due + self._gap_s, loop.time())
            loop.call_at(self._due, self._step, loop)


class _Stream:
    def __init__(self, transport: asyncio.WriteTransport, tokens: int) -> None:
        self._transport = transport
        self._left = tokens

    def emit(self) -> bool:
        """Write a token; False after the last one or when the client has gone."""
        if self._transport.is_closing():
            return False
        self._left -= 1
        self._transport.write(_TOKEN if self._left else _TOKEN + _END)
        return self._left > 0


class _Connection(asyncio.Protocol):
    def __init__(self, steps: dict[int, _Steps]) -> None:
        self._steps = steps
        self._buffer = b""
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's own class

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while not self._transport.is_closing() and (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            size = _content_length(head)
            if len(self._buffer) < end + 4 + size:
                return
            body = self._buffer[end + 4 : end + 4 + size]
            self._buffer = self._buffer[end + 4 + size :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        method, path = head.split(b" ", 2)[:2]
        if method == b"PRI":  # sglang-router asks first whether this is gRPC
            self._transport.close()
        elif method != b"POST":
            self._transport.write(_PAGES.get(path.partition(b"?")[0], _OTHER_PAGE))
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._stream(body)
        else:
            self._transport.write(_JSON_REPLY)

    def _stream(self, body: bytes) -> None:
        tokens, gap_ms = number_in(body, b"max_completion_tokens", 16), number_in(body, b"seed", 10)
        first = _STREAM_HEAD + _ROLE + _TOKEN
        if tokens == 1:
            self._transport.write(first + _END)
            return
        self._transport.write(first)
        if gap_ms not in self._steps:
            self._steps[gap_ms] = _Steps(gap_ms)
        self._steps[gap_ms].add(_Stream(self._transport, tokens - 1))


def _content_length(head: bytes) -> int:
    """Body length of a request; a relay that re-frames bodies would fail the run, which is what it should do."""
    lower = head.lower()
    if b"\r\ntransfer-encoding:" in lower:
        raise ValueError("the benchmark's engine reads bodies with a content length only")
    _, found, rest = lower.partition(b"\r\ncontent-length:")
    return int(rest.split(b"\r\n", 1)[0]) if found else 0


async def _serve(replicas: int) -> None:
    loop = asyncio.get_running_loop()
    ports: list[int] = []
    for _ in range(replicas):
        steps: dict[int, _Steps] = {}
        server = await loop.create_server(partial(_Connection, steps), "127.0.0.1", 0, backlog=2048)
        ports.append(server.sockets[0].getsockname()[1])
    print(*ports, flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("replicas", type=int)
    uvloop.run(_serve(parser.parse_args().replicas))


if __name__ == "__main__":
    main()
