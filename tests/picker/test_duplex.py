"""Calls of a gateway: both bodies pass through in pieces, whose keys and names count, and the event of usage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gorgo.config.model import ClientRuleConfig, ClientsConfig, Config, ModelConfig
from gorgo.picker.protocol.messages import DESTINATION, LB, SERVED, ProtocolError
from gorgo.picker.protocol.protos import ProcessingRequest
from tests.picker.virtual import (
    BODY,
    DUPLEX,
    EVENTS,
    JSON_BODY,
    Call,
    Picked,
    VirtualPicker,
    begin,
    body_message,
    chosen,
    config_of,
    error_of,
    headers_message,
    in_virtual_time,
    returned,
)
from tests.proxy.conftest import with_replica
from tests.proxy.fakes import DONE, ROLE, USAGE, delta

# --- Calls of a gateway: both bodies pass through the call in pieces, and none of their bytes is lost.


def test_the_choice_comes_with_the_headers_once_the_body_has_come_and_the_body_comes_back_after_it() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = begin(picker)
        assert call.feed(body_message("request_body", BODY[:10], end=False)) == []
        assert call.feed(body_message("request_body", BODY[10:], end=False)) == []
        head, *body = call.feed(body_message("request_body", b""))
        assert head.WhichOneof("response") == "request_headers"
        assert Picked(head).addresses == ["10.0.0.1:8000", "10.0.0.2:8000"]
        assert returned(body, "request_body") == BODY
        assert body[-1].request_body.response.body_mutation.streamed_response.end_of_stream
        call.close()

    in_virtual_time(test)


def test_a_large_body_comes_back_in_pieces_of_a_bounded_size() -> None:
    async def test(picker: VirtualPicker) -> None:
        text = "x" * 200_000
        body = b'{"model": "m", "prompt": "%s"}' % text.encode()
        call = begin(picker, path="/v1/completions")
        for start in range(0, len(body), 65_536):
            call.feed(body_message("request_body", body[start : start + 65_536], end=start + 65_536 >= len(body)))
        assert returned(call.output.sent[1:], "request_body") == body
        assert len(call.output.sent) == 5
        call.close()

    in_virtual_time(test)


def test_trailers_of_a_request_come_after_its_body_which_does_not_end_before_them() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = begin(picker)
        call.feed(body_message("request_body", BODY, end=False))
        trailers = ProcessingRequest()
        trailers.request_trailers.SetInParent()
        _, piece, last = call.feed(trailers)
        streamed = piece.request_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (BODY, False)
        assert last.WhichOneof("response") == "request_trailers"
        call.close()

    in_virtual_time(test)


def test_a_body_changed_for_the_replica_is_the_one_that_comes_back_with_its_length() -> None:
    config = with_replica(config_of("10.0.0.1:8000"), 0, request_usage=True)

    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker)
        head, *body = call.output.sent
        changed = returned(body, "request_body")
        assert b"include_usage" in changed
        assert Picked(head).headers["content-length"] == str(len(changed))
        call.close()

    in_virtual_time(test, config)


def test_a_streamed_answer_passes_byte_for_byte_and_its_first_token_and_usage_are_read() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker)
        (head,) = call.feed(headers_message("response_headers", *EVENTS))
        assert head.WhichOneof("response") == "response_headers"
        for chunk in (ROLE, b": ping\n\n"):
            assert returned(call.feed(body_message("response_body", chunk, end=False)), "response_body") == chunk
            assert picker.total("gorgo_ttft_seconds_count", replica="r0", region="here") == 0
        for chunk in (delta("a"), delta("b"), USAGE + DONE):
            assert returned(call.feed(body_message("response_body", chunk, end=False)), "response_body") == chunk
            assert picker.total("gorgo_ttft_seconds_count", replica="r0", region="here") == 1
        (end,) = call.feed(body_message("response_body", b""))
        assert end.response_body.response.body_mutation.streamed_response.end_of_stream
        assert picker.state.routing.router.in_flight == 1
        call.close()
        assert picker.attempts("completed") == 1
        assert picker.total("gorgo_output_tokens_total", replica="r0", region="here") == 2
        assert picker.total("gorgo_reported_cached_tokens_total", replica="r0", region="here") == 8

    in_virtual_time(test)


def test_an_answer_in_one_piece_has_no_first_token_and_its_usage_is_read() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker, JSON_BODY)
        call.feed(headers_message("response_headers", (":status", "200"), ("content-type", "application/json")))
        body = b'{"choices": [{}], "usage": {"prompt_tokens": 12, "completion_tokens": 3}}'
        for half in (body[:30], body[30:]):
            passed = call.feed(body_message("response_body", half, end=half != body[:30]))
            assert returned(passed, "response_body") == half
        call.close()
        assert picker.attempts("completed") == 1
        assert picker.total("gorgo_output_tokens_total", replica="r0", region="here") == 3
        assert picker.total("gorgo_ttft_seconds_count", replica="r0", region="here") == 0

    in_virtual_time(test)


@pytest.mark.parametrize(
    ("status", "result"),
    [
        ("429", "busy"),
        ("503", "busy"),
        ("500", "failed_before_content"),
        ("302", "failed_before_content"),
        ("404", "upstream_4xx"),
        ("200", "completed"),
    ],
)
def test_a_status_is_judged_as_by_the_proxy(status: str, result: str) -> None:
    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker, JSON_BODY)
        call.feed(headers_message("response_headers", (":status", status)))
        call.feed(body_message("response_body", b'{"usage": {"completion_tokens": 5}}'))
        call.close()
        assert picker.attempts(result) == 1

    in_virtual_time(test)


@pytest.mark.parametrize(
    ("chunks", "result"),
    [
        ([delta("a"), DONE], "completed"),
        ([delta("a")], "failed_after_content"),
        ([ROLE], "failed_before_content"),
        ([b'data: {"error": {"message": "m", "code": 400}}\n\n'], "upstream_4xx"),
        ([b'data: {"error": {"message": "m", "code": 500}}\n\n'], "failed_after_content"),
    ],
)
def test_a_stream_is_judged_by_its_end(chunks: list[bytes], result: str) -> None:
    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker)
        call.feed(headers_message("response_headers", *EVENTS))
        for chunk in chunks:
            call.feed(body_message("response_body", chunk, end=False))
        call.feed(body_message("response_body", b""))
        call.close()
        assert picker.attempts(result) == 1

    in_virtual_time(test)


def test_a_call_that_ends_before_its_answer_has_is_a_client_that_left() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker)
        call.feed(headers_message("response_headers", *EVENTS))
        call.feed(body_message("response_body", delta("a"), end=False))
        call.close()
        assert picker.attempts("client_disconnected") == 1
        assert picker.total("gorgo_client_aborts_total") == 1

    in_virtual_time(test)


def test_response_trailers_end_an_answer() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker)
        call.feed(headers_message("response_headers", *EVENTS))
        call.feed(body_message("response_body", delta("a") + DONE, end=False))
        trailers = ProcessingRequest()
        trailers.response_trailers.SetInParent()
        (last,) = call.feed(trailers)
        assert last.WhichOneof("response") == "response_trailers"
        call.close()
        assert picker.attempts("completed") == 1

    in_virtual_time(test)


def served_by(address: str) -> Any:
    """The head of a response with Envoy's own word on who has served."""
    head = headers_message("response_headers", *EVENTS)
    head.metadata_context.filter_metadata[LB].update({SERVED: address})
    return head


