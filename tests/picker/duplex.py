"""What a gateway does of a call, and the bodies that it gets back."""

from __future__ import annotations

from typing import Any

from gorgo.picker.protocol.answers import PIECE_BYTES
from tests.picker.virtual import BODY, DUPLEX, Call, VirtualPicker, body_message, headers_message

EVENTS = (":status", "200"), ("content-type", "text/event-stream")


def begin(picker: VirtualPicker, *headers: tuple[str, str], **options: Any) -> Call:
    call = picker.call()
    assert call.feed(headers_message("request_headers", *headers, mode=DUPLEX, response_mode=DUPLEX, **options)) == []
    return call


def chosen(picker: VirtualPicker, body: bytes = BODY) -> Call:
    call = begin(picker)
    call.feed(body_message("request_body", body))
    return call


def returned(messages: list[Any], kind: str) -> bytes:
    """The body that answers give back; the end is in the last one alone."""
    pieces = [getattr(message, kind).response.body_mutation.streamed_response for message in messages]
    assert [piece.end_of_stream for piece in pieces[:-1]] == [False] * (len(pieces) - 1)
    assert all(len(piece.body) <= PIECE_BYTES for piece in pieces)
    return b"".join(piece.body for piece in pieces)
