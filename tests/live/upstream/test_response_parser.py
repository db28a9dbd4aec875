"""One response, whatever its bytes and their cuts."""

from __future__ import annotations

import time

import pytest

from gorgo.live.upstream import response
from gorgo.live.upstream.response import MAX_HEAD_BYTES, MAX_HEADERS, MAX_INTERIM, ResponseParser

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def parsed(data: bytes, *, cut: int | None = None, head_only: bool = False) -> tuple[ResponseParser, bytes]:
    """The parser after `data` in pieces of `cut` bytes, and the body it found."""
    parser = ResponseParser(head_only=head_only)
    size = cut or len(data)
    body = bytearray()
    for start in range(0, len(data), size):
        if parser.failure is None:
            body += parser.feed(data[start : start + size])
    return parser, bytes(body)


#: Responses that are complete with their last byte: status, body, and whether the connection may carry another.
COMPLETE = {
    "a length": (OK, 200, b"ok", True),
    "chunks": (CHUNKED + b"1\r\na\r\n2;x=y\r\nbc\r\n0\r\n\r\n", 200, b"abc", True),
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\nset-cookie: a\r\nx: y\r\n\r\n", 200, b"a", True),
    "no content": (b"HTTP/1.1 204 None\r\n\r\n", 204, b"", True),
    "not modified, with the length of what is not sent": (
        b"HTTP/1.1 304 Same\r\nContent-Length: 9\r\n\r\n",
        304,
        b"",
        True,
    ),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", True),
    "to be closed": (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", False),
    "an old version": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", False),
    "an old version that would stay open": (
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
        200,
        b"ok",
        False,
    ),
    "chunks of an old version": (
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
        200,
        b"a",
        False,
    ),
    "interim answers": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + OK, 200, b"ok", True),
    "an empty body": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b"", True),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_a_response_reads_alike_however_it_is_cut(name: str) -> None:
    data, status, body, reusable = COMPLETE[name]
    for cut in (None, 1, 2, 3, 7):
        parser, found = parsed(data, cut=cut)
        assert (parser.status, found, parser.complete, parser.reusable) == (status, body, True, reusable), cut
        assert parser.failure is None
        assert not {b"Link", b"set-cookie"} & {name for name, _ in parser.headers}


@pytest.mark.parametrize("name", COMPLETE)
def test_a_response_is_complete_with_its_last_byte_and_not_before(name: str) -> None:
    data = COMPLETE[name][0]
    for end in range(1, len(data)):
        parser, _ = parsed(data[:end])
        assert not parser.complete
        assert not parser.feed_eof()
        assert not parser.reusable


