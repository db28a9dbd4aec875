"""Which headers pass in each direction, and TLS files that cannot be used."""

from __future__ import annotations

import re
import ssl
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import ClientRuleConfig, TlsConfig
from gorgo.config.values import HOP_BY_HOP, checked_header
from gorgo.errors import ConfigError
from gorgo.live.http.errors import HttpError
from gorgo.live.http.headers import (
    FORWARDED,
    IDENTITY,
    RETURNED,
    SESSION_HEADERS,
    EncodedHeaders,
    Header,
    RequestHeaders,
    client_headers,
    downstream_headers,
    encode_lines,
    find,
    headers_for_replica,
    is_encoded,
    is_event_stream,
    new_id,
    read_response,
    request_id,
    request_id_of,
    session_id,
    session_of,
    upstream_headers,
)
from gorgo.live.http.headers import KEYS as KEYS_HEADERS
from gorgo.live.http.tls import served_tls, shared_tls, upstream_tls
from gorgo.live.parsing.json_body import check_media_type
from gorgo.live.request_options import ClientKeys, ClientPolicies

# --- Which headers pass in each direction, pair by pair.


OWN_ID = (b"x-request-id", b"our-id")


def up(*headers: Header, api_key: str | None = None) -> list[Header]:
    """Return what a replica gets of the client, without what each one gets."""
    sent = upstream_headers(headers, request_id="our-id", api_key=api_key)
    assert sent.count(IDENTITY) == 1
    return [pair for pair in sent if pair != IDENTITY]


def down(*headers: Header, with_length: bool = True) -> list[Header]:
    traits, length = read_response(headers)
    sent = client_headers(traits, EncodedHeaders((), b""), length if with_length else None)
    assert sent.lines == encode_lines(sent)
    assert sent.length == next((int(value) for name, value in sent if name == b"content-length"), None)
    return list(sent)


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


def test_replica_is_asked_for_no_compression_whatever_the_client_or_an_operator_says() -> None:
    asked = [(b"accept-encoding", b"gzip, deflate"), (b"accept-encoding", b"*;q=0")]
    passed = {b"accept-encoding"}
    assert upstream_headers(asked, request_id=None, api_key=None, passed=passed) == [IDENTITY]
    sent = headers_for_replica(RequestHeaders(asked), request_id="r", api_key=None, passed=passed)
    assert sent == [IDENTITY, (b"x-request-id", b"r")]


def test_header_that_an_operator_allows_passes_in_both_directions() -> None:
    headers = ((b"x-tenant-id", b"1"), (b"x-other", b"2"))
    allowed = frozenset({b"x-tenant-id"})
    sent = upstream_headers(headers, request_id="our-id", api_key=None, passed=allowed)
    assert sent == [headers[0], IDENTITY, OWN_ID]
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


@pytest.mark.parametrize("name", sorted(KEYS_HEADERS))
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
    assert down(*headers) == [(b"content-type", b"text/plain"), (b"content-length", b"5")]
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


KEY = (b"authorization", b"Bearer secret")
HEADERS: list[Header] = [
    *((b"host", b"g"), (b"content-length", b"3"), KEY, (b"accept", b"*/*"), (b"x-session-id", b"s")),
    *((b"x-slo-ttft-ms", b"500"), (b"content-type", b"application/json")),
]
KEYS = ClientKeys([("alice", sha256(b"secret").digest())])


def repeated(headers: RequestHeaders) -> RequestHeaders:
    """The headers of the next request, of which only the length differs."""
    others = [(name, b"44" if name == b"content-length" else value) for name, value in headers]
    return RequestHeaders(others, headers.findings)


def test_a_client_is_admitted_again_without_its_key_and_with_its_length() -> None:
    first = RequestHeaders(HEADERS)
    name, rest = KEYS.admit(first)
    again, others = KEYS.admit(repeated(first))
    assert name == again == "alice"
    assert KEY not in rest
    assert KEY not in others
    assert (b"content-length", b"44") in others
    assert len(others) == len(rest) == len(HEADERS) - 1


def test_after_a_reload_a_removed_key_is_refused() -> None:
    first = RequestHeaders(HEADERS)
    KEYS.admit(first)
    with pytest.raises(HttpError):
        ClientKeys([("bob", sha256(b"other").digest())]).admit(repeated(first))


def test_keys_that_a_reload_brings_stay_at_the_proxy() -> None:
    first = RequestHeaders(HEADERS)
    assert KEY in headers_for_replica(first, request_id="a", api_key=None)
    _, rest = KEYS.admit(repeated(first))
    sent = headers_for_replica(rest, request_id="b", api_key=None)
    assert KEY not in sent
    assert isinstance(sent, EncodedHeaders)
    assert b"secret" not in sent.lines


@pytest.mark.parametrize("api_key", [None, "own"])
def test_a_replica_gets_the_same_headers_as_without_a_memory(api_key: str | None) -> None:
    first = RequestHeaders(HEADERS)
    for headers, name in ((first, "one"), (repeated(first), "two")):
        sent = headers_for_replica(headers, request_id=name, api_key=api_key)
        assert sorted(sent) == sorted(upstream_headers(HEADERS, request_id=name, api_key=api_key))
        assert isinstance(sent, EncodedHeaders)
        assert sent.lines == b"".join(b"%b: %b\r\n" % pair for pair in sent)


