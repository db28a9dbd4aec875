"""One stream: its messages of gRPC in both directions, and the windows of both ends.

Owns the `Output` of a call, what waits for the client's window, what of its own window is used, and the joining of
pieces of DATA to messages (`MessageReader`). Leaves sending to the connection's writer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from gorgo.core.limits import Buffer
from gorgo.picker.transport.frames import PREFIX_BYTES
from gorgo.picker.transport.services import ServedCall, Status

# Messages of gRPC in the DATA frames of a stream: a byte of compression, four of length, the message.


class MessageError(Exception):
    """A message that is too large, or compressed."""

    def __init__(self, text: str, *, too_large: bool) -> None:
        super().__init__(text)
        self.too_large = too_large


class MessageReader:
    """Joins the pieces of one stream.

    Example
    -------
    >>> reader = MessageReader(1000)
    >>> list(reader.feed(bytes([0, 0, 0, 0, 2]) + b"a")), list(reader.feed(b"b" + bytes(5))), reader.partial_bytes
    ([], [b'ab', b''], 0)
    """

    __slots__ = ("_limit_bytes", "_partial")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._partial = bytearray()

    @property
    def partial_bytes(self) -> int:
        """Return the bytes of an incomplete message."""
        return len(self._partial)

    def drop_partial(self) -> None:
        """Forget the incomplete message: its stream has failed."""
        self._partial.clear()

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Yield each message that is complete now. Raises `MessageError` at the prefix of a wrong one."""
        size = len(data) - PREFIX_BYTES
        if not self._partial and 0 <= size <= self._limit_bytes and data[:PREFIX_BYTES] == size.to_bytes(5, "big"):
            return (data[PREFIX_BYTES:],)
        return self._join(data)

    def _join(self, data: bytes) -> Iterator[bytes]:
        partial = self._partial
        if partial:
            missing = self._missing()
            partial += data
            if len(data) < missing:
                return
            data = bytes(partial)
            partial.clear()
        position, size = 0, len(data)
        while size - position >= PREFIX_BYTES:
            end = position + PREFIX_BYTES + self._length(data[position : position + PREFIX_BYTES])
            if end > size:
                break
            yield data[position + PREFIX_BYTES : end]
            position = end
        partial += data[position:]
        if position == size:
            return
        if len(partial) >= PREFIX_BYTES:
            self._length(partial)

    def _missing(self) -> int:
        """Return how many bytes complete the message, or at least its prefix."""
        have = len(self._partial)
        if have < PREFIX_BYTES:
            return 1
        return PREFIX_BYTES + self._length(self._partial) - have

    def _length(self, prefix: bytes | bytearray) -> int:
        if prefix[0]:
            raise MessageError("expected a message without compression", too_large=False)
        length = int.from_bytes(prefix[1:PREFIX_BYTES], "big")
        if length > self._limit_bytes:
            problem = f"a message of {length} bytes; expected at most {self._limit_bytes}"
            raise MessageError(problem, too_large=True)
        return length


class StreamOutput(Protocol):
    """What sends for a stream."""

    def write(self, stream: CallStream) -> None:
        """Send what of a stream can be sent."""
        ...

    def write_message(self, stream: CallStream, message: bytes) -> None:
        """Send a message, or let it wait."""
        ...


class CallStream:
    """An open stream of a connection."""

    __slots__ = (
        "_writer",
        "call",
        "counted",
        "end_status",
        "end_text",
        "granted",
        "input_ended",
        "is_head_sent",
        "reader",
        "stream_id",
        "unacknowledged",
        "unsent",
        "unsent_bytes",
    )

    def __init__(self, writer: StreamOutput, stream_id: int, *, message_bytes: int) -> None:
        self._writer = writer
        self.stream_id = stream_id
        #: `None` for a stream that is answered without a service.
        self.call: ServedCall | None = None
        self.reader = MessageReader(message_bytes)
        #: The reservation of its incomplete message; `None` without one.
        self.counted: Buffer | None = None
        #: Bytes that the client still takes beyond its initial window, which is the same for all streams: a change of
        #: that one touches no stream.
        self.granted = 0
        #: Received bytes for which the client has no new window yet.
        self.unacknowledged = 0
        #: Messages, or rests of them, that wait for the window.
        self.unsent: deque[bytes] = deque()
        self.unsent_bytes = 0
        self.is_head_sent = False
        #: The client has sent its last frame.
        self.input_ended = False
        #: Status to end with after `unsent`; `None` while the call is open.
        self.end_status: Status | None = None
        self.end_text = ""

    def send_message(self, message: bytes) -> None:
        if self.end_status is None:
            self._writer.write_message(self, message)

    def end_call(self) -> None:
        self._end(Status.OK, "")

    def fail_call(self, status: Status, text: str) -> None:
        self._end(status, text)

    def _end(self, status: Status, text: str) -> None:
        if self.end_status is None:
            self.end_status, self.end_text = status, text
            self._writer.write(self)