REFUSED = {
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "one length twice": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok",
    "a list of lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nok",
    "a signed length": b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok",
    "a length and chunks": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and a length": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
    "another coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nxx",
    "another coding of an interim answer": b"HTTP/1.1 100 Continue\r\nTransfer-Encoding: gzip\r\n\r\n" + OK,
    "a coding before chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a folded line": b"HTTP/1.1 200 OK\r\na: b\r\n c\r\nContent-Length: 2\r\n\r\nok",
    "a bare line feed": b"HTTP/1.1 200 OK\r\na: b\nContent-Length: 2\r\n\r\nok",
    "a bare carriage return": b"HTTP/1.1 200 OK\r\na: b\rc\r\nContent-Length: 2\r\n\r\nok",
    "a space before the colon": b"HTTP/1.1 200 OK\r\nContent-Length : 2\r\n\r\nok",
    "a NUL": b"HTTP/1.1 200 OK\r\na: \0\r\n\r\n",
    "no name": b"HTTP/1.1 200 OK\r\n: b\r\n\r\n",
    "a switch of protocols": b"HTTP/1.1 101 Switch\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nxx",
    "a status below 100": b"HTTP/1.1 099 Low\r\nContent-Length: 2\r\n\r\nok",
    "a status of four digits": b"HTTP/1.1 2000 OK\r\nContent-Length: 2\r\n\r\nok",
    "no HTTP": b"ICY 200 OK\r\n\r\n",
    "chunks by line feed": CHUNKED + b"1\na\n0\n\n",
    "a chunk size with a prefix": CHUNKED + b"0x1\r\na\r\n0\r\n\r\n",
    "a chunk beyond 64 bits": CHUNKED + b"f" * 17 + b"\r\na",
    "a chunk longer than its size": CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
    "a length in the trailers": CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n",
    "an empty length in the trailers": CHUNKED + b"0\r\nx: y\r\nContent-Length:\r\n\r\n",
    "a coding in the trailers": CHUNKED + b"0\r\nTransfer-Encoding: gzip\r\n\r\n",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_response_with_two_readings_or_none_is_refused(name: str) -> None:
    for cut in (None, 1, 5):
        parser, body = parsed(REFUSED[name], cut=cut)
        assert parser.failure is not None, cut
        assert not parser.complete
        assert not parser.reusable
        assert b"ok" not in body


def test_what_came_before_a_broken_chunk_is_of_the_body() -> None:
    parser, body = parsed(CHUNKED + b"1\r\na\r\n1\r\nb\r\nzz\r\n")
    assert body == b"ab"
    assert parser.failure is not None


@pytest.mark.parametrize("extra", [OK, b"x", b"HTTP/1.1 200 OK\r\n", b"0\r\n\r\n"])
def test_bytes_after_a_response_leave_it_whole_and_its_connection_unusable(extra: bytes) -> None:
    for cut in (None, 1):
        parser, body = parsed(OK + extra, cut=cut)
        assert (body, parser.complete, parser.reusable, parser.failure) == (b"ok", True, False, None)


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    parser, body = parsed(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")
    assert (body, parser.complete) == (b"until the end", False)
    assert parser.feed_eof()
    assert not parser.reusable


def test_a_response_to_head_ends_with_its_head_whatever_its_length() -> None:
    parser, body = parsed(OK, head_only=True)
    assert (parser.status, body, parser.complete, parser.reusable) == (200, b"", True, False)


def test_interim_answers_are_bounded() -> None:
    interim = b"HTTP/1.1 103 Hints\r\nlink: x\r\n\r\n"
    parser, _ = parsed(interim * MAX_INTERIM + OK)
    assert parser.complete
    parser, _ = parsed(interim * (MAX_INTERIM + 1) + OK)
    assert "interim" in str(parser.failure)


def test_headers_are_bounded_in_number_the_trailers_too() -> None:
    fits = b"".join(b"x-%d: y\r\n" % number for number in range(MAX_HEADERS - 1))
    head = b"HTTP/1.1 200 OK\r\n" + fits + b"Content-Length: 2\r\n\r\nok"
    parser, _ = parsed(head)
    assert (parser.complete, len(parser.headers)) == (True, MAX_HEADERS)
    parser, _ = parsed(head.replace(b"x-0", b"x: z\r\nx-0"))
    assert f"more than {MAX_HEADERS} headers" in str(parser.failure)
    parser, _ = parsed(CHUNKED + b"0\r\n" + b"x: y\r\n" * MAX_HEADERS + b"\r\n")
    assert f"more than {MAX_HEADERS} headers" in str(parser.failure)


@pytest.mark.parametrize(
    ("start", "endless"),
    [
        (b"HTTP/1.1 200 ", b"reason "),
        (b"HTTP/1.1 200 OK\r\nx: ", b"a" * 8),
        (CHUNKED + b"0\r\nx: ", b"a" * 8),
        (CHUNKED + b"1;", b"a" * 8),
    ],
)
def test_bytes_that_bring_no_body_are_bounded(start: bytes, endless: bytes) -> None:
    parser = ResponseParser()
    fed = len(start)
    parser.feed(start)
    while parser.failure is None:
        parser.feed(endless)
        fed += len(endless)
        assert fed <= MAX_HEAD_BYTES + len(start) + len(endless)
    assert fed > MAX_HEAD_BYTES
    assert "without a body" in str(parser.failure)


def test_a_body_has_no_bound_here() -> None:
    parser = ResponseParser()
    parser.feed(CHUNKED)
    for _ in range(3 * MAX_HEAD_BYTES // 1000):
        assert len(parser.feed(b"3e8\r\n" + bytes(1000) + b"\r\n")) == 1000
    assert parser.failure is None


def test_chunks_of_one_byte_cost_little() -> None:
    parser = ResponseParser()
    parser.feed(CHUNKED)
    slice_ = (b"1\r\na\r\n" * 3000)[:16_384]
    shortest_s = float("inf")
    for _ in range(5):
        begun_s = time.perf_counter()
        parser.feed(slice_ + slice_ + slice_)  # 49,152 bytes are whole chunks
        shortest_s = min(shortest_s, time.perf_counter() - begun_s)
    # Measured: 0.4 ms; the bound is for a busy machine.
    assert shortest_s < 0.02


def test_bounds_of_a_response() -> None:
    found = response.MAX_INTERIM, response.MAX_HEADERS, response.MAX_HEAD_BYTES
    assert found == (8, 128, 65_536)
