"""Answers that break off at one replica and go on at another, in virtual time: what the client gets."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import pytest

from gorgo.core.continuation import MOST_PAUSE_S, whole_events
from gorgo.live.reload.reloader import move_streams
from gorgo.live.upstream.client import UpstreamError
from gorgo.proxy.exchange import response
from gorgo.proxy.exchange.passage import Passage
from tests.proxy.conftest import Running, Start
from tests.proxy.exchange.test_handler import config
from tests.proxy.fakes import DONE, ROLE, chat, delta, event, hang
from tests.proxy.virtual import EVENTS, JSON, Script, ScriptedUpstream, Step, VirtualProxy, in_virtual_time

STREAM = chat(stream=True)
LOST = UpstreamError("disconnected")


def said(text: str, finish: str | None = None, name: str = "first", **more: Any) -> bytes:
    choices = [{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}]
    return event({"id": name, "model": "m", "choices": choices, **more})


#: Of the engine, in the middle of its answer.
ERROR = event({"error": {"message": "cuda", "code": 500}})
REST = Script([0.2, ROLE, said("c", name="second"), said("d", name="second"), said("", "stop", "second"), DONE])


def virtually(
    test: Callable[[VirtualProxy], Awaitable[None]], *scripts: list[Script], engines: str = "vllm", **limits: Any
) -> None:
    names = {f"r{number}": script for number, script in enumerate(scripts)}
    found = config(**limits)
    third = replace(found.replicas[1], name="r2")
    rows = tuple(replace(row, engine=engines) for row in (*found.replicas, third) if row.name in names)
    in_virtual_time(test, replace(found, replicas=rows), names)


def text_of(stream: bytes) -> str:
    found = [json.loads(part[6:]) for part in stream.split(b"\n\n") if part.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for each in found for choice in each.get("choices", []))


async def move_from(proxy: VirtualProxy, name: str) -> int:
    return await move_streams(proxy.state, proxy.state.replicas.targets[name])


def broken(*steps: Step) -> Script:
    return Script([said("a"), 0.1, said("b"), 0.1, *(steps or (LOST,))])


def test_an_answer_whose_replica_dies_goes_on_at_another_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gorgo")

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert text_of(answered.body) == "abcd"
        assert (answered.status, answered.complete) == (200, True)
        assert answered.body.count(b"[DONE]") == answered.body.count(b'"stop"') == 1
        assert b'"second"' not in answered.body
        assert b": x-gorgo-continued r1\n\n" in answered.body
        asked = json.loads(proxy.replicas["r1"].received[0].body)
        assert asked["messages"][-1] == {"role": "assistant", "content": "ab"}
        assert asked["continue_final_message"] is True
        sample = proxy.state.routing.router.samples.after(0, 1)["samples"][0]
        assert (sample["status"], sample["continued"], sample["retries"], sample["replica"]) == (200, 1, 0, "r1")
        assert sample["ttft_ms"] == pytest.approx(0.0)
        assert proxy.total("gorgo_streams_continued_total", reason="disconnected") == 1.0
        assert proxy.total("gorgo_stream_seam_seconds_sum") == pytest.approx(0.3)
        assert proxy.total("gorgo_attempts_total", replica="r0", region="here", result="failed_after_content") == 1.0
        assert proxy.state.buffers.used_bytes == 0
        proxy.state.routing.router.check()

    virtually(test, [broken()], [REST])
    (found,) = [record for record in caplog.records if record.getMessage() == "request"]
    assert found.fields["continued"] == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((said("half")[:20], LOST), id="in the middle of an event"),
        pytest.param((0.1,), id="without an end"),
        pytest.param((event({"error": {"message": "cuda", "code": 500}}), DONE), id="by an error of the engine"),
        pytest.param((said("x")[:9], said("x")[9:] + said("y")[:5], LOST), id="after a split event"),
        pytest.param((1000.0,), id="by silence"),
    ],
)
def test_the_client_sees_no_doubled_and_no_missing_character_however_it_breaks_off(steps: tuple[Step, ...]) -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        between = "x" if b"x" in b"".join(step for step in steps if isinstance(step, bytes)) else ""
        assert text_of(answered.body) == f"ab{between}cd"
        assert b'"error"' not in answered.body
        assert answered.complete

    virtually(test, [broken(*steps)], [REST])


def test_an_answer_that_comes_in_whole_events_is_not_searched_and_only_its_two_ends_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[bytes] = []
    looked_at: list[bytes] = []
    checked = Passage._pass_checked

    def check(passage: Passage, chunk: bytes) -> bool:
        looked_at.append(chunk)
        return checked(passage, chunk)

    def search(data: bytes) -> int:
        searched.append(data)
        return whole_events(data)

    monkeypatch.setattr(Passage, "_pass_checked", check)
    monkeypatch.setattr("gorgo.proxy.exchange.passage.whole_events", search)
    tokens = [said(f" word{number}") for number in range(300)]
    stream = [said("a"), *(step for token in tokens for step in (0.02, token)), said("", "stop"), DONE]

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert answered.body == b"".join(step for step in stream if isinstance(step, bytes))

    virtually(test, [Script(stream)], [REST])
    assert searched == []
    assert len(looked_at) < 5, "the first, and those of the end"


@pytest.mark.parametrize(
    ("steps", "between"),
    [
        pytest.param((said("x"), 0.1, said("y") + ERROR, DONE), "xy", id="an error behind an event"),
        pytest.param((said("x"), 0.1, ERROR), "x", id="an error of its own"),
        pytest.param((said("x"), 0.1, said("y")[:30], 0.1, said("y")[30:], said("z"), LOST), "xyz", id="two halves"),
        pytest.param(
            (said("x"), said("y")[:30], 0.1, said("y")[30:] + said("z"), 0.1, said("w")[:-2], LOST), "xyz", id="an end"
        ),
        pytest.param((said("x"), b": wait\n\n", 0.1, said("y")[:-1], LOST), "x", id="a comment and no end"),
    ],
)
@pytest.mark.parametrize("usage", ["", ', "stream_options": {"include_usage": true}'])
def test_an_answer_of_events_that_end_alike_is_cut_at_the_last_whole_one(
    steps: tuple[Step, ...], between: str, usage: str
) -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM[:-1] + usage.encode() + b"}")
        assert text_of(answered.body) == f"ab{between}cd"
        assert b'"error"' not in answered.body
        assert answered.complete

    virtually(test, [broken(said(""), 0.1, *steps)], [REST])


def test_a_rest_that_breaks_off_too_goes_on_a_second_time_and_no_third() -> None:
    second = Script([said("c", name="second"), LOST])

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert text_of(answered.body) == "abccd"
        assert json.loads(proxy.replicas["r2"].received[0].body)["messages"][-1]["content"] == "abc"

    virtually(test, [broken()], [second], [REST])

    async def ends(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert text_of(answered.body) == "abc"
        assert answered.body.endswith(b"\n\n")
        assert b'"upstream_failed"' in answered.body
        assert proxy.replicas["r2"].received == []

    virtually(ends, [broken()], [second], [REST], continuations=1)


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_rest_that_a_replica_refuses_goes_on_at_another_one(status: int) -> None:
    async def test(proxy: VirtualProxy) -> None:
        assert text_of((await proxy.ask(STREAM)).body) == "abcd"
        assert [len(proxy.replicas[name].received) for name in ("r0", "r1", "r2")] == [1, 1, 1]
        assert proxy.state.buffers.used_bytes == 0

    virtually(test, [broken()], [Script([b"{}"], status=status)], [REST])


def test_a_rest_that_breaks_off_behind_its_end_is_whole_and_asked_for_nowhere_else() -> None:
    second = Script([said("c", name="second"), said("", "stop", "second"), LOST])

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert (text_of(answered.body), answered.complete) == ("abc", True)
        assert b'"error"' not in answered.body
        assert proxy.replicas["r2"].received == []

    virtually(test, [broken()], [second], [REST])


def test_what_comes_in_one_chunk_with_an_error_of_the_rest_reaches_the_client_before_the_next_seam() -> None:
    error = event({"error": {"message": "cuda", "code": 500}})

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert json.loads(proxy.replicas["r2"].received[0].body)["messages"][-1]["content"] == "abc"
        assert text_of(answered.body) == "abccd"

    virtually(test, [broken()], [Script([said("c", name="second") + error])], [REST])


def test_an_event_of_an_unknown_form_leaves_the_client_an_error_event() -> None:
    odd = event({"id": "first", "choices": [None]})

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert b'"upstream_failed"' in answered.body
        assert answered.complete

    virtually(test, [broken(odd, LOST)], [REST])


def test_an_event_of_an_unknown_form_in_a_rest_sends_the_answer_on() -> None:
    odd = Script([said("c", name="second"), event({"id": "second", "choices": [None]}), DONE])

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert text_of(answered.body) == "abccd"
        assert answered.body.count(b"[DONE]") == 1

    virtually(test, [broken()], [odd], [REST])


def test_a_replica_that_fails_before_the_rest_is_followed_by_another_one() -> None:
    async def test(proxy: VirtualProxy) -> None:
        assert text_of((await proxy.ask(STREAM)).body) == "abcd"
        assert len(proxy.replicas["r1"].received) == len(proxy.replicas["r2"].received) == 1

    virtually(test, [broken()], [Script(refuses="connect_failed")], [REST])


@pytest.mark.parametrize(
    ("body", "engines", "limits"),
    [
        (STREAM, "vllm", {"continuations": 0}),
        (STREAM, "openai", {}),
        (STREAM[:-1] + b', "n": 2}', "vllm", {}),
        (STREAM[:-1] + b', "response_format": {"type": "json_object"}}', "vllm", {}),
    ],
)
def test_what_cannot_be_continued_ends_with_an_error_event(body: bytes, engines: str, limits: dict[str, int]) -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(body)
        assert text_of(answered.body) == "ab"
        assert b'"upstream_failed"' in answered.body
        assert proxy.replicas["r1"].received == []
        assert proxy.state.buffers.used_bytes == 0

    virtually(test, [broken()], [REST], engines=engines, **limits)


def test_an_error_of_the_engine_is_passed_on_where_no_replica_can_go_on() -> None:
    failure = event({"error": {"message": "cuda", "code": 500}})

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert answered.body == said("a") + said("b") + failure
        assert answered.complete

    virtually(test, [broken(failure)])


def test_the_counts_are_those_of_the_whole_answer() -> None:
    usage = event({"id": "second", "choices": [], "usage": {"prompt_tokens": 14, "completion_tokens": 3}})
    rest = Script([said("c", name="second"), said("", "stop", "second"), usage, DONE])

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM[:-1] + b', "stream_options": {"include_usage": true}}')
        assert b'"usage":{"prompt_tokens":12,"completion_tokens":5}' in answered.body
        sample = proxy.state.routing.router.samples.after(0, 1)["samples"][0]
        assert (sample["input_tokens"], sample["output_tokens"]) == (12, 5)

    virtually(test, [broken()], [rest])


def test_a_client_that_leaves_behind_the_seam_leaves_no_load() -> None:
    async def test(proxy: VirtualProxy) -> None:
        await proxy.ask(STREAM, leaves_s=0.3)
        assert len(proxy.replicas["r1"].received) == 1

    virtually(test, [broken()], [Script([said("c"), 1000.0])])


def test_memory_that_an_upload_needs_is_given_up_and_the_answer_is_not_continued() -> None:
    async def test(proxy: VirtualProxy) -> None:
        budget = proxy.state.buffers

        async def upload() -> None:
            await asyncio.sleep(4.0)
            large = budget.new_buffer("another", now=proxy.now_s)
            assert budget.reserve(large, budget.size_limit, now=proxy.now_s)
            budget.close(large)

        body = STREAM[:-1] + b', "user": "' + b"x" * 8192 + b'"}'
        answered, _ = await asyncio.gather(proxy.ask(body), upload())
        assert text_of(answered.body) == "abz"
        assert b'"upstream_failed"' in answered.body
        assert budget.used_bytes == 0

    virtually(test, [broken(5.0, said("z"), LOST)], [REST])


def test_a_replica_whose_streams_all_stand_still_loses_them_long_before_the_bound_of_silence() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert text_of(answered.body) == "abcd"
        assert answered.at_s == pytest.approx(5.3)
        assert proxy.total("gorgo_streams_continued_total", reason="stalled") == 1.0

    virtually(test, [broken(100.0, said("late"), DONE)], [REST])


def test_a_stream_that_pauses_while_others_of_its_replica_go_on_is_waited_for() -> None:
    lively = Script([*(step for _ in range(30) for step in (said("y"), 1.0)), said("", "stop"), DONE])
    paused = Script([said("a"), 0.1, 20.0, said("b"), said("", "stop"), DONE])

    async def test(proxy: VirtualProxy) -> None:
        first = asyncio.create_task(proxy.ask(STREAM))
        await asyncio.sleep(0.01)
        proxy.replicas["r1"].scripts = [REST]
        second = asyncio.create_task(proxy.ask(STREAM))
        await asyncio.sleep(0.01)
        third = asyncio.create_task(proxy.ask(STREAM))
        assert text_of((await first).body) == "y" * 30
        await second
        assert text_of((await third).body) == "ab"
        assert proxy.total("gorgo_streams_continued_total", reason="stalled") == 0.0

    virtually(test, [lively, paused], [REST])


def test_a_stalled_stream_without_another_replica_is_waited_for() -> None:
    async def test(proxy: VirtualProxy) -> None:
        assert text_of((await proxy.ask(STREAM)).body) == "ablate"

    virtually(test, [broken(30.0, said("late"), DONE)])


def test_a_drained_replica_gives_its_streams_to_others_and_has_not_failed() -> None:
    async def test(proxy: VirtualProxy) -> None:
        asking = asyncio.create_task(proxy.ask(STREAM))
        await asyncio.sleep(1.0)
        router = proxy.state.routing.router
        router.replicas.drain("r0", now=proxy.now_s)
        assert await move_from(proxy, "r0") == 1
        assert text_of((await asking).body) == "abcd"
        view = router.view.snapshots(now=proxy.now_s)[0]
        assert (view.failures, view.failures_in_a_row, view.in_flight_requests) == (0, 0, 0)
        assert proxy.total("gorgo_streams_continued_total", reason="moved") == 1.0
        assert proxy.total("gorgo_attempts_total", replica="r0", region="here", result="superseded") == 1.0

    virtually(test, [broken(100.0, said("late"), DONE)], [REST])


def test_a_stream_that_cannot_go_on_elsewhere_stays_at_its_drained_replica() -> None:
    async def test(proxy: VirtualProxy) -> None:
        asking = asyncio.create_task(proxy.ask(STREAM[:-1] + b', "n": 1, "logprobs": true}'))
        await asyncio.sleep(1.0)
        proxy.state.routing.router.replicas.drain("r0", now=proxy.now_s)
        assert await move_from(proxy, "r0") == 0
        assert text_of((await asking).body) == "ablate"

    virtually(test, [broken(20.0, said("late"), said("", "stop"), DONE)], [REST])


def test_memory_is_given_up_in_the_middle_of_an_event_and_no_byte_is_lost_or_out_of_order() -> None:
    half = said("half")
    slow = Script([said("a"), 3.0, half[:20], 2.0, half[20:], 20.0, said("z"), said("", "stop"), DONE])

    async def test(proxy: VirtualProxy) -> None:
        budget = proxy.state.buffers

        async def upload() -> None:
            await asyncio.sleep(4.0)
            large = budget.new_buffer("another", now=proxy.now_s)
            assert budget.reserve(large, budget.size_limit, now=proxy.now_s)
            budget.close(large)

        body = STREAM[:-1] + b', "user": "' + b"x" * 8192 + b'"}'
        answered, _ = await asyncio.gather(proxy.ask(body), upload())
        assert answered.body == said("a") + half + said("z") + said("", "stop") + DONE
        assert proxy.replicas["r1"].received == []

    virtually(test, [slow], [REST])


def test_an_event_that_is_too_long_to_wait_for_passes_in_parts_and_its_answer_is_not_continued() -> None:
    long = said("x" * 100_000)
    parts = [long[at : at + 30_000] for at in range(0, len(long), 30_000)]

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert answered.body.startswith(said("a") + long + said("b"))
        assert b'"upstream_failed"' in answered.body
        assert len(answered.parts[1][1]) < len(long), "before its end"
        assert proxy.replicas["r1"].received == []

    virtually(test, [Script([said("a"), 0.1, *parts, said("b"), 0.1, LOST])], [REST])


#: Content after a seam, and then silence.
SILENT_REST = Script([said("c", name="second"), 100.0, said("late", name="second"), DONE])


def test_a_rest_that_stands_still_with_all_streams_of_its_replica_goes_on_a_second_time() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert text_of(answered.body) == "abccd"
        assert answered.at_s == pytest.approx(5.4)
        assert answered.body.count(b": x-gorgo-continued r1") == answered.body.count(b": x-gorgo-continued r2") == 1
        assert proxy.total("gorgo_streams_continued_total", reason="stalled") == 1.0
        assert proxy.state.buffers.used_bytes == 0

    virtually(test, [broken()], [SILENT_REST], [REST])


def test_a_rest_is_moved_from_a_drained_replica_as_a_first_part_is() -> None:
    async def test(proxy: VirtualProxy) -> None:
        asking = asyncio.create_task(proxy.ask(STREAM))
        await asyncio.sleep(1.0)
        proxy.state.routing.router.replicas.drain("r1", now=proxy.now_s)
        assert await move_from(proxy, "r1") == 1
        answered = await asking
        assert text_of(answered.body) == "abccd"
        assert json.loads(proxy.replicas["r2"].received[0].body)["messages"][-1]["content"] == "abc"
        assert proxy.total("gorgo_streams_continued_total", reason="moved") == 1.0
        assert not proxy.state.replicas.targets["r1"].streams

    virtually(test, [broken()], [SILENT_REST], [REST])


def test_a_rest_stays_where_it_is_once_its_continuations_are_used_up() -> None:
    async def test(proxy: VirtualProxy) -> None:
        asking = asyncio.create_task(proxy.ask(STREAM))
        await asyncio.sleep(1.0)
        proxy.state.routing.router.replicas.drain("r1", now=proxy.now_s)
        assert await move_from(proxy, "r1") == 0
        answered = await asking
        assert text_of(answered.body) == "abclate"
        assert b'"error"' not in answered.body
        assert proxy.replicas["r2"].received == []

    rest = Script([said("c", name="second"), 20.0, said("late", name="second"), said("", "stop", "second"), DONE])
    virtually(test, [broken()], [rest], [REST], continuations=1)


def test_a_stream_is_not_taken_from_its_replica_where_only_those_are_left_that_failed_it() -> None:
    async def test(proxy: VirtualProxy) -> None:
        asking = asyncio.create_task(proxy.ask(STREAM))
        await asyncio.sleep(1.0)
        proxy.state.routing.router.replicas.drain("r1", now=proxy.now_s)
        assert await move_from(proxy, "r1") == 0
        answered = await asking
        assert text_of(answered.body) == "abclate"
        assert b'"error"' not in answered.body

    rest = Script([said("c", name="second"), 20.0, said("late", name="second"), said("", "stop", "second"), DONE])
    virtually(test, [broken()], [rest])


def test_a_moved_stream_may_come_back_to_a_replica_that_was_drained_before() -> None:
    first = Script([said("a"), 0.1, said("b"), 100.0])

    async def test(proxy: VirtualProxy) -> None:
        router = proxy.state.routing.router
        asking = asyncio.create_task(proxy.ask(STREAM))
        await asyncio.sleep(1.0)
        for name, scripts in (("r0", [REST]), ("r1", [])):
            router.replicas.drain(name, now=proxy.now_s)
            assert await move_from(proxy, name) == 1
            proxy.replicas[name].scripts = scripts
            await asyncio.sleep(0.1)
            router.replicas.drain(name, False, now=proxy.now_s)
        assert text_of((await asking).body) == "abccd"

    virtually(test, [first], [SILENT_REST])


def test_a_client_that_reads_slowly_keeps_its_stream_when_its_replica_is_drained() -> None:
    blocked, reading = asyncio.Event(), asyncio.Event()
    chatty = Script([said("a"), 0.1, said("b"), 5.0, said("c"), 20.0, said("late"), said("", "stop"), DONE])

    async def reads(chunk: bytes) -> None:
        if b'"b"' in chunk:
            blocked.set()
            await reading.wait()

    async def test(proxy: VirtualProxy) -> None:
        asking = asyncio.create_task(proxy.ask(STREAM, reads=reads))
        await blocked.wait()
        proxy.state.routing.router.replicas.drain("r0", now=proxy.now_s)
        moving = asyncio.create_task(move_from(proxy, "r0"))
        await asyncio.sleep(1.0)
        reading.set()
        assert text_of((await asking).body) == "abcd"
        assert await moving == 1

    virtually(test, [chatty], [REST])


def test_a_stream_that_begins_after_the_drain_is_moved_too() -> None:
    late = Script([said("a"), 0.1, said("b"), 100.0], head_s=3.0)

    async def test(proxy: VirtualProxy) -> None:
        asking = asyncio.create_task(proxy.ask(STREAM))
        await asyncio.sleep(1.0)
        proxy.state.routing.router.replicas.drain("r0", now=proxy.now_s)
        assert await move_from(proxy, "r0") == 1
        assert text_of((await asking).body).endswith("cd")

    virtually(test, [late], [REST])


def test_a_rest_without_memory_to_retain_it_passes_and_is_not_continued() -> None:
    rest = Script([said("c", name="second"), 5.0, said("z", name="second"), LOST])

    async def test(proxy: VirtualProxy) -> None:
        budget = proxy.state.buffers

        async def upload() -> None:
            await asyncio.sleep(2.0)
            large = budget.new_buffer("another", now=proxy.now_s)
            assert budget.reserve(large, budget.size_limit, now=proxy.now_s)
            budget.close(large)

        answered, _ = await asyncio.gather(proxy.ask(STREAM), upload())
        assert text_of(answered.body) == "abcz"
        assert b'"upstream_failed"' in answered.body
        assert proxy.replicas["r2"].received == []
        assert proxy.state.telemetry.metrics.stream_breaks()["not_continued"] == {"memory": 1}
        assert budget.used_bytes == 0

    virtually(test, [broken()], [rest], [REST])


@pytest.mark.parametrize(
    ("body", "limits", "why"),
    [
        (STREAM[:-1] + b', "logprobs": true}', {}, "request"),
        (STREAM, {"continuations": 0}, "request"),
        (STREAM, {"continuations": 1}, "no_replica"),
    ],
)
def test_an_answer_that_is_not_continued_is_counted_by_why_it_could_not_be(
    body: bytes, limits: dict[str, Any], why: str
) -> None:
    async def test(proxy: VirtualProxy) -> None:
        assert b'"upstream_failed"' in (await proxy.ask(body)).body
        assert proxy.total("gorgo_streams_not_continued_total", reason=why) == 1.0
        streams = proxy.state.telemetry.metrics.stream_breaks()
        assert streams["not_continued"] == {why: 1}
        assert streams["continued"] == ({"disconnected": 1} if limits.get("continuations") else {})

    virtually(test, [broken()], [Script([said("c", name="second"), LOST])], [REST], **limits)


def test_an_error_of_the_engine_that_is_passed_on_is_counted_once() -> None:
    async def test(proxy: VirtualProxy) -> None:
        await proxy.ask(STREAM)
        assert proxy.state.telemetry.metrics.stream_breaks()["not_continued"] == {"request": 1}

    failure = event({"error": {"message": "cuda", "code": 500}})
    virtually(test, [broken(failure, DONE)], [REST], continuations=0)


def test_a_drained_replica_gives_no_stream_to_one_whose_queue_is_long() -> None:
    long = chat(stream=True, messages=[{"role": "user", "content": "word " * 60_000}])
    busy = Script([said("x"), said("", "stop"), DONE], head_s=4.0)

    async def test(proxy: VirtualProxy) -> None:
        router = proxy.state.routing.router
        asking = asyncio.create_task(proxy.ask(STREAM))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(proxy.ask(long))
        await asyncio.sleep(0.5)
        backlog_s = router.view.snapshots(now=proxy.now_s)[1].backlog_s
        assert backlog_s > 1.0
        assert router.view.has_short_queue(backlog_s=backlog_s + 0.01, now=proxy.now_s)
        router.replicas.drain("r0", now=proxy.now_s)
        assert not router.view.has_short_queue(backlog_s=backlog_s - 0.01, now=proxy.now_s)
        assert await move_from(proxy, "r0") == 1
        assert text_of((await asking).body) == "abcd"
        await waiting
        assert proxy.replicas["r1"].received[1].at_s > 4.1, "the long prompt is read"

    virtually(test, [broken(100.0, said("late"), DONE)], [busy, REST])


def words(text: str) -> list[str]:
    """An engine's tokens: each letter, and white space."""
    return list(text)


