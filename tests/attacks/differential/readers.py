"""The proxy's reader of requests and its client of replicas beside h11's, on the same pieces."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import combinations

import h11
import httpx

from gorgo.live.listener.connection.reader import Refused, RequestReader
from gorgo.live.listener.heads import HeadLimits
from gorgo.live.upstream.connection import ReplicaConnection
from gorgo.live.upstream.response import HttpResponse
from tests.attacks.differential.messages import Answered

# --- The proxy's reader of requests and h11's, on the same pieces.
#
# Held here: whatever both accept has one reading, and the proxy's reader accepts nothing that h11 refuses. The proxy
# may refuse more; h11 is known to accept a length beside a coding, a repeated length, folded lines, lines that end
# with a bare LF, targets that are no path, other versions, codings before HTTP/1.1, and blanks, lone CRs or more than
# 64 bits in the line of a chunk.


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


# --- The proxy's client of replicas and h11's, on the same pieces from a replica.
#
# Held here: a response that the proxy takes as complete has the status, headers and body that h11 reads; an incomplete
# one fails or waits; a connection that the proxy uses again is one that h11 permits to use again. The proxy may refuse
# more. The connection and the response are the real ones, over a transport that only pauses.
#
# Of httptools is known, and changes no reading: it skips empty lines before a status line; it takes any byte but CR
# and LF in the reason, which the proxy does not pass on, and any number of zeros before the size of a chunk, where h11
# takes 20 digits.


_HEAD_BYTES_MAX = 64 * 1024
#: What httptools skips, and h11 does not.
_SKIPPED = (
    (re.compile(rb"(?:\A|(?<=\r\n\r\n))[\r\n]+(?=HTTP/)"), b""),
    (re.compile(rb"^(HTTP/\d\.\d \d{3} )[^\r\n]*[\x00\x0b\x0c][^\r\n]*", re.MULTILINE), rb"\1"),
    (re.compile(rb"^(?=[0-9A-Fa-f]{21})0+(?=[0-9A-Fa-f])", re.MULTILINE), b""),
)
_TURNS_MAX = 50


@dataclass(slots=True)
class ReadingClient:
    """A response as it was read, and whether its connection may carry another."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    complete: bool = False
    reusable: bool = False
    refused: str = ""


class _Transport(asyncio.Transport):
    """Takes what is written, and records whether it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reading, self.closed = True, False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    close = abort


class Client:
    """Reads responses with the proxy's client, on an event loop of its own."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def read(self, answered: Answered, pieces: Sequence[bytes]) -> ReadingClient:
        return self._runner.run(_read(answered, pieces))

    def close(self) -> None:
        self._runner.close()


async def _read(answered: Answered, pieces: Sequence[bytes]) -> ReadingClient:
    idle: list[ReplicaConnection] = []
    connection, transport = ReplicaConnection(idle.append, lambda _: None), _Transport()
    connection.connection_made(transport)
    response = HttpResponse(connection, head_only=answered.head_only)
    connection.write_request(b"GET / HTTP/1.1\r\n\r\n", b"", response)
    reading = ReadingClient()
    consumer = asyncio.get_running_loop().create_task(_consume(response, reading, piped=answered.piped))
    for piece in pieces:
        await _turns(transport)
        if transport.closed:
            break
        connection.data_received(piece)
    await _turns(transport)
    reading.reusable = bool(idle) and connection.is_connected() and not answered.ended
    if answered.ended or transport.closed:
        connection.connection_lost(None)
        await consumer
    else:
        for _ in range(3):
            await asyncio.sleep(0)
        consumer.cancel()
        await asyncio.gather(consumer, return_exceptions=True)
    return reading


async def _turns(transport: _Transport) -> None:
    """Let callbacks run, and wait until the connection reads."""
    for _ in range(_TURNS_MAX):
        await asyncio.sleep(0)
        if transport.reading or transport.closed:
            return
    raise AssertionError("reading stays paused")


async def _consume(response: HttpResponse, reading: ReadingClient, *, piped: bool) -> None:
    def sink(chunk: bytes) -> bool:
        reading.body += chunk
        return True

    try:
        await response.read_head()
        reading.status = response.status
        reading.headers = normalized([(name.lower(), value.strip()) for name, value in response.headers])
        if piped:
            await response.pipe(sink)
        else:
            async for chunk in response:
                reading.body += chunk
    except httpx.TransportError as failure:
        reading.refused = str(failure) or type(failure).__name__
    else:
        reading.complete = True


def read_h11_client(answered: Answered, pieces: Sequence[bytes]) -> ReadingClient:
    """Read with h11 as it is."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES_MAX)
    connection.send(h11.Request(method="HEAD" if answered.head_only else "GET", target="/", headers=[("host", "g")]))
    connection.send(h11.EndOfMessage())
    reading = ReadingClient()
    try:
        for piece in (*pieces, b"") if answered.ended else pieces:
            connection.receive_data(piece)
            while not reading.complete:
                event = connection.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED:
                    break
                _take_client(reading, event)
    except h11.RemoteProtocolError as error:
        reading.refused = str(error)
    clean = not connection.trailing_data[0].strip(b"\r\n") and not answered.ended and connection.their_state is h11.DONE
    reading.reusable = reading.complete and clean and connection.our_state is h11.DONE
    return reading


def _take_client(reading: ReadingClient, event: object) -> None:
    match event:
        case h11.Response():
            reading.status = event.status_code
            reading.headers = normalized([(bytes(name), bytes(value)) for name, value in event.headers])
        case h11.Data():
            reading.body += bytes(event.data)
        case h11.EndOfMessage():
            reading.complete = True
        case h11.InformationalResponse():
            if event.status_code == 101:
                raise h11.RemoteProtocolError("a switch of protocols")
        case _:
            raise h11.RemoteProtocolError(f"{event}")


def without_skipped(pieces: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Yield the bytes without some or all of what httptools is known to skip: a body may look alike, and stays.

    >>> [*without_skipped([b"HTTP/1.1 200 a\\0b\\r\\n", b"\\r\\n00000000000000000000a\\r\\n"])][-1]
    [b'HTTP/1.1 200 \\r\\n\\r\\na\\r\\n']
    """
    text = b"".join(pieces)
    for size in range(1, len(_SKIPPED) + 1):
        for some in combinations(_SKIPPED, size):
            yield [reduce(lambda without, one: one[0].sub(one[1], without), some, text)]


def disagreement_client(ours: ReadingClient, theirs: ReadingClient) -> str | None:
    """Return what is read in two ways, or taken by the proxy alone."""
    if ours.complete:
        if not theirs.complete:
            return f"complete for the proxy alone: {ours}, h11: {theirs}"
        if (ours.status, ours.headers, ours.body) != (theirs.status, theirs.headers, theirs.body):
            return f"two readings: {ours}, h11: {theirs}"
    if ours.reusable and not theirs.reusable:
        return f"used again by the proxy alone: {ours}, h11: {theirs}"
    return None
