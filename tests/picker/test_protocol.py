"""The hand-written codec of Envoy's messages against the library of Protocol Buffers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from hypothesis import given
from hypothesis import strategies as st

from gorgo.live.http.headers import Header, RequestHeaders
from gorgo.picker.protocol import messages as codec
from gorgo.picker.protocol.answers import EndpointChoice, Labels, answered, chosen, varint
from gorgo.picker.protocol.messages import (
    DESTINATION,
    LB,
    OWN,
    VARYING,
    HeadReader,
    ProtocolError,
    read_message,
    read_subset,
)
from gorgo.picker.protocol.protos import OVERWRITE_IF_EXISTS_OR_ADD, HeaderValue, ProcessingResponse
from tests.picker.virtual import BUFFERED, DUPLEX, body_message, headers_message

# --- Answers that are joined from bytes are those that the library of Protocol Buffers makes.


addresses = st.lists(st.sampled_from(("10.0.0.1:80", "[fd00::1]:8000", "10.0.0.3:9")), min_size=1, max_size=3)
tokens = st.text("abc-", min_size=1, max_size=20).map(str.encode)
headers = st.lists(st.tuples(tokens, st.binary(max_size=300)), max_size=3)


def expected(kind: str, choice: EndpointChoice, *, with_body: bool) -> ProcessingResponse:
    response = ProcessingResponse()
    common = getattr(response, kind).response
    pairs = [(DESTINATION.encode(), choice.destination.encode()), *choice.set_headers]
    if choice.body is not None:
        pairs.append((b"content-length", str(len(choice.body)).encode()))
        if with_body:
            common.body_mutation.body = choice.body
    for name, value in pairs:
        common.header_mutation.set_headers.add(
            header=HeaderValue(key=name.decode(), raw_value=value),
            append_action=OVERWRITE_IF_EXISTS_OR_ADD,
        )
    common.header_mutation.remove_headers.extend(name.decode() for name in choice.remove_headers)
    common.clear_route_cache = kind == "request_headers"
    first = choice.destination.split(",")[0]
    own = {"id": choice.exchange_id, "destination": first, **dict(choice.labels)}
    response.dynamic_metadata.update({LB: {DESTINATION: choice.destination}, OWN: own})
    return response


@given(
    st.sampled_from(("request_headers", "request_body")),
    addresses,
    st.text("abc-9", max_size=200),
    headers,
    st.lists(tokens, max_size=3),
    st.none() | st.binary(max_size=70_000),
    st.booleans(),
    st.sampled_from([(), (("replica", "r0"), ("policy", "gorgo"))]),
)
def test_the_answer_with_a_choice_is_the_one_that_the_library_makes(
    kind: str,
    found: list[str],
    exchange_id: str,
    set_headers: list[tuple[bytes, bytes]],
    removed: list[bytes],
    body: bytes | None,
    with_body: bool,
    labels: Labels,
) -> None:
    choice = EndpointChoice(",".join(found), exchange_id, set_headers, tuple(removed), body, labels=labels)
    answer = ProcessingResponse.FromString(chosen(kind, choice, with_body=with_body))
    assert answer == expected(kind, choice, with_body=with_body)


@pytest.mark.parametrize("is_shortened", [True, False])
def test_the_answer_to_a_response_s_head_has_the_labels_and_removes_a_wrong_length(is_shortened: bool) -> None:
    answer = ProcessingResponse.FromString(answered((("replica", "r0"), ("region", "here")), is_shortened=is_shortened))
    response = ProcessingResponse()
    mutation = response.response_headers.response.header_mutation
    for name, value in (("x-gorgo-replica", b"r0"), ("x-gorgo-region", b"here")):
        mutation.set_headers.add(
            header=HeaderValue(key=name, raw_value=value), append_action=OVERWRITE_IF_EXISTS_OR_ADD
        )
    mutation.remove_headers.extend(["content-length"] * is_shortened)
    assert answer == response


@given(st.integers(0, 2**40))
def test_numbers_have_seven_bits_a_byte(number: int) -> None:
    found = varint(number)
    assert sum((byte & 127) << 7 * place for place, byte in enumerate(found)) == number
    assert [byte >> 7 for byte in found] == [1] * (len(found) - 1) + [0]


# --- What begins a call is read as the library of Protocol Buffers reads it, and a repeated head is known again.


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


def expected_heads(message: Any) -> tuple[Any, ...]:
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
        assert read(reader, message.SerializeToString()) == expected_heads(message)


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
        assert found == expected_heads(read_message(damaged))


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
    monkeypatch.setattr(codec, "MAX_KNOWN", 4)
    reader = HeadReader()
    for number in range(40):
        message = headers_message("request_headers", ("accept", str(number)), path=f"/{number}").SerializeToString()
        assert read(reader, message) is not None
        assert max(len(reader._heads), len(reader._headers), len(reader._modes)) <= 4


def test_what_is_no_head_is_left_to_the_library() -> None:
    assert HeadReader().read(body_message("request_body", b"{}").SerializeToString()) is None
    both = headers_message("request_headers").SerializeToString() * 2
    assert HeadReader().read(both) is None


# --- The messages for readers, `envoy.proto`, and for programs, `envoy.binpb`.


FOLDER = files("gorgo.picker.protocol")


def type_of(field: FieldDescriptorProto, package: str) -> str:
    if field.type == field.TYPE_MESSAGE:
        return str(field.type_name).removeprefix(f".{package}.").removeprefix(".")
    return str(FieldDescriptorProto.Type.Name(field.type)).removeprefix("TYPE_").lower()


def lines_of(message: DescriptorProto, package: str) -> Iterator[str]:
    """Yield the lines of a message as `envoy.proto` has them, without comments and indentation."""
    maps = {f".{package}.{message.name}.{entry.name}": entry for entry in message.nested_type}
    open_choice = None
    yield f"message {message.name} {{"
    for field in message.field:
        choice = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
        if choice != open_choice and open_choice is not None:
            yield "}"
        if choice != open_choice and choice is not None:
            yield f"oneof {choice} {{"
        open_choice = choice
        repeated = "repeated " if field.label == field.LABEL_REPEATED and field.type_name not in maps else ""
        kind = type_of(field, package)
        if field.type_name in maps:
            key, value = maps[field.type_name].field
            kind = f"map<{type_of(key, package)}, {type_of(value, package)}>"
        yield f"{repeated}{kind} {field.name} = {field.number};"
    yield from ["}"] * (1 if open_choice is None else 2)


def text_of(file: FileDescriptorProto) -> list[str]:
    head = [
        f'syntax = "{file.syntax}";',
        f"package {file.package};",
        *(f'import "{name}";' for name in file.dependency),
    ]
    return head + [line for message in file.message_type for line in lines_of(message, file.package)]


def test_what_programs_read_is_what_readers_read() -> None:
    (file,) = FileDescriptorSet.FromString(FOLDER.joinpath("envoy.binpb").read_bytes()).file
    written = FOLDER.joinpath("envoy.proto").read_text()
    lines = [re.sub(r"\s*//.*", "", line).strip() for line in written.splitlines()]
    assert text_of(file) == [line for line in lines if line]
