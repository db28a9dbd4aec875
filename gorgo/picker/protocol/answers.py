"""Messages of a call as they go: what Envoy is told to change, or to answer itself.

Owns their bytes. Messages without content are made once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from gorgo.core.record import record
from gorgo.live.http.headers import Header
from gorgo.picker.protocol.messages import DESTINATION, LB, OWN
from gorgo.picker.protocol.protos import OVERWRITE_IF_EXISTS_OR_ADD, HeaderValue, ProcessingResponse
from gorgo.picker.protocol.wire import field, struct_entry, text_entry

#: Bytes of a body in one message: the bound of the Gateway API's own picker, far below that of gRPC messages.
PIECE_BYTES = 62_000
_OVERWRITE = OVERWRITE_IF_EXISTS_OR_ADD
#: Destinations whose bytes are retained: a fleet's usual orders of the best three.
MAX_DESTINATIONS = 4096
#: Labels whose bytes are retained: a set for each replica of a large fleet.
MAX_LABELS = 4096
#: Lists of removed names whose bytes are retained: each kind of client sends one or two, at most some kilobytes long.
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
    option, lb, first = _destination(choice.destination)
    mutation = [option, *(_option(name, value) for name, value in choice.set_headers)]
    common = b""
    if choice.body is not None:
        mutation.append(_option(b"content-length", b"%d" % len(choice.body)))
        if with_body:
            common = field(_BODY_MUTATION, field(1, choice.body))
    mutation.append(_removals(choice.remove_headers))
    if kind == "request_headers":
        common += _CLEAR_ROUTE_CACHE
    common = field(_HEADER_MUTATION, b"".join(mutation)) + common
    own = struct_entry(OWN, text_entry("id", choice.exchange_id.encode()) + first + _entries(choice.labels))
    return field(_KINDS[kind], field(1, common)) + field(_DYNAMIC_METADATA, lb + own)


@lru_cache(MAX_DESTINATIONS)
def _destination(destination: str) -> tuple[bytes, bytes, bytes]:
    """Return what a choice says of a destination: the header, Envoy's metadata, and the first address in our own."""
    addresses = destination.encode()
    lb = struct_entry(LB, text_entry(DESTINATION, addresses))
    return _option(_DESTINATION, addresses), lb, text_entry("destination", addresses.split(b",", 1)[0])


@lru_cache(MAX_REMOVALS)
def _removals(names: tuple[bytes, ...]) -> bytes:
    return b"".join([field(2, name) for name in names])


@lru_cache(MAX_LABELS)
def _entries(labels: Labels) -> bytes:
    return b"".join(text_entry(name, text.encode()) for name, text in labels)


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
    """Return the answer to the head of a response: headers `x-gorgo-*`, and no length of a body that gets shorter."""
    mutation = [_option(f"x-gorgo-{name}".encode(), text.encode()) for name, text in labels]
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
    return field(1, field(1, field(1, name) + field(3, value)) + _APPEND_ACTION)


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
