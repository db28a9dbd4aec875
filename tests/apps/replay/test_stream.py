from __future__ import annotations

import pytest

from gorgo.apps.replay.stream import StreamReader
from tests.apps.replay.fake_router import DONE, ROLE, event, token, usage


def read(*chunks: tuple[float, bytes]) -> StreamReader:
    reader = StreamReader()
    for now, chunk in chunks:
        reader.feed(chunk, now=now)
    return reader


def test_the_first_token_is_content_not_a_role_and_gaps_follow_it() -> None:
    end = usage(10, 4, 3) + DONE
    reader = read((1.0, ROLE), (2.0, token()), (2.5, token()), (2.75, token()), (9.0, end))
    assert reader.first_content_s == 2.0
    assert reader.gaps_s == [0.5, 0.25]
    assert reader.error() is None
    assert reader.usage is not None
    assert (reader.usage.prompt_tokens, reader.usage.cached_tokens, reader.usage.output_tokens) == (10, 4, 3)


@pytest.mark.parametrize("spaced", [False, True], ids=["compact", "spaced"])
def test_usage_and_the_end_are_no_token_gaps(spaced: bool) -> None:
    """Tokens at 2, 2.5 and 4 s make two gaps; usage at 7 s and the end at 9 s carry no token."""
    last = usage(10, 4, 3)
    if spaced:
        last = last.replace(b'":', b'": ')
    no_usage_yet = event({"choices": [{"index": 0, "delta": {"content": "abcd"}}], "usage": None})
    reader = read((2.0, token()), (2.5, no_usage_yet), (4.0, token()), (7.0, last), (9.0, DONE))
    assert reader.gaps_s == [0.5, 1.5]
    assert reader.usage is not None
    assert reader.usage.output_tokens == 3


def test_an_event_split_over_two_chunks_counts_when_it_is_whole() -> None:
    whole = token()
    assert read((1.0, whole[:9]), (2.0, whole[9:])).first_content_s == 2.0


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (ROLE + DONE, "no content"),
        (token(), "truncated"),
        (token() + event({"error": {"message": "x", "code": 502}}) + DONE, "stream error"),
        (token() + b'event: error\ndata: {"message":"x"}\n\n', "stream error"),
        (event({"error": {"message": "x", "code": 503}}), "stream error 503"),
        (b"", "no content"),
    ],
)
def test_a_stream_that_is_no_whole_answer_says_why(stream: bytes, said: str) -> None:
    error = read((1.0, stream)).error()
    assert error is not None
    assert error.startswith(said)


@pytest.mark.parametrize(("behind", "whole"), [(4088, True), (4089, False)])
def test_the_end_is_looked_for_in_the_last_bytes(behind: int, whole: bool) -> None:
    """`[DONE]` and two line ends are 8 of the last 4,096 bytes."""
    error = read((1.0, token() + DONE + b":" * behind)).error()
    assert (error is None) == whole


def test_text_that_looks_like_an_error_event_is_text() -> None:
    assert read((1.0, token('\ndata: {"error": 1}\nevent: error') + DONE)).error() is None
