"""The parts of a run of chaos on their own: answers that fail, the gate, the questions with their verdicts, the
schedule.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gorgo.core.stream import FirstTokenDetector, StreamState
from gorgo.lab.engine_server.job import CHAT, COMPLETIONS, GENERATE
from tests.chaos.failing import FastFailure, Received, answer_to, read_request
from tests.chaos.fleet import REPLICAS
from tests.chaos.gate import HOST, Gate
from tests.chaos.questions import Ending, Question, draw_questions, judge
from tests.chaos.run import BRIEF, FULL, SHORT, Plan, plan_schedule
from tests.chaos.schedule import CONFIGURATION, RECOVERY_S, Kind, Planned
from tests.chaos.test_processes import BRIEF_SEED
from tests.proxy.fakes import DONE, event

# --- Answers of a replica that fails fast: each is what its name says, and no client takes one for the right answer.


QUESTIONS = {(each.route, each.stream): each for each in draw_questions(5, seconds=20.0, per_s=10.0)}
WITH_STATUS = [each for each in FastFailure if each.status != 200]


def received(question: Question) -> Received:
    return Received("POST", question.route, json.loads(question.body))


def split(data: bytes) -> tuple[int, bool, bytes]:
    """Return status, whether all of the body is there, and the body."""
    head, _, body = data.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if b"content-length: " in head:
        return status, len(body) == int(head.rsplit(b"content-length: ", 1)[1]), body
    chunks = []
    while body and (size := int(body.split(b"\r\n", 1)[0], 16)):
        rest = body.split(b"\r\n", 1)[1]
        chunks.append(rest[:size])
        body = rest[size + 2 :]
    return status, body == b"0\r\n\r\n", b"".join(chunks)


@pytest.mark.parametrize("failure", FastFailure)
@pytest.mark.parametrize("asked", QUESTIONS, ids=str)
def test_no_answer_passes_for_the_right_one(failure: FastFailure, asked: tuple[str, bool]) -> None:
    question = QUESTIONS[asked]
    status, _, body = split(answer_to(received(question), failure).data)
    assert judge(question, status, body).ending is not Ending.COMPLETE


@pytest.mark.parametrize("failure", FastFailure)
@pytest.mark.parametrize("asked", QUESTIONS, ids=str)
def test_only_a_truncated_answer_is_incomplete_and_ends_the_connection(
    failure: FastFailure, asked: tuple[str, bool]
) -> None:
    answer = answer_to(received(QUESTIONS[asked]), failure)
    _, whole, _ = split(answer.data)
    assert (answer.closes, not whole) == ((failure is FastFailure.TRUNCATED,) * 2)


def test_failures_with_a_status_have_it_and_probes_are_refused_by_those_that_refuse_everything() -> None:
    question = QUESTIONS["/generate", True]
    found = {each.value: split(answer_to(received(question), each).data)[0] for each in WITH_STATUS}
    assert sorted(found.values()) == [401, 403, 404, 405, 429, 503]
    assert all(name.startswith(str(status)) for name, status in found.items())
    assert [each.status for each in FastFailure if each.on_probes] == [401, 403, 404, 405]


def test_answers_of_one_token_are_the_beginning_of_the_right_one_and_say_that_they_are_complete() -> None:
    for (route, stream), question in QUESTIONS.items():
        _, _, body = split(answer_to(received(question), FastFailure.ONE_TOKEN).data)
        short = replace(question, text=question.text[:4])
        verdict = judge(question, 200, body)
        assert verdict.reason is not None
        assert verdict.reason.startswith(f"{len(short.text)} characters"), (route, stream, verdict)


@pytest.mark.parametrize(
    ("failure", "state"),
    [
        (FastFailure.ERROR_EVENT, StreamState.ERROR),
        (FastFailure.NO_TOKEN, StreamState.WAITING),
        (FastFailure.ONE_TOKEN, StreamState.CONTENT),
        (FastFailure.UNFINISHED, StreamState.CONTENT),
        (FastFailure.TRUNCATED, StreamState.CONTENT),
    ],
)
def test_streams_begin_as_their_name_says(failure: FastFailure, state: StreamState) -> None:
    for (route, stream), question in QUESTIONS.items():
        if stream:
            _, _, body = split(answer_to(received(question), failure).data)
            assert FirstTokenDetector(route).feed(body) is state, route


def test_a_request_is_read_when_all_of_it_is_there() -> None:
    whole = b'POST /generate HTTP/1.1\r\nContent-Length: 15\r\n\r\n{"stream":true}'
    assert all(read_request(whole[:end]) is None for end in range(len(whole)))
    assert read_request(whole) == Received("POST", "/generate", {"stream": True})
    assert read_request(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n") == Received("GET", "/health", {})


# --- The gate: bytes pass as they are, and each way of cutting is what it says.


class Echo:
    """An engine that answers every piece with itself, and has figures."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                self.heard.append(data)
                figures = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n%02d" % len(self.heard)
                writer.write(figures if data.startswith(b"GET ") else data)
        with suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()
        self.open -= 1


