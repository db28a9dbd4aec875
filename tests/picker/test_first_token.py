"""The call of the filter of first tokens: what it credits, and when it ends."""

from __future__ import annotations

import asyncio

import pytest

from gorgo.picker.call import ProtocolError
from tests.picker.virtual import (
    BODY,
    JSON_BODY,
    VirtualPicker,
    body_message,
    headers_message,
    in_virtual_time,
)
from tests.proxy.fakes import DONE, ROLE, USAGE, delta


def first_tokens(picker: VirtualPicker) -> float:
    return picker.total("gorgo_ttft_seconds_count", replica="r0", region="here")


def test_the_first_token_is_credited_at_its_time_and_the_call_ends() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request()
        await asyncio.sleep(0.25)
        first = picker.first_bytes(picked.exchange_id, delta("a"))
        assert (first.output.sent, first.output.ends) == ([], 1)
        first.close()
        assert first_tokens(picker) == 1
        assert picker.total("gorgo_ttft_seconds_sum", replica="r0", region="here") == pytest.approx(0.25)
        (view, _) = picker.state.routing.router.view.snapshots(now=picker.state.routing.clock())
        assert (view.in_flight_requests, view.queued_prefill_tokens) == (1, 0)
        call.close()

    in_virtual_time(test)


def test_events_without_content_are_waited_through() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request()
        first = picker.first_bytes(picked.exchange_id, b": ping\n\n", ROLE)
        assert (first.output.ends, first_tokens(picker)) == (0, 0)
        first.feed(body_message("response_body", delta("a"), end=False, exchange_id=picked.exchange_id))
        assert (first.output.ends, first_tokens(picker)) == (1, 1)
        first.close()
        call.close()

    in_virtual_time(test)


@pytest.mark.parametrize("chunk", [b'data: {"error": {"message": "m", "code": 500}}\n\n', ROLE + DONE])
def test_an_answer_that_ends_without_content_has_no_first_token(chunk: bytes) -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request()
        first = picker.first_bytes(picked.exchange_id, chunk, b"", end=True)
        assert (first.output.ends, first_tokens(picker)) == (1, 0)
        first.close()
        call.close()

    in_virtual_time(test)


def test_an_answer_in_one_piece_gives_its_usage_and_no_first_token() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request(JSON_BODY)
        body = b'{"choices": [{}], "usage": {"prompt_tokens": 12, "completion_tokens": 3}}'
        first = picker.first_bytes(picked.exchange_id, body[:20], body[20:], end=True)
        assert (first.output.ends, first_tokens(picker)) == (1, 0)
        first.close()
        call.close()
        await asyncio.sleep(1.1)
        assert picker.total("gorgo_output_tokens_total", replica="r0", region="here") == 3

    in_virtual_time(test)


def test_a_first_token_that_comes_after_the_end_of_its_exchange_counts_until_its_entry_has_come() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request()
        await asyncio.sleep(0.1)
        call.close()
        await asyncio.sleep(0.01)
        first = picker.first_bytes(picked.exchange_id, delta("a") + USAGE + DONE)
        first.close()
        assert picker.total("gorgo_ttft_seconds_sum", replica="r0", region="here") == pytest.approx(0.1)
        picker.log(picked.exchange_id)
        late = picker.first_bytes(picked.exchange_id, delta("a"))
        assert late.output.ends == 1
        late.close()
        assert first_tokens(picker) == 1

    in_virtual_time(test)


def test_an_unknown_exchange_ends_the_call_at_once() -> None:
    async def test(picker: VirtualPicker) -> None:
        for exchange_id in ("pick-999", "other-1"):
            first = picker.first_bytes(exchange_id, delta("a"))
            assert first.output.ends == 1
            first.close()
        unnamed = picker.call()
        unnamed.feed(body_message("response_body", b"x"))
        assert unnamed.output.ends == 1
        unnamed.close()

    in_virtual_time(test)


def test_a_filter_that_waits_for_answers_gets_them() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request()
        first = picker.call()
        message = body_message("response_body", delta("a"), end=False, exchange_id=picked.exchange_id)
        message.observability_mode = False
        (answer,) = first.feed(message)
        assert answer.WhichOneof("response") == "response_body"
        first.close()
        call.close()

    in_virtual_time(test)


def test_with_the_head_of_the_answer_its_kind_is_known() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request(BODY)
        first = picker.call()
        head = headers_message("response_headers", (":status", "500"), ("content-type", "application/json"))
        head.observability_mode = True
        named = body_message("response_body", b"", exchange_id=picked.exchange_id)
        head.metadata_context.CopyFrom(named.metadata_context)
        first.feed(head)
        first.feed(body_message("response_body", b"{}", end=True, exchange_id=picked.exchange_id))
        assert first.output.ends == 1
        first.close()
        call.close()
        await asyncio.sleep(1.1)
        assert picker.attempts("failed_before_content") == 1

    in_virtual_time(test)


def served_by_r1(picker: VirtualPicker, status: float) -> None:
    """A request that Envoy sent to `r0` and then to `r1`, which answered so."""
    picker.state.routing.router.replicas.drain("r1", now=picker.state.routing.clock())
    call, picked = picker.request()
    message = body_message("response_body", delta("a"), end=False, exchange_id=picked.exchange_id)
    served = {"upstream.address": "10.0.0.2:8000", "response.code": status}
    message.attributes["envoy.filters.http.ext_proc"].update(served)
    first = picker.call()
    first.feed(message)
    assert [target.active for target in picker.state.replicas.targets.values()] == [0, 1]
    first.close()
    call.close()
    picker.log(picked.exchange_id, status=int(status), served="10.0.0.2:8000")


def test_a_replica_whose_requests_another_one_answers_after_envoy_s_retry_is_ejected() -> None:
    async def test(picker: VirtualPicker) -> None:
        for _ in range(3):
            assert picker.state.routing.router.view.health_states() == {"r0": "healthy", "r1": "healthy"}
            served_by_r1(picker, 200)
        assert picker.state.routing.router.view.health_states() == {"r0": "ejected", "r1": "healthy"}
        assert first_tokens(picker) == 0, "it has not answered"

    in_virtual_time(test)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405])
def test_requests_that_the_last_replica_refuses_too_blame_none(status: int) -> None:
    async def test(picker: VirtualPicker) -> None:
        for _ in range(10):
            served_by_r1(picker, status)
        assert picker.state.routing.router.view.health_states() == {"r0": "healthy", "r1": "healthy"}
        assert (picker.attempts("upstream_4xx"), picker.attempts("upstream_4xx", "r1")) == (10, 10)

    in_virtual_time(test)


@pytest.mark.parametrize(
    ("status", "result"), [(200, "completed"), (404, "upstream_4xx"), (502, "failed_before_content")]
)
def test_without_an_entry_of_the_log_the_status_beside_the_first_bytes_counts(status: int, result: str) -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request()
        message = body_message("response_body", b"{}", exchange_id=picked.exchange_id)
        message.attributes["envoy.filters.http.ext_proc"].update({"response.code": status})
        first = picker.call()
        first.feed(message)
        first.close()
        call.close()
        await asyncio.sleep(1.1)
        assert picker.attempts(result) == 1

    in_virtual_time(test)


def test_a_request_in_the_call_of_first_tokens_breaks_the_protocol() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request()
        first = picker.first_bytes(picked.exchange_id, ROLE)
        with pytest.raises(ProtocolError, match="expected a response"):
            first.feed(body_message("request_body", b""))
        call.close()

    in_virtual_time(test)
