"""Calls of Envoy replayed at pickers without an Envoy: how many decisions a core makes, and how late they come.

A process of its own: figures as JSON on standard output. A call has the two messages of a BUFFERED request, and then
ends. The client knows as much of HTTP/2 as that needs; with a library it would be slower than the pickers.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import select
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gorgo.picker.protocol.protos import HeaderValue, ProcessingMode, ProcessingRequest
from gorgo.picker.transport import frames
from gorgo.picker.transport.services import PROCESS
from tests.bench.relay import measure, wire

#: Calls in progress at each picker, in a closed loop.
CALLS = 16
#: Before what is measured, s: a picker's first requests cost more.
WARM_UP_S = 1.0
_VARIANTS = 16
_CONNECT_S, _LAST_S = 10.0, 10.0
_RECEIVED_MAX = 1 << 18
_PREFIX_BYTES = 5
#: What the first block after the server's settings begins with: no dynamic table (RFC 7541, 6.3).
_TABLE_OF_0 = b"\x20"
#: First byte of an answer with a choice: field 3, `request_body`.
_CHOICE = 0x1A
_HEADERS = (
    *((":method", "POST"), (":path", "/v1/chat/completions"), (":authority", "bench")),
    *(("user-agent", "OpenAI/Python 1.99.1"), ("content-type", "application/json"), ("x-forwarded-proto", "http")),
    *(("authorization", f"Bearer {wire.KEY}"), ("x-request-id", "4b7ffb61-2a0c-4b9e-8f7c-0d8f5dd0c111")),
)


@dataclass(slots=True)
class _Call:
    """One open call."""

    begun_s: float
    messages: int = 0
    received: bytes = b""


class _Connection:
    """One connection to a picker."""

    def __init__(self, port: int, bodies: Iterator[bytes]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.latencies_s: list[float] = []
        self.bad = 0
        self.calls: dict[int, _Call] = {}
        self._bodies = bodies
        self._head = _grpc(_head_message())
        self._ids = itertools.count(1, 2)
        self._window = frames.FIRST_WINDOW
        self._unsent: list[tuple[int, int, bytes]] = []
        self._received = b""
        self._update = b""
        grow = frames.LARGEST_WINDOW - frames.FIRST_WINDOW
        settings = frames.settings({frames.INITIAL_WINDOW_SIZE: frames.LARGEST_WINDOW})
        self.socket.sendall(frames.PREFACE + settings + frames.window_update(0, grow))

    def begin(self, begun_s: float) -> None:
        """Open a call."""
        stream = next(self._ids)
        self.calls[stream] = _Call(begun_s)
        self.socket.sendall(frames.frame(frames.HEADERS, frames.END_HEADERS, stream, self._update + _BLOCK))
        self._update = b""
        self._send(stream, 0, self._head)

    def read(self) -> int:
        """Read what has come; return how many calls have ended. Raises `OSError`."""
        data = self.socket.recv(_RECEIVED_MAX)
        if not data:
            raise ConnectionResetError("the picker has closed the connection")
        data, ended = self._received + data, 0
        at = 0
        while len(data) - at >= frames.HEAD_BYTES:
            end = at + frames.HEAD_BYTES + int.from_bytes(data[at : at + 3], "big")
            if len(data) < end:
                break
            stream = int.from_bytes(data[at + 5 : at + 9], "big")
            ended += self._take(data[at + 3], data[at + 4], stream, data[at + frames.HEAD_BYTES : end])
            at = end
        self._received = data[at:]
        return ended

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> bool:
        """Act on a frame; return whether it ends a call."""
        if kind == frames.DATA:
            self._answers(stream, payload)
        elif kind == frames.WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
            unsent, self._unsent = self._unsent, []
            for each in unsent:
                self._send(*each)
        elif kind in (frames.PING, frames.SETTINGS) and not flags & frames.ACK:
            echo = payload if kind == frames.PING else b""
            self.socket.sendall(frames.frame(kind, frames.ACK, 0, echo))
            if kind == frames.SETTINGS:
                self._update = _TABLE_OF_0
        if kind == frames.RST_STREAM or (kind in (frames.DATA, frames.HEADERS) and flags & frames.END_STREAM):
            call = self.calls.pop(stream, None)
            self.bad += call is not None and call.messages < 2
            return call is not None
        return False

    def _answers(self, stream: int, payload: bytes) -> None:
        call = self.calls.get(stream)
        if call is None:
            return
        call.received += payload
        while len(call.received) >= _PREFIX_BYTES:
            end = _PREFIX_BYTES + int.from_bytes(call.received[1:_PREFIX_BYTES], "big")
            if len(call.received) < end:
                return
            message, call.received = call.received[_PREFIX_BYTES:end], call.received[end:]
            call.messages += 1
            if call.messages == 1:
                self._send(stream, 0, _grpc(_body_message(next(self._bodies))))
            elif call.messages == 2:
                self.latencies_s.append(time.perf_counter() - call.begun_s)
                self.bad += message[0] != _CHOICE
                self._send(stream, frames.END_STREAM, b"")

    def _send(self, stream: int, flags: int, payload: bytes) -> None:
        if self._unsent or len(payload) > self._window:
            self._unsent.append((stream, flags, payload))
            return
        self._window -= len(payload)
        self.socket.sendall(frames.frame(frames.DATA, flags, stream, payload))


def _head_message() -> bytes:
    message = ProcessingRequest()
    for name, value in _HEADERS:
        message.request_headers.headers.headers.append(HeaderValue(key=name, raw_value=value.encode()))
    message.protocol_config.request_body_mode = ProcessingMode.BUFFERED
    whole: bytes = message.SerializeToString()
    return whole


def _body_message(body: bytes) -> bytes:
    message = ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = body, True
    whole: bytes = message.SerializeToString()
    return whole


def _grpc(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def _literal(name: str, value: str) -> bytes:
    """Return a header that no table keeps (RFC 7541, 6.2.2), of less than 127 bytes."""
    return b"\0%c%b%c%b" % (len(name), name.encode(), len(value), value.encode())


_BLOCK = b"".join(
    _literal(*pair)
    for pair in (
        *((":method", "POST"), (":scheme", "http"), (":path", PROCESS), (":authority", "picker")),
        *(("te", "trailers"), ("content-type", "application/grpc")),
    )
)


def _bodies(size: int) -> Iterator[bytes]:
    """Yield bodies that end differently each."""
    variants = []
    for variant in range(_VARIANTS):
        before, after = wire.request(size, variant=variant, tokens=16, gap_ms=0)
        variants.append((before.partition(b"\r\n\r\n")[2], after))
    for number, (before, after) in zip(
        itertools.count(time.time_ns() // 1_000_000), itertools.cycle(variants), strict=False
    ):
        yield b"%b%0*d%b" % (before, wire.NUMBER_BYTES, number % 10**wire.NUMBER_BYTES, after)


def replay(
    ports: Sequence[int], processes: Sequence[int], *, seconds: float, rate: float | None, size: int
) -> dict[str, object]:
    """Return the figures of `seconds`: with a `rate` calls arrive by chance, without one each ends another's wait."""
    bodies = _bodies(size)
    connections = [_Connection(port, bodies) for port in ports]
    epoll = select.epoll()
    by_number = {each.socket.fileno(): each for each in connections}
    for number in by_number:
        epoll.register(number, select.EPOLLIN)
    rng = random.Random(0)
    in_turn = itertools.cycle(connections)
    before_s = measure.cpu_times(processes)[0]
    started_s = time.perf_counter()
    until_s = started_s + seconds
    due_s = started_s if rate else float("inf")
    if not rate:
        for each in connections * CALLS:
            each.begin(time.perf_counter())
    while (now_s := time.perf_counter()) < until_s:
        while rate and due_s <= now_s:
            # Counted from when it was due: a late client does not flatter the picker.
            next(in_turn).begin(due_s)
            due_s += rng.expovariate(rate)
        for number, _ in epoll.poll(max(0.0, min(due_s, until_s) - now_s)):
            ended = by_number[number].read()
            for _ in range(0 if rate else ended):
                by_number[number].begin(time.perf_counter())
    wall_s, cpu_s = time.perf_counter() - started_s, measure.cpu_times(processes)[0] - before_s
    latencies = np.array([latency for each in connections for latency in each.latencies_s] or [0.0])
    return {
        "decisions": sum(len(each.latencies_s) for each in connections),
        "bad": sum(each.bad for each in connections),
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "latency_s": [float(at) for at in np.quantile(latencies, (0.5, 0.99))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ports", type=int, nargs="+")
    parser.add_argument("--process", type=int, action="append", required=True, help="a picker, whose time counts")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rate", type=float, help="calls a second; without it as many as there can be")
    parser.add_argument("--size", type=int, default=500)
    asked = parser.parse_args()
    gc.disable()  # a collection would look like a slow picker
    replay(asked.ports, asked.process, seconds=WARM_UP_S, rate=None, size=asked.size)
    found = replay(asked.ports, asked.process, seconds=asked.seconds, rate=asked.rate, size=asked.size)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
