"""What passes between the workers of one router and their parent: frames on a socket pair, and their bounds.

Owns the form of a frame and one end of a connection (`Channel`). Leaves what frames say to `link`, and who gets them to
`parent`.

Theory of operation. Each worker has one connection, to the parent, which passes frames on to the others by their head
alone. All ends are this program's own and of one machine, so what a frame carries is pickled, and its age is a
difference of the machine's monotonic clock. Nobody waits for a slow reader. One that misses a frame would differ from
the rest for good, so its connection is cut, and the worker is started anew. What the next one replaces, a report of
load, is no frame (`reports`).
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

#: Length of the content, kind, sender, receiver, number.
_HEAD = struct.Struct("!IBhhI")
HEAD_BYTES = _HEAD.size
#: As a receiver: every other worker. And as sender or receiver: the parent.
ALL, PARENT = -1, -2
#: Bytes that wait for a reader: above them the connection is cut. A whole push of a large cache waits below it.
MAX_WAITING_BYTES = 64 << 20


class FrameKind(IntEnum):
    """What a frame is."""

    #: From the parent: what the worker starts with, which worker leads, one that has ended, all workers, the end.
    START = 1
    LEADER = 2
    ENDED = 3
    TABLE = 4
    RETIRE = 5
    #: Whether changes wait for a successor.
    PAUSE = 12
    #: From a worker, to the parent: it serves; one that is to be started again; it ends and leads no longer, which the
    #: parent answers with the leader.
    READY = 6
    RESTART = 11
    LEAVE = 13
    #: Between workers: an event, a question and its answer.
    EVENT = 8
    QUESTION = 9
    ANSWER = 10


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. `content` is pickled."""

    kind: FrameKind
    sender: int
    receiver: int
    number: int
    content: bytes

    def as_bytes(self) -> bytes:
        """Return the form on the socket.

        >>> frame = Frame(FrameKind.EVENT, 0, ALL, 7, b"content")
        >>> read_head(frame.as_bytes()[:HEAD_BYTES])
        (7, <FrameKind.EVENT: 8>, 0, -1, 7)
        """
        head = _HEAD.pack(len(self.content), self.kind, self.sender, self.receiver, self.number)
        return head + self.content


def read_head(head: bytes) -> tuple[int, FrameKind, int, int, int]:
    """Return the length of the content, and the fields before it. Raises `ValueError`."""
    size, kind, sender, receiver, number = _HEAD.unpack(head)
    return size, FrameKind(kind), sender, receiver, number


def packed(content: object) -> bytes:
    """Return what a frame carries."""
    return pickle.dumps(content, pickle.HIGHEST_PROTOCOL)


def unpacked(content: bytes) -> Any:
    """Return what a frame of this program carries."""
    return pickle.loads(content)


class Channel(asyncio.Protocol):
    """One end of a connection.

    Parameters
    ----------
    on_frame:
        Called with each frame, in order.
    on_end:
        Called once when the other end has closed, or was cut.
    """

    def __init__(self, on_frame: Callable[[Frame], None], on_end: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def write_frame(self, frame: Frame) -> bool:
        """Write a frame; return whether it was taken. A reader that would miss one is cut."""
        if self._transport is None or self._transport.is_closing():
            return False
        waiting = self._transport.get_write_buffer_size()
        if waiting > MAX_WAITING_BYTES:
            self._transport.abort()
            return False
        self._transport.write(frame.as_bytes())
        return True

    def close(self) -> None:
        """Close this end, after what was written."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        start, size = 0, len(received)
        while size - start >= _HEAD.size:
            length, kind, sender, receiver, number = read_head(bytes(received[start : start + _HEAD.size]))
            end = start + _HEAD.size + length
            if size < end:
                break
            content = bytes(received[start + _HEAD.size : end])
            start = end
            self._on_frame(Frame(kind, sender, receiver, number, content))
        if start:
            del received[:start]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._on_end()
