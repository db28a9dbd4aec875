"""Processor time of one call of the endpoint picker, and calls a second that one core would carry."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from statistics import median
from typing import Any, cast

import uvloop
from hpack import Encoder

from gorgo.config.model import PickerTlsConfig
from gorgo.core.limits import BufferBudget
from gorgo.live.logs import set_up_logs
from gorgo.picker.call import PickerCall
from gorgo.picker.transport import frames
from gorgo.picker.transport.server import Http2Server
from gorgo.picker.transport.services import (
    PROCESS,
    CallHandlers,
    Health,
    Output,
    Services,
    TransportLimits,
    nothing_open,
    services,
)
from tests.bench import picker_call
from tests.picker.virtual import BUFFERED, body_message, headers_message

# --- A client of calls on one HTTP/2 connection, cheap enough to be beside what it measures.


_HEAD = (
    *((":method", "POST"), (":scheme", "http"), (":path", PROCESS), (":authority", "picker")),
    *(("te", "trailers"), ("content-type", "application/grpc")),
)
#: Of the client: no answer waits for it.
_WINDOW = 1 << 30


class CallClient(asyncio.Protocol):
    """Calls of the same messages; the next one is sent with each answer, and the end after the last."""

    def __init__(self, messages: tuple[bytes, ...]) -> None:
        self._messages = [_in_frames(message) for message in messages]
        self._block = b"\x20" + bytes(Encoder().encode([(name, value, True) for name, value in _HEAD]))
        self._buffer = b""
        self._next_id = 1
        self._turns: dict[int, int] = {}
        self._to_begin = 0
        self._window = frames.FIRST_WINDOW
        self._waiting: deque[tuple[int, list[bytes]]] = deque()
        self._out: list[bytes] = []
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        window = frames.settings({frames.INITIAL_WINDOW_SIZE: _WINDOW})
        self._transport.write(frames.PREFACE + window + frames.window_update(0, _WINDOW))

    async def calls(self, count: int, *, width: int) -> None:
        """Make `count` calls, `width` at a time."""
        self._done = asyncio.get_running_loop().create_future()
        self._to_begin = count
        for _ in range(min(width, count)):
            self._begin()
        self._flush()
        await asyncio.wait_for(self._done, 120)

    def close(self) -> None:
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data
        place = 0
        while len(buffer) - place >= frames.HEAD_BYTES:
            end = place + frames.HEAD_BYTES + int.from_bytes(buffer[place : place + 3], "big")
            if end > len(buffer):
                break
            stream_id = int.from_bytes(buffer[place + 5 : place + 9], "big")
            self._take(buffer[place + 3], buffer[place + 4], stream_id, buffer[place + frames.HEAD_BYTES : end])
            place = end
        self._buffer = buffer[place:]
        self._flush()

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.DATA and payload:
            self._turn(stream_id)
        elif kind == frames.HEADERS and flags & frames.END_STREAM:
            assert self._turns.pop(stream_id) == len(self._messages), "each message has an answer"
            self._begin()
            if not self._turns and self._done is not None:
                self._done.set_result(None)
        elif kind in (frames.SETTINGS, frames.PING) and not flags & frames.ACK:
            self._out.append(frames.frame(kind, frames.ACK, 0, payload if kind == frames.PING else b""))
        elif kind == frames.WINDOW_UPDATE and not stream_id:
            self._window += int.from_bytes(payload, "big")
            self._send_waiting()
        elif kind == frames.GOAWAY:
            raise ConnectionError(payload[8:].decode(errors="replace"))

    def _begin(self) -> None:
        if not self._to_begin:
            return
        self._to_begin -= 1
        stream_id, self._next_id = self._next_id, self._next_id + 2
        self._turns[stream_id] = 0
        self._out.append(frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, self._block))
        self._queue(stream_id, 0)

    def _turn(self, stream_id: int) -> None:
        """An answer has come: answers are smaller than a frame."""
        turn = self._turns[stream_id] = self._turns[stream_id] + 1
        if turn < len(self._messages):
            self._queue(stream_id, turn)
        else:
            self._out.append(frames.frame(frames.DATA, frames.END_STREAM, stream_id))

    def _queue(self, stream_id: int, turn: int) -> None:
        self._waiting.append((stream_id, self._messages[turn]))
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Send whole messages while the server's window lasts."""
        while self._waiting:
            stream_id, parts = self._waiting[0]
            size = sum(map(len, parts))
            if size > self._window:
                return
            self._window -= size
            self._waiting.popleft()
            self._out += (frames.frame(frames.DATA, 0, stream_id, part) for part in parts)

    def _flush(self) -> None:
        if self._out:
            self._transport.write(b"".join(self._out))
            self._out.clear()


