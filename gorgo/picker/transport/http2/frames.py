"""Frames of HTTP/2 (RFC 9113): their numbers, their bytes, and the errors that end a connection."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

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
