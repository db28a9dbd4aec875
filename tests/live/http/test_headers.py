"""Which headers pass in each direction, pair by pair."""

from __future__ import annotations

import pytest

from gorgo.config.header_names import HOP_BY_HOP, checked_header
from gorgo.live.http.headers import (
    FORWARDED,
    KEYS,
    RETURNED,
    SESSION_HEADERS,
    Header,
    downstream_headers,
    find,
    is_encoded,
    is_event_stream,
    new_id,
    request_id,
    session_id,
    upstream_headers,
)

OWN_ID = (b"x-request-id", b"our-id")


def up(*headers: Header, api_key: str | None = None) -> list[Header]:
    return upstream_headers(headers, request_id="our-id", api_key=api_key)


def down(*headers: Header, with_length: bool = True) -> list[Header]:
    return downstream_headers(headers, with_length=with_length)


def test_names_that_belong_to_one_hop_are_those_of_rfc_9110_and_older_ones() -> None:
    assert {
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "http2-settings"),
        *("proxy-authenticate", "proxy-authorization", "proxy-authentication-info", "proxy-connection"),
    } == HOP_BY_HOP


# -- up


@pytest.mark.parametrize(
    "name",
    [b"accept", b"x-session-id", b"traceparent", b"user-agent", b"authorization", b"openai-project", b"anthropic-beta"],
)
def test_header_of_the_client_passes_as_it_is(name: bytes) -> None:
    assert up((name, b"a"), (name, b"b")) == [(name, b"a"), (name, b"b"), OWN_ID]


@pytest.mark.parametrize(
    "name",
    [
        *sorted(name.encode() for name in HOP_BY_HOP - {"connection"}),
        *(b"x-gateway-destination-endpoint", b"x-smg-target-worker", b"x-dynamo-worker-instance-id"),
        *(b"x-dynamo-dp-rank", b"x-data-parallel-rank", b"x-override-anything", b"x-gorgo-replica"),
        *(b"x-prefiller-host-port", b"x-encoder-hosts-ports", b"x-data-parallel-host-port", b"x-worker-instance-id"),
        *(b"x-prefill-instance-id", b"x-dp-rank", b"x-envoy-original-dst-host", b"x-original-url", b"x-rewrite-url"),
        *(b"x-http-method-override", b"x-forwarded-for", b"x-forwarded-host", b"forwarded", b"via", b"x-real-ip"),
        *(b"x-kv-cache-source-host", b"x-decode-instance-id", b"priority", b"x-priority", b"cookie", b"origin"),
        *(b"x-", b"xy", b"openai", b"x_session_id", b"openai_project"),
        b"host",
        b"content-length",
        b"expect",
        b"x-request-id",
        b"x_gorgo_replica",
        b"content_length",
    ],
)
def test_header_of_one_hop_or_with_a_target_does_not(name: bytes) -> None:
    assert up((name, b"a")) == [OWN_ID]


def test_header_that_the_client_declares_its_own_does_not_pass() -> None:
    connection = (b"connection", b"Openai-First , keep-alive,openai-second")
    headers = ((b"openai-first", b"1"), (b"openai-second", b"2"), (b"openai-third", b"3"))
    assert up(connection, *headers) == [headers[2], OWN_ID]
    more = ((b"connection", b"openai-first"), (b"connection", b"openai-second"))
    assert up(*more, *headers[:2]) == [OWN_ID]


def test_header_that_an_operator_allows_passes_in_both_directions() -> None:
    headers = ((b"x-tenant-id", b"1"), (b"x-other", b"2"))
    allowed = frozenset({b"x-tenant-id"})
    assert upstream_headers(headers, request_id="our-id", api_key=None, passed=allowed) == [headers[0], OWN_ID]
    assert downstream_headers(headers, passed=allowed) == [headers[0]]


@pytest.mark.parametrize(
    "name", ["host", "x-request-id", "connection", "x-gorgo-replica", "X-Tenant", "x_tenant", "", "a:b"]
)
def test_header_of_one_hop_or_of_the_proxy_cannot_be_allowed(name: str) -> None:
    with pytest.raises(ValueError, match="header"):
        checked_header(name)


def test_no_header_of_one_hop_or_of_the_proxy_always_passes() -> None:
    for name in FORWARDED | RETURNED:
        if name not in (b"content-length",):
            checked_header(name.decode())


@pytest.mark.parametrize("name", sorted(KEYS))
def test_key_of_the_replica_stands_in_for_any_of_the_client(name: bytes) -> None:
    assert up((name, b"theirs"), (b"accept", b"a"), api_key="ours") == [
        (b"accept", b"a"),
        OWN_ID,
        (b"authorization", b"Bearer ours"),
    ]


# -- down


def test_header_of_the_replica_passes_in_lower_case_and_trimmed() -> None:
    assert down((b"Vary", b" accept\t"), (b"X-Model", b"a b\tc"), (b"X-Model", b"")) == [
        (b"vary", b"accept"),
        (b"x-model", b"a b\tc"),
        (b"x-model", b""),
    ]