@pytest.mark.parametrize("trims", [False, True])
def test_an_engine_s_own_count_of_the_answer_bounds_the_rest(*, trims: bool) -> None:
    """An event may have several tokens. A template that trims has the engine say the white space again."""

    def tokens_of(asked: dict[str, Any]) -> list[str]:
        if "messages" not in asked:
            assert (asked["prompt"], asked["add_special_tokens"]) == (asked["content"], False)
            return words(asked["prompt"])
        assert (asked["continue_final_message"], asked["add_generation_prompt"]) == (True, False)
        last = asked["messages"][-1]["content"]
        return words(last.rstrip() if trims else last)

    spaces = [said(" ", name="second"), said("\n", name="second")] if trims else []
    usage = event({"id": "second", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}})
    rest = Script([ROLE, *spaces, said("f", name="second"), said("", "length", "second"), usage, DONE])

    async def test(proxy: VirtualProxy) -> None:
        proxy.replicas["r1"].tokens_of = tokens_of
        answered = await proxy.ask(chat(stream=True, max_tokens=10))
        assert text_of(answered.body) == "abcde \nf"
        asked = json.loads(proxy.replicas["r1"].received[0].body)
        assert asked["max_tokens"] == (5 if trims else 3)
        sample = proxy.state.routing.router.samples.after(0, 1)["samples"][0]
        assert sample["output_tokens"] == (9 if trims else 11)

    virtually(test, [Script([said("abc"), said("de \n"), LOST])], [rest])


