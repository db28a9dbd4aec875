"""A client of one connection without any socket: frames in, frames out, and the calls that they open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hpack import Decoder, Encoder

from gorgo.core.limits import BufferBudget
from gorgo.picker.transport import frames
from gorgo.picker.transport.connection import Connection
from gorgo.picker.transport.services import PROCESS, CallHandlers, Output, Services, TransportLimits
from tests.picker.transport.conftest import EchoCall

MESSAGE_BYTES = 200_000
CALLS = 8


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def code(self) -> int:
        """Of RST_STREAM and GOAWAY."""
        return int.from_bytes(self.payload[4:8] if self.kind == frames.GOAWAY else self.payload[:4], "big")

    @property
    def size(self) -> int:
        """Of WINDOW_UPDATE."""
        return int.from_bytes(self.payload, "big")


def split(data: bytes) -> Iterator[Frame]:
    """The whole frames of some output."""
    while data:
        size = int.from_bytes(data[:3], "big")
        assert len(data) >= frames.HEAD_BYTES + size, "the output has whole frames alone"
        payload = data[frames.HEAD_BYTES : frames.HEAD_BYTES + size]
        yield Frame(data[3], data[4], int.from_bytes(data[5:9], "big"), payload)
        data = data[frames.HEAD_BYTES + size :]


def block(path: str = PROCESS, method: str = "POST", *more: tuple[str, str]) -> bytes:
    pairs = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "x")]
    pairs += [("content-type", "application/grpc"), *more]
    return encoded(*pairs)


def encoded(*pairs: tuple[str, str]) -> bytes:
    """A block without a dynamic table, which it says at its start."""
    return b"\x20" + bytes(Encoder().encode([(name, value, True) for name, value in pairs]))


BLOCK = block()


def headers(stream_id: int, fragment: bytes = BLOCK, flags: int = frames.END_HEADERS) -> bytes:
    return frames.frame(frames.HEADERS, flags, stream_id, fragment)


def message(content: bytes) -> bytes:
    return b"\0" + len(content).to_bytes(4, "big") + content


def data(stream_id: int, content: bytes, *, end: bool = False) -> bytes:
    return frames.frame(frames.DATA, frames.END_STREAM if end else 0, stream_id, content)


@dataclass
class Peer:
    """The client. `greeted`: it has sent its preface and settings, and has read the server's."""

    calls_limit: int = CALLS
    calls: list[EchoCall] = field(default_factory=list)
    wakes: int = 0
    #: Of the connection's clock, which stands still.
    now: float = 0.0
    #: Of all connections, and the host of this one.
    buffers: BufferBudget = field(default_factory=lambda: BufferBudget(64 * MESSAGE_BYTES))
    client: str = "10.0.0.9"

    def __post_init__(self) -> None:
        def process(output: Output) -> CallHandlers:
            self.calls.append(EchoCall(output))
            return CallHandlers(self.calls[-1].feed, self.calls[-1].closed)

        self.services = Services({PROCESS: process})
        limits = TransportLimits(MESSAGE_BYTES, self.calls_limit)
        self.connection = Connection(self.services, limits, self._wake, self.buffers, clock=lambda: self.now)
        self.connection.client = self.client

    def _wake(self) -> None:
        self.wakes += 1

    def send(self, *sent: bytes) -> list[Frame]:
        """Send bytes; return what comes back."""
        self.connection.receive(b"".join(sent))
        return self.read()

    def read(self) -> list[Frame]:
        return list(split(self.connection.take_output()))

    def greet(self, values: dict[int, int] | None = None) -> list[Frame]:
        return self.send(frames.PREFACE, frames.settings(values or {}), frames.frame(frames.SETTINGS, frames.ACK, 0))


def greeted(values: dict[int, int] | None = None, *, calls_limit: int = CALLS) -> Peer:
    peer = Peer(calls_limit=calls_limit)
    peer.greet(values)
    return peer


def decoded(found: Frame) -> dict[str, str]:
    return {str(name): str(value) for name, value in Decoder().decode(found.payload)}


def kinds(found: list[Frame]) -> list[int]:
    return [each.kind for each in found]
