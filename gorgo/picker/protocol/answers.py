"""Messages of a call as they go: what Envoy is told to change, or to answer itself.

Owns their bytes. Messages without content are made once. Messages that are made for each request are joined, not built
and serialized: an object of a message costs a microsecond per field.

Theory of operation. A field that comes twice is merged (Protocol Buffers, "last one wins"). So the answer with a choice
is a row of parts, each of one thing: destination, changes, id. What differs each time is the last of its part, and what
precedes it depends on its size alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from gorgo.core.record import record
from gorgo.live.http.headers import Header
from gorgo.picker.protocol.messages import DESTINATION, LB, OWN
from gorgo.picker.protocol.protos import OVERWRITE_IF_EXISTS_OR_ADD, HeaderValue, ProcessingResponse

#: Bytes of a body in one message: the bound of the Gateway API's own picker, far below that of gRPC messages.
PIECE_BYTES = 62_000
_OVERWRITE = OVERWRITE_IF_EXISTS_OR_ADD
#: Sizes of destinations for which what precedes them is retained.
MAX_SIZES = 1024
#: Labels whose bytes are retained: a set for each replica of a large fleet.
MAX_LABELS = 4096
#: Lists of headers that are set, and of names that are removed, whose bytes are retained: each kind of client has one
#: or two, at most some kilobytes long.
MAX_REMOVALS = 256
_DESTINATION = DESTINATION.encode()
#: Numbers of fields: of ProcessingResponse, of CommonResponse, and one whole field of that.
_KINDS = {
    kind: ProcessingResponse.DESCRIPTOR.fields_by_name[kind].number
    for kind in ("request_headers", "request_body", "response_headers")
}
_DYNAMIC_METADATA = ProcessingResponse.DESCRIPTOR.fields_by_name["dynamic_metadata"].number
_HEADER_MUTATION, _BODY_MUTATION = 2, 3
_CLEAR_ROUTE_CACHE = bytes([5 << 3, 1])
#: Of a header's option: what is done with a header of the client.
_APPEND_ACTION = bytes([3 << 3, _OVERWRITE])


#: Pairs of names and texts; a few, of the configuration.
Labels = tuple[tuple[str, str], ...]


@record
class EndpointChoice:
    """Where a request goes, and what of it is changed.

    Parameters
    ----------
    destination:
        Addresses, best first, joined by commas.
    exchange_id:
        This picker's id of the exchange.
    set_headers, remove_headers:
        Of the request, beside the destination.
    body:
        The other body that is sent; `None` for the client's own.
    adds_usage:
        That body requests a usage event which the client has not requested.
    labels:
        Of the decision, by name: what clients see of it.
    """

    destination: str
    exchange_id: str
    set_headers: Sequence[Header] = ()
    remove_headers: tuple[bytes, ...] = ()
    body: bytes | None = None
    adds_usage: bool = False
    labels: Labels = ()


def chosen(kind: str, choice: EndpointChoice, *, with_body: bool) -> bytes:
    """Return the answer of a `kind` with the choice; `with_body`: it carries another body too."""
    destination, exchange_id = choice.destination.encode(), choice.exchange_id.encode()
    before, between = _around_destination(kind, len(destination))
    changes = _changes(kind, choice, with_body=with_body)
    own_part = _own(choice.destination.partition(",")[0], choice.labels, len(exchange_id))
    return b"".join((before, destination, between, destination, changes, own_part, exchange_id))


@lru_cache(MAX_SIZES)
def _around_destination(kind: str, size: int) -> tuple[bytes, bytes]:
    """Return what precedes a destination as a header, and as Envoy's metadata."""
    unknown = bytes(size)
    header = _common(kind, field(_HEADER_MUTATION, _option(_DESTINATION, unknown)))
    lb = field(_DYNAMIC_METADATA, struct_entry(LB, text_entry(DESTINATION, unknown)))
    return header[: len(header) - size], lb[: len(lb) - size]


def _changes(kind: str, choice: EndpointChoice, *, with_body: bool) -> bytes:
    """Return what of a request is changed, beside its destination."""
    headers, body = tuple(choice.set_headers), b""
    if choice.body is not None:
        headers += ((b"content-length", b"%d" % len(choice.body)),)
        if with_body:
            body = _common(kind, field(_BODY_MUTATION, field(1, choice.body)))
    return _settings(kind, headers) + body + _removals(kind, choice.remove_headers)


@lru_cache(MAX_REMOVALS)
def _settings(kind: str, headers: tuple[Header, ...]) -> bytes:
    """Return the headers that are set: the same for most requests to a replica."""
    options = b"".join([_option(name, value) for name, value in headers])
    return _common(kind, field(_HEADER_MUTATION, options)) if headers else b""