def test_an_answer_that_can_go_on_elsewhere_has_no_length() -> None:
    """An engine that knows the length of its stream says it; that of the whole answer is another."""
    steps = broken().steps
    size = sum(len(step) for step in steps if isinstance(step, bytes)) + 500
    first = Script(steps, headers=(*EVENTS, (b"content-length", b"%d" % size)))

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert (text_of(answered.body), answered.complete) == ("abcd", True)
        assert "content-length" not in answered.headers

    virtually(test, [first], [REST])


def test_more_tokens_than_the_text_has_bytes_are_not_believed() -> None:
    async def test(proxy: VirtualProxy) -> None:
        proxy.replicas["r1"].tokens_of = lambda _: ["x"] * 4
        await proxy.ask(chat(stream=True, max_tokens=10))
        assert json.loads(proxy.replicas["r1"].received[0].body)["max_tokens"] == 8

    virtually(test, [broken()], [REST])


def test_an_engine_without_a_count_is_given_one_token_for_each_event() -> None:
    async def test(proxy: VirtualProxy) -> None:
        assert text_of((await proxy.ask(chat(stream=True, max_tokens=10))).body) == "abcd"
        assert json.loads(proxy.replicas["r1"].received[0].body)["max_tokens"] == 8

    virtually(test, [broken()], [REST])