@pytest.fixture
async def echo() -> Echo:
    return Echo()


@pytest.fixture
async def gate(echo: Echo) -> AsyncIterator[Gate]:
    server = await asyncio.start_server(echo.serve, HOST, 0)
    gate = Gate("a", server.sockets[0].getsockname()[1])
    await gate.open()
    yield gate
    await gate.close()
    server.close()
    async with asyncio.timeout(5):
        while gate.ends or echo.open:
            await asyncio.sleep(0.001)


async def said(gate: Gate, data: bytes, door: int = 0) -> bytes:
    """What comes back on a connection of its own."""
    async with asyncio.timeout(5), connected(gate, door) as (reader, writer):
        writer.write(data)
        return await reader.read(65536)


@asynccontextmanager
async def connected(gate: Gate, door: int = 0) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(HOST, gate.ports[door])
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("door", [0, 1])
async def test_bytes_pass_and_requests_are_noted(gate: Gate, door: int) -> None:
    asked = b"POST /v1/completions HTTP/1.1\r\nX-Request-Id: r-1\r\n\r\nbody"
    assert await said(gate, asked, door) == asked
    assert [name for name, _ in gate.passed] == ["r-1"]


async def test_refused_resets_what_is_open_and_takes_nothing_until_it_is_mended(gate: Gate) -> None:
    async with connected(gate) as (reader, writer):
        writer.write(b"hello")
        assert await reader.read(5) == b"hello"
        gate.cut("refused")
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
    with pytest.raises(ConnectionRefusedError):
        await said(gate, b"hello")
    await gate.mend("refused")
    assert await said(gate, b"hello") == b"hello"


async def test_silent_delays_what_is_sent_and_loses_nothing(gate: Gate, echo: Echo) -> None:
    gate.cut("silent")
    waiting = asyncio.create_task(said(gate, b"hello"))
    done, _ = await asyncio.wait((waiting,), timeout=0.1)
    assert not done
    assert echo.heard == []
    await gate.mend("silent")
    assert await waiting == b"hello"


async def test_dark_does_not_even_answer_a_syn(gate: Gate) -> None:
    gate.cut("dark")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await asyncio.open_connection(HOST, gate.ports[0])
    await gate.mend("dark")
    assert await said(gate, b"hello") == b"hello"


async def test_figures_hang_or_stand_still_while_requests_pass(gate: Gate) -> None:
    assert (await said(gate, b"GET /metrics HTTP/1.1\r\n\r\n"))[-2:] == b"01"
    await gate.freeze_figures()
    assert (await said(gate, b"GET /metrics HTTP/1.1\r\n\r\n"))[-2:] == b"02"
    assert (await said(gate, b"GET /metrics HTTP/1.1\r\n\r\n"))[-2:] == b"02"
    gate.figures = "hang"
    waiting = asyncio.create_task(said(gate, b"GET /metrics HTTP/1.1\r\n\r\n"))
    assert await said(gate, b"hello") == b"hello"
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait((waiting,))


async def test_an_engine_that_is_gone_resets(gate: Gate) -> None:
    gate.engine_port = 1
    with pytest.raises(ConnectionResetError):
        await said(gate, b"hello")


ASKED = b'POST /generate HTTP/1.1\r\nx-request-id: r-1\r\ncontent-length: 15\r\n\r\n{"stream":true}'


async def test_a_failing_replica_answers_requests_in_pieces_and_leaves_probes_to_the_engine(
    gate: Gate, echo: Echo
) -> None:
    gate.failure = FastFailure.TOO_MANY
    async with asyncio.timeout(5), connected(gate) as (reader, writer):
        for _ in range(2):
            for piece in (ASKED[:30], ASKED[30:-4], ASKED[-4:]):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429 ")
            await reader.readexactly(int(head.rsplit(b" ", 1)[1]))
        assert echo.heard == []
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        assert (await reader.read(65536))[-2:] == b"01"


