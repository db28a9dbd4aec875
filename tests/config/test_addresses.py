"""What counts as a replica's URL and as an address to listen on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gorgo.config.addresses import checked_bind, checked_url, split_bind


@pytest.mark.parametrize(
    "text",
    [
        "http://a",
        "https://a.b-c:1/base/",
        "http://[::1]:30000",
        "http://127.0.0.1:65535",
        "HTTP://a",
        "http://a.",
        "http://1a.2",
    ],
)
def test_base_url_is_taken_as_it_stands(text: str) -> None:
    assert checked_url(text) == text


OTHER_URLS = (
    *("", "a:1", "//a", "http://", "http:///x", "http://:80", "ftp://a", "http://a:0", "http://a:65536", "http://a:x"),
    *(
        "http://u@a",
        "http://u:p@a",
        "http://a?q",
        "http://a#f",
        "http://a/?",
        "http://a b",
        "http://a\n",
        "http://[::1",
    ),
    *("http://\u00e9", "http://a\\b", "http://a%20b", "http://10.0.0.999", "http://10.0.0", "http://a..b", "http://.a"),
    *(f"http://{'a' * 64}.b", "http://[1:2]"),
)
OTHER_BINDS = ("", "8080", ":8080", "a:", "a:-1", "a:65536", "a:1 ", "::1:80", "a:\u0661", "a b:1")


def refused(check: Callable[[str], object], text: str, expected: str) -> bool:
    try:
        check(text)
    except ValueError as error:
        return expected in str(error)
    return False


def test_other_text_is_no_base_url() -> None:
    assert [text for text in OTHER_URLS if not refused(checked_url, text, "an http://")] == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [("127.0.0.1:8080", ("127.0.0.1", 8080)), ("localhost:0", ("localhost", 0)), ("[::]:65535", ("::", 65535))],
)
def test_bind_is_split_into_host_and_port(text: str, parts: tuple[str, int]) -> None:
    assert checked_bind(text) == text
    assert split_bind(text) == parts


def test_other_text_is_no_bind() -> None:
    assert [text for text in OTHER_BINDS if not refused(split_bind, text, "host:port")] == []
