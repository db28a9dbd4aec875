"""Frames, header blocks and streams of HTTP/2 (RFC 9113): their numbers, their bytes, and the errors of a connection.

Owns the encoding and decoding of single frames, the heads of gRPC in header blocks (`HeadDecoder`, `trailers`,
`refusal`), the joining of CONTINUATION frames (`BlockReader`) and of pieces of DATA to messages (`MessageReader`), and
one stream: the `Output` of a call, what waits for the client's window, and what of its own window is used
(`CallStream`). Leaves what a frame does, and sending, to the connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Protocol
from urllib.parse import quote

from gorgo.core.limits import Buffer
from gorgo.core.record import record
from gorgo.errors import MissingExtra
from gorgo.picker.transport.services import ServedCall, Status

#: First bytes of a client.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
#: Default and least bound of a frame; larger ones are not allowed here, so that a part of one needs little memory.
FRAME_BYTES = 16_384
LARGEST_FRAME_BYTES = (1 << 24) - 1
LARGEST_WINDOW = (1 << 31) - 1
#: Window of a connection or stream before any setting.
FIRST_WINDOW = 65_535

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS = 1, 2, 3
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 4, 5, 6

_SETTING = Struct(">HI")
#: Of a frame: length and kind, flags, stream. Of one with a whole message of gRPC: that, no compression, its length.
_HEAD, _MESSAGE_HEAD = Struct(">IBI"), Struct(">IBIBI")
read_head = _HEAD.unpack_from
PREFIX_BYTES = 5


class Code(IntEnum):
    """Errors of streams and connections."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Http2Error(Exception):
    """The peer broke the protocol: the connection ends with `code`."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return one frame.

    Example
    -------
    >>> frame(PING, ACK, 0, bytes(8)).hex()
    '0000080601000000000000000000000000'
    """
    return _HEAD.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def message_frame(stream_id: int, message: bytes) -> bytes:
    """Return DATA with one message of gRPC.

    Example
    -------
    >>> message_frame(1, b"ab") == frame(DATA, 0, 1, bytes([0, 0, 0, 0, 2]) + b"ab")
    True
    """
    size = len(message)
    return _MESSAGE_HEAD.pack(size + PREFIX_BYTES << 8 | DATA, 0, stream_id, 0, size) + message


def settings(values: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in values.items()))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return the pairs of a SETTINGS frame. Raises `Http2Error`."""
    if len(payload) % _SETTING.size:
        raise Http2Error(Code.FRAME_SIZE_ERROR, "expected settings of 6 bytes each")
    return list(_SETTING.iter_unpack(payload))


def window_update(stream_id: int, size: int) -> bytes:
    """Return a frame that adds `size` to a window of the peer."""
    return frame(WINDOW_UPDATE, 0, stream_id, size.to_bytes(4, "big"))


def reset(stream_id: int, code: Code) -> bytes:
    """Return a frame that ends a stream."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def goaway(last_stream_id: int, code: Code, text: str = "") -> bytes:
    """Return a frame that announces the end of a connection."""
    return frame(GOAWAY, 0, 0, last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big") + text.encode()[:200])


def unpadded(flags: int, payload: bytes) -> bytes:
    """Return the payload of a DATA or HEADERS frame without padding. Raises `Http2Error`."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise Http2Error(Code.PROTOCOL_ERROR, "expected less padding than payload")
    return payload[1 : len(payload) - payload[0]]


# Header blocks: requests of gRPC in, a response's head and trailers out.
#
# Theory of operation. The server allows no dynamic table, so a block means the same each time once the client has
# followed that setting. Envoy then repeats one block per service, which is decoded once. Own blocks use no dynamic
# table either, and those that recur are made once.


try:
    from hpack import Decoder, Encoder, HPACKError
except ImportError as error:
    raise MissingExtra("the picker's HTTP/2 needs the extra: pip install 'gorgo-router[picker]'") from error

#: Bytes of a decoded head, as HTTP/2 counts them; those of Envoy's calls have a few hundred.
MAX_LIST_BYTES = 64 * 1024
#: Table that a client may use until it has taken the server's settings.
_DEFAULT_TABLE_BYTES = 4096
#: Decoded blocks; one per service, method and set of headers. A longer one is decoded each time.
_MAX_CACHED, _MAX_CACHED_BYTES = 256, 1024
#: Characters of a status message that stand for themselves.
_UNQUOTED = " !#$&'()*+,/:;<=>?@[]^_`{|}~"
_GRPC = b"application/grpc"


@dataclass(frozen=True, slots=True)
class CallHead:
    """What of a request's head matters. `refusal` is the status of a request that is no gRPC call."""

    path: str
    refusal: int | None = None


class HeadDecoder:
    """Decodes the blocks of one connection."""

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=MAX_LIST_BYTES)
        self._decoder.max_allowed_table_size = _DEFAULT_TABLE_BYTES
        self._cached: dict[bytes, CallHead] = {}

    def forbid_table(self) -> None:
        """The client has taken the settings: a block that uses a dynamic table is an error from now on."""
        self._decoder.max_allowed_table_size = 0

    def is_cached(self, block: bytes) -> bool:
        """Return whether a block need not be decoded."""
        return block in self._cached

    def decode(self, block: bytes) -> CallHead:
        """Return the head of a request. Raises `Http2Error`: the state of the decoder is lost with a wrong block."""
        head = self._cached.get(block)
        if head is None:
            head = _read(self._pairs(block))
            is_short = len(block) <= _MAX_CACHED_BYTES
            if is_short and self._decoder.header_table_size == 0 and len(self._cached) < _MAX_CACHED:
                self._cached[block] = head
        return head

    def skip(self, block: bytes) -> None:
        """Decode a block whose content does not matter."""
        self._pairs(block)

    def _pairs(self, block: bytes) -> list[tuple[bytes, bytes]]:
        try:
            pairs: list[tuple[bytes, bytes]] = list(self._decoder.decode(block, raw=True))
        except (HPACKError, IndexError, ValueError) as failure:
            raise Http2Error(Code.COMPRESSION_ERROR, "expected a valid header block") from failure
        return pairs