async def test_a_replica_that_refuses_everything_refuses_probes_and_is_well_again_afterwards(gate: Gate) -> None:
    gate.failure = FastFailure.UNAUTHORIZED
    async with asyncio.timeout(5), connected(gate) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401 ")
    gate.failure = None
    assert await said(gate, ASKED) == ASKED


async def test_a_truncated_answer_ends_the_connection(gate: Gate) -> None:
    gate.failure = FastFailure.TRUNCATED
    async with asyncio.timeout(5), connected(gate) as (reader, writer):
        writer.write(ASKED.replace(b'{"stream":true}', b'{"text":"a   "}'))
        data = await reader.read()
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert 0 < len(body) < int(head.rsplit(b" ", 1)[1])


# --- The verdict on an answer: what is right passes, and nothing else does.


QUESTIONS_ASKED = draw_questions(5, seconds=20.0, per_s=10.0)
ERROR = event({"error": {"message": "broken", "type": "server_error", "param": None, "code": "upstream_failed"}})


def asked(route: str, *, stream: bool) -> Question:
    return next(each for each in QUESTIONS_ASKED if (each.route, each.stream) == (route, stream))


def ended(last: bytes) -> bytes:
    """The event with nothing new but a finish reason."""
    fields = json.loads(last[6:])
    if "choices" in fields:
        return event(fields | {"choices": [{"delta": {}, "text": "", "finish_reason": "stop"}]})
    return event(fields | {"meta_info": fields["meta_info"] | {"finish_reason": {"type": "stop"}}})


def counted(last: bytes) -> bytes:
    """The event with counts, and without choices where it has any."""
    fields: dict[str, Any] = json.loads(last[6:])
    if "choices" in fields:
        fields["choices"] = []
    return event(fields | {"usage": {"completion_tokens": 1}})


def events(question: Question, *, rid: str = "a") -> list[bytes]:
    """The right stream, without its end."""
    words = [question.text[at : at + 4] for at in range(0, len(question.text), 4)]
    made: list[dict[str, object]]
    if question.route == GENERATE:
        made = [{"text": question.text[: 4 * n], "meta_info": {"id": rid}} for n in range(1, len(words) + 1)]
    elif question.route == COMPLETIONS:
        made = [{"id": rid, "choices": [{"text": word}]} for word in words]
    else:
        made = [{"id": rid, "choices": [{"delta": {"content": word}}]} for word in words]
    return [event(each) for each in made]


def whole(question: Question) -> dict[str, object]:
    if question.route == GENERATE:
        return {"text": question.text, "meta_info": {"id": "a"}}
    if question.route == COMPLETIONS:
        return {"id": "a", "choices": [{"text": question.text}]}
    return {"id": "a", "choices": [{"message": {"content": question.text}}]}


def test_questions_repeat_with_their_seed_and_cover_every_route() -> None:
    assert draw_questions(5, seconds=20.0, per_s=10.0) == QUESTIONS_ASKED
    assert draw_questions(6, seconds=20.0, per_s=10.0) != QUESTIONS_ASKED
    assert len({(each.route, each.stream) for each in QUESTIONS_ASKED}) == 6
    assert len({each.request_id for each in QUESTIONS_ASKED}) == len(QUESTIONS_ASKED) == 200
    assert any(each.leaves_after_s is not None for each in QUESTIONS_ASKED)


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE])
def test_a_right_answer_is_complete(route: str) -> None:
    question = asked(route, stream=True)
    assert judge(question, 200, b"".join([*events(question), DONE])).ending is Ending.COMPLETE
    question = asked(route, stream=False)
    assert judge(question, 200, json.dumps(whole(question)).encode()).ending is Ending.COMPLETE


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE])
def test_an_error_event_after_the_beginning_of_the_right_answer_is_a_clean_cut(route: str) -> None:
    question = asked(route, stream=True)
    verdict = judge(question, 200, b"".join([*events(question)[:3], b"\n\n" + ERROR]))
    assert (verdict.ending, verdict.code, verdict.content) == (Ending.CUT, "upstream_failed", 3)
    torn = b"".join([*events(question)[:3], events(question)[3][:20], b"\n\n" + ERROR])
    assert judge(question, 200, torn).ending is Ending.CUT


