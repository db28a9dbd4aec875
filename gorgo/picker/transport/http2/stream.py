"""One stream: the `Output` of its call, what waits for the client's window, and what of its own window is used."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from gorgo.picker.transport.http2.messages import MessageReader
from gorgo.picker.transport.streams import ServedCall, Status


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
        "counted_bytes",
        "end_status",
        "end_text",
        "input_ended",
        "is_head_sent",
        "reader",
        "stream_id",
        "unacknowledged",
        "unsent",
        "unsent_bytes",
        "window",
    )

    def __init__(self, writer: StreamOutput, stream_id: int, *, window: int, message_bytes: int) -> None:
        self._writer = writer
        self.stream_id = stream_id
        #: `None` for a stream that is answered without a service.
        self.call: ServedCall | None = None
        self.reader = MessageReader(message_bytes)
        #: Bytes of its incomplete message that the connection has counted.
        self.counted_bytes = 0
        #: Bytes that the client still takes.
        self.window = window
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