def test_a_retry_of_the_gateway_is_credited_to_who_served() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker)
        call.feed(served_by("10.0.0.2:8000"))
        call.feed(body_message("response_body", delta("a") + DONE))
        assert [target.active for target in picker.state.replicas.targets.values()] == [0, 1]
        call.close()
        assert (picker.attempts("failed_before_content"), picker.attempts("completed", "r1")) == (1, 1)

    in_virtual_time(test)


def test_a_header_of_an_engine_blames_no_other_replica() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker)
        status = (":status", "500"), ("content-type", "application/json")
        call.feed(headers_message("response_headers", *status, (SERVED, "10.0.0.2:8000")))
        call.feed(body_message("response_body", b"{}"))
        assert [target.active for target in picker.state.replicas.targets.values()] == [1, 0]
        call.close()
        assert (picker.attempts("failed_before_content"), picker.attempts("failed_before_content", "r1")) == (1, 0)

    in_virtual_time(test)


def test_an_answer_of_the_address_that_was_chosen_or_of_an_unknown_one_moves_nothing() -> None:
    async def test(picker: VirtualPicker) -> None:
        for served in ("10.0.0.1:8000", "10.9.9.9:8000", "nonsense"):
            picker.state.routing.router.replicas.drain("r1", now=picker.state.routing.clock())
            call = chosen(picker)
            call.feed(served_by(served))
            call.feed(body_message("response_body", delta("a") + DONE))
            call.close()
        assert picker.attempts("completed") == 3

    in_virtual_time(test)


