"""ZMTP 3, the protocol of ZeroMQ, for one subscribed connection: bytes in, messages out. No IO.

Owns greeting, handshake without security, subscription, frames and heartbeats. Its own code, since libzmq's queue
between two threads takes two thirds of the processor time of a message here (DESIGN). See `connections` for sockets.

Theory of operation. Both sides send a greeting of 64 bytes and a READY command; then each message is a row of frames,
of which all but the last have a flag. A frame has flags, a length of 1 or 8 bytes, and its body. A subscription is a
message of one frame: a byte and the topic.
"""

from __future__ import annotations

_MORE, _LONG, _COMMAND = 1, 2, 4
#: Signature, version 3.0 (every later one speaks it), the mechanism `NULL`, no server, and zeros.
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_GREETING_BYTES = 64
_SHORT, _LONG_HEAD = 2, 9
#: Largest command: names and addresses of a peer.
_MAX_COMMAND_BYTES = 4096
#: Frames of a message: events have three.
_MAX_FRAMES = 16
PING = b"\x04\x07\x04PING\x00\x00"


class ZmtpError(Exception):
    """The peer speaks another protocol, or exceeds a bound."""


class ZmtpSubscriber:
    """One connection.

    Parameters
    ----------
    topic:
        Prefix of the topics to receive.
    max_bytes:
        Longest frame.

    Example
    -------
    >>> connection = ZmtpSubscriber("kv", max_bytes=100)
    >>> connection.received(_GREETING + _ready("PUB") + b"\\x01\\x02kv\\x00\\x03abc")
    [[b'kv', b'abc']]
    >>> connection.is_ready, connection.take_replies()
    (True, b'\\x00\\x03\\x01kv')
    """

    def __init__(self, topic: str, *, max_bytes: int) -> None:
        self._topic = topic.encode()
        self._max_bytes = max_bytes
        #: Whether the handshake has ended.
        self.is_ready = False
        self._is_greeted = False
        #: What has come of an unfinished frame, and the length from which it may be whole.
        self._rest = bytearray()
        self._needed = 0
        self._frames: list[bytes] = []
        self._replies: list[bytes] = []

    def opening(self) -> bytes:
        """Return what is sent first."""
        return _GREETING + _ready("SUB")

    def take_replies(self) -> bytes:
        """Return what has to be sent since the last call."""
        replies, self._replies = b"".join(self._replies), []
        return replies

    def received(self, data: bytes) -> list[list[bytes]]:
        """Return the messages that `data` completes. Raises `ZmtpError`."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        messages: list[list[bytes]] = []
        used = self._read(data, messages)
        if used < len(data):
            self._rest += memoryview(data)[used:]
            self._needed -= used
        return messages

    def _read(self, data: bytes, messages: list[list[bytes]]) -> int:
        """Read whole frames; return their bytes, and set `_needed` to where the next one ends at the earliest."""
        place = 0
        if not self._is_greeted:
            _check_greeting(data)
            self._needed = _GREETING_BYTES
            if len(data) < _GREETING_BYTES:
                return 0
            self._is_greeted, place = True, _GREETING_BYTES
        end = len(data)
        while True:
            self._needed = place + _SHORT
            if self._needed > end:
                return place
            flags = data[place]
            if flags & _LONG:
                self._needed = place + _LONG_HEAD
                if self._needed > end:
                    return place
                size = int.from_bytes(data[place + 1 : place + _LONG_HEAD], "big")
                begin = place + _LONG_HEAD
            else:
                size, begin = data[place + 1], place + _SHORT
            if flags > _MORE | _LONG | _COMMAND or size > (_MAX_COMMAND_BYTES if flags & _COMMAND else self._max_bytes):
                raise ZmtpError(f"a frame with flags {flags} of {size:,} bytes")
            self._needed = place = begin + size
            if place > end:
                return begin - (_LONG_HEAD if flags & _LONG else _SHORT)
            body = data[begin:place]
            if flags & _COMMAND:
                self._command(body)
                continue
            if not self.is_ready or len(self._frames) == _MAX_FRAMES:
                raise ZmtpError("a message before the handshake, or of too many frames")
            self._frames.append(body)
            if not flags & _MORE:
                messages.append(self._frames)
                self._frames = []

    def _command(self, body: bytes) -> None:
        name = body[1 : 1 + body[0]] if body else b""
        if name == b"READY":
            if not self.is_ready:
                self.is_ready = True
                self._replies.append(_frame(0, b"\x01" + self._topic))
        elif name == b"ERROR":
            raise ZmtpError(f"refused: {body[7:100]!r}")
        elif name == b"PING":
            # After a time to live of two bytes, up to 16 bytes that are sent back.
            self._replies.append(_frame(_COMMAND, b"\x04PONG" + body[7:23]))


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | _LONG]) + len(body).to_bytes(8, "big") + body


def _ready(kind: str) -> bytes:
    name, value = b"Socket-Type", kind.encode()
    return _frame(_COMMAND, b"\x05READY" + bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value)


def _check_greeting(data: bytes) -> None:
    """Raise `ZmtpError` for the beginning of another protocol, version or mechanism."""
    expected = ((0, b"\xff"), (9, b"\x7f"), (12, b"NULL\0"))
    for place, wanted in expected:
        found = data[place : place + len(wanted)]
        if found != wanted[: len(found)]:
            raise ZmtpError(f"no ZMTP 3 without security: {data[:_GREETING_BYTES]!r}")
    if len(data) > 10 and data[10] < 3:
        raise ZmtpError(f"ZMTP {data[10]}: expected 3")