# A stream that stands still or is moved stays open until the rest of its answer begins elsewhere.


def late_rest(head_s: float, *steps: Step) -> Script:
    """Return a rest whose first content comes so long after it is asked for."""
    return Script([ROLE, said("c", name="second"), *steps, said("", "stop", "second"), DONE], head_s=head_s)


def ended_once(stream: bytes) -> bool:
    return stream.count(b"[DONE]") == stream.count(b'"stop"') == 1 and b'"error"' not in stream


def test_a_stalled_stream_that_goes_on_before_the_rest_begins_keeps_its_answer_and_blames_nobody() -> None:
    usage = event({"id": "first", "choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 4}})
    resumed = broken(6.0, said("C"), 1.0, said("D"), said("", "stop"), usage, DONE)

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM[:-1] + b', "stream_options": {"include_usage": true}}')
        assert answered.body == said("a") + said("b") + said("C") + said("D") + said("", "stop") + usage + DONE
        (asked,) = proxy.replicas["r1"].received
        assert asked.at_s == pytest.approx(5.1), "while the first one is open"
        assert asked.closed_s == pytest.approx(6.2), "with the first event of the other"
        sample = proxy.state.routing.router.samples.after(0, 1)["samples"][0]
        assert (sample["replica"], sample["continued"], sample["retries"]) == ("r0", 0, 0)
        assert (sample["input_tokens"], sample["output_tokens"]) == (12, 4)
        views = proxy.state.routing.router.view.snapshots(now=proxy.now_s)
        assert [(view.failures, view.in_flight_requests) for view in views] == [(0, 0)] * 2
        assert proxy.total("gorgo_streams_continued_total", reason="stalled") == 0.0
        assert proxy.total("gorgo_attempts_total", replica="r1", region="there", result="superseded") == 1.0
        assert proxy.state.buffers.used_bytes == 0
        proxy.state.routing.router.check()

    virtually(test, [resumed], [late_rest(3.0)])


def test_a_stalled_stream_stays_open_until_the_rest_begins_and_is_closed_then() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert text_of(answered.body) == "abc"
        assert ended_once(answered.body)
        assert proxy.replicas["r0"].received[0].closed_s == pytest.approx(8.1)
        view = proxy.state.routing.router.view.snapshots(now=proxy.now_s)[0]
        assert view.failures == 1, "it stood still"

    virtually(test, [broken(100.0, said("late"), DONE)], [late_rest(3.0)])


def test_a_comment_of_a_stalled_stream_is_no_sign_of_its_answer() -> None:
    async def test(proxy: VirtualProxy) -> None:
        assert text_of((await proxy.ask(STREAM)).body) == "abc"

    virtually(test, [broken(6.0, b": ping\n\n", 100.0)], [late_rest(3.0)])


def test_a_rest_that_fails_leaves_a_stalled_stream_as_it_was_and_the_next_one_is_asked_a_second_later() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert text_of(answered.body) == "abc"
        assert [each.at_s for name in ("r1", "r2") for each in proxy.replicas[name].received] == pytest.approx(
            [5.1, 6.1]
        )
        sample = proxy.state.routing.router.samples.after(0, 1)["samples"][0]
        assert (sample["continued"], sample["status"]) == (1, 200)

    virtually(test, [broken(100.0)], [Script(refuses="connect_failed")], [late_rest(3.0)], continuations=1)


def test_a_stalled_stream_that_ends_is_left_to_the_rest_that_was_asked_for() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert text_of(answered.body) == "abc"
        assert ended_once(answered.body)
        assert len(proxy.replicas["r1"].received) == 1
        assert proxy.replicas["r2"].received == []
        assert proxy.total("gorgo_streams_continued_total", reason="stalled") == 1.0

    virtually(test, [broken(6.0, LOST)], [late_rest(3.0)], [REST])


def test_a_stalled_stream_and_the_rest_that_both_fail_go_on_at_a_third_replica() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert text_of(answered.body) == "abcd"
        assert ended_once(answered.body)
        assert [len(proxy.replicas[name].received) for name in ("r1", "r2")] == [1, 1]

    virtually(test, [broken(6.0, LOST)], [Script(head_s=3.0, refuses="disconnected")], [REST])


#: A stream that says a word each 100 ms.
LIVELY = broken(*(step for number in range(40) for step in (said(f" {number}"), 0.1)), said("", "stop"), DONE)
WORDS = "ab" + "".join(f" {number}" for number in range(40))


async def drained(proxy: VirtualProxy, name: str = "r0", after_s: float = 1.05) -> Any:
    """Ask, drain the replica then, and return the answer and how many streams were moved."""
    asking = asyncio.create_task(proxy.ask(STREAM))
    await asyncio.sleep(after_s)
    proxy.state.routing.router.replicas.drain(name, now=proxy.now_s)
    return await asyncio.gather(asking, move_from(proxy, name))


def test_a_moved_stream_is_read_on_until_the_rest_begins_and_no_character_is_doubled_or_missing() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered, moved = await drained(proxy)
        said_before = json.loads(proxy.replicas["r1"].received[0].body)["messages"][-1]["content"]
        assert (moved, text_of(answered.body)) == (1, said_before + "c")
        assert WORDS.startswith(said_before)
        assert ended_once(answered.body)
        assert proxy.replicas["r0"].received[0].closed_s == pytest.approx(2.05)
        assert proxy.total("gorgo_streams_continued_total", reason="moved") == 1.0
        view = proxy.state.routing.router.view.snapshots(now=proxy.now_s)[0]
        assert (view.failures, view.in_flight_requests) == (0, 0)

    virtually(test, [LIVELY], [late_rest(1.0)])


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Script(head_s=1.0, refuses="disconnected"), id="it breaks off"),
        pytest.param(Script([b"{}"], status=400, head_s=1.0), id="it is refused"),
        pytest.param(Script(head_s=1.0), id="it has no content"),
        pytest.param(late_rest(1000.0), id="the stream ends before it begins"),
    ],
)
def test_a_move_that_fails_costs_the_answer_nothing(other: Script) -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered, _ = await drained(proxy)
        assert text_of(answered.body) == WORDS
        assert ended_once(answered.body)
        assert b"x-gorgo-continued" not in answered.body
        assert answered.at_s == pytest.approx(4.2)
        sample = proxy.state.routing.router.samples.after(0, 1)["samples"][0]
        assert (sample["replica"], sample["continued"], sample["status"]) == ("r0", 0, 200)
        assert proxy.total("gorgo_streams_continued_total", reason="moved") == 0.0
        assert proxy.state.buffers.used_bytes == 0
        proxy.state.routing.router.check()

    virtually(test, [LIVELY], [other])


