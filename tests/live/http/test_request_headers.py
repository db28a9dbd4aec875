"""What was found in headers serves the next request with the same ones, and no other settings."""

from __future__ import annotations

from hashlib import sha256

import pytest

from gorgo.config.model import ClientRuleConfig
from gorgo.live.http.client_auth import ClientKeys
from gorgo.live.http.errors import HttpError
from gorgo.live.http.headers import Header, upstream_headers
from gorgo.live.http.request_headers import (
    RequestHeaders,
    UpstreamHeaders,
    headers_for_replica,
    request_id_of,
    session_of,
)
from gorgo.live.parsing.json_body import check_media_type
from gorgo.live.request_options import ClientPolicies

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
    assert isinstance(sent, UpstreamHeaders)
    assert b"secret" not in sent.lines


@pytest.mark.parametrize("api_key", [None, "own"])
def test_a_replica_gets_the_same_headers_as_without_a_memory(api_key: str | None) -> None:
    first = RequestHeaders(HEADERS)
    for headers, request_id in ((first, "one"), (repeated(first), "two")):
        sent = headers_for_replica(headers, request_id=request_id, api_key=api_key)
        assert sorted(sent) == sorted(upstream_headers(HEADERS, request_id=request_id, api_key=api_key))
        assert isinstance(sent, UpstreamHeaders)
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
