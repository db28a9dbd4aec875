"""The reading of a request's bytes, without a socket: what is refused, with which status, and where each bound lies."""

from __future__ import annotations

from random import Random

import h11
import pytest

from gorgo.live.listener.connection.reader import (
    MAX_LINE_BYTES,
    MEAN_CHUNK_BYTES,
    SMALL_CHUNKS,
    Head,
    Refused,
    RequestReader,
)
from gorgo.live.listener.heads import HeadLimits

#: Of 1,000 bytes.
LIMITS = HeadLimits(1000, 10.0)
GET = b"GET / HTTP/1.1\r\nhost: g\r\n"
POST = b"POST / HTTP/1.1\r\nhost: g\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


def reader_of(data: bytes) -> RequestReader:
    made = RequestReader(LIMITS)
    made.receive(data)
    return made


def read(data: bytes) -> tuple[Head, bytes]:
    """The head and the body of the one request in `data`, which is complete."""
    reader = reader_of(data)
    head = reader.next_head()
    assert head is not None
    body = reader.read_body()
    assert reader.complete
    return head, body


def refused(data: bytes) -> int:
    """The status with which it is."""
    with pytest.raises(Refused) as refusal:
        read(data)
    return refusal.value.status


def body_of(data: bytes) -> bytes:
    return read(data)[1]


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
        pytest.param(b"GET http://other/ HTTP/1.1\r\nhost: g\r\n\r\n", 400, id="absolute target of another host"),
        pytest.param(b"GET http://g:80/ HTTP/1.1\r\nhost: g\r\n\r\n", 400, id="absolute target of another port"),
        pytest.param(b"GET http://g/ HTTP/1.0\r\n\r\n", 400, id="absolute target without a host"),
        pytest.param(b"GET http://u@g/ HTTP/1.1\r\nhost: g\r\n\r\n", 400, id="absolute target with a user"),
        pytest.param(b"GET ftp://g/ HTTP/1.1\r\nhost: g\r\n\r\n", 400, id="absolute target of another scheme"),
        pytest.param(b"GET http:///a HTTP/1.1\r\nhost: g\r\n\r\n", 400, id="absolute target of no host"),
        pytest.param(b"GET  HTTP/1.1\r\nhost: g\r\n\r\n", 400, id="no target"),
        pytest.param(b"GET g:80 HTTP/1.1\r\nhost: g:80\r\n\r\n", 400, id="an address alone"),
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
    reader = reader_of(data + GET + b"\r\n")
    with pytest.raises(Refused):
        reader.next_head()
    reader.receive(GET + b"\r\n")  # and nothing behind it is a request
    assert (reader.next_head(), reader.buffered_bytes) == (None, 0)


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
    head, body = read(data)
    assert (head.length, body) == (0, b"")


@pytest.mark.parametrize(
    ("target", "host", "path", "query"),
    [
        (b"http://g/v1/models?a=b", b"g", b"/v1/models", b"a=b"),
        (b"HTTPS://Gorgo.Example:8080/v1/models", b"gorgo.example:8080", b"/v1/models", b""),
        (b"http://[::1]:8080/a", b"[::1]:8080", b"/a", b""),
        (b"http://g", b"g", b"/", b""),
        (b"http://g//h/a", b"g", b"//h/a", b""),
    ],
)
def test_absolute_target_with_the_host_of_the_header_is_its_path(
    target: bytes, host: bytes, path: bytes, query: bytes
) -> None:
    taken = read(b"GET " + target + b" HTTP/1.1\r\nhost: " + host + b"\r\n\r\n")[0]
    assert (taken.raw_path, taken.query, taken.path) == (path, query, path.decode())
    assert taken.target == path + (b"?" + query if query else b"")


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
        assert len(read(data)[0].headers) == lines
    else:
        assert refused(data) == 431


def test_head_that_does_not_end_is_refused_at_its_bound() -> None:
    assert refused(GET + b"pad: " + b"x" * 1000) == 431
    assert reader_of(GET + b"pad: x").next_head() is None


@pytest.mark.parametrize("data", [b"\x16\x03\x01", b"\r\n", b" GET", b"GET / HTTP/1.1\nhost"])
def test_incomplete_head_that_can_be_none_is_refused_at_once(data: bytes) -> None:
    assert refused(data) == 400


def test_head_is_read_however_it_is_cut() -> None:
    data = POST + b"content-length: 2\r\nA:  b c \r\n\r\n"
    for cut in range(1, len(data)):
        reader = reader_of(data[:cut])
        assert reader.next_head() is None
        reader.receive(data[cut:] + b"{")
        head = reader.next_head()
        assert head is not None
        assert head.headers == [(b"host", b"g"), (b"content-length", b"2"), (b"a", b"b c")]
        assert (reader.read_body(), reader.complete) == (b"{", False)
        reader.receive(b"}x")
        assert (reader.read_body(), reader.complete, reader.buffered_bytes) == (b"}", True, 1)


