"""Both ends of the relay benchmark read what the other end and any relay between them may write."""

from __future__ import annotations

import json

import pytest

from tests.bench.relay.wire import NUMBER_BYTES, TOKEN_MARK, ResponseReader, number_in, request

EVENT = b"data: {" + TOKEN_MARK + b"}\n\n"


def chunked(*chunks: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 10_000])
def test_tokens_are_counted_however_the_bytes_are_split(step: int) -> None:
    # The third event is split over two chunks, as a relay may re-frame it.
    data = chunked(EVENT, EVENT + EVENT[:20], EVENT[20:])
    reader = ResponseReader()
    complete = [reader.feed(data[at : at + step]) for at in range(0, len(data), step)]
    assert complete == [False] * (len(complete) - 1) + [True]
    assert (reader.status, reader.tokens) == (200, 3)


def test_a_response_with_a_length_ends_at_its_length() -> None:
    reader = ResponseReader()
    assert not reader.feed(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nab")
    assert reader.feed(b"cd")
    assert reader.status == 503


def test_bytes_beyond_the_length_are_an_error() -> None:
    with pytest.raises(ValueError, match="more bytes"):
        ResponseReader().feed(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab")


def test_a_reader_serves_one_response_after_another() -> None:
    reader = ResponseReader()
    assert reader.feed(chunked(EVENT))
    reader.start()
    assert reader.feed(chunked(EVENT, EVENT))
    assert reader.tokens == 2


@pytest.mark.parametrize("size", [500, 90_000])
def test_a_request_has_its_size_and_says_its_length(size: int) -> None:
    before, after = request(size, variant=3, tokens=8, gap_ms=10)
    head, _, body = (before + b"0" * NUMBER_BYTES + after).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    assert len(body) == size
    assert json.loads(body)["max_completion_tokens"] == 8


def test_a_number_is_found_without_parsing_and_defaults_where_it_is_missing() -> None:
    assert number_in(b'{"a":1,"seed": 25,"b":2}', b"seed", 1) == 25
    assert number_in(b'{"a":1}', b"seed", 10) == 10