def test_a_subset_of_the_gateway_is_kept_to() -> None:
    async def test(picker: VirtualPicker) -> None:
        for subset in (["10.0.0.2:8000"], "10.0.0.2:8000, 10.9.9.9:1"):
            for _ in range(2):
                head = headers_message("request_headers", mode=DUPLEX, response_mode=DUPLEX)
                hint = {f"{DESTINATION}-subset": subset}
                head.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(hint)
                call = picker.call()
                call.feed(head)
                call.feed(body_message("request_body", BODY))
                assert Picked(call.output.sent[0]).addresses == ["10.0.0.2:8000"]
                call.close()

    in_virtual_time(test)


def test_a_subset_of_unknown_addresses_is_503() -> None:
    async def test(picker: VirtualPicker) -> None:
        head = headers_message("request_headers", mode=DUPLEX, response_mode=DUPLEX)
        head.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({f"{DESTINATION}-subset": "10.9.9.9:1"})
        call = picker.call()
        call.feed(head)
        call.feed(body_message("request_body", BODY))
        assert error_of(call.last)[:2] == (503, "no_replica")
        call.close()

    in_virtual_time(test)


def test_any_path_of_a_gateway_goes_to_a_replica_with_its_body() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = begin(picker, path="/anything", method="PUT")
        head, *body = call.feed(body_message("request_body", b"no json"))
        assert Picked(head).addresses[0] == "10.0.0.1:8000"
        assert returned(body, "request_body") == b"no json"
        call.feed(headers_message("response_headers", (":status", "200"), end=True))
        call.close()
        call = picker.call()
        (head,) = call.feed(headers_message("request_headers", mode=DUPLEX, method="GET", path="/", end=True))
        assert Picked(head).addresses[0] == "10.0.0.2:8000"
        call.close()
        assert picker.total("gorgo_requests_total", route="/anything", policy="round-robin", status="2xx") == 0

    in_virtual_time(test)


def test_more_of_a_body_than_its_end_breaks_the_protocol() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker)
        with pytest.raises(ProtocolError, match="no more of the request's body"):
            call.feed(body_message("request_body", b"more"))
        assert picker.state.routing.router.in_flight == 0

    in_virtual_time(test)


def test_a_response_before_the_choice_breaks_the_protocol() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = begin(picker)
        with pytest.raises(ProtocolError, match="expected response_headers after the choice"):
            call.feed(headers_message("response_headers", *EVENTS))

    in_virtual_time(test)


# --- Keys, quotas and names of models where a gateway carries the bodies: what the replica gets, and who is refused.


KEYS = {"main": "key-of-the-main-client", "small": "key-of-the-small-client"}
MAIN = ("authorization", f"Bearer {KEYS['main']}")


def with_keys(folder: Path) -> Config:
    """One request in ten seconds for `small`, any number for `main`."""
    lines = [f"{name}:{hashlib.sha256(key.encode()).hexdigest()}" for name, key in KEYS.items()]
    file = folder / "keys"
    file.write_text("\n".join(lines))
    rules = (ClientRuleConfig(name="small", requests_per_minute=6.0),)
    return config_of("10.0.0.1:8000", clients=ClientsConfig(keys_file=str(file), rules=rules))