def test_a_move_holds_an_answer_back_for_a_bounded_time_and_the_pause_is_a_gap() -> None:
    long = broken(*(step for number in range(300) for step in (said(f" {number}"), 0.1)), said("", "stop"), DONE)

    async def test(proxy: VirtualProxy) -> None:
        answered, _ = await drained(proxy)
        assert text_of(answered.body) == "ab" + "".join(f" {number}" for number in range(300))
        times = [at_s for at_s, part in answered.parts if b"data:" in part]
        pauses = [later - earlier for earlier, later in pairwise(times) if later - earlier > 0.2]
        assert pauses == [pytest.approx(MOST_PAUSE_S, abs=0.2)]
        assert proxy.replicas["r1"].received[0].closed_s == pytest.approx(11.1, abs=0.2)

    virtually(test, [long], [late_rest(1000.0)])


def test_a_move_holds_a_bounded_size() -> None:
    large = said("x" * 50_000)
    many = broken(*(step for _ in range(20) for step in (large, 0.1)), said("", "stop"), DONE)

    async def test(proxy: VirtualProxy) -> None:
        answered, _ = await drained(proxy, after_s=0.35)
        assert text_of(answered.body) == "ab" + "x" * 1_000_000
        assert ended_once(answered.body)
        assert proxy.replicas["r1"].received[0].closed_s == pytest.approx(0.9, abs=0.15)

    virtually(test, [many], [late_rest(1000.0)])


