"""The reading of a request's bytes, without a socket: what is refused, with which status, and where each bound lies."""

from __future__ import annotations

from typing import Any

import h11
import pytest

from gorgo.proxy.http.heads import HeadLimits
from gorgo.proxy.http.http1 import MEAN_CHUNK_BYTES, SMALL_CHUNKS, StrictConnection

#: Of 1,000 bytes.
LIMITS = HeadLimits(1000, 10.0)
GET = b"GET / HTTP/1.1\r\nhost: g\r\n"
POST = b"POST / HTTP/1.1\r\nhost: g\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


def connection(data: bytes) -> StrictConnection:
    made = StrictConnection(LIMITS)
    made.receive_data(data)
    return made


def events(made: StrictConnection) -> list[Any]:
    """Until it needs more, pauses or is over."""
    found = []
    while True:
        event = made.next_event()
        found.append(event)
        if event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, (h11.ConnectionClosed, h11.EndOfMessage)):
            return found


def refused(data: bytes) -> int:
    """The status with which it is."""
    made = connection(data)
    with pytest.raises(h11.RemoteProtocolError) as refusal:
        events(made)
    return refusal.value.error_status_hint


def body_of(made: StrictConnection) -> bytes:
    return b"".join(bytes(event.data) for event in events(made) if isinstance(event, h11.Data))


# -- heads


@pytest.mark.parametrize(
    ("data", "status"),
    [
        pytest.param(b"GET / HTTP/1.1\nhost: g\r\n\r\n", 400, id="LF behind the request line"),
        pytest.param(GET + b"a: b\n\r\n", 400, id="LF behind a header"),
        pytest.param(GET + b"a: b\rc\r\n\r\n", 400, id="CR in a header"),
        pytest.param(GET + b"a: b\n\n", 400, id="LF at the end"),
        pytest.param(GET + b"a: b\r\n c\r\n\r\n", 400, id="folded by a blank"),
        pytest.param(GET + b"a: b\r\n\tc\r\n\r\n", 400, id="folded by a tab"),
        pytest.param(GET + b"a: \x00\r\n\r\n", 400, id="NUL"),
        pytest.param(GET + b"a: \x7f\r\n\r\n", 400, id="DEL"),
        pytest.param(GET + b"a: \x0b\r\n\r\n", 400, id="vertical tab"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, id="preface of HTTP/2"),
        pytest.param(b"GET http://g/ HTTP/1.1\r\nhost: g\r\n\r\n", 400, id="absolute target"),
        pytest.param(b"OPTIONS * HTTP/1.1\r\nhost: g\r\n\r\n", 400, id="no path"),
        pytest.param(b"GET / HTTP/2.0\r\nhost: g\r\n\r\n", 400, id="another version"),
        pytest.param(POST + b"content-length: 1\r\nContent-Length: 1\r\n\r\n", 400, id="two lengths"),
        pytest.param(POST + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400, id="length and coding"),
        pytest.param(POST + b"content-length : 1\r\n\r\n", 400, id="blank before the colon"),
        pytest.param(POST + b"content-length: +1\r\n\r\n", 400, id="length with a sign"),
        pytest.param(POST + b"content-length: \r\n\r\n", 400, id="empty length"),
        pytest.param(POST + b"content-length: 1, 1\r\n\r\n", 400, id="list of lengths"),
        pytest.param(POST + b"content-length: " + b"1" * 20 + b"\r\n\r\n", 400, id="length of more than 64 bits"),
        pytest.param(b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n", 400, id="coding before HTTP/1.1"),
        pytest.param(POST + b"transfer-encoding: gzip, chunked\r\n\r\n", 501, id="another coding"),
    ],
)
def test_head_with_two_meanings_is_refused(data: bytes, status: int) -> None:
    assert refused(data) == status
    made = connection(data + GET + b"\r\n")
    for _ in range(2):  # and nothing behind it is a request
        with pytest.raises(h11.RemoteProtocolError):
            events(made)
    assert not made.has_begun


@pytest.mark.parametrize(
    "data",
    [
        GET + b"a: b\tc d\r\n\r\n",
        b"GET /?a=b HTTP/1.0\r\n\r\n",
        POST + b"content-length: 0 \t\r\n\r\n",
        POST + b"content-length: 0\r\n\r\n",
        b"GET /*http://x HTTP/1.1\r\nhost: g\r\n\r\n",
    ],
)
def test_head_with_one_meaning_is_taken(data: bytes) -> None:
    request, end = events(connection(data))
    assert isinstance(request, h11.Request)
    assert isinstance(end, h11.EndOfMessage)


def head(size: int, *, lines: int = 2) -> bytes:
    """One of so many bytes and header lines."""
    padding = b"".join(b"a: b\r\n" for _ in range(lines - 2))
    start = GET + padding + b"pad: "
    return start + b"x" * (size - len(start) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("size", "lines", "taken"), [(1000, 2, True), (1001, 2, False), (900, 128, True), (900, 129, False)]
)
def test_head_has_its_bytes_and_its_lines_at_most(size: int, lines: int, taken: bool) -> None:
    data = head(size, lines=lines)
    assert (len(data), data.count(b"\r\n") - 2) == (size, lines)
    if taken:
        assert isinstance(events(connection(data))[0], h11.Request)
    else:
        assert refused(data) == 431


def test_head_that_does_not_end_is_refused_at_its_bound() -> None:
    assert refused(GET + b"pad: " + b"x" * 1000) == 431
    assert events(connection(GET + b"pad: x")) == [h11.NEED_DATA]


def test_wish_for_another_protocol_is_left_out() -> None:
    request = events(connection(GET + b"upgrade: h2c\r\naccept: a\r\n\r\n"))[0]
    assert [name for name, _ in request.headers] == [b"host", b"accept"]
    assert (request.method, request.target, request.http_version) == (b"GET", b"/", b"1.1")


# -- chunked bodies


@pytest.mark.parametrize(
    "body",
    [
        b"3\r\nabc\r\n0\r\n\r\n",
        b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n",
        b"0000000000000003\r\nabc\r\n0\r\n\r\n",
        b"3;name=value\r\nabc\r\n0\r\n\r\n",
        b"3\r\nabc\r\n0\r\ntrailer: t\r\n\r\n",
    ],
)
def test_chunked_body_is_read_however_it_is_cut(body: bytes) -> None:
    assert body_of(connection(CHUNKED + body)) == b"abc"
    made = StrictConnection(LIMITS)
    found, ended = b"", False
    for byte in CHUNKED + body:
        made.receive_data(bytes((byte,)))
        while not ended and (event := made.next_event()) is not h11.NEED_DATA:
            found += bytes(event.data) if isinstance(event, h11.Data) else b""
            ended = isinstance(event, h11.EndOfMessage)
    assert (found, ended) == (b"abc", True)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b"3 \r\nabc\r\n0\r\n\r\n", 400, id="blank behind the size"),
        pytest.param(b"00000000000000003\r\nabc\r\n0\r\n\r\n", 400, id="size of more than 64 bits"),
        pytest.param(b"3;a\rb\r\nabc\r\n0\r\n\r\n", 400, id="CR in an extension"),
        pytest.param(b"3;a\x00\r\nabc\r\n0\r\n\r\n", 400, id="NUL in an extension"),
        pytest.param(b"3\nabc\r\n0\r\n\r\n", 400, id="LF behind the size"),
        pytest.param(b"3\r\nabc\r\n0\r\na: b\n\r\n", 400, id="LF in a trailer"),
        pytest.param(b"3\r\nabc\r\n0\r\na: \x00\r\n\r\n", 400, id="NUL in a trailer"),
        pytest.param(b"3\r\nabc\r\n0\r\na: b\r\n c\r\n\r\n", 400, id="folded trailer"),
        pytest.param(b"3\r\nabc\r\n0\r\na: " + b"x" * 1000 + b"\r\n\r\n", 431, id="large trailers"),
        pytest.param(b"3\r\nabc\r\n0\r\n" + b"a: b\r\n" * 129 + b"\r\n", 431, id="many trailers"),
    ],
)
def test_chunk_with_two_meanings_is_refused(body: bytes, status: int) -> None:
    assert refused(CHUNKED + body) == status


