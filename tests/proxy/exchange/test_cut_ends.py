"""Streams that break off behind their finish reason: what the client gets of the counts and the last event."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from gorgo.live.reload.reloader import move_streams
from gorgo.proxy.exchange.exchange import LACKS_COUNTS, MOST_CUT_ENDS
from tests.proxy.exchange.test_continuation import LOST, STREAM, answer_with, said, text_of, virtually
from tests.proxy.exchange.test_handler import config
from tests.proxy.fakes import DONE, ROLE, event
from tests.proxy.virtual import Script, ScriptedUpstream, Step, VirtualProxy, in_virtual_time

COUNTED = STREAM[:-1] + b', "stream_options": {"include_usage": true}}'
STOP = said("", "stop")


def usage(prompt: int, output: int, name: str = "first") -> bytes:
    return event(
        {"id": name, "model": "m", "choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}
    )


#: Two tokens and one that says the end.
WHOLE: list[Step] = [said("a"), 0.1, said("b"), 0.1, STOP, usage(9, 3), DONE]
#: What an engine says that is asked for one token behind "ab".
COUNTS = Script([0.2, ROLE, said("x", name="second"), said("", "length", "second"), usage(11, 1, "second"), DONE])


def cut(*steps: Any) -> Script:
    return Script([said("a"), 0.1, said("b"), 0.1, *steps, LOST])


def usages_of(stream: bytes) -> list[tuple[int, int]]:
    found = [json.loads(part[6:]) for part in stream.split(b"\n\n") if part.startswith(b"data: {")]
    return [(each["usage"]["prompt_tokens"], each["usage"]["completion_tokens"]) for each in found if "usage" in each]


def ends_of(stream: bytes) -> tuple[int, int, int]:
    return stream.count(b'"stop"') + stream.count(b'"length"'), stream.count(b"[DONE]"), stream.count(b'"error"')


def sample_of(proxy: VirtualProxy) -> dict[str, Any]:
    found: dict[str, Any] = proxy.state.routing.router.samples.after(0, 1)["samples"][0]
    return found


def failures_of(proxy: VirtualProxy) -> list[int]:
    return [view.failures for view in proxy.state.routing.router.view.snapshots(now=proxy.now_s)]


@pytest.mark.parametrize(
    ("body", "behind", "usages"),
    [
        pytest.param(STREAM, (), [], id="no counts are asked for"),
        pytest.param(COUNTED, (usage(9, 3),), [(9, 3)], id="the counts came"),
        pytest.param(COUNTED, (usage(9, 3), DONE[:5]), [(9, 3)], id="and a part of the last event"),
        pytest.param(COUNTED, (usage(9, 3), DONE), [(9, 3)], id="and the last event"),
        pytest.param(COUNTED, (usage(9, 3), event({"error": {"code": 500}})), [(9, 3)], id="and an error"),
    ],
)
def test_a_stream_that_lacks_nothing_but_its_last_event_gets_it_and_no_replica_is_asked_or_blamed(
    body: bytes, behind: tuple[bytes, ...], usages: list[tuple[int, int]]
) -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(body)
        assert (text_of(answered.body), usages_of(answered.body), ends_of(answered.body)) == ("ab", usages, (1, 1, 0))
        assert answered.complete
        assert answered.body.endswith(DONE)
        assert proxy.replicas["r1"].received == []
        assert (sample_of(proxy)["status"], failures_of(proxy)) == (200, [0, 0])

    virtually(test, [cut(STOP, *behind)], [COUNTS])


def test_counts_that_did_not_come_are_asked_for_elsewhere_and_no_replica_is_blamed() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(COUNTED)
        assert (text_of(answered.body), ends_of(answered.body)) == ("ab", (1, 1, 0))
        assert usages_of(answered.body) == [(9, 3)]
        (asked,) = proxy.replicas["r1"].received
        assert (json.loads(asked.body)["max_tokens"], json.loads(asked.body)["messages"][-1]["content"]) == (1, "ab")
        sample = sample_of(proxy)
        assert (sample["status"], sample["input_tokens"], sample["output_tokens"]) == (200, 9, 3)
        assert failures_of(proxy) == [0, 0]
        assert proxy.state.buffers.used_bytes == 0

    virtually(test, [cut(STOP)], [COUNTS])


def test_counts_that_each_event_has_are_known() -> None:
    def counted(text: str, output: int, finish: str | None = None) -> bytes:
        return said(text, finish, usage={"prompt_tokens": 9, "completion_tokens": output})

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(COUNTED)
        assert usages_of(answered.body) == [(9, 1), (9, 2), (9, 3), (9, 3)]
        assert answered.body.endswith(b'"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\n' + DONE)
        assert proxy.replicas["r1"].received == []

    virtually(test, [Script([counted("a", 1), counted("b", 2), counted("", 3, "stop"), LOST])], [COUNTS])


def test_counts_in_the_event_with_the_finish_reason_alone_are_all_that_its_engine_sends() -> None:
    last = said("", "stop", usage={"prompt_tokens": 9, "completion_tokens": 3})

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(COUNTED)
        assert (usages_of(answered.body), ends_of(answered.body)) == ([(9, 3)], (1, 1, 0))
        assert proxy.replicas["r1"].received == []

    virtually(test, [cut(last)], [COUNTS])


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([], id="there is no other"),
        pytest.param([Script(refuses="connect_failed")], id="it is down"),
        pytest.param([Script([b"{}"], status=400)], id="it refuses"),
        pytest.param([Script(refuses="disconnected", head_s=0.1)], id="it breaks off"),
        pytest.param([Script([ROLE, said("x", name="second"), LOST])], id="it breaks off before the counts"),
        pytest.param([Script([ROLE, said("", "stop", "second")])], id="it has no counts"),
        pytest.param([Script([b"{}"], status=500)] * 3, id="all fail"),
        pytest.param([Script([ROLE, 10_000.0])], id="it is silent"),
    ],
)
def test_an_answer_whose_counts_no_replica_says_is_whole_and_the_log_says_that_they_are_missing(
    others: list[Script], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="gorgo")

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(COUNTED)
        assert (answered.status, answered.complete) == (200, True)
        assert (text_of(answered.body), usages_of(answered.body), ends_of(answered.body)) == ("ab", [], (1, 1, 0))
        assert answered.body.endswith(LACKS_COUNTS + DONE)
        assert (sample_of(proxy)["status"], failures_of(proxy)[0]) == (200, 0)
        assert proxy.total("gorgo_streams_not_continued_total", reason="no_replica") == 0.0
        proxy.state.routing.router.check()

    virtually(test, [cut(STOP)], *([other] for other in others[:2]))
    (found,) = [record for record in caplog.records if record.getMessage() == "request"]
    assert (found.fields["counts"], found.fields["status"]) == ("missing", 200)  # type: ignore[attr-defined]


def test_an_engine_that_always_ends_so_costs_its_fleet_few_prefills_and_is_not_ejected() -> None:
    async def test(proxy: VirtualProxy) -> None:
        for number in range(20):
            answered = await proxy.ask(COUNTED)
            assert (text_of(answered.body), ends_of(answered.body)) == ("ab", (1, 1, 0)), number
            await asyncio.sleep(0.5)
        asked = [json.loads(each.body) for name in ("r0", "r1") for each in proxy.replicas[name].received]
        counts = [body for body in asked if body["messages"][-1]["role"] == "assistant"]
        assert len(counts) <= 2 * MOST_CUT_ENDS
        assert set(proxy.state.routing.router.view.health_states().values()) == {"healthy"}
        assert failures_of(proxy) == [0, 0]

    virtually(test, [cut(STOP)], [cut(STOP)])


def test_counts_are_asked_for_again_once_the_engine_has_ended_as_others_do() -> None:
    first = [cut(STOP)]

    async def test(proxy: VirtualProxy) -> None:
        for upstream in proxy.replicas.values():
            answer_with(upstream, lambda: first[0], COUNTS)
        found = [usages_of((await proxy.ask(COUNTED)).body) for _ in range(3 * MOST_CUT_ENDS)]
        assert [(9, 3)] in found
        assert found[-1] == []
        first[:] = [Script(WHOLE)]
        for _ in range(2 * MOST_CUT_ENDS):
            assert usages_of((await proxy.ask(COUNTED)).body) == [(9, 3)]
        first[:] = [cut(STOP)]
        assert usages_of((await proxy.ask(COUNTED)).body) == [(9, 3)]

    virtually(test, [COUNTS], [COUNTS])


def test_a_rest_that_breaks_off_before_its_counts_leaves_them_to_a_third_replica() -> None:
    second = Script([ROLE, said("c", name="second"), said("", "stop", "second"), LOST])
    third = Script([ROLE, said("x", name="third"), said("", "length", "third"), usage(12, 1, "third"), DONE])

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(COUNTED)
        assert (text_of(answered.body), ends_of(answered.body)) == ("abc", (1, 1, 0))
        assert usages_of(answered.body) == [(9, 4)]
        assert failures_of(proxy) == [1, 0, 0]
        assert sample_of(proxy)["status"] == 200

    virtually(test, [cut()], [second], [third])


@pytest.mark.parametrize("steps", [(usage(12, 2, "second"),), (usage(12, 2, "second"), DONE[:4])])
def test_a_rest_that_breaks_off_behind_its_counts_is_whole(steps: tuple[bytes, ...]) -> None:
    second = Script([ROLE, said("c", name="second"), said("", "stop", "second"), *steps, LOST])

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(COUNTED)
        assert (text_of(answered.body), usages_of(answered.body)) == ("abc", [(10, 4)])
        assert ends_of(answered.body) == (1, 1, 0)
        assert proxy.replicas["r2"].received == []

    virtually(test, [cut()], [second], [COUNTS])


def test_counts_that_break_off_behind_themselves_are_not_said_twice() -> None:
    counts = Script([ROLE, said("x", name="second"), said("", "length", "second"), usage(11, 1, "second"), LOST])

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(COUNTED)
        assert (usages_of(answered.body), ends_of(answered.body)) == ([(9, 3)], (1, 1, 0))
        assert proxy.replicas["r2"].received == []

    virtually(test, [cut(STOP)], [counts], [COUNTS])


def test_every_byte_behind_the_finish_reason_leaves_one_end_one_count_and_one_last_event() -> None:
    stream = b"".join(step for step in WHOLE if isinstance(step, bytes))
    begins = stream.index(STOP) + len(STOP)
    failed = []
    for place in range(begins, len(stream) + 1):

        async def test(proxy: VirtualProxy, place: int = place) -> None:
            answered = await proxy.ask(COUNTED)
            found = text_of(answered.body), usages_of(answered.body), ends_of(answered.body)
            if found != ("ab", [(9, 3)], (1, 1, 0)):
                failed.append((place, found))

        virtually(test, [Script([stream[:begins], 0.1, stream[begins:place], LOST])], [COUNTS])
    assert not failed


def test_a_stream_that_stays_open_behind_its_finish_reason_is_whole_once_its_time_is_over() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert (text_of(answered.body), ends_of(answered.body)) == ("ab", (1, 1, 0))
        assert sample_of(proxy)["status"] == 200

    virtually(test, [Script([said("a"), 0.1, said("b"), STOP, 10_000.0])])


MESSAGE: list[dict[str, Any]] = [
    {"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 9, "output_tokens": 0}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "ab"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}},
]


def test_a_message_and_an_answer_of_generate_have_their_counts_and_get_their_last_event() -> None:
    message = [b"event: %s\ndata: %s\n\n" % (each["type"].encode(), json.dumps(each).encode()) for each in MESSAGE]
    meta = {"prompt_tokens": 9, "completion_tokens": 3, "finish_reason": {"type": "stop"}}
    generated = [event({"text": "ab", "meta_info": meta})]
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    async def ask(proxy: VirtualProxy, route: str, body: bytes, whole: bytes) -> None:
        answered = await proxy.ask(body, route=route)
        assert answered.body == whole
        assert answered.complete

    body = b'{"model": "m", "max_tokens": 9, "stream": true, "messages": [{"role": "user", "content": "hi"}]}'
    for engine in ("vllm", "llamacpp"):
        virtually(
            lambda proxy: ask(proxy, "/v1/messages", body, b"".join(message) + stop),
            [Script([*message, LOST])],
            [COUNTS],
            engines=engine,
        )
    virtually(
        lambda proxy: ask(proxy, "/generate", b'{"text": "p", "stream": true}', generated[0] + DONE),
        [Script([*generated, LOST])],
        [COUNTS],
        engines="sglang",
    )


def test_an_engine_of_which_it_is_not_known_gets_no_last_event() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert answered.body == said("a") + said("b") + STOP
        assert answered.complete

    virtually(test, [cut(STOP)], [COUNTS], engines="openai")
    virtually(test, [cut(STOP)], [COUNTS], continuations=0)


# --- Answers of numbered words before replicas that pause, break off, fail and are drained at random.


WORDS = 60
NAMES = ("r0", "r1", "r2")


def behind(body: bytes) -> int:
    """Return how many words a request says that its client has."""
    last = json.loads(body)["messages"][-1]
    if last["role"] != "assistant":
        return 0
    words = last["content"].split()
    assert words == [str(number) for number in range(len(words))]
    return len(words)


def script_of(body: bytes, rng: random.Random) -> Script:
    """Return the rest of the answer, with what happens to it."""
    if rng.random() < 0.1:
        return Script(head_s=rng.choice((0.0, 2.0)), refuses=rng.choice(("disconnected", "connect_failed", "timeout")))
    if rng.random() < 0.05:
        return Script([b"{}"], status=rng.choice((400, 500, 503)))
    steps: list[Step] = [ROLE]
    for number in range(behind(body), WORDS):
        word = said(f"{number} ", name=f"id{rng.random()}")
        cut = rng.randrange(1, len(word))
        steps += [word] if rng.random() < 0.7 else [word[:cut], rng.choice((0.0, 0.02)), word[cut:]]
        steps.append(rng.choice((0.03, 0.05, 0.08)))
        chance = rng.random()
        if chance < 0.02:
            steps.append(rng.uniform(4.0, 14.0))
        elif chance < 0.03:
            steps += [b": ping\n\n", 200.0]
        elif chance < 0.045:
            return Script([*steps, LOST], head_s=rng.uniform(0.0, 3.0))
        elif chance < 0.055:
            return Script([*steps, event({"error": {"message": "cuda", "code": 500}}), DONE])
    return Script(
        [*steps, said("", "stop"), *rng.choice(([DONE], [0.1, DONE], [], [LOST], [0.1, LOST]))],
        head_s=rng.uniform(0.0, 3.0),
    )


def at_random(upstream: ScriptedUpstream, rng: random.Random) -> None:
    plain = upstream.open

    async def open_next(path: str, headers: Any, body: bytes, **more: Any) -> Any:
        upstream.scripts = [script_of(body, rng)]
        return await plain(path, headers, body, **more)

    upstream.open = open_next  # type: ignore[method-assign]


async def drains(proxy: VirtualProxy, rng: random.Random) -> None:
    """Drain one replica after the other and move its streams, for a while each."""
    router = proxy.state.routing.router
    while True:
        await asyncio.sleep(rng.uniform(0.2, 3.0))
        name = rng.choice(NAMES)
        router.replicas.drain(name, now=proxy.now_s)
        moving = asyncio.create_task(move_streams(proxy.state, proxy.state.replicas.targets[name]))
        await asyncio.sleep(rng.uniform(0.2, 4.0))
        router.replicas.drain(name, False, now=proxy.now_s)
        await moving


async def reads(proxy: VirtualProxy, rng: random.Random) -> str:
    """Ask, and return the end of the answer, whose words are checked."""
    leaves_s = rng.uniform(0.1, 10.0) if rng.random() < 0.1 else None

    async def slow(_: bytes) -> None:
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.0, 0.5)))

    answered = await proxy.ask(STREAM, leaves_s=leaves_s, reads=slow if rng.random() < 0.3 else None)
    words = text_of(answered.body).split()
    assert words == [str(number) for number in range(len(words))]
    ends = answered.body.count(b'"stop"'), answered.body.count(b"[DONE]"), answered.body.count(b'"upstream_failed"')
    whole = len(words) == WORDS
    if leaves_s is None and answered.status == 200:
        assert ends[:2] <= (1, 1)
        assert ends == (1, 1, 0) if whole and ends[0] else ends[2] or b'"cuda"' in answered.body, answered.body
    return "whole" if whole else "broken"


def served_at_random(seed: int) -> Counter[str]:
    """Return how many answers were whole, why answers went on elsewhere, and how many attempts were cancelled."""
    rng = random.Random(seed)
    found: Counter[str] = Counter()

    async def test(proxy: VirtualProxy) -> None:
        for upstream in proxy.replicas.values():
            at_random(upstream, rng)
        draining = asyncio.create_task(drains(proxy, rng))
        found.update(await asyncio.gather(*(reads(proxy, rng) for _ in range(6))))
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        await asyncio.sleep(100.0)
        proxy.state.routing.router.check()
        assert proxy.state.buffers.used_bytes == 0
        assert not any(target.streams or target.active for target in proxy.state.replicas.targets.values())
        found.update(proxy.state.telemetry.metrics.stream_breaks()["continued"])
        for name in NAMES:
            region = proxy.state.replicas.targets[name].region
            labels = {"replica": name, "region": region, "result": "superseded"}
            found["superseded"] += int(proxy.total("gorgo_attempts_total", **labels))

    known = config(continuations=4, request_timeout_s=600.0)
    rows = (*known.replicas, replace(known.replicas[1], name="r2"))
    rows = tuple(replace(row, engine="vllm") for row in rows)
    in_virtual_time(test, replace(known, replicas=rows), {name: [Script()] for name in NAMES})
    return found


def test_each_word_comes_once_and_in_order() -> None:
    found = sum(map(served_at_random, range(24)), Counter[str]())
    # More attempts were cancelled than streams were moved: some of the moves were undone by the stream itself.
    assert found["superseded"] > found["moved"] > 0
    assert min(found[kind] for kind in ("whole", "stalled", "disconnected", "error_event")) > 0
