"""Header blocks in HEADERS and CONTINUATION frames."""

from __future__ import annotations

from gorgo.core.record import record
from gorgo.picker.transport.http2 import frames
from gorgo.picker.transport.http2.frames import Code, Http2Error
from gorgo.picker.transport.http2.headers import MAX_LIST_BYTES

#: A block, with all its CONTINUATION frames.
BLOCK_BYTES = MAX_LIST_BYTES
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
        if partial is not None and (kind != frames.CONTINUATION or stream_id != partial.stream_id):
            raise Http2Error(Code.PROTOCOL_ERROR, "expected the rest of the header block")

    def start(self, stream_id: int, flags: int, payload: bytes) -> HeaderBlock | None:
        """Take HEADERS; return the block if it is whole. Raises `Http2Error`."""
        if not stream_id % 2:
            raise Http2Error(Code.PROTOCOL_ERROR, "expected HEADERS on a stream of the client")
        fragment = frames.unpadded(flags, payload)
        if flags & frames.WITH_PRIORITY:
            if len(fragment) < _PRIORITY_BYTES:
                raise Http2Error(Code.FRAME_SIZE_ERROR, "expected 5 bytes of priority")
            fragment = fragment[_PRIORITY_BYTES:]
        return self._next(HeaderBlock(stream_id, fragment, bool(flags & frames.END_STREAM)), flags)

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
        if flags & frames.END_HEADERS:
            self.partial, self._continuations = None, 0
            return block
        self.partial = block
        return None