def test_a_key_is_the_picker_s_and_no_replica_gets_it(tmp_path: Path) -> None:
    async def test(picker: VirtualPicker) -> None:
        call = begin(picker, MAIN)
        head, *body = call.feed(body_message("request_body", BODY))
        assert "authorization" in Picked(head).common.header_mutation.remove_headers
        assert returned(body, "request_body") == BODY
        call.close()
        assert picker.total("gorgo_client_requests_total", client="main", model="other", status="499") == 1

    in_virtual_time(test, with_keys(tmp_path))


@pytest.mark.parametrize("headers", [(), (("authorization", "Bearer wrong"),)])
def test_a_request_without_a_known_key_is_401_before_its_body(
    tmp_path: Path, headers: tuple[tuple[str, str], ...]
) -> None:
    async def test(picker: VirtualPicker) -> None:
        call = picker.call()
        (refusal,) = call.feed(headers_message("request_headers", *headers, mode=DUPLEX, response_mode=DUPLEX))
        assert error_of(refusal)[0] == 401
        assert call.feed(body_message("request_body", BODY)) == []
        assert call.output.ends == 1
        call.close()

    in_virtual_time(test, with_keys(tmp_path))


def test_a_used_up_quota_is_429_and_no_byte_of_the_body_comes_back(tmp_path: Path) -> None:
    async def test(picker: VirtualPicker) -> None:
        key = ("authorization", f"Bearer {KEYS['small']}")
        first = begin(picker, key)
        assert returned(first.feed(body_message("request_body", BODY))[1:], "request_body") == BODY
        first.close()
        second = begin(picker, key)
        (refusal,) = second.feed(body_message("request_body", BODY))
        status, code, headers = error_of(refusal)
        assert (status, code) == (429, "client_rate")
        assert 1 <= int(headers["retry-after"]) <= 10
        second.close()
        other = begin(picker, MAIN)
        assert len(other.feed(body_message("request_body", BODY))) == 2
        other.close()

    in_virtual_time(test, with_keys(tmp_path))