@lru_cache(MAX_REMOVALS)
def _removals(kind: str, names: tuple[bytes, ...]) -> bytes:
    removals = field(_HEADER_MUTATION, b"".join([field(2, name) for name in names]))
    return _common(kind, removals + (_CLEAR_ROUTE_CACHE if kind == "request_headers" else b""))


def _common(kind: str, content: bytes) -> bytes:
    """Return a part of the answer to a `kind`."""
    return field(_KINDS[kind], field(1, content))


@lru_cache(MAX_LABELS)
def _own(first: str, labels: Labels, size: int) -> bytes:
    """Return the picker's own metadata up to an id of `size` bytes: the first address, and labels."""
    texts = (("destination", first), *labels)
    entries = b"".join(text_entry(name, text.encode()) for name, text in texts)
    whole = field(_DYNAMIC_METADATA, struct_entry(OWN, entries + text_entry("id", bytes(size))))
    return whole[: len(whole) - size]


def refused(status: int, headers: Iterable[Header], body: bytes, *, code: str) -> bytes:
    """Return the answer that Envoy sends to the client itself; `code` is for Envoy's access log."""
    response = ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = status
    _set(immediate.headers.set_headers, headers)
    immediate.body = body
    immediate.details = f"gorgo_{code}"
    serialized: bytes = response.SerializeToString()
    return serialized


@lru_cache(MAX_LABELS)
def answered(labels: Labels, *, is_shortened: bool) -> bytes:
    """Return the answer to the head of a response: headers `x-gorgo-*`, and no length of a body that gets shorter.

    The engine's own headers of these names are replaced, or removed where the client may not know the replica.
    """
    mutation = [_option(f"x-gorgo-{name}".encode(), text.encode()) for name, text in labels]
    mutation += [field(2, f"x-gorgo-{name}".encode()) for name in ("replica", "region") if name not in dict(labels)]
    if is_shortened:
        mutation.append(field(2, b"content-length"))
    return field(_KINDS["response_headers"], field(1, field(_HEADER_MUTATION, b"".join(mutation))))


def streamed(kind: str, body: bytes, *, end: bool) -> Iterator[bytes]:
    """Yield the answers of a `kind` that give a body back in pieces; at least one, since each message has an answer."""
    for start in range(0, max(len(body), 1), PIECE_BYTES):
        response = ProcessingResponse()
        piece = getattr(response, kind).response.body_mutation.streamed_response
        piece.body = body[start : start + PIECE_BYTES]
        piece.end_of_stream = end and start + PIECE_BYTES >= len(body)
        yield response.SerializeToString()


def _set(options: object, headers: Iterable[Header]) -> None:
    add = options.add  # type: ignore[attr-defined]
    for name, value in headers:
        add(header=HeaderValue(key=name.decode("latin-1"), raw_value=value), append_action=_OVERWRITE)


def _option(name: bytes, value: bytes) -> bytes:
    """Return a header that replaces the client's."""
    return field(1, _APPEND_ACTION + field(1, field(1, name) + field(3, value)))


def _unchanged(kind: str) -> bytes:
    response = ProcessingResponse()
    getattr(response, kind).SetInParent()
    serialized: bytes = response.SerializeToString()
    return serialized


#: Answers that change nothing, by kind.
UNCHANGED = {
    kind: _unchanged(kind)
    for kind in (
        *("request_headers", "request_body", "request_trailers"),
        *("response_headers", "response_body", "response_trailers"),
    )
}


_ONE_BYTE = tuple(bytes([number]) for number in range(128))


def varint(number: int) -> bytes:
    """Return a number that is not negative.

    >>> varint(300).hex()
    'ac02'
    """
    if number < 128:
        return _ONE_BYTE[number]
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def field(number: int, content: bytes) -> bytes:
    """Return a field of bytes, text or a message; its number is at most 15.

    >>> field(1, b"a").hex()
    '0a0161'
    """
    return _ONE_BYTE[number << 3 | 2] + varint(len(content)) + content


@lru_cache(64)
def text_key(name: str) -> bytes:
    """Return the key of a map's entry."""
    return field(1, name.encode())


def text_entry(name: str, text: bytes) -> bytes:
    """Return an entry of a `Struct` with a text."""
    return field(1, text_key(name) + field(2, field(3, text)))


def struct_entry(name: str, entries: bytes) -> bytes:
    """Return an entry of a `Struct` with a `Struct` of these entries."""
    return field(1, text_key(name) + field(2, field(5, entries)))