@pytest.mark.parametrize(
    ("lines", "persistent"),
    [
        (b"", True),
        (b"connection: keep-alive\r\n", True),
        (b"connection: x, Close\r\n", False),
        (b"connection: keep-alive\r\nconnection: close\r\n", False),
    ],
)
def test_another_request_may_follow_unless_the_client_says_close(lines: bytes, persistent: bool) -> None:
    assert read(GET + lines + b"\r\n")[0].persistent is persistent
    assert not read(b"GET / HTTP/1.0\r\n" + lines + b"\r\n")[0].persistent


def test_client_of_http_1_1_may_wait_for_an_interim_response() -> None:
    wish = b"expect: 100-Continue\r\n\r\n"
    assert read(GET + wish)[0].expects_continue
    assert not read(b"GET / HTTP/1.0\r\n" + wish)[0].expects_continue


def test_heads_mean_what_they_mean_to_h11() -> None:
    lines = b"Empty:\r\nBlanks: \t \r\nhigh: \xe9\r\nTwice: 1\r\ntwice: 2\r\n-!#$%&'*+.^_`|~9: token\r\n\r\n"
    for data in (GET + lines, b"DELETE /a?b=%20#c HTTP/1.0\r\n" + lines):
        peer = h11.Connection(h11.SERVER)
        peer.receive_data(data)
        request = peer.next_event()
        assert isinstance(request, h11.Request)
        head = read(data)[0]
        assert head.headers == list(request.headers)
        assert (head.method.encode(), head.target, head.version.encode()) == (
            *(request.method, request.target, request.http_version),
        )


def test_wish_for_another_protocol_is_left_out() -> None:
    lines = b"connection: upgrade\r\nupgrade: h2c\r\naccept: a\r\n"
    head, body = read(POST + lines + b"content-length: 2\r\n\r\n{}")
    assert [name for name, _ in head.headers] == [b"host", b"connection", b"accept", b"content-length"]
    assert (head.method, head.target, head.version, body) == ("POST", b"/", "1.1", b"{}")


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
    assert body_of(CHUNKED + body) == b"abc"
    reader = reader_of(CHUNKED)
    assert reader.next_head() is not None
    found = b""
    for byte in body:
        assert not reader.complete
        reader.receive(bytes((byte,)))
        found += reader.read_body()
    assert (found, reader.complete, reader.buffered_bytes) == (b"abc", True, 0)


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
        pytest.param(b"3\r\nabc\r\n0\r\nContent-Length: 3\r\n\r\n", 400, id="length as a trailer"),
        pytest.param(b"3\r\nabc\r\n0\r\na: b\r\ntransfer-encoding:x\r\n\r\n", 400, id="coding as a trailer"),
        pytest.param(b"3\r\nabc\r\n0\r\na: " + b"x" * 1000 + b"\r\n\r\n", 431, id="large trailers"),
        pytest.param(b"3\r\nabc\r\n0\r\n" + b"a: b\r\n" * 129 + b"\r\n", 431, id="many trailers"),
    ],
)
def test_chunk_with_two_meanings_is_refused(body: bytes, status: int) -> None:
    assert refused(CHUNKED + body) == status
    reader = reader_of(CHUNKED)
    assert reader.next_head() is not None
    statuses = []
    for byte in body:
        reader.receive(bytes((byte,)))
        try:
            reader.read_body()
        except Refused as refusal:
            statuses.append(refusal.status)
    assert (statuses, reader.complete) == ([status], False)


def test_trailers_have_as_many_lines_as_a_head() -> None:
    assert body_of(CHUNKED + b"3\r\nabc\r\n0\r\n" + b"a: b\r\n" * 7 + b"\r\n") == b"abc"


def test_line_of_a_chunk_is_bounded() -> None:
    extension = b"x" * (MAX_LINE_BYTES - 4)
    assert body_of(CHUNKED + b"3;%b\r\nabc\r\n0\r\n\r\n" % extension) == b"abc"
    assert refused(CHUNKED + b"3;%bx\r\nabc\r\n0\r\n\r\n" % extension) == 400
    assert refused(CHUNKED + b"3;%b" % (b"x" * MAX_LINE_BYTES)) == 400


# -- what follows


def test_next_request_waits_unread_until_its_turn() -> None:
    reader = reader_of(GET + b"\r\n" + GET + b"a: b\r\n\r\n" + GET)
    assert reader.next_head() is not None
    assert (reader.read_body(), reader.complete) == (b"", True)
    assert reader.buffered_bytes == 2 * len(GET) + 8
    reader.start_next()
    head = reader.next_head()
    assert head is not None
    assert head.headers[-1] == (b"a", b"b")
    reader.start_next()
    assert (reader.next_head(), reader.buffered_bytes) == (None, len(GET))