def test_a_long_body_gets_the_replica_s_name_of_the_model_and_all_else_comes_back(tmp_path: Path) -> None:
    config = config_of("10.0.0.1:8000", models=(ModelConfig(name="llama", aliases=("m",)),))
    config = with_replica(config, 0, models=("llama",), request_usage=True)
    text = "".join(f"{number:06d} " for number in range(40_000))
    body = json.dumps({"messages": [{"role": "user", "content": text}], "stream": True, "model": "m"}).encode()

    async def test(picker: VirtualPicker) -> None:
        call = begin(picker)
        for start in range(0, len(body), 65_536):
            call.feed(body_message("request_body", body[start : start + 65_536], end=False))
        call.feed(body_message("request_body", b""))
        head, *pieces = call.output.sent
        changed = returned(pieces, "request_body")
        assert len(pieces) == -(-len(changed) // 62_000) == 5
        options = b',"stream_options":{"include_usage":true}}'
        assert changed == body[:-1].replace(b'"model": "m"', b'"model": "llama"') + options
        assert Picked(head).headers["content-length"] == str(len(changed))
        call.close()

    in_virtual_time(test, config)


def test_an_unknown_model_is_404_and_nothing_comes_back() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = begin(picker)
        (refusal,) = call.feed(body_message("request_body", BODY))
        assert error_of(refusal)[:2] == (404, "model_not_found")
        call.close()

    in_virtual_time(test, with_replica(config_of("10.0.0.1:8000"), 0, models=("llama",)))


#: Orders to engines, other spellings of a route with a prompt, and answers that somebody has stored.
OTHER_PATHS = [
    "/invocations",
    "/v1/chat%2fcompletions",
    "/v1/chat/completions/",
    "//v1/chat/completions",
    "/v1/load_lora_adapter",
    "/flush_cache",
    "/update_weights_from_disk",
    "/sleep",
    "/v1/responses/resp_1",
    "/health",
    "/metrics",
]


@pytest.mark.parametrize("kind", ["keys", "models", "engine"])
def test_behind_a_gateway_no_path_goes_round_keys_models_and_an_engines_key(tmp_path: Path, kind: str) -> None:
    config, headers, environ = with_keys(tmp_path), (MAIN,), {}
    if kind == "models":
        config = config_of("10.0.0.1:8000", models=(ModelConfig(name="m", allowed_regions=("here",)),))
    elif kind == "engine":
        config, environ = (
            with_replica(config_of("10.0.0.1:8000"), 0, api_key_env="ENGINE_KEY"),
            {"ENGINE_KEY": "k" * 16},
        )

    async def test(picker: VirtualPicker) -> None:
        for path in OTHER_PATHS:
            for method in ("POST", "GET"):
                call = picker.call()
                message = headers_message("request_headers", *headers, mode=DUPLEX, method=method, path=path, end=True)
                (refusal,) = call.feed(message)
                assert error_of(refusal)[:2] == (404, "not_found"), path
                call.close()
        for path, method in (("/v1/completions", "PUT"), ("/v1/models", "POST")):
            call = picker.call()
            message = headers_message("request_headers", *headers, mode=DUPLEX, method=method, path=path, end=True)
            (refusal,) = call.feed(message)
            assert error_of(refusal)[:2] == (405, "method_not_allowed"), path
            call.close()
        call = picker.call()
        (head,) = call.feed(
            headers_message("request_headers", *headers, mode=DUPLEX, method="GET", path="/v1/models", end=True)
        )
        assert Picked(head).addresses == ["10.0.0.1:8000"], "nothing is listed yet"
        call.close()
        call = begin(picker, *headers)
        assert Picked(call.feed(body_message("request_body", BODY))[0]).addresses == ["10.0.0.1:8000"]
        call.close()

    in_virtual_time(test, config, environ=environ)


# --- The event of usage that only the picker has requested: a gateway's client gets every other byte, and not it.


ASKING = with_replica(config_of("10.0.0.1:8000", "10.0.0.2:8000"), 0, request_usage=True)
ONLY = with_replica(config_of("10.0.0.1:8000"), 0, request_usage=True)
WANTED = BODY.replace(b"true}", b'true, "stream_options": {"include_usage": true}}')
#: Bytes that only look like the event; their last event carries usage beside content.
ALIKE = delta('"usage": {"prompt_tokens": 1}') + USAGE.replace(b'"choices": []', b'"choices": [{"index": 0}]')


def answered(
    call: Call, chunks: Sequence[bytes], *headers: tuple[str, str], trailers: bool = False, served: str | None = None
) -> bytes:
    """The body that the client gets of an answer in these chunks, which Envoy says `served` has given."""
    head = headers_message("response_headers", *(headers or EVENTS))
    if served is not None:
        head.metadata_context.filter_metadata[LB].update({SERVED: served})
    call.feed(head)
    sent: list[Any] = []
    for chunk in chunks:
        sent += call.feed(body_message("response_body", chunk, end=False))
    if trailers:
        message = ProcessingRequest()
        message.response_trailers.SetInParent()
        *pieces, last = call.feed(message)
        assert last.WhichOneof("response") == "response_trailers"
        sent += pieces
    else:
        sent += call.feed(body_message("response_body", b""))
        assert sent[-1].response_body.response.body_mutation.streamed_response.end_of_stream
    return returned(sent, "response_body")


def test_the_event_is_removed_and_its_counts_are_read() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker)
        assert answered(call, [ROLE, delta("a"), ALIKE, USAGE, DONE]) == ROLE + delta("a") + ALIKE + DONE
        call.close()
        assert picker.attempts("completed") == 1
        assert picker.total("gorgo_output_tokens_total", replica="r0", region="here") == 2
        assert picker.total("gorgo_reported_cached_tokens_total", replica="r0", region="here") == 8

    in_virtual_time(test, ASKING)


@pytest.mark.parametrize("chunks", [[delta("a"), USAGE + DONE], [delta("a") + USAGE, DONE]])
def test_an_event_beside_others_in_a_chunk_is_removed(chunks: list[bytes]) -> None:
    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker)
        assert answered(call, chunks) == delta("a") + DONE
        call.close()

    in_virtual_time(test, ASKING)