def test_an_error_of_the_engine_while_its_stream_is_moved_is_withheld_and_the_rest_goes_on() -> None:
    failure = event({"error": {"message": "cuda", "code": 500}})
    words = [step for number in range(12) for step in (said(f" {number}"), 0.1)]

    async def test(proxy: VirtualProxy) -> None:
        answered, _ = await drained(proxy)
        said_before = json.loads(proxy.replicas["r1"].received[0].body)["messages"][-1]["content"]
        assert text_of(answered.body) == said_before + "c"
        assert ended_once(answered.body)

    virtually(test, [broken(*words, failure, DONE)], [late_rest(1.0)])


def test_a_rest_is_moved_with_its_stream_read_on_too() -> None:
    lively = [step for number in range(40) for step in (said(f" {number}", name="second"), 0.1)]
    rest = Script([*lively, said("", "stop", "second"), DONE])

    async def moved_to(proxy: VirtualProxy, text: str) -> None:
        answered, _ = await drained(proxy, "r1")
        assert text_of(answered.body) == text
        assert ended_once(answered.body)

    virtually(lambda proxy: moved_to(proxy, "ab 0 1 2 3 4 5 6 7 8c"), [broken()], [rest], [late_rest(1.0)])
    virtually(lambda proxy: moved_to(proxy, WORDS), [broken()], [rest], [Script(head_s=1.0, refuses="disconnected")])