def test_an_error_in_openai_s_form_is_a_refusal() -> None:
    question = asked(CHAT, stream=True)
    verdict = judge(question, 502, ERROR[6:].strip())
    assert (verdict.ending, verdict.code) == (Ending.REFUSED, "502 upstream_failed")


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE])
def test_nothing_else_passes(route: str) -> None:
    question = asked(route, stream=True)
    right = events(question)
    wrong = {
        "without an end": right,
        "two ends": [*right, DONE, DONE],
        "an end and an error": [*right, DONE, ERROR],
        "an error and an end": [*right[:3], ERROR, DONE],
        "something after the end": [*right, DONE, right[0]],
        "a token missing": [*right[:2], *right[3:], DONE] if route != GENERATE else [*right[:-1], DONE],
        "cut in mid-event": [*right[:3], right[3][:20]],
        "a torn event before the end": [*right[:3], right[3][:20] + b"\n\n", DONE],
        "two replicas": [*right[:3], *events(question, rid="b")[3:], DONE],
        "another text before an error": [*events(asked_otherwise(question))[:5], ERROR],
        "two finish reasons": [*right, ended(right[-1]), ended(right[-1]), DONE],
        "two counts of tokens": [*right, counted(right[-1]), counted(right[-1]), DONE],
        "nothing": [b""],
    }
    for name, parts in wrong.items():
        assert judge(question, 200, b"".join(parts)).ending is Ending.WRONG, name
    for status, body in ((500, b"oops"), (502, b'{"error": "no"}'), (302, ERROR[6:]), (404, b'{"detail": "no"}')):
        assert judge(question, status, body).ending is Ending.WRONG, body
    short = asked(route, stream=False)
    for body in (json.dumps(whole(asked_otherwise(short))).encode(), b"", b"[]", b'{"id": "a"}'):
        assert judge(short, 200, body).ending is Ending.WRONG, body


def asked_otherwise(question: Question) -> Question:
    """With an answer that is right for another prompt."""
    return replace(question, text=question.text[8:] + question.text[:8])


# --- The schedule: the same for the same seed, every kind in it, and somebody always well.


def drawn(seed: int, plan: Plan = SHORT) -> list[Planned]:
    return plan_schedule(plan, seed)


def test_a_seed_is_a_schedule() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


@pytest.mark.parametrize("plan", [FULL, BRIEF], ids=["full", "brief"])
def test_one_replica_is_well_at_every_moment_but_in_a_blackout(plan: Plan) -> None:
    for seed in range(20):
        planned = drawn(seed, plan)
        assert planned
        for fault in planned:
            if not fault.ill or fault.kind is Kind.BLACKOUT:
                continue
            beside = [each for each in planned if each.ill and each.start_s <= fault.start_s < each.end_s + RECOVERY_S]
            assert Kind.BLACKOUT not in {each.kind for each in beside}, seed
            assert len({each.target for each in beside}) < len(REPLICAS), seed


def test_one_thing_at_a_time_happens_to_each() -> None:
    for seed in range(20):
        planned = drawn(seed, FULL)
        for target in (*REPLICAS, CONFIGURATION):
            mine = [each for each in planned if target in (each.target, CONFIGURATION if _edits(each) else None)]
            assert all(before.end_s < after.start_s for before, after in pairwise(mine)), (seed, target)


def test_every_kind_comes_and_is_got_over_in_time() -> None:
    for seed in range(20):
        planned = drawn(seed, FULL)
        counts = [sum(each.kind is kind for each in planned) for kind in Kind]
        assert min(counts) >= 3, seed
        assert all(each.end_s + RECOVERY_S <= FULL.load_s for each in planned), seed


def test_the_short_form_has_nearly_all_of_them() -> None:
    assert min(len({each.kind for each in drawn(seed)}) for seed in range(20)) >= len(Kind) - 2


def test_the_brief_form_has_all_but_the_blackout_and_a_kill_of_a_sidecar_that_has_written() -> None:
    planned = {each.kind: each for each in drawn(BRIEF_SEED, BRIEF)}
    assert set(Kind) - set(planned) == {Kind.BLACKOUT}
    # Thirty requests have been asked by then, two windows and more.
    assert planned[Kind.TUNER].start_s > 3.0
    # One replica has nothing wrong with it from beginning to end, so that each error before content is judged.
    assert len({each.target for each in planned.values() if each.ill}) < len(REPLICAS)


def _edits(fault: Planned) -> bool:
    return fault.kind is Kind.RELOAD