def test_an_answer_gets_no_length_if_an_event_of_it_may_be_removed() -> None:
    async def test(picker: VirtualPicker) -> None:
        asking, other = chosen(picker), chosen(picker)
        for call, removed in ((asking, ["content-length"]), (other, [])):
            (head,) = call.feed(headers_message("response_headers", *EVENTS, ("content-length", "900")))
            assert list(head.response_headers.response.header_mutation.remove_headers) == removed
            call.close()

    in_virtual_time(test, ASKING)


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda picker: chosen(picker, WANTED), id="the client requested it"),
        pytest.param(lambda picker: (chosen(picker), chosen(picker))[1], id="the replica is not asked"),
        pytest.param(lambda picker: chosen(picker, JSON_BODY), id="no stream"),
    ],
)
def test_usage_that_the_picker_has_not_requested_stays(ask: Callable[[VirtualPicker], Call]) -> None:
    async def test(picker: VirtualPicker) -> None:
        call = ask(picker)
        assert answered(call, [delta("a"), USAGE[:30], USAGE[30:], DONE]) == delta("a") + USAGE + DONE
        for each in tuple(picker.state.calls):
            each.closed()  # type: ignore[attr-defined]

    in_virtual_time(test, ASKING)


@pytest.mark.parametrize(
    "headers",
    [
        ((":status", "200"), ("content-type", "application/json")),
        ((":status", "500"), ("content-type", "text/event-stream")),
        (*EVENTS, ("content-encoding", "gzip")),
    ],
)
def test_an_answer_that_is_no_readable_stream_passes_byte_for_byte(headers: tuple[tuple[str, str], ...]) -> None:
    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker)
        assert answered(call, [USAGE[:9], USAGE[9:]], *headers) == USAGE
        call.close()

    in_virtual_time(test, ASKING)


def test_the_body_that_was_sent_decides_and_not_the_replica_that_served_in_the_end() -> None:
    async def test(picker: VirtualPicker) -> None:
        call = chosen(picker)
        assert answered(call, [delta("a"), USAGE, DONE], served="10.0.0.2:8000") == delta("a") + DONE
        call.close()
        assert picker.total("gorgo_output_tokens_total", replica="r1", region="here") == 2

    in_virtual_time(test, ASKING)


def test_what_trailers_end_and_what_breaks_off_within_an_event_is_whole() -> None:
    async def test(picker: VirtualPicker) -> None:
        for trailers in (True, False):
            call = chosen(picker)
            assert answered(call, [delta("a"), USAGE[:20]], trailers=trailers) == delta("a") + USAGE[:20]
            call.close()

    in_virtual_time(test, ONLY)


def test_an_event_longer_than_a_piece_and_one_longer_than_any_buffer_pass() -> None:
    async def test(picker: VirtualPicker) -> None:
        for size in (63_000, 500_000):
            call = chosen(picker)
            long = delta("x" * size)
            chunks = [long[start : start + 16_384] for start in range(0, len(long), 16_384)]
            assert answered(call, [*chunks, USAGE, DONE]) == long + DONE
            call.close()

    in_virtual_time(test, ONLY)


USAGE_EVENTS = (USAGE, USAGE.replace(b"\n", b"\r\n"))
PARTS = (ROLE, delta("a"), ALIKE, b": ping\n\n", *USAGE_EVENTS, b"no event", b"\n\n", DONE)


def kept_of(parts: Sequence[bytes]) -> bytes:
    """What the client gets of these parts."""
    kept = b""
    for part in parts:
        # After half an event, it and what follows up to the next blank line are one.
        is_event = not kept or kept.endswith((b"\n\n", b"\r\n\r\n"))
        kept += b"" if part in USAGE_EVENTS and is_event else part
    return kept


def test_however_an_answer_is_cut_the_client_gets_all_but_that_event() -> None:
    async def test(picker: VirtualPicker) -> None:
        chance = Random(1)
        for _ in range(150):
            parts = chance.choices(PARTS, k=chance.randrange(12))
            whole = b"".join(parts)
            edges = [0, *sorted(chance.choices(range(len(whole) + 1), k=chance.randrange(8))), len(whole)]
            call = chosen(picker)
            got = answered(call, [whole[a:b] for a, b in pairwise(edges)], trailers=chance.random() < 0.3)
            assert got == kept_of(parts)
            call.close()

    in_virtual_time(test, ONLY)