def test_nothing_is_read_behind_a_request_that_was_to_be_the_last() -> None:
    reader = reader_of(GET + b"connection: close\r\n\r\n" + GET)
    assert reader.next_head() is not None
    reader.receive(GET + b"\r\n")
    assert (reader.complete, reader.buffered_bytes) == (True, 0)


def test_many_small_chunks_are_a_400_and_a_few_or_larger_ones_are_read() -> None:
    end = b"0\r\n\r\n"
    assert len(body_of(CHUNKED + b"1\r\nx\r\n" * SMALL_CHUNKS + end)) == SMALL_CHUNKS
    assert refused(CHUNKED + b"1\r\nx\r\n" * (SMALL_CHUNKS + 1)) == 400
    mean = b"%x\r\n%b\r\n" % (MEAN_CHUNK_BYTES, b"x" * MEAN_CHUNK_BYTES)
    assert len(body_of(CHUNKED + mean * (SMALL_CHUNKS + 1) + end)) == MEAN_CHUNK_BYTES * (SMALL_CHUNKS + 1)


LIMITS_REPEATED_HEAD = HeadLimits(400, 10.0)
TEXT = (
    b"POST /v1/completions?a=%41 HTTP/1.1\r\nhost: g\r\nContent-Length: 12\r\nauthorization: Bearer key\r\n"
    b"accept: */*\r\nx-a: content-length: 9\r\n\r\n"
)


def reading(text: bytes, *before: bytes) -> tuple[object, ...]:
    """What a reader makes of a head, after heads with their bodies; the status of a refusal."""
    reader = RequestReader(LIMITS_REPEATED_HEAD)
    for earlier in before:
        reader.receive(earlier)
        head = reader.next_head()
        assert head is not None
        assert head.length is not None
        reader.receive(b"x" * head.length)
        reader.read_body()
        reader.start_next()
    reader.receive(text)
    try:
        head = reader.next_head()
    except Refused as refused:
        return (refused.status,)
    return ("incomplete",) if head is None else facts(head)


def facts(head: Head) -> tuple[object, ...]:
    return (
        *(head.method, head.target, head.raw_path, head.path, head.query, head.version, list(head.headers)),
        *(head.length, head.persistent, head.expects_continue),
    )


@pytest.mark.parametrize(
    "length", [b"0", b"12", b"007", b"999999999999999", b"9999999999999999999", b"+1", b"", b"1 2"]
)
def test_any_length_is_read_as_by_a_new_reader(length: bytes) -> None:
    text = TEXT.replace(b"12", length, 1)
    assert reading(text, TEXT) == reading(text)


def test_a_repeated_head_shares_what_was_found_in_its_headers() -> None:
    reader = RequestReader(LIMITS_REPEATED_HEAD)
    heads = []
    for length in (b"1", b"23"):
        reader.receive(TEXT.replace(b"12", length, 1))
        head = reader.next_head()
        assert head is not None
        heads.append(head)
        reader.receive(b"x" * (head.length or 0))
        reader.read_body()
        reader.start_next()
    first, second = heads
    assert first.headers.findings is second.headers.findings
    assert [dict(head.headers)[b"content-length"] for head in heads] == [b"1", b"23"]


def test_other_lines_are_read_anew() -> None:
    other = TEXT.replace(b"Bearer key", b"Bearer kez")
    assert reading(other, TEXT) == reading(other)
    assert reading(other, TEXT) != reading(TEXT)


def test_a_head_does_not_outgrow_its_bound_by_a_longer_length() -> None:
    padded = TEXT.replace(b"*/*", b"*/*" + b"x" * (LIMITS_REPEATED_HEAD.size_bytes - len(TEXT)))
    assert reading(padded, padded) == reading(padded)
    longer = padded.replace(b"12", b"123", 1)
    assert reading(longer, padded) == reading(longer) == (431,)


def test_a_mutated_head_is_read_as_by_a_new_reader() -> None:
    chance = Random(18)
    pieces = (
        b"\r\n",
        b"\n",
        b" ",
        b":",
        b"0",
        b"content-length: 3\r\n",
        b"transfer-encoding: chunked\r\n",
        b"\0",
        b"9",
    )
    for _ in range(3000):
        text = bytearray(TEXT)
        for _ in range(chance.randrange(1, 4)):
            place = chance.randrange(len(text))
            match chance.randrange(3):
                case 0:
                    text[place] = chance.randrange(256)
                case 1:
                    del text[place : place + chance.randrange(1, 4)]
                case _:
                    text[place:place] = chance.choice(pieces)
        assert reading(bytes(text), TEXT) == reading(bytes(text)), bytes(text)
