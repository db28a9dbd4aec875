"""The event of usage that only the picker has requested: a gateway's client gets every other byte, and not it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from gorgo.picker.protocol.messages import LB, SERVED
from gorgo.picker.protocol.protos import ProcessingRequest
from tests.picker.duplex import EVENTS, chosen, returned
from tests.picker.virtual import (
    BODY,
    JSON_BODY,
    Call,
    VirtualPicker,
    body_message,
    config_of,
    headers_message,
    in_virtual_time,
)
from tests.proxy.conftest import with_replica
from tests.proxy.fakes import DONE, ROLE, USAGE, delta

ASKING = with_replica(config_of("10.0.0.1:8000", "10.0.0.2:8000"), 0, request_usage=True)
ONLY = with_replica(config_of("10.0.0.1:8000"), 0, request_usage=True)
WANTED = BODY.replace(b"true}", b'true, "stream_options": {"include_usage": true}}')
#: Bytes that only look like the event; their last event carries usage beside content.
ALIKE = delta('"usage": {"prompt_tokens": 1}') + USAGE.replace(b'"choices": []', b'"choices": [{"index": 0}]')


def answered(
    call: Call, chunks: Sequence[bytes], *headers: tuple[str, str], trailers: bool = False, served: str | None = None
) -> bytes:
    """The body that the client gets of an answer in these chunks, which Envoy says `served` has given."""
    head = headers_message("response_headers", *(headers or EVENTS))
    if served is not None:
        head.metadata_context.filter_metadata[LB].update({SERVED: served})
    call.feed(head)
    sent: list[Any] = []
    for chunk in chunks:
        sent += call.feed(body_message("response_body", chunk, end=False))
    if trailers:
        message = ProcessingRequest()
        message.response_trailers.SetInParent()
        *pieces, last = call.feed(message)
        assert last.WhichOneof("response") == "response_trailers"
        sent += pieces
    else:
        sent += call.feed(body_message("response_body", b""))
        assert sent[-1].response_body.response.body_mutation.streamed_response.end_of_stream
    return returned(sent, "response_body")


def test_the_event_is_removed_and_its_counts_are_read() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker)
        assert answered(call, [ROLE, delta("a"), ALIKE, USAGE, DONE]) == ROLE + delta("a") + ALIKE + DONE
        call.close()
        assert picker.attempts("completed") == 1
        assert picker.total("gorgo_output_tokens_total", replica="r0", region="here") == 2
        assert picker.total("gorgo_reported_cached_tokens_total", replica="r0", region="here") == 8

    in_virtual_time(test, ASKING)


@pytest.mark.parametrize("chunks", [[delta("a"), USAGE + DONE], [delta("a") + USAGE, DONE]])
def test_an_event_beside_others_in_a_chunk_is_removed(chunks: list[bytes]) -> None:
    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker)
        assert answered(call, chunks) == delta("a") + DONE
        call.close()

    in_virtual_time(test, ASKING)


def test_an_answer_gets_no_length_if_an_event_of_it_may_be_removed() -> None:
    async def test(picker: VirtualPicker) -> None:
        asking, other = chosen(picker), chosen(picker)
        for call, removed in ((asking, ["content-length"]), (other, [])):
            (head,) = call.feed(headers_message("response_headers", *EVENTS, ("content-length", "900")))
            assert list(head.response_headers.response.header_mutation.remove_headers) == removed
            call.close()

    in_virtual_time(test, ASKING)


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda picker: chosen(picker, WANTED), id="the client requested it"),
        pytest.param(lambda picker: (chosen(picker), chosen(picker))[1], id="the replica is not asked"),
        pytest.param(lambda picker: chosen(picker, JSON_BODY), id="no stream"),
    ],
)
def test_usage_that_the_picker_has_not_requested_stays(ask: Callable[[VirtualPicker], Call]) -> None:
    async def test(picker: VirtualPicker) -> None:
        call = ask(picker)
        assert answered(call, [delta("a"), USAGE[:30], USAGE[30:], DONE]) == delta("a") + USAGE + DONE
        for each in tuple(picker.state.calls):
            each.closed()  # type: ignore[attr-defined]

    in_virtual_time(test, ASKING)


@pytest.mark.parametrize(
    "headers",
    [
        ((":status", "200"), ("content-type", "application/json")),
        ((":status", "500"), ("content-type", "text/event-stream")),
        (*EVENTS, ("content-encoding", "gzip")),
    ],
)
def test_an_answer_that_is_no_readable_stream_passes_byte_for_byte(headers: tuple[tuple[str, str], ...]) -> None:
    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker)
        assert answered(call, [USAGE[:9], USAGE[9:]], *headers) == USAGE
        call.close()

    in_virtual_time(test, ASKING)


def test_the_body_that_was_sent_decides_and_not_the_replica_that_served_in_the_end() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker)
        assert answered(call, [delta("a"), USAGE, DONE], served="10.0.0.2:8000") == delta("a") + DONE
        call.close()
        assert picker.total("gorgo_output_tokens_total", replica="r1", region="here") == 2

    in_virtual_time(test, ASKING)


def test_what_trailers_end_and_what_breaks_off_within_an_event_is_whole() -> None:
    async def test(picker: VirtualPicker) -> None:
        for trailers in (True, False):
            call = chosen(picker)
            assert answered(call, [delta("a"), USAGE[:20]], trailers=trailers) == delta("a") + USAGE[:20]
            call.close()

    in_virtual_time(test, ONLY)


def test_an_event_longer_than_a_piece_and_one_longer_than_any_buffer_pass() -> None:
    async def test(picker: VirtualPicker) -> None:
        for size in (63_000, 500_000):
            call = chosen(picker)
            long = delta("x" * size)
            chunks = [long[start : start + 16_384] for start in range(0, len(long), 16_384)]
            assert answered(call, [*chunks, USAGE, DONE]) == long + DONE
            call.close()

    in_virtual_time(test, ONLY)


USAGE_EVENTS = (USAGE, USAGE.replace(b"\n", b"\r\n"))
PARTS = (ROLE, delta("a"), ALIKE, b": ping\n\n", *USAGE_EVENTS, b"no event", b"\n\n", DONE)


def kept_of(parts: Sequence[bytes]) -> bytes:
    """What the client gets of these parts."""
    kept = b""
    for part in parts:
        # After half an event, it and what follows up to the next blank line are one.
        is_event = not kept or kept.endswith((b"\n\n", b"\r\n\r\n"))
        kept += b"" if part in USAGE_EVENTS and is_event else part
    return kept


def test_however_an_answer_is_cut_the_client_gets_all_but_that_event() -> None:
    async def test(picker: VirtualPicker) -> None:
        chance = Random(1)
        for _ in range(150):
            parts = chance.choices(PARTS, k=chance.randrange(12))
            whole = b"".join(parts)
            edges = [0, *sorted(chance.choices(range(len(whole) + 1), k=chance.randrange(8))), len(whole)]
            call = chosen(picker)
            got = answered(call, [whole[a:b] for a, b in pairwise(edges)], trailers=chance.random() < 0.3)
            assert got == kept_of(parts)
            call.close()

    in_virtual_time(test, ONLY)
