"""What is seen of one replica's answer as it passes: its first token, an error instead of it, its usage, its end.

Owns the reading, by the rules of the core. Bytes are not changed, and only both ends of an answer are retained. What
the answer says of its attempt is `outcomes`'.
"""

from __future__ import annotations

from collections.abc import Sequence

from gorgo.core.stream import FirstTokenDetector, StreamState, Usage, UsageReader, error_of_body, read_usage
from gorgo.live.http.headers import Header, is_encoded, is_event_stream
from gorgo.live.request.gaps import Gaps, is_comment
from gorgo.live.request.parse import ParsedRequest

#: Bytes of an answer in one piece that are retained to be judged: a larger one is no error.
BODY_BYTES = 64 * 1024


class ObservedAnswer:
    """One answer.

    Parameters
    ----------
    route:
        Path of the request, on which the form of a token depends.
    request:
        `None` for a request without a prompt, whose answer is not read.
    """

    __slots__ = (
        "_body",
        "_detector",
        "_events",
        "_tail",
        "chunks",
        "complete",
        "gaps",
        "has_content",
        "headers",
        "in_first_chunk",
        "request",
        "route",
        "size",
        "status",
    )

    def __init__(self, route: str, request: ParsedRequest | None) -> None:
        self.route = route
        self.request = request
        #: 0 before the head, or where only the access log has it.
        self.status = 0
        self.headers: Sequence[Header] = ()
        #: Whether it is a stream of events that can be read; by the request where no head is seen.
        self._events = request is not None and request.route.streamed
        self._detector: FirstTokenDetector | None = None
        self._tail: UsageReader | None = None
        self._body = bytearray()
        self.gaps = Gaps()
        self.size = self.chunks = 0
        #: The first token has come, and with the first bytes of the body.
        self.has_content = self.in_first_chunk = False
        #: All of it has passed.
        self.complete = False

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of readable events."""
        return self._events

    @property
    def body(self) -> bytes | None:
        """The whole body in one piece; `None` for a stream, and for one that is not retained to its end."""
        return bytes(self._body) if self.complete and not self._events and self.size <= BODY_BYTES else None

    @property
    def error_status(self) -> int | None:
        """Status of an error event before any content, or of an error that is the whole body."""
        if self._detector is not None:
            return self._detector.error_status
        body = self.body
        return None if body is None else error_of_body(body)

    @property
    def has_failed(self) -> bool:
        """Whether an error came instead of content."""
        return self.error_status is not None

    @property
    def last_content_s(self) -> float | None:
        """When the last content came, `None` before any."""
        return self.gaps.last_s if self.has_content else None

    @property
    def tail(self) -> bytes:
        """The last bytes of a stream."""
        return b"" if self._tail is None else self._tail.tail

    def read_head(self, status: int, headers: Sequence[Header]) -> None:
        """Read the head of the answer, where the call carries it."""
        self.status, self.headers = status, headers
        self._events = self.request is not None and status < 300 and is_event_stream(headers)
        if is_encoded(headers):
            self._events, self.request = False, None

    def feed(self, chunk: bytes, *, now: float, end: bool = False) -> bool:
        """Read a part of the body; return whether the first token is in it."""
        self.complete = self.complete or end
        if not chunk:
            return False
        self.chunks += 1
        self.size += len(chunk)
        if self.request is None:
            return False
        return self._read_event(chunk, now) if self._events else self._retain(chunk)

    def usage(self) -> Usage | None:
        """Return the usage that the answer reports; `None` before its end has come or without one."""
        if self._events:
            return None if self._tail is None else self._tail.usage()
        body = self.body
        return None if body is None else read_usage(body)

    @property
    def is_waiting(self) -> bool:
        """Whether a stream has shown neither content nor an error."""
        return self._events and not self.has_content and not self.has_failed

    def _retain(self, chunk: bytes) -> bool:
        if self.size <= BODY_BYTES:
            self._body += chunk
        return False

    def _read_event(self, chunk: bytes, now: float) -> bool:
        if self._tail is None:
            self._tail, self._detector = UsageReader(), FirstTokenDetector(self.route)
        self._tail.feed(chunk)
        if self.has_content:
            if not is_comment(chunk):
                self.gaps.add(chunk, now)
            return False
        assert self._detector is not None
        if self._detector.feed(chunk) is not StreamState.CONTENT:
            return False
        self.gaps.last_s = now
        self.has_content = True
        self.in_first_chunk = self.chunks == 1
        return True
