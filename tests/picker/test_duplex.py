"""Calls of a gateway: both bodies pass through the call in pieces, and none of their bytes is lost."""

from __future__ import annotations

from typing import Any

import pytest

from gorgo.picker.call import ProtocolError
from gorgo.picker.protocol.messages import DESTINATION, LB, SERVED
from gorgo.picker.protocol.protos import ProcessingRequest
from tests.picker.duplex import EVENTS, begin, chosen, returned
from tests.picker.virtual import (
    BODY,
    DUPLEX,
    JSON_BODY,
    Picked,
    VirtualPicker,
    body_message,
    config_of,
    error_of,
    headers_message,
    in_virtual_time,
)
from tests.proxy.conftest import with_replica
from tests.proxy.fakes import DONE, ROLE, USAGE, delta


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