def test_each_replica_gets_its_own_key_and_the_names_that_pass_now() -> None:
    headers = RequestHeaders([*HEADERS, (b"x-more", b"1")])
    assert (b"authorization", b"Bearer a") in headers_for_replica(headers, request_id="r", api_key="a")
    assert (b"authorization", b"Bearer b") in headers_for_replica(headers, request_id="r", api_key="b")
    assert KEY in headers_for_replica(headers, request_id="r", api_key=None)
    assert (b"x-more", b"1") in headers_for_replica(headers, request_id="r", api_key=None, passed={b"x-more"})
    assert (b"x-more", b"1") not in headers_for_replica(headers, request_id="r", api_key=None)


def test_ids_are_new_unless_the_client_sends_one() -> None:
    first = RequestHeaders(HEADERS)
    assert request_id_of(first) != request_id_of(repeated(first))
    own = RequestHeaders([*HEADERS, (b"x-request-id", b"mine")])
    assert request_id_of(own) == request_id_of(repeated(own)) == "mine"


def test_session_media_type_and_options_are_those_of_the_headers() -> None:
    first = RequestHeaders(HEADERS)
    policies = ClientPolicies(clients={"alice": ClientRuleConfig(name="alice", priority=2)})
    for headers in (first, repeated(first)):
        assert session_of(headers) == "s"
        check_media_type(headers)
        assert policies.request_options(headers, client=None, model=None).slo_ttft_s == 0.5
        assert policies.request_options(headers, client="alice", model=None).priority == 2
    assert ClientPolicies().request_options(repeated(first), client="alice", model=None).priority == 0


def test_a_refusal_is_not_remembered_as_a_finding() -> None:
    headers = RequestHeaders([(b"content-type", b"text/html"), (b"x-slo-ttft-ms", b"soon")])
    for _ in range(2):
        with pytest.raises(HttpError):
            check_media_type(headers)
        with pytest.raises(HttpError):
            ClientPolicies().request_options(headers, client=None, model=None)


# --- TLS files that cannot be used: which replica or listener they are of, and what was expected.


PAIR = "a certificate chain and a private key without a passphrase, both in PEM form"


def replica(**files: Any) -> ReplicaConfig:
    return ReplicaConfig(name="a", region="here", url="https://a:443", **files)


@pytest.mark.parametrize(
    ("files", "subject", "expected"),
    [
        ({"ca_file": "{0}"}, "ca_file '{0}'", "certificates of authorities in PEM form"),
        ({"client_cert": "{0}", "client_key": "{0}"}, "'{0}' with '{0}'", PAIR),
    ],
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_file_of_a_replica_that_cannot_be_used_is_named_with_the_replica(
    files: dict[str, str], subject: str, expected: str, exists: bool, tmp_path: Path
) -> None:
    path = tmp_path / "file.pem"
    if exists:
        path.write_text("no certificate")
    shared = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with pytest.raises(ConfigError) as raised:
        upstream_tls(replica(**{key: value.format(path) for key, value in files.items()}), shared_tls(shared))
    reason = ".+" if exists else "No such file or directory"
    words = re.escape(f"replica 'a': {subject.format(path)}: ") + reason + re.escape(f"; expected {expected}")
    assert re.fullmatch(words, str(raised.value))


def test_a_replica_without_files_of_its_own_has_the_shared_context() -> None:
    shared = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    assert upstream_tls(replica(), shared_tls(shared)) is shared


def test_the_authorities_are_read_once_and_for_a_replica_that_encrypts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[ssl.SSLContext] = []

    def create() -> ssl.SSLContext:
        made.append(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        return made[-1]

    monkeypatch.setattr(ssl, "create_default_context", create)
    shared = shared_tls()
    plain = upstream_tls(replace(replica(), url="http://a:80"), shared)
    assert made == []
    assert plain.verify_mode is ssl.CERT_REQUIRED, "and it trusts nobody"
    assert plain.get_ca_certs() == []
    assert [upstream_tls(replica(), shared), upstream_tls(replica(), shared)] == [made[0], made[0]]
    assert len(made) == 1


def test_a_certificate_of_the_listener_that_cannot_be_used_is_named() -> None:
    assert served_tls(TlsConfig()) is None
    with pytest.raises(ConfigError, match=f"^proxy.tls: '/no.crt' with '/no.key': No such file.*; expected {PAIR}$"):
        served_tls(TlsConfig(cert="/no.crt", key="/no.key"))


@pytest.mark.parametrize(
    ("kind", "events", "is_json"),
    [
        (b"text/event-stream; charset=utf-8", True, False),
        (b"Application/JSON; charset=utf-8", False, True),
        (b"text/html", False, False),
    ],
)
def test_response_s_headers_are_read_once_for_all_that_differ_in_their_length_alone(
    kind: bytes, events: bool, is_json: bool
) -> None:
    first, of_first = read_response([(b"Content-Type", kind), (b"Content-Length", b"17")])
    again, of_other = read_response([(b"content-length", b"23"), (b"Content-Type", kind)])
    assert again is first
    assert (first.is_events, first.is_json, first.is_encoded, of_first, of_other) == (events, is_json, False, 17, 23)


def test_response_without_a_readable_length_declares_none() -> None:
    traits, length = read_response([(b"content-length", b"1a"), (b"content-encoding", b"gzip"), (b"x-own", b"1")])
    assert (length, traits.is_encoded, list(traits.returned)) == (None, True, [(b"content-encoding", b"gzip")])
    assert (b"x-own", b"1") in read_response([(b"x-own", b"1")], passed=frozenset({b"x-own"}))[0].returned
