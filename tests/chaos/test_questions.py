"""The verdict on an answer: what is right passes, and nothing else does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gorgo.lab.engine_server.job import CHAT, COMPLETIONS, GENERATE
from tests.chaos.questions import Ending, Question, draw_questions, judge
from tests.proxy.fakes import DONE, event

QUESTIONS = draw_questions(5, seconds=20.0, per_s=10.0)
ERROR = event({"error": {"message": "broken", "type": "server_error", "param": None, "code": "upstream_failed"}})


def asked(route: str, *, stream: bool) -> Question:
    return next(each for each in QUESTIONS if (each.route, each.stream) == (route, stream))


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
    assert draw_questions(5, seconds=20.0, per_s=10.0) == QUESTIONS
    assert draw_questions(6, seconds=20.0, per_s=10.0) != QUESTIONS
    assert len({(each.route, each.stream) for each in QUESTIONS}) == 6
    assert len({each.request_id for each in QUESTIONS}) == len(QUESTIONS) == 200
    assert any(each.leaves_after_s is not None for each in QUESTIONS)


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
