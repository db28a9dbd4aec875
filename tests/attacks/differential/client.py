"""The proxy's client of replicas and h11's, on the same pieces from a replica.

Held here: a response that the proxy takes as complete has the status, headers and body that h11 reads; an incomplete
one fails or waits; a connection that the proxy uses again is one that h11 permits to use again. The proxy may refuse
more. The connection and the response are the real ones, over a transport that only pauses.

Of httptools is known, and changes no reading: it skips empty lines before a status line; it takes any byte but CR and
LF in the reason, which the proxy does not pass on, and any number of zeros before the size of a chunk, where h11 takes
20 digits.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import combinations

import h11
import httpx

from gorgo.live.upstream.connection import ReplicaConnection
from gorgo.live.upstream.response import HttpResponse
from tests.attacks.differential.reader import normalized
from tests.attacks.differential.responses import Answered

_HEAD_BYTES_MAX = 64 * 1024
#: What httptools skips, and h11 does not.
_SKIPPED = (
    (re.compile(rb"(?:\A|(?<=\r\n\r\n))[\r\n]+(?=HTTP/)"), b""),
    (re.compile(rb"^(HTTP/\d\.\d \d{3} )[^\r\n]*[\x00\x0b\x0c][^\r\n]*", re.MULTILINE), rb"\1"),
    (re.compile(rb"^(?=[0-9A-Fa-f]{21})0+(?=[0-9A-Fa-f])", re.MULTILINE), b""),
)
_TURNS_MAX = 50


@dataclass(slots=True)
class Reading:
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

    def read(self, answered: Answered, pieces: Sequence[bytes]) -> Reading:
        return self._runner.run(_read(answered, pieces))

    def close(self) -> None:
        self._runner.close()


async def _read(answered: Answered, pieces: Sequence[bytes]) -> Reading:
    idle: list[ReplicaConnection] = []
    connection, transport = ReplicaConnection(idle.append, lambda _: None), _Transport()
    connection.connection_made(transport)
    response = HttpResponse(connection, head_only=answered.head_only)
    connection.write_request(b"GET / HTTP/1.1\r\n\r\n", b"", response)
    reading = Reading()
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


async def _consume(response: HttpResponse, reading: Reading, *, piped: bool) -> None:
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


def read_h11(answered: Answered, pieces: Sequence[bytes]) -> Reading:
    """Read with h11 as it is."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES_MAX)
    connection.send(h11.Request(method="HEAD" if answered.head_only else "GET", target="/", headers=[("host", "g")]))
    connection.send(h11.EndOfMessage())
    reading = Reading()
    try:
        for piece in (*pieces, b"") if answered.ended else pieces:
            connection.receive_data(piece)
            while not reading.complete:
                event = connection.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED:
                    break
                _take(reading, event)
    except h11.RemoteProtocolError as error:
        reading.refused = str(error)
    clean = not connection.trailing_data[0].strip(b"\r\n") and not answered.ended and connection.their_state is h11.DONE
    reading.reusable = reading.complete and clean and connection.our_state is h11.DONE
    return reading


def _take(reading: Reading, event: object) -> None:
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


def disagreement(ours: Reading, theirs: Reading) -> str | None:
    """Return what is read in two ways, or taken by the proxy alone."""
    if ours.complete:
        if not theirs.complete:
            return f"complete for the proxy alone: {ours}, h11: {theirs}"
        if (ours.status, ours.headers, ours.body) != (theirs.status, theirs.headers, theirs.body):
            return f"two readings: {ours}, h11: {theirs}"
    if ours.reusable and not theirs.reusable:
        return f"used again by the proxy alone: {ours}, h11: {theirs}"
    return None
