"""Requests that two programs in a row could read as two different ones: refused, and no replica sees any of them."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from itertools import combinations

import pytest

from gorgo.live.listener.connection.reader import RequestReader
from gorgo.live.listener.heads import HeadLimits
from tests.proxy.conftest import Start
from tests.proxy.fakes import DONE, answer, chat, delta, hang, stream
from tests.proxy.raw import connected

#: Also on the HTTP of `gorgo serve --plain`.
IN_BOTH_FORMS = True
#: Where stock hypercorn and h11 differ: why, and the tests of it.
OWN_ALONE = {
    "h11 accepts some of the forms, which test_what_plain_accepts_... looks at": (
        "test_ambiguous_request_is_refused_and_its_connection_ends",
        "test_ambiguous_request_is_refused_however_it_is_cut",
    ),
    "h11 refuses bytes behind a last request before its answer": (
        "test_what_follows_the_last_request_is_no_request_and_spoils_no_answer",
    ),
    "hypercorn speaks HTTP/2, and answers the preface in its frames": (
        "test_http_2_preface_is_a_505_that_names_http_1_1_and_the_connection_ends",
    ),
    "h11 accepts the request that is refused there": ("test_what_a_refused_client_still_sends_is_not_read",),
    "h11 bounds a line, and not all trailers": ("test_trailers_are_bounded_as_heads_are",),
    "hypercorn answers h2c and websocket": ("test_wish_for_another_protocol_is_not_answered_and_not_passed_on",),
}

CHAT = b"/v1/chat/completions"
BODY = chat()
SIZE = b"%d" % len(BODY)
LENGTH = b"content-length: " + SIZE + b"\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
IN_CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
#: What a smuggler wants to have read as a request of its own.
SECOND = b"POST %b HTTP/1.1\r\nhost: g\r\nx-smuggled: yes\r\n%b\r\n%b" % (CHAT, LENGTH, BODY)

#: The start of HTTP/2 without TLS: its preface, and empty settings.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"


def post(*lines: bytes, body: bytes = BODY, target: bytes = CHAT, version: bytes = b"1.1") -> bytes:
    return b"POST %b HTTP/%b\r\nhost: g\r\n%b\r\n%b" % (target, version, b"".join(lines), body)


FORMS = {
    "a length and a coding": post(LENGTH, CHUNKED, body=IN_CHUNKS),
    "a coding and a length": post(CHUNKED, LENGTH, body=IN_CHUNKS),
    "a coding and a length of nothing": post(CHUNKED, b"content-length: 0\r\n", body=IN_CHUNKS),
    "two lengths": post(LENGTH, b"content-length: 5\r\n"),
    "the same length twice": post(LENGTH, LENGTH),
    "the same length twice in a line": post(b"content-length: " + SIZE + b", " + SIZE + b"\r\n"),
    "two lengths in a line": post(b"content-length: " + SIZE + b",5\r\n"),
    "a length with a sign": post(b"content-length: +" + SIZE + b"\r\n"),
    "a negative length": post(b"content-length: -1\r\n"),
    "a hexadecimal length": post(b"content-length: 0x10\r\n"),
    "a length with an underscore": post(b"content-length: 1_0\r\n"),
    "a length that is empty": post(b"content-length:\r\n"),
    "a length with a fraction": post(b"content-length: 5.0\r\n"),
    "a length in other digits": post(b"content-length: \xd9\xa5\r\n"),
    "a length of twenty digits": post(b"content-length: 18446744073709551617\r\n"),
    "a blank before the colon": post(b"content-length : " + SIZE + b"\r\n"),
    "a blank before the name": post(b" " + LENGTH),
    "a tab before the colon of a coding": post(LENGTH, b"transfer-encoding\t: chunked\r\n"),
    "a folded value": post(LENGTH, b"x-a: 1\r\n 2\r\n"),
    "a folded coding": post(b"transfer-encoding:\r\n chunked\r\n", body=IN_CHUNKS),
    "a folded value by a tab": post(LENGTH, b"x-a: 1\r\n\tcontent-length: 5\r\n"),
    "chunked twice": post(CHUNKED, CHUNKED, body=IN_CHUNKS),
    "chunked twice in a line": post(b"transfer-encoding: chunked, chunked\r\n", body=IN_CHUNKS),
    "identity before chunked": post(b"transfer-encoding: identity, chunked\r\n", body=IN_CHUNKS),
    "identity": post(LENGTH, b"transfer-encoding: identity\r\n"),
    "gzip before chunked": post(b"transfer-encoding: gzip, chunked\r\n", body=IN_CHUNKS),
    "another coding": post(b"transfer-encoding: xchunked\r\n", body=IN_CHUNKS),
    "a quoted coding": post(b'transfer-encoding: "chunked"\r\n', body=IN_CHUNKS),
    "a coding with a vertical tab": post(b"transfer-encoding: \x0bchunked\r\n", body=IN_CHUNKS),
    "a coding with HTTP/1.0": post(CHUNKED, body=IN_CHUNKS, version=b"1.0"),
    "a coding with HTTP/1.2": post(CHUNKED, body=IN_CHUNKS, version=b"1.2"),
    "lines that end with LF": post(LENGTH).replace(b"\r\n", b"\n"),
    "one line that ends with LF": post(b"x-a: 1\n", LENGTH),
    "a head that ends with LF": post(LENGTH, body=b"").removesuffix(b"\r\n") + b"\n" + BODY,
    "a request line that ends with LF": post(LENGTH).replace(b"HTTP/1.1\r\n", b"HTTP/1.1\n"),
    "a CR in a value": post(LENGTH, b"x-a: 1\r2\r\n"),
    "two CR before LF": post(LENGTH, b"x-a: 1\r\r\n"),
    "a NUL in a value": post(LENGTH, b"x-a: 1\x002\r\n"),
    "a control character in a value": post(LENGTH, b"x-a: 1\x012\r\n"),
    "an escape in a value": post(LENGTH, b"user-agent: \x1b[2J\r\n"),
    "a DEL in a value": post(LENGTH, b"x-a: 1\x7f2\r\n"),
    "a NUL in a name": post(LENGTH, b"x\x00a: 1\r\n"),
    "no colon": post(LENGTH, b"x-a\r\n"),
    "no name": post(LENGTH, b": 1\r\n"),
    "no host": b"POST %b HTTP/1.1\r\n%b\r\n%b" % (CHAT, LENGTH, BODY),
    "two hosts": post(LENGTH, b"host: other\r\n"),
    "a URL of another host than the header's": post(LENGTH, target=b"http://other" + CHAT),
    "a URL of another host": post(LENGTH, target=b"http://169.254.169.254/latest/meta-data"),
    "a target without its slash": post(LENGTH, target=b"v1/chat/completions"),
    "a star as the target": post(LENGTH, target=b"*"),
    "a blank in the target": post(LENGTH, target=b"/v1/chat completions"),
    "CONNECT": b"CONNECT 10.0.0.1:80 HTTP/1.1\r\nhost: 10.0.0.1:80\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "a version with a second digit": post(LENGTH, version=b"1.11"),
    "a version of another kind": post(LENGTH, version=b"2.0"),
    "a chunk size with a blank behind it": post(CHUNKED, body=IN_CHUNKS.replace(b"\r\n", b" \r\n", 1)),
    "a chunk size beyond 64 bits": post(CHUNKED, body=b"1%016x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    "a CR in the extension of a chunk": post(CHUNKED, body=IN_CHUNKS.replace(b"\r\n", b";a\rb\r\n", 1)),
    "a NUL in the extension of a chunk": post(CHUNKED, body=IN_CHUNKS.replace(b"\r\n", b";a\0b\r\n", 1)),
    "a CR in the extension of the last chunk": post(CHUNKED, body=IN_CHUNKS.replace(b"0\r\n\r", b"0;a\rb\r\n\r")),
    "a blank behind the size of the last chunk": post(CHUNKED, body=IN_CHUNKS.replace(b"0\r\n\r", b"0 \r\n\r")),
    "a tab behind the size of the last chunk": post(CHUNKED, body=IN_CHUNKS.replace(b"0\r\n\r", b"0\t\r\n\r")),
    "a last chunk of twenty zeros": post(CHUNKED, body=IN_CHUNKS.replace(b"0\r\n\r", b"0" * 20 + b"\r\n\r")),
    "a last chunk that ends with LF": post(CHUNKED, body=IN_CHUNKS.replace(b"0\r\n\r", b"0\n\r")),
    "a chunk size with a sign": post(CHUNKED, body=b"+5\r\nhello\r\n0\r\n\r\n"),
    "a chunk size with 0x": post(CHUNKED, body=b"0x5\r\nhello\r\n0\r\n\r\n"),
    "a chunk size that ends with LF": post(CHUNKED, body=b"5\nhello\r\n0\r\n\r\n"),
    "a negative chunk size": post(CHUNKED, body=b"-1\r\nhello\r\n0\r\n\r\n"),
    "a chunk size of many digits": post(CHUNKED, body=b"0" * 40 + b"5\r\nhello\r\n0\r\n\r\n"),
    "a chunk that is longer than it says": post(CHUNKED, body=b"1\r\nhello\r\n0\r\n\r\n"),
    "an extension of a chunk with LF": post(CHUNKED, body=b"5;a\nb\r\nhello\r\n0\r\n\r\n"),
    "trailers that end with LF": post(CHUNKED, body=IN_CHUNKS[:-2] + b"\n"),
    "a trailer that ends with LF": post(CHUNKED, body=IN_CHUNKS[:-2] + b"x-a: 1\n\r\n"),
    "a folded trailer": post(CHUNKED, body=IN_CHUNKS[:-2] + b"x-a: 1\r\n 2\r\n\r\n"),
}


async def test_ambiguous_request_is_refused_and_its_connection_ends(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    for form, request in FORMS.items():
        async with connected(fleet.addresses.data) as client:
            client.writer.write(request + SECOND)
            head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 ")), form
        assert b"\r\nconnection: close" in head.lower(), form
        assert json.loads(body)["error"]["type"], form  # and nothing behind it: the rest was not read as a request
    assert fleet.replicas[0].seen == []
    await fleet.idle()


async def test_what_plain_accepts_reaches_a_replica_as_one_clear_request(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    for form, request in FORMS.items() if start.plain else ():
        async with connected(fleet.addresses.data) as client:
            client.writer.write(request)
            with suppress(TimeoutError, ConnectionError):  # h11 waits for more of some forms
                await asyncio.wait_for(client.reader.read(1), 0.2)
        await fleet.idle()
        for seen in fleet.replicas[0].seen:
            assert seen.header("content-length") == [str(len(seen.body))], form
            assert seen.header("transfer-encoding") == [], form
            assert seen.body in (BODY, b"hello"), form
        fleet.replicas[0].seen.clear()


async def test_ambiguous_request_is_refused_however_it_is_cut(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    for form, request in FORMS.items():
        async with connected(fleet.addresses.data) as client:
            answered = b""
            with suppress(ConnectionError):  # closed before the end was written
                for at in range(len(request)):
                    client.writer.write(request[at : at + 1])
                    await asyncio.sleep(0)
                client.writer.write(SECOND)
                answered = await client.rest()
        assert b" 2" not in answered.split(b"\r\n")[0], form
        assert answered.count(b"HTTP/1.1 ") <= 1, form
    assert fleet.replicas[0].seen == []
    await fleet.idle()


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_what_follows_the_last_request_is_no_request_and_spoils_no_answer(start: Start, version: bytes) -> None:
    fleet = await start.fleet([stream(delta("good"), DONE)])
    for behind in (b"\r\n", SECOND, b"\0" * 200_000):
        async with connected(fleet.addresses.data) as client:
            client.writer.write(post(LENGTH, b"connection: close\r\n", version=version) + behind)
            said = await client.rest()
        assert said.startswith(b"HTTP/1.1 200 ")
        assert said.count(b"HTTP/1.1 ") == 1
        assert delta("good") in said
    assert len(fleet.replicas[0].seen) == 3
    await fleet.idle()


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n"], ids=["first", "second"])
async def test_http_2_preface_is_a_505_that_names_http_1_1_and_the_connection_ends(start: Start, before: bytes) -> None:
    fleet = await start.fleet([answer(200)])
    async with connected(fleet.addresses.data) as client:
        client.writer.write(before + PREFACE)
        said = await client.rest()
    assert said.count(b"HTTP/1.1 ") == 1 + bool(before)
    head, _, body = said[said.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 505 ")
    assert b"\r\nconnection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error["code"] == "http_version"
    assert "expected HTTP/1.1" in error["message"]
    assert fleet.replicas[0].seen == []
    await fleet.idle()


async def test_requests_far_ahead_of_their_answers_wait_unread(start: Start) -> None:
    fleet = await start.fleet([hang(rest=[delta("good"), DONE]), stream(delta("good"), DONE)])
    body = chat(text="x" * 20_000)
    request = post(b"content-length: %d\r\n" % len(body), body=body)
    async with connected(fleet.addresses.data) as client:
        client.writer.write(request * 50)
        await fleet.replicas[0].arrived.wait()
        fleet.replicas[0].release.set()
        for _ in range(50):
            assert b"good" in await client.reader.readuntil(b"0\r\n\r\n")
    assert [seen.body for seen in fleet.replicas[0].seen] == [body] * 50
    await fleet.idle()


async def test_what_a_refused_client_still_sends_is_not_read(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    async with connected(fleet.addresses.data) as client:
        client.writer.write(FORMS["a length and a coding"])
        assert b" 400 " in await client.head()
        client.writer.write(SECOND)
        await client.rest()
    assert fleet.replicas[0].seen == []
    await fleet.idle()


async def test_trailers_are_bounded_as_heads_are(start: Start) -> None:
    fleet = await start.fleet([answer(200)], max_header_bytes=8192)
    for trailers in (b"x-a: 1\r\n" * 129, b"x-a: " + b"1" * 8192 + b"\r\n"):
        async with connected(fleet.addresses.data) as client:
            client.writer.write(post(CHUNKED, body=IN_CHUNKS[:-2] + trailers + b"\r\n"))
            assert b" 431 " in await client.head()
    assert fleet.replicas[0].seen == []


async def test_chunked_request_is_taken_and_goes_on_with_its_length(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    trailer = IN_CHUNKS[:-2] + b"x-injected: 1\r\n\r\n"
    async with connected(fleet.addresses.data) as client:
        for body in (IN_CHUNKS, b"%X;ext=1\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY), trailer):
            client.writer.write(post(b"Transfer-Encoding: Chunked\r\n", body=body))
            assert b" 200 " in await client.head()
            await client.reader.readexactly(2)
    for seen in fleet.replicas[0].seen:
        assert seen.body == BODY
        assert seen.header("content-length") == [str(len(BODY))]
        assert not seen.header("transfer-encoding")
        assert not seen.header("x-injected")
    assert len(fleet.replicas[0].seen) == 3


def test_chunked_request_is_taken_however_it_is_cut() -> None:
    head = post(CHUNKED, body=b"")
    body = b"3;a=b\r\n%b\r\n%x\r\n%b\r\n0\r\nx-a: 1\r\n\r\n" % (BODY[:3], len(BODY) - 3, BODY[3:])
    for first, second in combinations(range(len(body) + 1), 2):
        reader = RequestReader(HeadLimits(4096, 10.0))
        reader.receive(head)
        assert reader.next_head() is not None
        taken = b""
        for piece in (body[:first], body[first:second], body[second:]):
            reader.receive(piece)
            taken += reader.read_body()
        assert (taken, reader.complete, reader.buffered_bytes) == (BODY, True, 0)


@pytest.mark.parametrize(
    "lines",
    [
        b"upgrade: h2c\r\nconnection: upgrade, http2-settings\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n",
        b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        b"sec-websocket-version: 13\r\n",
        b"upgrade: anything/7\r\nconnection: upgrade\r\n",
    ],
    ids=["h2c", "websocket", "anything"],
)
async def test_wish_for_another_protocol_is_not_answered_and_not_passed_on(start: Start, lines: bytes) -> None:
    fleet = await start.fleet([answer(200)])
    async with connected(fleet.addresses.data) as client:
        client.writer.write(b"GET /health HTTP/1.1\r\nhost: g\r\n%b\r\n" % lines)
        head = await client.head()
        assert b" 200 " in head
        assert b"upgrade" not in head.lower()
        await client.reader.readuntil(b"}")
        client.writer.write(post(LENGTH, lines))
        assert b" 200 " in await client.head()
    (seen,) = fleet.replicas[0].seen
    assert not {"upgrade", "connection", "http2-settings"} & {name.decode().lower() for name, _ in seen.headers}


async def test_requests_in_a_row_on_one_connection_are_each_read_once(start: Start) -> None:
    fleet = await start.fleet([stream(delta("good"), DONE)])
    async with connected(fleet.addresses.data) as client:
        client.writer.write(SECOND * 5)
        for _ in range(5):
            assert b"good" in await client.reader.readuntil(b"0\r\n\r\n")
    assert [seen.body for seen in fleet.replicas[0].seen] == [BODY] * 5
    await fleet.idle()