def test_a_client_that_leaves_while_both_are_open_leaves_no_load() -> None:
    async def test(proxy: VirtualProxy) -> None:
        asking = asyncio.create_task(proxy.ask(STREAM, leaves_s=1.5))
        await asyncio.sleep(1.05)
        proxy.state.routing.router.replicas.drain("r0", now=proxy.now_s)
        await asyncio.gather(asking, move_from(proxy, "r0"))
        sample = proxy.state.routing.router.samples.after(0, 1)["samples"][0]
        assert (sample["status"], sample["continued"]) == (499, 0)
        assert proxy.state.buffers.used_bytes == 0

    virtually(test, [LIVELY], [late_rest(3.0)])


def test_memory_that_is_given_up_while_both_are_open_costs_no_character() -> None:
    async def test(proxy: VirtualProxy) -> None:
        budget = proxy.state.buffers

        async def upload() -> None:
            await asyncio.sleep(1.5)
            large = budget.new_buffer("another", now=proxy.now_s)
            assert budget.reserve(large, budget.size_limit, now=proxy.now_s)
            budget.close(large)

        (answered, _), _ = await asyncio.gather(drained(proxy), upload())
        assert ended_once(answered.body)
        assert text_of(answered.body) in (WORDS, "ab 0 1 2 3 4 5 6 7 8c")
        assert budget.used_bytes == 0

    for other in (late_rest(1.0), Script(head_s=1.0, refuses="disconnected")):
        virtually(test, [LIVELY], [other])


def test_a_client_that_leaves_behind_the_end_of_a_rest_has_had_its_answer() -> None:
    usage = event({"id": "second", "choices": [], "usage": {"prompt_tokens": 14, "completion_tokens": 3}})

    async def test(proxy: VirtualProxy) -> None:
        asked = STREAM[:-1] + b', "stream_options": {"include_usage": true}}'
        answered = await proxy.ask(asked, leaves_s=5.0)
        assert (text_of(answered.body), answered.complete) == ("abc", False)
        sample = proxy.state.routing.router.samples.after(0, 1)["samples"][0]
        assert (sample["status"], sample["input_tokens"], sample["output_tokens"]) == (200, 12, 5)
        assert proxy.total("gorgo_client_disconnects_total") == 0.0

    virtually(test, [broken()], [Script([said("c", name="second"), said("", "stop", "second"), usage, 100.0, DONE])])


def test_a_client_that_leaves_in_the_middle_of_a_rest_has_not_had_its_answer() -> None:
    async def test(proxy: VirtualProxy) -> None:
        await proxy.ask(STREAM, leaves_s=5.0)
        assert proxy.state.routing.router.samples.after(0, 1)["samples"][0]["status"] == 499

    virtually(test, [broken()], [Script([said("c", name="second"), 100.0])])


def answer_with(upstream: ScriptedUpstream, first: Callable[[], Script], rest: Script) -> None:
    """Let a replica answer requests with `first`, and those for the rest of an answer with `rest`."""
    plain = upstream.open

    async def open_next(path: str, headers: Any, body: bytes, **more: Any) -> Any:
        is_rest = json.loads(body)["messages"][-1]["role"] == "assistant"
        upstream.scripts = [rest if is_rest else first()]
        return await plain(path, headers, body, **more)

    upstream.open = open_next  # type: ignore[method-assign]


def alternating(upstream: ScriptedUpstream, rest: Script) -> None:
    """Let every other answer break off, and each rest be whole."""
    number, whole = count(), Script([said("a"), said("b"), said("", "stop"), DONE])
    answer_with(upstream, lambda: broken() if next(number) % 2 == 0 else whole, rest)


def lost_of_alternating(rest: Script) -> int:
    """Return how many of 24 answers had no end."""
    found: list[bool] = []

    async def test(proxy: VirtualProxy) -> None:
        for upstream in proxy.replicas.values():
            alternating(upstream, rest)
        for _ in range(24):
            found.append(ended_once((await proxy.ask(STREAM)).body))
            await asyncio.sleep(0.2)
        states = set(proxy.state.routing.router.view.health_states().values())
        assert all(found) == (states == {"healthy"})

    virtually(test, [REST], [REST])
    return found.count(False)


def test_replicas_of_which_every_other_answer_breaks_off_do_not_eject_each_other_where_each_rest_is_whole() -> None:
    assert lost_of_alternating(REST) == 0


def test_a_rest_of_a_token_is_no_proof_that_its_replica_does_not_break_answers_off() -> None:
    assert lost_of_alternating(Script([said("", "stop", "second"), DONE])) > 0


def test_a_rest_that_stands_still_and_goes_on_first_blames_neither_replica() -> None:
    resumed = Script([said("c", name="second"), 6.0, said("d", name="second"), 0.1, said("", "stop", "second"), DONE])

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert text_of(answered.body) == "abcd"
        assert ended_once(answered.body)
        assert [len(proxy.replicas[name].received) for name in ("r1", "r2")] == [1, 1]
        views = proxy.state.routing.router.view.snapshots(now=proxy.now_s)
        assert [view.failures for view in views] == [1, 0, 0]
        sample = proxy.state.routing.router.samples.after(0, 1)["samples"][0]
        assert (sample["replica"], sample["continued"], sample["retries"]) == ("r1", 1, 0)

    virtually(test, [broken()], [resumed], [late_rest(3.0)])


def vllm_event(text: str, finish: str | None = None) -> bytes:
    """An event as vLLM sends it, whose last bytes are those of each other one."""
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish, "token_ids": None}
    return event({"id": "first", "model": "m", "choices": [choice]})


@pytest.mark.parametrize("last", [vllm_event("", "abort"), vllm_event(" 6", "abort"), said("", "error")])
@pytest.mark.parametrize("together", [False, True])
def test_an_answer_that_an_engine_breaks_off_by_its_finish_reason_goes_on_elsewhere(
    last: bytes, together: bool
) -> None:
    words = [step for number in range(6) for step in (0.1, vllm_event(f" {number}"))]
    end = [last + DONE] if together else [last, DONE]

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert text_of(answered.body) == " 0 1 2 3 4 5cd"
        assert b"abort" not in answered.body
        assert ended_once(answered.body)
        assert proxy.total("gorgo_streams_continued_total", reason="error_event") == 1.0

    virtually(test, [Script([*words, 0.1, *end])], [REST])