def _in_frames(message: bytes) -> list[bytes]:
    whole = b"\0" + len(message).to_bytes(4, "big") + message
    return [whole[start : start + frames.FRAME_BYTES] for start in range(0, len(whole), frames.FRAME_BYTES)]


# --- Processor time of one call of the endpoint picker, and calls a second that one core would carry.
#
# A server in a process of its own has calls as Envoy makes them: 32 at once on one connection. First alone, each
# message with an answer of 200 bytes, then with the picker behind it: 64 replicas, gorgo-ms. The client is not
# counted.


ROUNDS = 3
CALLS = 1000
#: Calls at once.
WIDTH = 32
ANSWER = bytes(200)


@dataclass(frozen=True)
class Workload:
    """Messages of one call, each sent after the answer to the one before."""

    name: str
    messages: tuple[bytes, ...]
    with_picker: bool = False


def workloads() -> list[Workload]:
    head = headers_message("request_headers", *picker_call.HEADERS, mode=BUFFERED).SerializeToString()
    body = body_message("request_body", picker_call.BODY).SerializeToString()
    large = body_message("request_body", b"x" * 48_000).SerializeToString()
    chunk = body_message("response_body", b"x" * 130, end=False).SerializeToString()
    return [
        Workload(f"2 messages, a body of {len(picker_call.BODY)} bytes", (head, body)),
        Workload("2 messages, a body of 48,000 bytes", (head, large)),
        Workload("22 messages: a stream in pieces", (head, body, *[chunk] * 20)),
        Workload("2 messages with the picker", (head, body), with_picker=True),
    ]


def run() -> None:
    """Print medians of rounds."""
    set_up_logs(level="warning")
    print(f"us of processor time a call and calls/s of one core, median (least us) of {ROUNDS} rounds of {CALLS} calls")
    for workload in workloads():
        us = [_measure(workload) for _ in range(ROUNDS)]
        shown = f"{median(us):.0f} ({min(us):.0f}), {1e6 / median(us):,.0f}/s"
        print(f"{workload.name:<38}{shown:>24}")


def _measure(workload: Workload) -> float:
    """Return the server's us a call."""
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=_serve_process, args=(workload.with_picker, theirs))
    server.start()
    try:
        port = ours.recv()
        return uvloop.run(_drive(port, workload.messages, ours)) * 1e6 / CALLS
    finally:
        ours.send("end")
        server.join(10)


async def _drive(port: int, messages: tuple[bytes, ...], server: Any) -> float:
    """Return the server's s of `CALLS` calls, after some to warm up."""
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: CallClient(messages), "127.0.0.1", port)
    await client.calls(WIDTH * 4, width=WIDTH)
    server.send("time")
    before_s = server.recv()
    await client.calls(CALLS, width=WIDTH)
    server.send("time")
    spent_s: float = server.recv() - before_s
    client.close()
    return spent_s


# -- the server's process
def _serve_process(with_picker: bool, pipe: Pipe) -> None:
    set_up_logs(level="error")
    uvloop.run(_serve(with_picker, pipe))


async def _serve(with_picker: bool, pipe: Pipe) -> None:
    limits = TransportLimits(1_000_000, 10_000)
    server = Http2Server(_with_picker() if with_picker else _alone(), limits, BufferBudget(1 << 28))
    _, port = server.bind("127.0.0.1:0", PickerTlsConfig())
    closing = asyncio.Event()

    def on_order() -> None:
        if pipe.recv() == "end":
            closing.set()
        else:
            pipe.send(time.process_time())

    asyncio.get_running_loop().add_reader(pipe.fileno(), on_order)
    gc.freeze()
    task = asyncio.create_task(server.serve_calls(closing))
    await asyncio.sleep(0.05)
    pipe.send(port)
    await task


def _alone() -> Services:
    def process(output: Output) -> CallHandlers:
        return CallHandlers(lambda _: output.send_message(ANSWER), nothing_open)

    return services(process, lambda _: None, Health(lambda: True))


def _with_picker() -> Services:
    state = picker_call.make_state()

    def process(output: Output) -> CallHandlers:
        call = PickerCall(state, output)
        return CallHandlers(call.feed, call.closed)

    return services(process, lambda _: None, Health(lambda: True))
