"""Messages of gRPC in the DATA frames of a stream: a byte of compression, four of length, the message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gorgo.picker.transport.http2.frames import PREFIX_BYTES


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
            found = f"a message of {length} bytes; expected at most {self._limit_bytes}"
            raise MessageError(found, too_large=True)
        return length