def test_an_answer_that_an_engine_breaks_off_and_no_other_can_go_on_with_is_a_failure_of_its_replica() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert answered.body == said("a") + said("b") + said("", "abort")
        sample = proxy.state.routing.router.samples.after(0, 1)["samples"][0]
        assert sample["status"] == 502

    virtually(test, [broken(said("", "abort"))])


@pytest.mark.parametrize("size", [10, 100_000])
def test_an_answer_in_one_piece_that_an_engine_breaks_off_is_asked_for_elsewhere(size: int) -> None:
    def whole(text: str, finish: str) -> bytes:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
        return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}).encode()

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(chat())
        assert answered.body == whole("long", "stop")

    first = Script([whole("x" * size, "abort")], headers=JSON)
    virtually(test, [first], [Script([whole("long", "stop")], headers=JSON)])


def thought(text: str, name: str = "second") -> bytes:
    choices = [{"index": 0, "delta": {"reasoning_content": text}, "finish_reason": None}]
    return event({"id": name, "model": "m", "choices": choices})


THINKING = Script([0.2, ROLE, thought("hm"), thought("so"), said("c", name="second"), said("", "stop", "second"), DONE])


def test_a_rest_that_comes_as_a_chain_of_thought_goes_on_elsewhere_and_its_replica_has_not_failed() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert text_of(answered.body) == "abcd"
        assert b"reasoning" not in answered.body
        assert ended_once(answered.body)
        views = proxy.state.routing.router.view.snapshots(now=proxy.now_s)
        assert [view.failures for view in views] == [1, 0, 0]

    virtually(test, [broken()], [THINKING], [REST])


def test_an_answer_whose_rest_comes_as_a_chain_of_thought_everywhere_ends_with_an_error() -> None:
    async def test(proxy: VirtualProxy) -> None:
        for upstream in proxy.replicas.values():
            answer_with(upstream, broken, THINKING)
        for _ in range(2):
            answered = await proxy.ask(STREAM)
            assert (text_of(answered.body), b"reasoning" in answered.body) == ("ab", False)
            assert b'"upstream_failed"' in answered.body
        views = proxy.state.routing.router.view.snapshots(now=proxy.now_s)
        assert sum(view.failures for view in views) == 2, "of the first parts alone"
        assert set(proxy.state.routing.router.view.health_states().values()) == {"healthy"}

    virtually(test, [broken()], [THINKING], [THINKING])


def test_a_thought_in_the_text_ends_with_an_error_event() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert text_of(answered.body) == "<think>hm"
        assert b'"upstream_failed"' in answered.body
        assert proxy.replicas["r1"].received == []

    virtually(test, [Script([said("<think>"), 0.1, said("hm"), LOST])], [REST])


def test_half_a_character_at_the_end_is_cut_at_the_last_whole_one_and_its_other_half_comes_from_elsewhere() -> None:
    smile = "\U0001f600"
    rest = Script([ROLE, said(smile + "!", name="second"), said("", "stop", "second"), DONE])

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert json.loads(proxy.replicas["r1"].received[0].body)["messages"][-1]["content"] == "ab "
        units = text_of(answered.body).encode("utf-16-le", "surrogatepass")
        assert units.decode("utf-16-le") == f"ab {smile}!"

    virtually(test, [broken(said(" \ud83d"), LOST)], [rest])


# --- Over sockets: the replica of a stream and the one that is asked for the rest of its answer, both open at once.


STOP = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
BEGUN = (ROLE, delta("a"))
MOVED_REST = (delta("b"), STOP, DONE)


async def read(fleet: Running, begun: asyncio.Event) -> bytes:
    got = b""
    async with fleet.client.stream("POST", "/v1/chat/completions", content=chat(stream=True)) as response:
        async for chunk in response.aiter_bytes():
            got += chunk
            if delta("a") in got:
                begun.set()
    return got


async def both_open(start: Start, why: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Running, asyncio.Task[bytes]]:
    """Return a fleet whose first replica is silent behind `a`, and whose second one has been asked for the rest."""
    if why == "stalled":
        monkeypatch.setattr(response, "STALL_S", 0.05)
    other = (ROLE, delta("B"), STOP, DONE)
    fleet = await start.fleet([hang(*BEGUN, rest=MOVED_REST)], [hang(rest=other)])
    begun = asyncio.Event()
    reading = asyncio.create_task(read(fleet, begun))
    await asyncio.wait_for(begun.wait(), 20)
    if why == "moved":
        (await fleet.admin.post("/admin/replicas/r0/drain", json={"move": True})).raise_for_status()
    await asyncio.wait_for(fleet.replicas[1].arrived.wait(), 20)
    assert json.loads(fleet.replicas[1].seen[0].body)["messages"][-1] == {"role": "assistant", "content": "a"}
    assert not fleet.replicas[0].dropped.is_set()
    return fleet, reading


@pytest.mark.parametrize("why", ["moved", "stalled"])
async def test_the_old_stream_is_closed_once_the_rest_has_begun(
    start: Start, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, reading = await both_open(start, why, monkeypatch)
    fleet.replicas[1].release.set()
    got = await asyncio.wait_for(reading, 20)
    await asyncio.wait_for(fleet.replicas[0].dropped.wait(), 20)
    assert got.startswith(b"".join(BEGUN))
    assert got.count(b'"B"') == got.count(b"[DONE]") == got.count(b'"stop"') == 1
    assert b'"b"' not in got
    await fleet.idle()
    (sample,) = fleet.state.routing.router.samples
    assert (sample.replica, sample.continued, sample.retries) == ("r1", 1, 0)


@pytest.mark.parametrize("why", ["moved", "stalled"])
async def test_a_stream_that_goes_on_first_keeps_its_answer_and_the_other_connection_is_closed(
    start: Start, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, reading = await both_open(start, why, monkeypatch)
    fleet.replicas[0].release.set()
    got = await asyncio.wait_for(reading, 20)
    await asyncio.wait_for(fleet.replicas[1].dropped.wait(), 20)
    assert got == b"".join((*BEGUN, *MOVED_REST))
    await fleet.idle()
    (sample,) = fleet.state.routing.router.samples
    assert (sample.replica, sample.continued, sample.retries, sample.status) == ("r0", 0, 0, 200)
    views = fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())
    assert [(view.failures, view.in_flight_requests) for view in views] == [(0, 0), (0, 0)]
