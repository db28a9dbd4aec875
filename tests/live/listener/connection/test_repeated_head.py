"""A head that repeats the last one of its connection is read as by a reader without a past."""

from __future__ import annotations

from random import Random

import pytest

from gorgo.live.listener.connection.head import Head, Refused
from gorgo.live.listener.connection.reader import RequestReader
from gorgo.live.listener.heads import HeadLimits

LIMITS = HeadLimits(400, 10.0)
TEXT = (
    b"POST /v1/completions?a=%41 HTTP/1.1\r\nhost: g\r\nContent-Length: 12\r\nauthorization: Bearer key\r\n"
    b"accept: */*\r\nx-a: content-length: 9\r\n\r\n"
)


def reading(text: bytes, *before: bytes) -> tuple[object, ...]:
    """What a reader makes of a head, after heads with their bodies; the status of a refusal."""
    reader = RequestReader(LIMITS)
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
    reader = RequestReader(LIMITS)
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
    padded = TEXT.replace(b"*/*", b"*/*" + b"x" * (LIMITS.size_bytes - len(TEXT)))
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
