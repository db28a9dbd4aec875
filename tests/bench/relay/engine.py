"""A very cheap engine, a process of its own: it reads little and answers at once, so that relays are what is measured.

All running streams of a replica get their next token in the same step, as in an engine with continuous batching. The
first token comes with the head. Prints its ports on one line, then serves until its standard input closes.

Sockets and epoll, without an event loop: 120,000 events a second have to fit beside the load on one core.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache

from tests.bench.relay.wire import MODEL, TOKEN_MARK, number_in

_EVENT = b'{"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1700000000,"model":"bench","choices":[%s]}'


def _event(data: bytes) -> bytes:
    line = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(line), line)


def _choice(delta: bytes, finish: bytes = b"null") -> bytes:
    return _event(_EVENT % (b'{"index":0,%s,"logprobs":null,"finish_reason":%s}' % (delta, finish)))


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ROLE = _choice(b'"delta":{"role":"assistant","content":""}')
TOKEN = _choice(TOKEN_MARK + b"}")
_STOP, _DONE = _choice(b'"delta":{"content":""}', b'"stop"'), _event(b"[DONE]") + b"0\r\n\r\n"
_ANSWER = json.dumps(
    {
        "id": "chatcmpl-bench",
        "object": "chat.completion",
        "created": 1700000000,
        "model": MODEL,
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": " token" * 128}, "finish_reason": "length"}
        ],
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
    "max_running_requests": 4096,
}


def _page(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(body), body)


#: What relays ask of a replica beside completions.
_PAGES: Mapping[bytes, bytes] = {
    b"/metrics": _page(_METRICS, b"text/plain; version=0.0.4"),
    b"/v1/models": _page(json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()),
    b"/v1/loads?include=core": _page(
        b'{"loads":[{"dp_rank":0,"num_running_reqs":1,"num_waiting_reqs":0,"num_total_tokens":1000}]}'
    ),
}
_OTHER_PAGE = _page(json.dumps(_INFO).encode())

#: Of an answer in one piece.
_WHOLE_TOKENS = 8
#: Lengths of prompts in one run, with and without their prefix in the cache.
_LENGTHS_MAX = 1024
_BYTES_PER_TOKEN, _PAGE_TOKENS = 4, 64
#: Bytes of a body by which the benchmark's prompts differ, but for the number at their end.
_PREFIX_BYTES = 256
_EPOLL_EVENTS = 256
_RECEIVED_MAX = 1 << 18
_IN, _OUT = select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT
_STDIN = 0


def _usage(prompt: int, cached: int, output: int) -> bytes:
    details = b'"prompt_tokens_details":{"cached_tokens":%d}' % cached
    counts = b'"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d' % (prompt, prompt + output, output)
    return b',"usage":{%s,%s}}' % (counts, details)


@lru_cache(_LENGTHS_MAX)
def answer(prompt: int, cached: int) -> bytes:
    return _page(_ANSWER[:-1] + _usage(prompt, cached, _WHOLE_TOKENS))


@lru_cache(_LENGTHS_MAX)
def _end(prompt: int, cached: int, output: int) -> bytes:
    return _STOP + _event((_EVENT % b"")[:-1] + _usage(prompt, cached, output)) + _DONE


class PrefixCache:
    """The prefix cache of one replica. Reports as an engine would: others would look as if they evicted everything."""

    def __init__(self) -> None:
        #: Lengths and beginnings of prompts: two of each variant.
        self._seen: set[tuple[int, bytes]] = set()

    def tokens(self, body: bytes) -> tuple[int, int]:
        """Return the tokens of a prompt, and of its prefix in the cache, where it is from now on."""
        key, prompt = (len(body), body[:_PREFIX_BYTES]), len(body) // _BYTES_PER_TOKEN
        if key in self._seen:
            return prompt, max(0, prompt - _PAGE_TOKENS) // _PAGE_TOKENS * _PAGE_TOKENS
        self._seen.add(key)
        return prompt, 0


class _Steps:
    """Emits one token to each running stream of one replica, every `gap_ms`."""

    def __init__(self, gap_ms: int) -> None:
        self._gap_s = gap_ms / 1000
        self._running: list[_Connection] = []
        self.due_s = float("inf")

    def add(self, stream: _Connection) -> None:
        if not self._running:
            self.due_s = time.monotonic() + self._gap_s
        self._running.append(stream)

    def step(self) -> None:
        self._running = [stream for stream in self._running if stream.emit()]
        # A late step does not make the next ones late, unless it was a whole gap late.
        self.due_s = max(self.due_s + self._gap_s, time.monotonic()) if self._running else float("inf")


class _Connection:
    """A client's connection, and the stream on it."""

    def __init__(
        self, client: socket.socket, epoll: select.epoll, steps: dict[int, _Steps], cache: PrefixCache
    ) -> None:
        self._socket, self._epoll, self._steps, self._cache = client, epoll, steps, cache
        self._fd = client.fileno()
        self._received = b""
        #: Bytes that the client does not take yet; a job is short, which bounds them.
        self._unsent = b""
        self._left = 0
        #: The end of the stream, with its usage.
        self._end = b""
        self.closed = False

    def emit(self) -> bool:
        """Write a token; False after the last one or when the client has disconnected."""
        if self.closed:
            return False
        self._left -= 1
        if self._left:
            self._write(TOKEN)
            return True
        self._write(TOKEN + self._end)
        return False

    def on_ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush()
        if events & ~select.EPOLLOUT and not self.closed:
            self._read()

    def _read(self) -> None:
        try:
            data = self._socket.recv(_RECEIVED_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close()
            return
        self._received += data
        while not self.closed and (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end]
            size = _content_length(head)
            if len(self._received) < end + 4 + size:
                return
            body = self._received[end + 4 : end + 4 + size]
            self._received = self._received[end + 4 + size :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        method, path = head.split(b" ", 2)[:2]
        if method == b"PRI":  # sglang-router first tries gRPC
            self._close()
        elif method != b"POST":
            self._write(_PAGES.get(path.partition(b"?")[0], _OTHER_PAGE))
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._stream(body)
        else:
            self._write(answer(*self._cache.tokens(body)))

    def _stream(self, body: bytes) -> None:
        tokens, gap_ms = number_in(body, b"max_completion_tokens", 16), number_in(body, b"seed", 10)
        first = STREAM_HEAD + ROLE + TOKEN
        self._end = _end(*self._cache.tokens(body), tokens)
        if tokens == 1:
            self._write(first + self._end)
            return
        self._write(first)
        self._left = tokens - 1
        if gap_ms not in self._steps:
            self._steps[gap_ms] = _Steps(gap_ms)
        self._steps[gap_ms].add(self)

    def _write(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = os.write(self._fd, data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close()
            return
        if sent < len(data):
            self._unsent = data[sent:]
            self._epoll.modify(self._fd, _OUT)

    def _flush(self) -> None:
        data, self._unsent = self._unsent, b""
        self._epoll.modify(self._fd, _IN)
        self._write(data)

    def _close(self) -> None:
        self.closed = True
        self._socket.close()  # which takes it out of epoll


def _content_length(head: bytes) -> int:
    """Body length of a request; a relay that re-frames bodies would fail the run, which is what it should do."""
    lower = head.lower()
    if b"\r\ntransfer-encoding:" in lower:
        raise ValueError("the benchmark's engine reads bodies with a content length only")
    _, found, rest = lower.partition(b"\r\ncontent-length:")
    return int(rest.split(b"\r\n", 1)[0]) if found else 0


def _serve(replicas: int) -> None:
    epoll = select.epoll()
    servers: dict[int, tuple[socket.socket, dict[int, _Steps], PrefixCache]] = {}
    connections: dict[int, _Connection] = {}
    for _ in range(replicas):
        server = socket.create_server(("127.0.0.1", 0), backlog=4096)
        server.setblocking(False)
        servers[server.fileno()] = server, {}, PrefixCache()
        epoll.register(server, _IN)
    epoll.register(_STDIN, _IN)
    print(*(server.getsockname()[1] for server, _, _ in servers.values()), flush=True)
    while True:
        due_s = min((steps.due_s for _, of, _ in servers.values() for steps in of.values()), default=float("inf"))
        wait_s = min(60.0, max(0.0, due_s - time.monotonic()))
        for fd, events in epoll.poll(wait_s, _EPOLL_EVENTS):
            if fd in servers:
                _accept(*servers[fd], epoll, connections)
            elif fd != _STDIN:
                connections[fd].on_ready(events)
            elif not os.read(_STDIN, 1):
                return
        now_s = time.monotonic()
        for _, of, _ in servers.values():
            for steps in of.values():
                if steps.due_s <= now_s:
                    steps.step()


def _accept(
    server: socket.socket,
    steps: dict[int, _Steps],
    cache: PrefixCache,
    epoll: select.epoll,
    connections: dict[int, _Connection],
) -> None:
    with suppress(BlockingIOError):
        while True:
            client, _ = server.accept()
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connections[client.fileno()] = _Connection(client, epoll, steps, cache)
            epoll.register(client, _IN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("replicas", type=int)
    replicas = parser.parse_args().replicas
    gc.disable()  # nothing here is cyclic but closed connections, and a collection would delay a step
    _serve(replicas)


if __name__ == "__main__":
    main()