@pytest.mark.parametrize(
    "name",
    [
        b"Connection",
        b"Transfer-Encoding",
        b"Keep-Alive",
        b"X-Request-Id",
        b"X-Gorgo-Replica",
        b"Location",
        b"Content-Location",
        b"Server",
        b"Alt-Svc",
        b"Refresh",
        b"Clear-Site-Data",
        b"Strict-Transport-Security",
        *(b"Set-Cookie", b"X-Accel-Redirect", b"X-Accel-Buffering", b"X-Sendfile", b"X-LIGHTTPD-send-file"),
        *(b"X-Reproxy-URL", b"X-LiteSpeed-Location", b"Service-Worker-Allowed", b"NEL", b"Report-To", b"Link"),
        *(b"WWW-Authenticate", b"Access-Control-Allow-Origin", b"Content-Security-Policy", b"X-Frame-Options"),
        *(b"Surrogate-Control", b"CDN-Cache-Control", b"SourceMap", b"Public-Key-Pins", b"Timing-Allow-Origin"),
        b"odd name",
        b"odd:name",
        b"",
    ],
)
def test_header_of_the_hop_of_the_replica_or_an_odd_one_does_not(name: bytes) -> None:
    assert down((name, b"a")) == []


@pytest.mark.parametrize("value", [b"a\x00b", b"a\rb", b"a\nb", b"a\r\n b", b"a\x0bb", b"\x1b[31m", b"a\x08", b"\x7f"])
def test_value_that_nobody_may_write_is_left_out(value: bytes) -> None:
    assert down((b"x-model", value)) == []


def test_length_goes_where_the_body_changes() -> None:
    headers = ((b"Content-Length", b"5"), (b"Content-Type", b"text/plain"))
    assert down(*headers) == [(b"content-length", b"5"), (b"content-type", b"text/plain")]
    assert down(*headers, with_length=False) == [(b"content-type", b"text/plain")]


def test_header_that_the_replica_declares_its_own_does_not_pass() -> None:
    headers = ((b"Connection", b"close, X-Model"), (b"x-model", b"1"), (b"etag", b"2"))
    assert down(*headers) == [(b"etag", b"2")]


# -- what is read in them


@pytest.mark.parametrize("given", ["a", "A-1._:@+=-", "x" * 128])
def test_harmless_id_is_kept(given: str) -> None:
    assert request_id([(b"x-request-id", given.encode())]) == given


@pytest.mark.parametrize("given", [b"", b"a b", b"a\n", b"x" * 129, "ü".encode(), b"a/b", b'"'])
def test_other_ids_are_replaced(given: bytes) -> None:
    made = request_id([(b"x-request-id", given)])
    assert len(made) == 32
    assert made != request_id([(b"x-request-id", given)])
    assert int(made, 16) >= 0


def test_first_harmless_id_counts_and_other_headers_are_none() -> None:
    assert request_id([(b"x-other", b"a"), (b"x-request-id", b"b c"), (b"x-request-id", b"d")]) == "d"


def test_ids_do_not_repeat() -> None:
    assert len({new_id() for _ in range(1000)}) == 1000


def test_most_specific_session_counts_wherever_it_stands() -> None:
    for rank in range(len(SESSION_HEADERS)):
        found = [(name, name) for name in SESSION_HEADERS[rank:]]
        assert session_id(found) == session_id(found[::-1]) == SESSION_HEADERS[rank].decode()


def test_session_is_cut_and_an_empty_one_is_none() -> None:
    assert session_id([(b"x-session-id", b"s" * 300)]) == "s" * 256
    assert session_id([(b"x-session-id", b""), (b"x-session-token", b"t")]) == "t"
    assert session_id([(b"cookie", b"c")]) is None
    assert session_id([(b"x-session-id", "ü".encode())]) == "\xc3\xbc"


def test_header_is_found_by_any_case_and_the_first_counts() -> None:
    headers = [(b"A", b"0"), (b"Content-Type", b"1"), (b"content-type", b"2")]
    assert find(headers, b"content-type") == b"1"
    assert find(headers, b"b") is None


@pytest.mark.parametrize(
    ("kind", "stream"),
    [
        (b"text/event-stream", True),
        (b" Text/Event-Stream; charset=utf-8", True),
        (b"application/json", False),
        (b"x text/event-stream", False),
        (b"", False),
    ],
)
def test_event_stream_is_one_by_its_type(kind: bytes, stream: bool) -> None:
    assert is_event_stream([(b"Content-Type", kind)]) is stream
    assert is_event_stream([]) is False


@pytest.mark.parametrize(
    ("codings", "encoded"),
    [
        ([], False),
        ([b""], False),
        ([b" Identity "], False),
        ([b"gzip"], True),
        ([b"identity", b"br"], True),
        ([b"identity, gzip"], True),
    ],
)
def test_body_is_encoded_if_any_of_its_codings_does_something(codings: list[bytes], encoded: bool) -> None:
    assert is_encoded([(b"Content-Encoding", coding) for coding in codings]) is encoded
    assert is_encoded([(b"content-encoding", coding) for coding in codings]) is encoded
    assert is_encoded([(b"x-encoding", b"gzip")]) is False
