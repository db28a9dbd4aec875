"""The proxy's reader of requests and h11's, on the same pieces.

Held here: whatever both accept has one reading, and the proxy's reader accepts nothing that h11 refuses. The proxy may
refuse more; h11 is known to accept a length beside a coding, a repeated length, folded lines, lines that end with a
bare LF, targets that are no path, other versions, codings before HTTP/1.1, and blanks, lone CRs or more than 64 bits in
the line of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import h11

from gorgo.live.listener.connection.reader import Refused, RequestReader
from gorgo.live.listener.heads import HeadLimits

LIMITS = HeadLimits(2000, 10.0)
_RESPONSE = h11.Response(status_code=400, headers=[("content-length", "0")])


@dataclass(slots=True)
class Request:
    """A request as it was read; names of headers in lower case."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""


@dataclass(slots=True)
class Reading:
    """Complete requests in order, the incomplete one whose head was accepted, and why the rest was refused."""

    requests: list[Request] = field(default_factory=list)
    partial: Request | None = None
    refused: str = ""


def read(pieces: Sequence[bytes]) -> Reading:
    """Read with the proxy's reader, as if each complete request were answered at once."""
    reader, reading = RequestReader(LIMITS), Reading()
    try:
        for piece in pieces:
            reader.receive(piece)
            while _go_on(reader, reading):
                pass
    except Refused as refused:
        reading.refused = str(refused)
    return reading


def _go_on(reader: RequestReader, reading: Reading) -> bool:
    """Read a head or more of a body; return whether the next request may follow."""
    if reading.partial is None:
        head = reader.next_head()
        if head is None:
            return False
        reading.partial = Request(head.method.encode(), head.target, normalized(head.headers))
    reading.partial.body += reader.read_body()
    if not reader.complete:
        return False
    reading.requests.append(reading.partial)
    reading.partial = None
    reader.start_next()
    return True


def read_h11(pieces: Sequence[bytes]) -> Reading:
    """Read with h11 as it is, and answer each complete request, so that the next is read."""
    connection, reading = h11.Connection(h11.SERVER, max_incomplete_event_size=LIMITS.size_bytes), Reading()
    try:
        for piece in pieces:
            connection.receive_data(piece)
            while (event := connection.next_event()) is not h11.NEED_DATA and event is not h11.PAUSED:
                assert isinstance(event, h11.Event)
                _take(reading, event)
                if isinstance(event, h11.EndOfMessage):
                    connection.send(_RESPONSE)
                    connection.send(h11.EndOfMessage())
                    if connection.our_state is h11.MUST_CLOSE or connection.their_state is h11.MUST_CLOSE:
                        return reading
                    connection.start_next_cycle()
    except h11.RemoteProtocolError as error:
        reading.refused = str(error)
    return reading


def disagreement(ours: Reading, theirs: Reading) -> str | None:
    """Return what is read in two ways, or by the proxy alone."""
    for number, one in enumerate(ours.requests):
        if number >= len(theirs.requests):
            return f"request {number} is accepted by the proxy alone; h11: {theirs.refused or 'waits'}"
        if one != theirs.requests[number]:
            return f"request {number} has two readings: {one}, h11: {theirs.requests[number]}"
    begun = ours.partial
    if begun is not None:
        later = [*theirs.requests, *([theirs.partial] if theirs.partial else [])][len(ours.requests) :]
        if not later:
            return f"the head of request {len(ours.requests)} is accepted by the proxy alone: {theirs.refused}"
        head = begun.method, begun.target, begun.headers
        if head != (later[0].method, later[0].target, later[0].headers) or not later[0].body.startswith(begun.body):
            return f"the last request has two readings: {begun}, h11: {later[0]}"
    if not (ours.refused or theirs.refused) and ours != theirs:
        return f"one waits where the other reads: {ours}, h11: {theirs}"
    return None


def normalized(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return headers without `Upgrade`, which the proxy drops, and with the coding in lower case, as h11 returns it."""
    return [
        (name, value.lower() if name == b"transfer-encoding" else value)
        for name, value in headers
        if name != b"upgrade"
    ]


def _take(reading: Reading, event: h11.Event) -> None:
    if isinstance(event, h11.Request):
        headers = [(bytes(name), bytes(value)) for name, value in event.headers]
        target = bytes(event.target)
        if target.startswith(b"http://"):  # the reader returns the path of a URL
            target = b"/" + target.partition(b"://")[2].partition(b"/")[2]
        reading.partial = Request(bytes(event.method), target, normalized(headers))
        return
    assert reading.partial is not None
    if isinstance(event, h11.Data):
        reading.partial.body += bytes(event.data)
    else:
        reading.requests.append(reading.partial)
        reading.partial = None