def _read(pairs: list[tuple[bytes, bytes]]) -> CallHead:
    headers = dict(pairs)
    path = headers.get(b":path", b"").decode("latin-1")
    if headers.get(b":method") != b"POST":
        return CallHead(path, refusal=405)
    if not headers.get(b"content-type", b"").startswith(_GRPC):
        return CallHead(path, refusal=415)
    return CallHead(path)


def _block(*pairs: tuple[bytes, bytes]) -> bytes:
    # Sensitive ones enter no table.
    return bytes(Encoder().encode([(name, value, True) for name, value in pairs]))


_RESPONSE_HEAD = ((b":status", b"200"), (b"content-type", _GRPC))
#: Before the first message.
RESPONSE = _block(*_RESPONSE_HEAD)
_OK = ((b"grpc-status", b"0"),)
_TRAILERS_OK = _block(*_OK)
_ALL_OK = _block(*_RESPONSE_HEAD, *_OK)


def trailers(status: Status, text: str, *, with_head: bool) -> bytes:
    """Return the block that ends a call; `with_head`: nothing was sent before it."""
    if status is Status.OK:
        return _ALL_OK if with_head else _TRAILERS_OK
    message = quote(text, safe=_UNQUOTED).encode()
    pairs = ((b"grpc-status", b"%d" % status), (b"grpc-message", message))
    return _block(*(_RESPONSE_HEAD if with_head else ()), *pairs)


def refusal(status: int) -> bytes:
    """Return the block of a response without a body."""
    return _block((b":status", b"%d" % status))


#: A block, with all its CONTINUATION frames: as much as servers of gRPC take, and the work of a Huffman code is in it.
BLOCK_BYTES = 16 * 1024
#: These frames of one block: four of the smallest allowed bound, with some to spare. Each copies what came before it.
MAX_CONTINUATIONS = 16
_PRIORITY_BYTES = 5


@record
class HeaderBlock:
    """A whole block; `ends_stream`: nothing of the client follows."""

    stream_id: int
    fragment: bytes
    ends_stream: bool


class BlockReader:
    """Joins the frames of one connection's header blocks. Frames of no other kind may come between them."""

    def __init__(self) -> None:
        #: A block that lacks its rest.
        self.partial: HeaderBlock | None = None
        self._continuations = 0

    def check(self, kind: int, stream_id: int) -> None:
        """Raise `Http2Error` for a frame within the block of another."""
        partial = self.partial
        if partial is not None and (kind != CONTINUATION or stream_id != partial.stream_id):
            raise Http2Error(Code.PROTOCOL_ERROR, "expected the rest of the header block")

    def start(self, stream_id: int, flags: int, payload: bytes) -> HeaderBlock | None:
        """Take HEADERS; return the block if it is whole. Raises `Http2Error`."""
        if not stream_id % 2:
            raise Http2Error(Code.PROTOCOL_ERROR, "expected HEADERS on a stream of the client")
        fragment = unpadded(flags, payload)
        if flags & WITH_PRIORITY:
            if len(fragment) < _PRIORITY_BYTES:
                raise Http2Error(Code.FRAME_SIZE_ERROR, "expected 5 bytes of priority")
            fragment = fragment[_PRIORITY_BYTES:]
        return self._next(HeaderBlock(stream_id, fragment, bool(flags & END_STREAM)), flags)

    def add(self, flags: int, payload: bytes) -> HeaderBlock | None:
        """Take CONTINUATION; return the block if it is whole. Raises `Http2Error`."""
        partial = self.partial
        if partial is None:
            raise Http2Error(Code.PROTOCOL_ERROR, "expected CONTINUATION after HEADERS alone")
        fragment = partial.fragment + payload
        self._continuations += 1
        if len(fragment) > BLOCK_BYTES or self._continuations > MAX_CONTINUATIONS:
            expected = f"expected a header block of at most {BLOCK_BYTES} bytes in {1 + MAX_CONTINUATIONS} frames"
            raise Http2Error(Code.ENHANCE_YOUR_CALM, expected)
        return self._next(HeaderBlock(partial.stream_id, fragment, partial.ends_stream), flags)

    def _next(self, block: HeaderBlock, flags: int) -> HeaderBlock | None:
        if flags & END_HEADERS:
            self.partial, self._continuations = None, 0
            return block
        self.partial = block
        return None


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
