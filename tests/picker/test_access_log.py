"""What Envoy says of answers: entries of the access log, and the call of the filter of first tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gorgo.picker import state
from gorgo.picker.protocol.messages import LB, SERVED, ProtocolError
from gorgo.picker.protocol.protos import StreamAccessLogsMessage
from gorgo.picker.server import take_access_log
from tests.picker.virtual import (
    BODY,
    JSON_BODY,
    VirtualPicker,
    body_message,
    config_of,
    headers_message,
    in_virtual_time,
    log_message,
)
from tests.proxy.fakes import DONE, ROLE, USAGE, delta

# --- Entries of the access log: they complete outcomes, and release nothing.


USAGE_ACCESS_LOG = {"prompt_tokens": 12, "completion_tokens": 5, "cached_tokens": 8}


def test_the_end_of_a_call_releases_load_at_once_and_the_entry_completes_the_outcome() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request()
        picker.first_bytes(picked.exchange_id, delta("a")).close()
        await asyncio.sleep(2.0)
        call.close()
        assert picker.state.routing.router.in_flight == 0
        assert picker.attempts("completed") == 0
        await asyncio.sleep(0.05)
        picker.log(picked.exchange_id, usage=USAGE_ACCESS_LOG)
        assert picker.attempts("completed") == 1
        assert picker.total("gorgo_output_tokens_total", replica="r0", region="here") == 5
        assert picker.total("gorgo_reported_cached_tokens_total", replica="r0", region="here") == 8
        assert picker.total("gorgo_e2e_seconds_sum", replica="r0", region="here") == pytest.approx(2.0)
        (sample,) = picker.state.routing.router.samples
        assert (sample.input_tokens, sample.output_tokens, sample.status) == (12, 5, 200)

    in_virtual_time(test)


def test_an_entry_alone_releases_no_load() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request()
        picker.log(picked.exchange_id, usage=USAGE_ACCESS_LOG)
        picker.log(picked.exchange_id, usage={"prompt_tokens": 1, "completion_tokens": 1})
        await asyncio.sleep(5.0)
        assert picker.state.routing.router.in_flight == 1
        call.close()
        assert picker.attempts("completed") == 1
        assert picker.total("gorgo_output_tokens_total", replica="r0", region="here") == 5

    in_virtual_time(test)


def test_without_its_entry_an_exchange_is_closed_by_what_was_seen() -> None:
    async def test(picker: VirtualPicker) -> None:
        seen, picked = picker.request()
        picker.first_bytes(picked.exchange_id, delta("a")).close()
        unseen, _ = picker.request()
        seen.close()
        unseen.close()
        await asyncio.sleep(state.ENTRY_S + 0.01)
        assert (picker.attempts("completed"), picker.attempts("client_disconnected", "r1")) == (1, 1)
        picker.log(picked.exchange_id)
        assert picker.total("gorgo_picker_log_entries_total", result="late") == 1

    in_virtual_time(test)


def test_the_exact_time_of_the_first_body_byte_is_that_of_the_record(caplog: pytest.LogCaptureFixture) -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request()
        await asyncio.sleep(0.2)
        picker.first_bytes(picked.exchange_id, delta("a")).close()
        call.close()
        picker.log(picked.exchange_id, first_body_us=197_500)

    with caplog.at_level("INFO", logger="gorgo"):
        in_virtual_time(test)
    (line,) = [record for record in caplog.records if "ttft_ms" in str(getattr(record, "fields", ""))]
    assert line.fields["ttft_ms"] == 197.5  # type: ignore[attr-defined]


def test_an_answer_of_envoy_s_own_is_logged_with_its_status(caplog: pytest.LogCaptureFixture) -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request()
        call.close()
        picker.log(picked.exchange_id, status=504, flags=["stream_idle_timeout"], details="stream_idle_timeout")

    with caplog.at_level("INFO", logger="gorgo"):
        in_virtual_time(test)
    (line,) = [record for record in caplog.records if "e2e_s" in str(getattr(record, "fields", ""))]
    assert line.fields["status"] == 504  # type: ignore[attr-defined]


def test_an_answer_that_breaks_off_after_its_head_is_logged_as_failed_before_content_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request(BODY)
        call.close()
        picker.log(picked.exchange_id, details="upstream_reset_after_response_started{connection_termination}")
        assert picker.attempts("failed_before_content") == 1

    with caplog.at_level("INFO", logger="gorgo"):
        in_virtual_time(test)
    (line,) = [record for record in caplog.records if "e2e_s" in str(getattr(record, "fields", ""))]
    assert line.fields["status"] == 502  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("flags", "status", "details", "result"),
    [
        (["downstream_connection_termination"], 200, "downstream_remote_disconnect", "client_disconnected"),
        (["downstream_connection_termination", "upstream_remote_reset"], 0, "", "client_disconnected"),
        ([], 0, "", "client_disconnected"),
        ([], 413, "request_payload_too_large", "client_disconnected"),
        (["upstream_connection_failure"], 503, "upstream_reset_before_response_started{}", "failed_before_content"),
        (["upstream_remote_reset"], 503, "upstream_reset_before_response_started{}", "failed_before_content"),
        ([], 200, "upstream_reset_after_response_started{connection_termination}", "failed_before_content"),
        (["upstream_request_timeout"], 504, "response_timeout", "failed_before_content"),
        (["duration_timeout"], 504, "duration_timeout", "deadline_exceeded"),
        (["upstream_overflow"], 503, "overflow", "busy"),
        ([], 429, "via_upstream", "busy"),
        ([], 503, "via_upstream", "busy"),
        ([], 500, "via_upstream", "failed_before_content"),
        ([], 400, "via_upstream", "upstream_4xx"),
        ([], 200, "via_upstream", "completed"),
    ],
)
def test_the_reason_of_an_end_is_the_entry_s(flags: Sequence[str], status: int, details: str, result: str) -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request(JSON_BODY)
        call.close()
        picker.log(picked.exchange_id, status=status, flags=flags, details=details, first_body_us=900)
        assert picker.attempts(result) == 1

    in_virtual_time(test)


def test_an_engine_that_dies_in_the_middle_of_an_answer_has_failed_after_content() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request(BODY)
        picker.first_bytes(picked.exchange_id, delta("a")).close()
        call.close()
        picker.log(picked.exchange_id, details="upstream_reset_after_response_started{connection_termination}")
        assert picker.attempts("failed_after_content") == 1

    in_virtual_time(test)


def test_three_answers_that_the_engine_broke_off_eject_it_and_none_is_dispatched_again() -> None:
    async def test(picker: VirtualPicker) -> None:
        for _ in range(3):
            call, picked = picker.request()
            call.close()
            picker.log(picked.exchange_id, status=503, flags=["upstream_connection_failure"])
        assert picker.state.routing.router.view.health_states() == {"r0": "ejected"}
        assert picker.attempts("failed_before_content") == 3
        assert picker.state.routing.router.in_flight == 0

    in_virtual_time(test, config_of("10.0.0.1:8000"))


def test_answers_without_a_byte_are_failures_that_eject_their_replica() -> None:
    async def test(picker: VirtualPicker) -> None:
        for _ in range(3):
            call, picked = picker.request()
            call.close()
            picker.log(picked.exchange_id)
        assert picker.attempts("failed_before_content") == 3
        assert picker.state.routing.router.view.health_states() == {"r0": "ejected"}

    in_virtual_time(test, config_of("10.0.0.1:8000"))


def test_who_served_is_credited_by_the_entry_too() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request()
        picker.first_bytes(picked.exchange_id, delta("a")).close()
        call.close()
        picker.log(picked.exchange_id, served="10.0.0.2:8000", usage=USAGE_ACCESS_LOG)
        assert (picker.attempts("failed_before_content"), picker.attempts("completed", "r1")) == (1, 1)

    in_virtual_time(test)


def test_a_call_whose_end_never_comes_is_ended_by_its_time() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request()
        picker.log(picked.exchange_id)
        await asyncio.sleep(3500.0)
        assert picker.state.routing.router.in_flight == 1
        await asyncio.sleep(110.0)
        assert picker.state.routing.router.in_flight == 0
        assert picker.attempts("deadline_exceeded") == 1
        call.close()

    in_virtual_time(test)


def test_no_more_exchanges_wait_for_entries_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_WAITING", 3)

    async def test(picker: VirtualPicker) -> None:
        for _ in range(5):
            call, _ = picker.request()
            call.close()
        assert len(picker.state.open_exchanges) == 3

    in_virtual_time(test)


def test_an_answer_of_a_replica_that_no_picker_chose_is_counted_and_one_of_envoy_s_own_is_not() -> None:
    async def test(picker: VirtualPicker) -> None:
        for details in ("via_upstream", "direct_response", "route_not_found"):
            batch = StreamAccessLogsMessage()
            entry = batch.http_logs.log_entry.add()
            entry.response.response_code.value = 200
            entry.response.response_code_details = details
            picker.logged(batch.SerializeToString())
        assert picker.total("gorgo_picker_log_entries_total", result="undecided") == 1

    in_virtual_time(test)


def test_entries_of_others_are_counted_and_damaged_batches_refused() -> None:
    async def test(picker: VirtualPicker) -> None:
        picker.log("other-1")
        picker.log("pick-1")
        results = ("matched", "late", "unknown")
        assert [picker.total("gorgo_picker_log_entries_total", result=each) for each in results] == [0, 1, 1]
        with pytest.raises(ProtocolError, match="StreamAccessLogsMessage"):
            take_access_log(picker.state, b"\xff")

    in_virtual_time(test)


@pytest.mark.parametrize(
    "usage", [{"prompt_tokens": -1}, {"prompt_tokens": float("nan")}, {"prompt_tokens": 1e300}, {"prompt_tokens": "x"}]
)
def test_a_usage_that_no_engine_can_mean_is_none(usage: dict[str, int]) -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request(JSON_BODY)
        call.close()
        take_access_log(picker.state, log_message(picked.exchange_id, usage=usage))
        (sample,) = picker.state.routing.router.samples
        assert sample.output_tokens is None

    in_virtual_time(test)


def test_a_replica_that_served_after_a_retry_and_is_known_after_the_end_has_no_load() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request()
        call.close()
        message = body_message("response_body", delta("a"), end=False, exchange_id=picked.exchange_id)
        message.metadata_context.filter_metadata[LB].update({SERVED: "10.0.0.2:8000"})
        first = picker.call()
        first.feed(message)
        assert picker.state.routing.router.in_flight == 0
        assert [target.active for target in picker.state.replicas.targets.values()] == [0, 0]
        first.close()
        picker.log(picked.exchange_id, usage=USAGE_ACCESS_LOG)
        assert (picker.attempts("failed_before_content"), picker.attempts("completed", "r1")) == (1, 1)

    in_virtual_time(test)


async def answered(picker: VirtualPicker, *, rest_s: float, tokens: int | None) -> tuple[str, ...]:
    """Let `r0` end its streams so long after their first token; return the candidates of the last request."""
    for number in range(10):
        picker.state.routing.router.replicas.drain("r1", number < 3, now=picker.state.routing.clock())
        call, picked = picker.request()
        is_first = picked.addresses[0] == "10.0.0.1:8000"
        picker.first_bytes(picked.exchange_id, delta("a")).close()
        await asyncio.sleep(rest_s if is_first else 0.02)
        call.close()
        usage = {"prompt_tokens": 9, "completion_tokens": tokens if is_first else 9} if tokens else None
        picker.log(picked.exchange_id, usage=usage)
    (decision,) = picker.state.routing.router.view.decisions(picked.headers["x-request-id"])
    return tuple(decision.candidates)


@pytest.mark.parametrize(("tokens", "candidates"), [(1, ("r1",)), (2, ("r0", "r1"))])
def test_a_stream_whose_entry_counts_one_token_is_short(tokens: int, candidates: tuple[str, ...]) -> None:
    """The call of first tokens has ended before the answer has."""

    async def test(picker: VirtualPicker) -> None:
        assert await answered(picker, rest_s=0.02, tokens=tokens) == candidates

    in_virtual_time(test)


@pytest.mark.parametrize(("rest_s", "candidates"), [(0.001, ("r1",)), (0.02, ("r0", "r1"))])
def test_a_stream_of_unknown_length_that_ends_at_its_first_token_is_short(
    rest_s: float, candidates: tuple[str, ...]
) -> None:
    """An engine that reports no usage, or an answer that broke off without its end."""

    async def test(picker: VirtualPicker) -> None:
        assert await answered(picker, rest_s=rest_s, tokens=None) == candidates

    in_virtual_time(test)


def test_the_beginning_of_a_stream_does_not_say_how_long_it_gets() -> None:
    """Each event of `/generate` has the count so far, and the first of `/v1/messages` a count of one."""

    async def test(picker: VirtualPicker) -> None:
        body = b'{"text": "hello", "stream": true, "sampling_params": {"max_new_tokens": 90}}'
        for number in range(5):
            picker.state.routing.router.replicas.drain("r1", number < 4, now=picker.state.routing.clock())
            call, picked = picker.request(body, path="/generate")
            event = (
                b'data: {"text": "a", "meta_info": {"prompt_tokens": 9, "completion_tokens": 1, "cached_tokens": 4}}'
            )
            picker.first_bytes(picked.exchange_id, event + b"\n\n").close()
            await asyncio.sleep(0.5)
            call.close()
            picker.log(picked.exchange_id)
        (decision,) = picker.state.routing.router.view.decisions(picked.headers["x-request-id"])
        assert tuple(decision.candidates) == ("r0", "r1")
        assert [sample.output_tokens for sample in picker.state.routing.router.samples] == [None] * 5
        assert picker.total("gorgo_reported_cached_tokens_total", replica="r0", region="here") >= 16

    in_virtual_time(test)


# --- Short answers in one piece, which an entry has whole: no call was made of them.


COUNTED = b'{"choices": [{"message": {"content": "a b c"}}], "usage": {"prompt_tokens": 12, "completion_tokens": 3}}'


def test_an_answer_that_its_entry_has_gives_its_usage_and_no_first_token() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request(JSON_BODY)
        call.close()
        picker.log(picked.exchange_id, body=COUNTED, first_body_us=900)
        assert (picker.attempts("completed"), first_tokens(picker)) == (1, 0)
        (sample,) = picker.state.routing.router.samples
        assert (sample.input_tokens, sample.output_tokens) == (12, 3)

    in_virtual_time(test)


@pytest.mark.parametrize("is_first", [True, False], ids=["before the end of its call", "after it"])
@pytest.mark.parametrize(
    ("body", "result"),
    [
        (b'{"error": {"message": "no", "code": 500}}', "failed_before_content"),
        (b'{"error": {"message": "no", "code": 400}}', "upstream_4xx"),
        (COUNTED, "completed"),
    ],
)
def test_an_answer_is_judged_by_its_entry_as_by_the_call(body: bytes, result: str, is_first: bool) -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request(JSON_BODY)
        if not is_first:
            call.close()
        picker.log(picked.exchange_id, body=body, first_body_us=900)
        call.close()
        picker.state.routing.router.replicas.drain("r0", now=picker.state.routing.clock())
        other, picked = picker.request(JSON_BODY)
        picker.first_bytes(picked.exchange_id, body, end=True).close()
        other.close()
        picker.log(picked.exchange_id, first_body_us=900)
        assert (picker.attempts(result), picker.attempts(result, "r1")) == (1, 1)

    in_virtual_time(test)


def test_errors_in_one_piece_eject_their_replica_by_their_entries() -> None:
    async def test(picker: VirtualPicker) -> None:
        for _ in range(3):
            call, picked = picker.request(JSON_BODY)
            call.close()
            picker.log(picked.exchange_id, body=b'{"error": {"message": "no", "code": 500}}', first_body_us=900)
        assert picker.state.routing.router.view.health_states() == {"r0": "ejected"}

    in_virtual_time(test, config_of("10.0.0.1:8000"))


def test_of_an_answer_that_a_call_has_shown_the_entry_s_is_not_read_again() -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request(JSON_BODY)
        picker.first_bytes(picked.exchange_id, COUNTED, end=True).close()
        call.close()
        picker.log(picked.exchange_id, body=b'{"error": {"message": "no", "code": 500}}', first_body_us=900)
        assert picker.attempts("completed") == 1

    in_virtual_time(test)


@pytest.mark.parametrize("text", ["{", "e30", "e30=\n", "é", "A" * 4 * 22_000], ids=len)
def test_what_is_no_short_answer_in_base_64_is_none(text: str) -> None:
    async def test(picker: VirtualPicker) -> None:
        call, picked = picker.request(JSON_BODY)
        call.close()
        picker.log(picked.exchange_id, usage={"body": text}, first_body_us=900)
        (sample,) = picker.state.routing.router.samples
        assert (sample.status, sample.output_tokens) == (200, None)
        assert picker.attempts("completed") == 1

    in_virtual_time(test)


# --- The call of the filter of first tokens: what it credits, and when it ends.


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
