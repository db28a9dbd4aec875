"""Answers of a replica that fails fast: each is what its name says, and no client takes one for the right answer."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gorgo.core.stream import FirstTokenDetector, StreamState
from tests.chaos.failing import FastFailure, Received, answer_to, read_request
from tests.chaos.questions import Ending, Question, draw_questions, judge

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
