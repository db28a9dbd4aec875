"""Header blocks: requests of gRPC in, a response's head and trailers out.

Theory of operation. The server allows no dynamic table, so a block means the same each time once the client has
followed that setting. Envoy then repeats one block per service, which is decoded once. Own blocks use no dynamic table
either, and those that recur are made once.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from gorgo.errors import MissingExtra
from gorgo.picker.transport.http2.frames import Code, Http2Error
from gorgo.picker.transport.streams import Status

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

    def decode(self, block: bytes) -> CallHead:
        """Return the head of a request. Raises `Http2Error`: the state of the decoder is lost with a wrong block."""
        found = self._cached.get(block)
        if found is None:
            found = _read(self._pairs(block))
            is_short = len(block) <= _MAX_CACHED_BYTES
            if is_short and self._decoder.header_table_size == 0 and len(self._cached) < _MAX_CACHED:
                self._cached[block] = found
        return found

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
    found = dict(pairs)
    path = found.get(b":path", b"").decode("latin-1")
    if found.get(b":method") != b"POST":
        return CallHead(path, refusal=405)
    if not found.get(b"content-type", b"").startswith(_GRPC):
        return CallHead(path, refusal=415)
    return CallHead(path)


def _block(*pairs: tuple[bytes, bytes]) -> bytes:
    # Sensitive ones enter no table.
    return bytes(Encoder().encode([(name, value, True) for name, value in pairs]))


_HEAD = ((b":status", b"200"), (b"content-type", _GRPC))
#: Before the first message.
RESPONSE = _block(*_HEAD)
_OK = ((b"grpc-status", b"0"),)
_TRAILERS_OK = _block(*_OK)
_ALL_OK = _block(*_HEAD, *_OK)


def trailers(status: Status, text: str, *, with_head: bool) -> bytes:
    """Return the block that ends a call; `with_head`: nothing was sent before it."""
    if status is Status.OK:
        return _ALL_OK if with_head else _TRAILERS_OK
    message = quote(text, safe=_UNQUOTED).encode()
    pairs = ((b"grpc-status", b"%d" % status), (b"grpc-message", message))
    return _block(*(_HEAD if with_head else ()), *pairs)


def refusal(status: int) -> bytes:
    """Return the block of a response without a body."""
    return _block((b":status", b"%d" % status))
