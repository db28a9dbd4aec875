"""What begins a call is read as the library of Protocol Buffers reads it, and a repeated head is known again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.live.http.headers import Header, RequestHeaders
from gorgo.picker.protocol import heads
from gorgo.picker.protocol.heads import VARYING, HeadReader
from gorgo.picker.protocol.messages import ProtocolError, read_message, read_subset
from gorgo.picker.protocol.protos import HeaderValue
from tests.picker.virtual import BUFFERED, DUPLEX, body_message, headers_message

names = st.sampled_from((*(name.decode() for name in sorted(VARYING)), "accept", "authorization", "cookie"))
values = st.text("abc-9/", max_size=20) | st.just("x" * 300)


@st.composite
def messages(draw: st.DrawFn) -> Any:
    message = headers_message(
        "request_headers",
        *draw(st.lists(st.tuples(names, values), max_size=6)),
        end=draw(st.booleans()),
        mode=draw(st.sampled_from((None, BUFFERED, DUPLEX))),
        path=draw(st.sampled_from(("/v1/chat/completions", "/generate?a=b"))),
    )
    if draw(st.booleans()):
        message.request_headers.headers.headers.append(HeaderValue(key="x-old", value="text"))
    if draw(st.booleans()):
        hint = {"x-gateway-destination-endpoint-subset": draw(st.sampled_from(("10.0.0.1:80", "10.0.0.1:80, [::1]:9")))}
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(hint)
    return message


def expected(message: Any) -> tuple[Any, ...]:
    """What the message says, by the library."""
    found = message.request_headers
    pairs: list[Header] = [(pair.key.encode(), pair.raw_value or pair.value.encode()) for pair in found.headers.headers]
    own = dict(pairs)
    plain = [pair for pair in pairs if pair[0][:1] != b":"]
    plain.sort(key=lambda pair: pair[0] in VARYING)
    config = message.protocol_config
    mode = config.request_body_mode if message.HasField("protocol_config") else BUFFERED
    path = own[b":path"].split(b"?")[0].decode()
    return (
        own[b":method"].decode(),
        path,
        plain,
        found.end_of_stream,
        mode,
        config.response_body_mode,
        read_subset(message),
    )


def read(reader: HeadReader, message: bytes) -> tuple[Any, ...] | None:
    start = reader.read(message)
    if start is None:
        return None
    head, mode = start.head, start.mode
    assert head.varying == [pair for pair in head.headers if pair[0] in VARYING]
    return head.method, head.path, list(head.headers), head.ended, mode.request_body, mode.response_body, mode.subset


@given(st.lists(messages(), min_size=1, max_size=4))
def test_heads_are_read_as_the_library_reads_them(found: list[Any]) -> None:
    reader = HeadReader()
    for message in (*found, *found):
        assert read(reader, message.SerializeToString()) == expected(message)


@given(messages(), st.data())
def test_what_the_reader_takes_of_damaged_messages_is_what_the_library_takes(message: Any, data: st.DataObject) -> None:
    whole = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(
            st.sampled_from((0, 1, 2, 10, 18, 26, 127, 128, 255))
        )
    damaged = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        found = read(HeadReader(), damaged)
    except ProtocolError:
        return
    if found is not None:
        assert found == expected(read_message(damaged))


def test_a_head_that_differs_in_its_id_and_length_is_known_again() -> None:
    reader = HeadReader()
    starts = [
        reader.read(
            headers_message(
                "request_headers", ("x-request-id", text), ("content-length", text), ("accept", "*/*")
            ).SerializeToString()
        )
        for text in ("1", "2")
    ]
    first, second = (start.head.headers for start in starts if start is not None)
    assert isinstance(first, RequestHeaders)
    assert isinstance(second, RequestHeaders)
    assert first.findings is second.findings
    assert second[-2:] == [(b"x-request-id", b"2"), (b"content-length", b"2")]


def test_no_more_heads_are_retained_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MAX_KNOWN", 4)
    reader = HeadReader()
    for number in range(40):
        message = headers_message("request_headers", ("accept", str(number)), path=f"/{number}").SerializeToString()
        assert read(reader, message) is not None
        assert max(len(reader._heads), len(reader._headers), len(reader._modes)) <= 4


def test_what_is_no_head_is_left_to_the_library() -> None:
    assert HeadReader().read(body_message("request_body", b"{}").SerializeToString()) is None
    both = headers_message("request_headers").SerializeToString() * 2
    assert HeadReader().read(both) is None