def test_trailers_have_as_many_lines_as_a_head() -> None:
    assert body_of(connection(CHUNKED + b"3\r\nabc\r\n0\r\n" + b"a: b\r\n" * 7 + b"\r\n")) == b"abc"


# -- what follows


def test_next_request_waits_unread_up_to_the_size_of_a_head() -> None:
    made = connection(GET + b"\r\n")
    assert len(events(made)) == 2
    made.receive_data(b"x" * 1000)
    assert made.next_event() is h11.NEED_DATA
    made.receive_data(b"x")
    assert made.next_event() is h11.PAUSED


def test_nothing_is_read_behind_a_request_that_was_to_be_the_last() -> None:
    made = connection(GET + b"connection: close\r\n\r\n")
    assert len(events(made)) == 2
    made.receive_data(GET + b"\r\n")
    assert made.trailing_data[0] == b""
    assert made.next_event() is h11.NEED_DATA
    made.receive_data(b"")  # its client has left
    assert isinstance(made.trailing_data, tuple)
    assert made.trailing_data[1] is True


def test_head_has_begun_with_its_first_byte_and_ends_with_its_last() -> None:
    made = StrictConnection(LIMITS)
    assert not made.has_begun
    made.receive_data(b"G")
    assert (made.has_begun, made.has_more) == (True, True)
    made.receive_data(GET[1:] + b"\r\n")
    events(made)
    assert (made.has_begun, made.has_more) == (False, False)


def test_many_small_chunks_are_a_400_and_a_few_or_larger_ones_are_read() -> None:
    end = b"0\r\n\r\n"
    assert len(body_of(connection(CHUNKED + b"1\r\nx\r\n" * SMALL_CHUNKS + end))) == SMALL_CHUNKS
    assert refused(CHUNKED + b"1\r\nx\r\n" * (SMALL_CHUNKS + 1)) == 400
    mean = b"%x\r\n%b\r\n" % (MEAN_CHUNK_BYTES, b"x" * MEAN_CHUNK_BYTES)
    assert len(body_of(connection(CHUNKED + mean * (SMALL_CHUNKS + 1) + end))) == MEAN_CHUNK_BYTES * (SMALL_CHUNKS + 1)
