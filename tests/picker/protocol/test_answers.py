"""Answers that are joined from bytes are those that the library of Protocol Buffers makes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.picker.protocol.answers import EndpointChoice, Labels, answered, chosen
from gorgo.picker.protocol.messages import DESTINATION, LB, OWN
from gorgo.picker.protocol.protos import OVERWRITE_IF_EXISTS_OR_ADD, HeaderValue, ProcessingResponse
from gorgo.picker.protocol.wire import varint

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
