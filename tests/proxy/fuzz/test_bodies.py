"""Bodies and headers of any shape, made small by hypothesis: read as they came, or refused as the client's fault."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gorgo.config.values import BLOCK_BYTES
from gorgo.core.prompt.fingerprint import BytesPerToken, Fingerprinter
from gorgo.live.http.errors import HttpError
from gorgo.live.parsing.json_body import check_media_type, read_fields
from gorgo.live.request.parse import INFERENCE_ROUTES, ParsedRequest, parse_request
from gorgo.live.request_options import ClientPolicies
from gorgo.live.served_models import ServedModels
from gorgo.live.state import Routing
from gorgo.live.stored_responses import StoredResponses
from tests.proxy.conftest import config_for
from tests.proxy.fuzz.mutate import EXAMPLES, KEYS

ROUTING = cast(
    Routing,
    SimpleNamespace(
        client_policies=ClientPolicies.for_client(config_for([])),
        router=SimpleNamespace(token_ratios=BytesPerToken()),
        fingerprinter=Fingerprinter(key=7, block_bytes=BLOCK_BYTES),
        models=ServedModels(config_for([])),
    ),
)
bounded = settings(max_examples=EXAMPLES, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])

words = st.sampled_from(["user", "text", "m", ""]) | st.text(max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | words
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)
bodies = st.dictionaries(st.sampled_from((*KEYS, "n")), values, max_size=5)
#: What h11 lets through: visible bytes and blanks between them.
header_values = st.binary(max_size=40).map(lambda raw: bytes(byte for byte in raw if byte > 31 and byte != 127).strip())
names = st.sampled_from(
    [b"x-gorgo-priority", b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms", b"x-session-id", b"content-type", b"x-request-id"]
)


def ask(route: str, body: bytes, headers: list[tuple[bytes, bytes]]) -> ParsedRequest | None:
    """What is read of it; nothing if it is refused, which it may be as the client's fault alone."""
    try:
        check_media_type(headers)
        fields = read_fields(route, body, ROUTING.fingerprinter)
        return parse_request(ROUTING, StoredResponses(), route, headers, body, fields, request_id="r", received_s=0.0)
    except HttpError as refusal:
        refused = refusal
    assert refused.status in (400, 404, 415)
    assert refused.message.isprintable()
    return None


@bounded
@given(st.sampled_from(INFERENCE_ROUTES), bodies)
def test_body_of_any_shape_is_read_as_it_came_or_refused(route: str, body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    found = ask(route, raw, [])
    if found is not None:
        assert found.body == raw
        assert found.route.prompt_tokens >= 0
        assert not found.adds_usage or json.loads(found.body_for(None, with_usage=True))["stream_options"] == {
            "include_usage": True
        }


@bounded
@given(st.sampled_from(INFERENCE_ROUTES), st.binary(max_size=200) | st.text().map(lambda text: text.encode("utf-16")))
def test_bytes_that_are_no_body_are_refused(route: str, raw: bytes) -> None:
    assert ask(route, raw, []) is None


@bounded
@given(st.lists(st.tuples(names, header_values), max_size=4))
def test_headers_of_any_value_are_followed_or_refused(headers: list[tuple[bytes, bytes]]) -> None:
    found = ask("/v1/completions", b'{"prompt": "a"}', headers)
    if found is not None:
        assert -100 <= found.route.priority <= 100
        assert found.route.slo_ttft_s is None or found.route.slo_ttft_s > 0
