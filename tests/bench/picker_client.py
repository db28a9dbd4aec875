"""A client of calls on one HTTP/2 connection, cheap enough to be beside what it measures."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

from hpack import Encoder

from gorgo.picker.transport.http2 import frames
from gorgo.picker.transport.services import PROCESS

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
