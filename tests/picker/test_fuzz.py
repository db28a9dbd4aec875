"""Bytes and messages that no Envoy sends: a call ends with `ProtocolError`, and nothing else is left of it."""

from __future__ import annotations

from contextlib import suppress
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.picker.call import PickerCall, ProtocolError
from gorgo.picker.protocol.protos import ProcessingRequest
from gorgo.picker.server import take_access_log
from tests.picker.virtual import (
    BODY,
    BUFFERED,
    DUPLEX,
    NONE,
    STREAMED,
    Output,
    VirtualPicker,
    body_message,
    headers_message,
    in_virtual_time,
    log_message,
)
from tests.proxy.fakes import DONE, delta

KINDS = ("request_headers", "request_body", "response_headers", "response_body")


def feed(picker: VirtualPicker, messages: list[bytes]) -> None:
    output = Output()
    call = PickerCall(picker.state, output)
    refused = "expected"
    try:
        for message in messages:
            call.feed(message)
    except ProtocolError as error:
        refused = str(error)
    assert refused.startswith("expected"), refused
    call.closed()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=5))
def test_random_bytes_end_a_call_with_what_was_expected(messages: list[bytes]) -> None:
    async def test(picker: VirtualPicker) -> None:
        feed(picker, messages)
        for message in messages:
            with suppress(ProtocolError):
                take_access_log(picker.state, message)

    in_virtual_time(test)


def odd_message(chance: Random) -> bytes:
    """A message that is well formed, or nearly so."""
    kind = chance.choice(KINDS)
    mode = chance.choice((BUFFERED, DUPLEX, NONE, STREAMED, None))
    if kind.endswith("headers"):
        path = chance.choice(("/v1/chat/completions", "/v1/responses", "/health", "/v1/models", "", "%00", "/x?y"))
        name = chance.choice(("x-slo-ttft-ms", "x-request-id", "content-encoding", ":status", "x-forwarded-for"))
        value = chance.choice(("", "1", "200", "nan", "\x7f", "x" * 5000, "10.0.0.1", "gzip"))
        end = chance.random() < 0.3
        response_mode = chance.choice((NONE, STREAMED, DUPLEX))
        message = headers_message(kind, (name, value), mode=mode, path=path, end=end, response_mode=response_mode)
    else:
        body = chance.choice((BODY, b"", b"{}", b"[1]", b"\xff", delta("a") + DONE, BODY.replace(b"true", b"5")))
        exchange_id = chance.choice((None, None, "pick-1", "x"))
        message = body_message(kind, body, end=chance.random() < 0.6, exchange_id=exchange_id)
    if chance.random() < 0.1:
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(
            {"x-gateway-destination-endpoint-subset": chance.choice(("", "10.0.0.1:8000", 5, [], ["x"], {"a": 1}))}
        )
    if chance.random() < 0.1:
        message.metadata_context.filter_metadata["epp"].update({"id": chance.choice((5, [], "", "pick-1"))})
    data: bytes = message.SerializeToString()
    if chance.random() < 0.1:
        at = chance.randrange(len(data) + 1)
        data = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
    return data


def test_shuffled_and_damaged_messages_crash_nothing() -> None:
    async def test(picker: VirtualPicker) -> None:
        chance = Random(1)
        for _ in range(1500):
            feed(picker, [odd_message(chance) for _ in range(chance.randrange(6))])
            picker.state.routing.router.check()

    in_virtual_time(test)


def test_damaged_entries_crash_nothing() -> None:
    async def test(picker: VirtualPicker) -> None:
        chance = Random(2)
        for _ in range(500):
            call, picked = picker.request()
            call.close()
            data = bytearray(log_message(picked.exchange_id, usage={"prompt_tokens": 1}, first_body_us=5, served="x"))
            for _ in range(chance.randrange(4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            with suppress(ProtocolError):
                take_access_log(picker.state, bytes(data))

    in_virtual_time(test)


def test_an_empty_request_is_a_message_without_a_phase() -> None:
    assert ProcessingRequest().WhichOneof("request") is None
