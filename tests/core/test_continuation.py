"""Answers that break off: what is read of them, what is asked for, and the events behind the seam."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gorgo.core.continuation import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    Continuation,
    NotContinuableError,
    PartialAnswer,
    Seam,
    as_chat,
    continued_body,
    first_error,
    read_answer,
    refusal,
    tokens_left,
    whole_events,
    with_default_bound,
)

HI = [{"role": "user", "content": "hi"}]
FLAGS, LAST = Continuation.FLAGS, Continuation.LAST_MESSAGE


def event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chat(delta: dict[str, Any], finish: str | None = None, *, name: str = "first", **more: Any) -> bytes:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    return event({"id": name, "created": 1, "model": "m", "choices": choices, **more})


def events_of(stream: bytes) -> list[dict[str, Any]]:
    return [json.loads(part[6:]) for part in stream.split(b"\n\n") if part.startswith(b"data: {")]


COUNTS = {"prompt_tokens": 12, "completion_tokens": 4, "total_tokens": 16}
FIRST = chat({"role": "assistant", "content": ""}) + chat({"content": "Hel"}) + chat({"content": "lo"})


def answer_of(stream: bytes = FIRST, route: str = CHAT) -> PartialAnswer:
    return read_answer(route, stream)


def test_the_text_of_a_chat_and_its_tokens_are_those_of_its_events() -> None:
    found = answer_of(b": comment\n\n" + FIRST)
    assert (found.text, found.tokens, found.finished) == ("Hello", 2, False)
    assert found.fields == {"id": "first", "created": 1, "model": "m"}


def test_tokens_that_the_stream_itself_reports_count() -> None:
    last = chat({"content": "!"}, usage={"prompt_tokens": 9, "completion_tokens": 7})
    assert answer_of(FIRST + last).tokens == 7


@pytest.mark.parametrize(
    ("delta", "more"),
    [
        ({"tool_calls": [{"index": 0}]}, {}),
        ({"reasoning_content": "hm"}, {}),
        ({"audio": {"data": "a"}}, {}),
    ],
)
def test_calls_reasoning_and_audio_in_progress_are_not_continued(delta: dict[str, Any], more: dict[str, Any]) -> None:
    with pytest.raises(NotContinuableError):
        answer_of(FIRST + chat(delta, **more))


def test_a_second_choice_is_not_continued() -> None:
    with pytest.raises(NotContinuableError):
        answer_of(event({"id": "a", "choices": [{"index": 1, "delta": {"content": "b"}}]}))


@pytest.mark.parametrize(
    ("route", "body", "why"),
    [
        (CHAT, {"messages": []}, None),
        (CHAT, {"n": 1, "logprobs": False, "tools": [{}], "tool_choice": "auto", "store": False}, None),
        (CHAT, {"response_format": {"type": "text"}}, None),
        (CHAT, {"n": 2}, "n"),
        (CHAT, {"logprobs": True}, "logprobs"),
        (CHAT, {"store": True}, "store"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"guided_json": {}}, "guided_json"),
        (COMPLETIONS, {"prompt": "a", "best_of": 1}, None),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "echo"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (GENERATE, {"text": "a", "sampling_params": {"n": 3}}, "n"),
        (GENERATE, {"text": "a", "sampling_params": {"json_schema": "{}"}}, "json_schema"),
        (GENERATE, {"input_ids": [1]}, "text"),
        ("/v1/responses", {}, "route"),
        (MESSAGES, {}, "messages"),
        (MESSAGES, {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}]}, "messages"),
        (MESSAGES, {"messages": HI, "tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGES, {"messages": HI, "thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (MESSAGES, {"messages": HI, "output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        (MESSAGES, {"messages": HI, "output_format": {"type": "json_schema"}}, "output_format"),
        (MESSAGES, {"messages": HI, "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}}, None),
    ],
)
def test_requests_whose_rest_could_contradict_the_beginning_are_refused(
    route: str, body: dict[str, Any], why: str | None
) -> None:
    assert refusal(route, body) == why


def test_a_chat_goes_on_with_its_text_as_the_last_message() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 10, "min_tokens": 1, "stream": True}
    new = json.loads(continued_body(CHAT, body, answer_of(), FLAGS))
    assert new["messages"] == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert (new["continue_final_message"], new["add_generation_prompt"]) == (True, False)
    assert (new["max_tokens"], new["min_tokens"], new["stream"]) == (8, 0, True)
    assert "continue_final_message" not in json.loads(continued_body(CHAT, body, answer_of(), LAST))
    assert len(body["messages"]) == 1  # type: ignore[arg-type]


def test_a_client_s_own_beginning_of_the_answer_is_gone_on_with() -> None:
    body = {"messages": [{"role": "assistant", "content": "Well: "}], "continue_final_message": True}
    new = json.loads(continued_body(CHAT, body, answer_of(), FLAGS))
    assert new["messages"] == [{"role": "assistant", "content": "Well: Hello"}]


def test_a_rest_in_which_a_call_of_a_tool_has_begun_is_not_continued_again() -> None:
    seam = Seam(CHAT, answer_of(), {"messages": HI}, show_usage=False)
    seam.feed(chat({"content": "!"}, name="second"))
    seam.on_sent()
    assert seam.answer().text == "Hello!"
    seam.feed(chat({"tool_calls": [{"index": 0}]}, name="second"))
    with pytest.raises(NotContinuableError):
        seam.answer()


def test_a_stop_string_before_the_seam_ends_nothing_and_one_across_it_does() -> None:
    """An engine passes one by before `min_tokens`."""
    body = {"messages": HI, "stop": ["ll", "a very long stop", "o!"]}
    seam = Seam(CHAT, answer_of(), body, show_usage=False)
    assert events_of(seam.feed(chat({"content": " you"}, name="second")))[0]["choices"][0]["finish_reason"] is None
    seam = Seam(CHAT, answer_of(), body, show_usage=False)
    (event,) = events_of(seam.feed(chat({"content": "!"}, "length", name="second")))
    assert event["choices"][0]["finish_reason"] == "stop"


def test_what_one_event_alone_has_is_not_said_of_the_rest() -> None:
    found = answer_of(chat({"content": "a"}, timings={"predicted_n": 1}, system_fingerprint="f"))
    seam = Seam(CHAT, found, {"messages": HI}, show_usage=False)
    (event,) = events_of(seam.feed(chat({"content": "b"}, name="second", timings={"predicted_n": 2})))
    assert (event["id"], event["timings"], event["system_fingerprint"]) == ("first", {"predicted_n": 2}, "f")


@pytest.mark.parametrize(
    ("route", "body", "how", "left"),
    [
        (COMPLETIONS, {"prompt": "p"}, FLAGS, 14),
        (COMPLETIONS, {"prompt": "p", "max_tokens": 9}, FLAGS, 7),
        (COMPLETIONS, {"prompt": "p"}, LAST, None),
        (GENERATE, {"text": "p", "sampling_params": {"temperature": 0}}, FLAGS, 126),
        (CHAT, {"messages": HI}, FLAGS, None),
    ],
)
def test_a_bound_that_an_engine_takes_by_default_does_not_begin_anew_at_the_seam(
    route: str, body: dict[str, Any], how: Continuation, left: int | None
) -> None:
    assert tokens_left(with_default_bound(route, body, how), PartialAnswer(text="ab", tokens=2)) == left


@pytest.mark.parametrize(("how", "goes_on"), [(FLAGS, False), (LAST, True)])
def test_an_engine_with_flags_goes_on_with_a_client_s_message_only_if_it_was_asked_to(
    how: Continuation, *, goes_on: bool
) -> None:
    """Without its flag the client's last message was whole, and the answer is the next one."""
    messages = [*HI, {"role": "assistant", "content": "Well"}]
    asked = json.loads(continued_body(CHAT, {"messages": messages}, answer_of(), how))["messages"]
    assert asked == [*HI, {"role": "assistant", "content": "WellHello"}] if goes_on else [*messages, asked[-1]]
    assert asked[-1]["content"] == ("WellHello" if goes_on else "Hello")


@pytest.mark.parametrize(
    ("again", "rest", "text"),
    [
        (" \n", [" ", "\n", "you"], "Hello \nyou"),
        (" \n", [" \nyou"], "Hello \nyou"),
        (" \n", ["\nyou"], "Hello \n\nyou"),
        (" \n", [" you"], "Hello \nyou"),
        (" \n", ["you"], "Hello \nyou"),
        ("", ["\nyou"], "Hello\nyou"),
    ],
)
def test_white_space_that_an_engine_trims_and_says_again_comes_once(again: str, rest: list[str], text: str) -> None:
    client = FIRST + (chat({"content": again}) if again else b"")
    answer = replace(answer_of(client), again=len(again))
    asked = json.loads(continued_body(CHAT, {"messages": HI}, answer, FLAGS))
    assert asked["messages"][-1]["content"] == "Hello"
    seam = Seam(CHAT, answer, {"messages": HI}, show_usage=False)
    for piece in rest:
        client += seam.feed(chat({"content": piece}, name="second"))
    seam.on_sent()
    pieces = [choice["delta"].get("content") or "" for each in events_of(client) for choice in each["choices"]]
    assert ("".join(pieces), seam.answer().text, seam.answer().again) == (text, text, 0)


def test_an_answer_of_white_space_alone_is_asked_for_anew_where_it_is_trimmed() -> None:
    answer = replace(answer_of(chat({"content": "\n"})), again=1)
    asked = json.loads(continued_body(CHAT, {"messages": HI}, answer, FLAGS))
    assert asked == {"messages": HI}


def test_completions_go_on_behind_their_prompt() -> None:
    answer = PartialAnswer(text=" there 😀", tokens=3)
    new = json.loads(continued_body(COMPLETIONS, {"prompt": "Hi", "max_tokens": 3}, answer, FLAGS))
    assert (new["prompt"], new["max_tokens"]) == ("Hi there 😀", 1)
    sampling = {"sampling_params": {"max_new_tokens": 9}}
    new = json.loads(continued_body(GENERATE, {"text": "Hi", **sampling}, answer, FLAGS))
    assert (new["text"], new["sampling_params"]) == ("Hi there 😀", {"max_new_tokens": 6})
    assert sampling == {"sampling_params": {"max_new_tokens": 9}}


def test_the_least_bound_counts() -> None:
    assert tokens_left({"max_tokens": 5, "max_completion_tokens": 4}, PartialAnswer(tokens=4)) == 0


def test_whole_events_end_with_the_last_blank_line() -> None:
    assert whole_events(b"data: 1\r\n\r\ndata: 2\r\n") == len(b"data: 1\r\n\r\n")
    assert [whole_events(b"\n\n"), whole_events(b""), whole_events(b"data: a\n")] == [2, 0, 0]
    assert [whole_events(b"data: 1\n\r\ndata"), whole_events(b"data: 1\r\n\ndata")] == [10, 10]


def test_an_error_of_the_engine_s_own_is_found_and_a_client_s_is_not() -> None:
    failed, refused = event({"error": {"code": 500, "message": "x"}}), event({"error": {"code": 400}})
    assert first_error(FIRST + failed) == len(FIRST)
    assert first_error(FIRST + refused) is None
    assert first_error(chat({"content": '"error"'})) is None


# -- the seam


def rest(*events: bytes, body: dict[str, Any] | None = None, answer: PartialAnswer | None = None) -> tuple[Seam, bytes]:
    seam = Seam(CHAT, answer or answer_of(), body or {"max_tokens": 10}, show_usage=True)
    made = b"".join(seam.feed(one) for one in events)
    seam.on_sent()
    return seam, made


def test_events_that_the_client_does_not_have_are_no_part_of_the_answer_that_goes_on() -> None:
    seam, _ = rest(second(" big"))
    made = seam.feed(second(" world", "stop"))
    assert text_of(made) == " world"
    assert (seam.answer().text, seam.answer().tokens, seam.answer().finished) == ("Hello big", 3, False)
    seam.on_sent()
    assert (seam.answer().text, seam.answer().tokens, seam.answer().finished) == ("Hello big world", 4, True)


def second(content: str | None, finish: str | None = None, **more: Any) -> bytes:
    return chat({} if content is None else {"content": content}, finish, name="second", **more)


def text_of(stream: bytes) -> str:
    return "".join(
        choice["delta"].get("content") or "" for fields in events_of(stream) for choice in fields.get("choices", [])
    )


def test_the_rest_has_the_first_id_no_role_one_end_and_the_counts_of_both() -> None:
    seam, made = rest(
        chat({"role": "assistant", "content": ""}, name="second"),
        second(" world"),
        second(None, "stop"),
        event(
            {"id": "second", "choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 4, "total_tokens": 16}}
        ),
        b"data: [DONE]\n\n",
    )
    events = events_of(made)
    assert {fields["id"] for fields in events} == {"first"}
    assert b"role" not in made
    assert text_of(made) == " world"
    assert [choice["finish_reason"] for fields in events for choice in fields["choices"]] == [None, "stop"]
    assert events[-1]["usage"] == {"prompt_tokens": 10, "completion_tokens": 6, "total_tokens": 16}
    assert made.endswith(b"data: [DONE]\n\n")
    assert (seam.begun, seam.ended, seam.error) == (True, True, None)
    assert (seam.answer().text, seam.answer().tokens) == ("Hello world", 6)


def test_usage_that_the_client_did_not_ask_for_is_left_out() -> None:
    seam = Seam(CHAT, answer_of(), {}, show_usage=False)
    usage: dict[str, Any] = {"usage": {"prompt_tokens": 12, "completion_tokens": 4}}
    made = seam.feed(second("a", None, **usage) + event({"id": "s", "choices": [], **usage}) + b"data: [DONE]\n\n")
    assert b"usage" not in made
    assert (seam.usage.prompt, seam.usage.output) == (12, 4)


def test_counts_that_come_with_the_text_unasked_go_on_behind_the_seam() -> None:
    answer = answer_of(FIRST + chat({"content": "!"}, usage={"prompt_tokens": 9, "completion_tokens": 3}))
    seam = Seam(CHAT, answer, {}, show_usage=False)
    usage: dict[str, Any] = {"usage": {"prompt_tokens": 12, "completion_tokens": 1}}
    made = seam.feed(second("a", None, **usage) + event({"id": "s", "choices": [], **usage}))
    assert [fields["usage"] for fields in events_of(made)] == [{"prompt_tokens": 9, "completion_tokens": 4}]


def test_cached_tokens_are_at_most_the_prompt_s() -> None:
    usage = {"prompt_tokens": 12, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 11}}
    _, made = rest(event({"id": "s", "choices": [], "usage": usage}))
    assert events_of(made)[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 10}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_the_rest_is_the_same_however_its_bytes_are_split(size: int) -> None:
    stream = second("é ") + b": ping\n\n" + second("w") + second(None, "stop") + b"data: [DONE]\n\n"
    _, whole = rest(stream)
    _, split = rest(*(stream[at : at + size] for at in range(0, len(stream), size)))
    assert events_of(split) == events_of(whole)


def test_without_room_for_a_token_the_end_alone_is_passed() -> None:
    seam, made = rest(second("x"), second(None, "length"), b"data: [DONE]\n\n", body={"max_tokens": 2})
    assert text_of(made) == ""
    assert [choice["finish_reason"] for fields in events_of(made) for choice in fields["choices"]] == ["length"]
    assert seam.answer().text == "Hello"


def test_events_that_are_shorter_than_a_token_are_all_passed() -> None:
    _, made = rest(*(second(character) for character in "world"), second(None, "length"), body={"max_tokens": 4})
    assert text_of(made) == "world"


def test_an_answer_that_has_its_end_gets_no_other_one() -> None:
    answer = answer_of(FIRST + chat({}, "stop"))
    _, made = rest(second("x"), second(None, "length"), b"data: [DONE]\n\n", answer=answer)
    assert made == b"data: [DONE]\n\n"


def test_a_stop_string_across_the_seam_ends_the_answer() -> None:
    answer = PartialAnswer(text="one EN", tokens=2, fields={"id": "first"})
    seam, made = rest(second("D two"), second(" three"), body={"stop": ["END"]}, answer=answer)
    assert text_of(made) == ""
    assert [choice["finish_reason"] for fields in events_of(made) for choice in fields["choices"]] == ["stop"]
    assert seam.answer().finished


def test_an_error_event_is_not_passed() -> None:
    seam, made = rest(second("a"), event({"error": {"code": 503}}))
    assert (text_of(made), seam.error) == ("a", 503)


def test_a_completion_goes_on() -> None:
    first = event({"id": "first", "object": "text_completion", "choices": [{"index": 0, "text": "a "}]})
    seam = Seam(COMPLETIONS, answer_of(first, COMPLETIONS), {"prompt": "p"}, show_usage=True)
    made = seam.feed(
        event({"id": "second", "choices": [{"index": 0, "text": "b", "finish_reason": None}]})
        + event({"id": "second", "choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    )
    found = events_of(made)
    assert [fields["id"] for fields in found] == ["first", "first"]
    assert [fields["choices"][0]["text"] for fields in found] == ["b", ""]


def generated(text: str, ids: list[int], name: str, prompt: int, finish: object = None) -> bytes:
    meta = {"id": name, "prompt_tokens": prompt, "completion_tokens": len(ids), "finish_reason": finish}
    return event({"text": text, "output_ids": ids, "meta_info": meta})


def test_events_of_generate_have_the_whole_text_and_all_tokens() -> None:
    answer = answer_of(generated("a", [1], "first", 5) + generated("a b", [1, 2], "first", 5), GENERATE)
    assert (answer.text, answer.tokens, answer.token_ids) == ("a b", 2, (1, 2))
    seam = Seam(GENERATE, answer, {"text": "p"}, show_usage=False)
    made = seam.feed(generated(" c", [3], "second", 7) + generated(" c d", [3, 4], "second", 7, {"type": "stop"}))
    last = events_of(made)[-1]
    assert (last["text"], last["output_ids"]) == ("a b c d", [1, 2, 3, 4])
    assert last["meta_info"]["id"] == "first"
    assert (last["meta_info"]["prompt_tokens"], last["meta_info"]["completion_tokens"]) == (5, 4)
    assert seam.feed(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"
    assert seam.ended


def test_an_answer_of_generate_in_three_parts_has_the_tokens_of_all() -> None:
    answer = answer_of(generated("a", [1], "first", 5), GENERATE)
    seam = Seam(GENERATE, answer, {"text": "p"}, show_usage=False)
    seam.feed(generated(" b", [2], "second", 6))
    seam.on_sent()
    assert seam.answer().token_ids == (1, 2)
    third = Seam(GENERATE, seam.answer(), {"text": "p"}, show_usage=False)
    (last,) = events_of(third.feed(generated(" c", [3], "third", 7)))
    assert (last["text"], last["output_ids"]) == ("a b c", [1, 2, 3])


def test_a_token_of_generate_for_which_there_is_no_room_is_in_no_part_of_an_event() -> None:
    answer = answer_of(generated("a", [1], "first", 5), GENERATE)
    seam = Seam(GENERATE, answer, {"text": "p", "sampling_params": {"max_new_tokens": 1}}, show_usage=False)
    (last,) = events_of(seam.feed(generated(" b", [2], "second", 6, {"type": "length", "length": 1})))
    assert (last["text"], last["output_ids"], last["meta_info"]["completion_tokens"]) == ("a", [1], 1)


#: Half of a character that takes two units of UTF-16, as engines send that cut their text there.
HALVES = ("\ud83d", "\ude00")


def test_an_answer_that_ends_with_half_a_character_goes_on_behind_its_last_whole_one() -> None:
    answer = answer_of(FIRST + chat({"content": HALVES[0]}))
    body = continued_body(CHAT, {"messages": []}, answer, FLAGS)
    assert json.loads(body.decode())["messages"][-1]["content"] == "Hello"


@pytest.mark.parametrize(
    ("had", "said", "new"),
    [
        ("\ud83d", ["\U0001f600 yes"], "\ude00 yes"),
        ("\ud83d", ["\ud83d", "\ude00 yes"], "\ude00 yes"),
        ("\ud83d", ["\U0001f601"], "\ude01"),
        ("\ud83d", ["no"], "no"),
        ("a\ud83d\ude00", ["b"], "b"),
        ("a\ude00", ["b"], "b"),
    ],
)
def test_the_engine_says_the_character_again_and_the_client_gets_its_other_half(
    had: str, said: list[str], new: str
) -> None:
    answer = answer_of(FIRST + chat({"content": had}))
    _, made = rest(*map(second, said), answer=answer)
    assert text_of(made).encode("utf-16-le", "surrogatepass") == new.encode("utf-16-le", "surrogatepass")


@pytest.mark.parametrize("begin", ["<think>", "\n<think>\n", "[THINK]", "<|channel|>analysis<|message|>"])
def test_a_chain_of_thought_in_the_text_of_a_chat_is_not_continued(begin: str) -> None:
    for route, stream in ((CHAT, chat({"content": begin + "hm"})), (MESSAGES, message(begin + "hm"))):
        with pytest.raises(NotContinuableError):
            answer_of(stream, route)
    completed = event({"id": "first", "choices": [{"index": 0, "text": begin + "hm"}]})
    assert answer_of(completed, COMPLETIONS).text == begin + "hm", "its prompt is the text itself"


@pytest.mark.parametrize(
    "text", ["<think>hm</think>yes", "The tag <think> begins", "[THINK]hm[/THINK]yes", "</think>a"]
)
def test_a_chain_of_thought_that_is_over_is_text(text: str) -> None:
    assert answer_of(chat({"content": text})).text == text


def message(text: str) -> bytes:
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
    return b"event: content_block_delta\n" + event(delta)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_chain_of_thought_behind_text_does_not_reach_the_client(name: str) -> None:
    seam, made = rest(chat({"role": "assistant", "content": ""}, name="second"), chat({name: "hm"}, name="second"))
    assert (made, seam.unfit, seam.begun) == (b"", True, False)


def test_a_character_in_two_events_passes_the_seam() -> None:
    _, made = rest(*map(second, HALVES))
    assert text_of(made) == "".join(HALVES)


ODD: list[dict[str, Any]] = [
    {"choices": [None]},
    {"choices": "text"},
    {"choices": {"a": 1}},
    {"choices": [{"index": 0, "delta": "text"}]},
    {"choices": [{"index": 0, "delta": {"content": [{"type": "text", "text": "a"}]}}]},
]


@pytest.mark.parametrize("odd", ODD)
def test_events_of_an_unknown_form_are_not_continued_and_end_a_rest(odd: dict[str, Any]) -> None:
    with pytest.raises(NotContinuableError):
        answer_of(FIRST + event(odd))
    seam, made = rest(event(odd))
    assert (made, seam.error) == (b"", 500)


@pytest.mark.parametrize("odd", [{"text": 1}, {"text": "a", "meta_info": "a"}])
def test_events_of_generate_of_an_unknown_form_are_not_continued_and_end_a_rest(odd: dict[str, Any]) -> None:
    with pytest.raises(NotContinuableError):
        answer_of(event(odd), GENERATE)
    seam = Seam(GENERATE, PartialAnswer(), {"text": "p"}, show_usage=False)
    assert (seam.feed(event(odd)), seam.error) == (b"", 500)


@pytest.mark.parametrize("body", [{"messages": []}, {"messages": [], "max_tokens": 9}])
def test_an_answer_that_has_its_end_asks_for_one_token_more(body: dict[str, Any]) -> None:
    answer = answer_of(FIRST + chat({}, "stop"))
    assert json.loads(continued_body(CHAT, body, answer, FLAGS))["max_tokens"] == 1


WORDS = ["a ", "é", "😀", '"', "\\", "\n", "data: ", ": x", "[DONE]", '"error"', "b\r\n", "c ", "d ", "e ", "f "]


def engine_stream(route: str, begin: int, most: int | None, rng: random.Random) -> bytes:
    """Return the answer of an engine that goes on behind word `begin`, one word a token."""
    line, name = rng.choice([b"\n", b"\r\n", b"\r"]), f"engine {begin}"
    end = len(WORDS) if most is None else min(len(WORDS), begin + most)
    reason = "stop" if end == len(WORDS) else "length"
    parts: list[bytes] = []
    for at in range(begin, end + 1):
        count, finish = min(at + 1, end) - begin, reason if at == end else None
        usage = {"prompt_tokens": 9 + begin, "completion_tokens": count}
        word = "" if at == end else WORDS[at]
        if route == GENERATE:
            ended = {"type": finish, "length": count} if finish == "length" else {"type": finish}
            meta = {"id": name, **usage, "finish_reason": finish and ended}
            ids = list(range(begin, begin + count))
            fields: dict[str, Any] = {
                "text": "".join(WORDS[begin : begin + count]),
                "output_ids": ids,
                "meta_info": meta,
            }
        else:
            said = {"delta": {"content": word}} if route == CHAT else {"text": word}
            fields = {"id": name, "choices": [{"index": 0, "finish_reason": finish, **said}], "usage": usage}
        comment = rng.choice([b"", b": ping" + line, b": ping" + line + line])
        data = json.dumps(fields, ensure_ascii=rng.random() < 0.5).encode()
        parts.append(comment + b"data:" + rng.choice([b"", b" "]) + data + line + line)
    return b"".join(parts) + b"data: [DONE]" + line + line


def split(stream: bytes, rng: random.Random) -> Iterator[bytes]:
    at = 0
    while at < len(stream):
        size = rng.choice([1, 3, 17, 200])
        yield stream[at : at + size]
        at += size


def summary(route: str, stream: bytes) -> tuple[PartialAnswer, list[Any], int]:
    """Return the answer without what only its first engine knows, its finish reasons, and its ends."""
    datas = re.findall(rb"(?m)^data: ?(.*?)\r?$", stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
    found = [json.loads(data) for data in datas if data != b"[DONE]"]
    places = [fields["meta_info"] if route == GENERATE else fields["choices"][0] for fields in found]
    reasons = [place["finish_reason"] for place in places if place["finish_reason"]]
    assert len({place["id"] for place in (places if route == GENERATE else found)}) == 1
    counts = found[-1].get("meta_info") or found[-1]["usage"]
    answer = read_answer(route, stream)
    fields = {name: counts[name] for name in ("prompt_tokens", "completion_tokens")}
    return replace(answer, fields=fields), reasons, datas.count(b"[DONE]")


@pytest.mark.parametrize("seed", range(60))
def test_an_answer_in_up_to_five_parts_is_the_unbroken_one_wherever_it_breaks(seed: int) -> None:
    rng = random.Random(seed)
    route, most = rng.choice([CHAT, COMPLETIONS, GENERATE]), rng.choice([None, 4, 9])
    bounds = {"max_tokens": most} if route != GENERATE else {"sampling_params": {"max_new_tokens": most}}
    body: dict[str, Any] = {"messages": [], "prompt": "", "text": "", **(bounds if most else {})}
    stream, client, withheld = engine_stream(route, 0, most, rng), b"", b""
    expected = summary(route, stream)
    for chunk in split(stream[: rng.randrange(len(stream))], rng):
        data = withheld + chunk
        size = whole_events(data)
        client, withheld = client + data[:size], data[size:]
    answer = read_answer(route, client)
    last = rng.randrange(4)
    for part in range(last + 1):
        if not answer.text or answer.finished:
            return
        asked = json.loads(continued_body(route, body, answer, FLAGS))
        left = asked.get("max_tokens") or asked.get("sampling_params", {}).get("max_new_tokens")
        stream = engine_stream(route, answer.tokens, left, rng)
        seam = Seam(route, answer, body, show_usage=False)
        for chunk in split(stream if part == last else stream[: rng.randrange(len(stream))], rng):
            client += seam.feed(chunk)
            seam.on_sent()
        assert seam.error is None
        answer = seam.answer() if seam.begun else answer
    assert summary(route, client) == expected


TEXT = ["Hel", "lo ", "\u00e9", "\U0001f600", '"', "\n\n", "event: x", " end", "."]


def message_stream(begin: int, most: int, name: str) -> bytes:
    """Return the events of an engine that goes on behind text `begin`, one text a token; one more says the end."""
    end = min(len(TEXT), begin + most)
    output = end - begin + (end == len(TEXT))
    usage = {"input_tokens": 5 + begin, "cache_read_input_tokens": 2, "output_tokens": 0}
    message = {"id": name, "type": "message", "role": "assistant", "model": "m", "content": [], "usage": usage}
    block = {"type": "text", "text": ""}
    delta = {"stop_reason": "end_turn" if end == len(TEXT) else "max_tokens", "stop_sequence": None}
    found: list[dict[str, Any]] = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "ping"},
    ]
    found += [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        for text in TEXT[begin:end]
    ]
    found += [
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": delta, "usage": {**usage, "output_tokens": output}},
        {"type": "message_stop"},
    ]
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (each["type"].encode(), json.dumps(each, ensure_ascii=False).encode())
        for each in found
    )


@pytest.mark.parametrize("most", [6, 20])
def test_a_message_that_breaks_off_at_any_byte_is_the_unbroken_one_event_by_event(most: int) -> None:
    body = {"messages": HI, "max_tokens": most}
    unbroken = message_stream(0, most, "first")
    first = unbroken.index(b"\n\n", unbroken.index(b"Hel")) + 2
    sizes = {whole_events(unbroken[:place]) for place in range(first, len(unbroken))}
    assert len(sizes) == min(most, len(TEXT)) + 2
    for client in (unbroken[:size] for size in sorted(sizes)):
        answer = answer_of(client, MESSAGES)
        asked = json.loads(continued_body(MESSAGES, body, answer, LAST))
        assert asked["messages"][-1] == {"role": "assistant", "content": answer.text}
        seam = Seam(MESSAGES, answer, body, show_usage=False)
        rest = message_stream(answer.tokens, asked["max_tokens"], "second")
        for at in range(0, len(rest), 7):
            client += seam.feed(rest[at : at + 7])
        assert (seam.error, seam.begun, seam.ended) == (None, True, True)
        assert messages_of(client) == messages_of(unbroken)


def chat_stream(begin: int, most: int) -> bytes:
    """Return the same text of an engine that was asked by a chat, as vLLM sends it."""
    end = min(len(TEXT), begin + most)
    parts = [chat({"role": "assistant", "content": ""}, name="second")]
    parts += [chat({"content": text}, name="second") for text in TEXT[begin:end]]
    parts.append(chat({"content": ""}, "stop" if end == len(TEXT) else "length", name="second"))
    output = end - begin + (end == len(TEXT))
    usage = {"prompt_tokens": 7 + begin, "completion_tokens": output, "total_tokens": 7 + begin + output}
    return b"".join((*parts, event({"id": "second", "choices": [], "usage": usage}), b"data: [DONE]\n\n"))


@pytest.mark.parametrize("most", [6, 20])
def test_a_message_goes_on_as_a_chat_at_an_engine_whose_messages_have_no_flags(most: int) -> None:
    body = {"model": "m", "messages": HI, "system": "Be brief.", "max_tokens": most, "temperature": 0, "metadata": {}}
    unbroken = message_stream(0, most, "first")
    first = unbroken.index(b"\n\n", unbroken.index(b"Hel")) + 2
    for client in (
        unbroken[:size] for size in sorted({whole_events(unbroken[:at]) for at in range(first, len(unbroken))})
    ):
        answer = answer_of(client, MESSAGES)
        asked = json.loads(continued_body(MESSAGES, body, answer, Continuation.AS_CHAT))
        said = {"role": "assistant", "content": answer.text}
        assert asked["messages"] == [{"role": "system", "content": "Be brief."}, *HI, said]
        assert (asked["continue_final_message"], asked["add_generation_prompt"]) == (True, False)
        assert asked.keys() & {"system", "metadata", "temperature", "stream_options"} == {
            "temperature",
            "stream_options",
        }
        seam = Seam(MESSAGES, answer, body, show_usage=False, path=Continuation.AS_CHAT.route(MESSAGES))
        rest = chat_stream(answer.tokens, asked["max_tokens"])
        for at in range(0, len(rest), 7):
            client += seam.feed(rest[at : at + 7])
        assert (seam.error, seam.begun, seam.ended) == (None, True, True)
        assert messages_of(client) == messages_of(unbroken)


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({"stop_reason": "STOP"}, ("stop_sequence", "STOP")),
        ({"matched_stop": "STOP"}, ("stop_sequence", "STOP")),
        ({"stop_reason": 7}, ("end_turn", None)),
        ({}, ("end_turn", None)),
    ],
)
def test_the_stop_string_that_ended_a_chat_is_named_in_its_message(more: dict[str, Any], end: tuple[str, Any]) -> None:
    body = {"messages": HI, "max_tokens": 20, "stop_sequences": ["STOP"]}
    assert json.loads(continued_body(MESSAGES, body, PartialAnswer("a", 1), Continuation.AS_CHAT))["stop"] == ["STOP"]
    seam = Seam(MESSAGES, PartialAnswer("a", 1), body, show_usage=False, path=CHAT)
    choice = {"index": 0, "delta": {"content": "b"}, "finish_reason": "stop", **more}
    events = messages_of(seam.feed(event({"choices": [choice]}) + b"data: [DONE]\n\n"))
    assert [name for name, _ in events] == [
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[2][1]["delta"] == {"stop_reason": end[0], "stop_sequence": end[1]}
    assert events[2][1]["usage"]["output_tokens"] == 2, "without counts each event is a token"


@pytest.mark.parametrize(
    "stream",
    [
        event({"choices": [{"index": 0, "delta": {"tool_calls": [{}]}}]}),
        event({"choices": [{"index": 1, "delta": {"content": "b"}}]}),
        b"data: [DONE]\n\n",
    ],
)
def test_a_chat_that_cannot_be_the_rest_of_a_message_is_an_error(stream: bytes) -> None:
    seam = Seam(MESSAGES, PartialAnswer("a", 1), {"messages": HI}, show_usage=False, path=CHAT)
    assert (seam.feed(stream), seam.error, seam.ended) == (b"", 500, False)


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"name": "f"}]},
        {"thinking": {"type": "disabled"}},
        {"output_config": {"effort": "low"}},
        {"unknown": 1},
        {"system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}]},
        {"messages": [*HI, {"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [*HI, {"role": "system", "content": "a"}, *HI]},
    ],
)
def test_a_message_whose_chat_is_not_sure_is_not_asked_for_as_one(more: dict[str, Any]) -> None:
    assert as_chat({"messages": HI, "max_tokens": 5} | more) is None


def test_a_message_of_one_block_is_a_chat_of_its_text() -> None:
    block = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    found = as_chat(
        {"system": block, "messages": [{"role": "user", "content": block}], "tools": [], "tool_choice": None}
    )
    assert found is not None
    assert found["messages"] == [{"role": "system", "content": "hi"}, {"role": "user", "content": "hi"}]


def messages_of(stream: bytes) -> list[tuple[str, Any]]:
    """Return the events with their names; a ping says nothing."""
    found = [part.split(b"\n") for part in stream.split(b"\n\n") if part]
    named = [(name.removeprefix(b"event: ").decode(), json.loads(data.removeprefix(b"data: "))) for name, data in found]
    assert all(name == event["type"] for name, event in named)
    return [(name, event) for name, event in named if name != "ping"]


def test_a_stop_sequence_across_the_seam_ends_a_message_and_is_named() -> None:
    body = {"messages": HI, "max_tokens": 20, "stop_sequences": ["o \u00e9"]}
    broken = message_stream(0, 20, "first")
    client = broken[: broken.index(b"event: content_block_delta", broken.index(b"lo "))]
    seam = Seam(MESSAGES, answer_of(client, MESSAGES), body, show_usage=False)
    events = messages_of(seam.feed(message_stream(2, 18, "second")))
    assert [name for name, _ in events] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[1][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "o \u00e9"}


@pytest.mark.parametrize("kind", ["thinking", "tool_use"])
def test_a_message_with_another_block_than_text_is_not_continued(kind: str) -> None:
    start = {"type": "content_block_start", "index": 0, "content_block": {"type": kind}}
    with pytest.raises(NotContinuableError):
        answer_of(event(start), MESSAGES)
    seam = Seam(MESSAGES, PartialAnswer("a", 1), {"messages": HI}, show_usage=False)
    assert (seam.feed(event(start)), seam.error) == (b"", 500)


def test_a_text_that_a_stop_sequence_may_have_ended_is_asked_for_as_much_as_the_sequence_has() -> None:
    stream = message_stream(0, 20, "first")
    closed = stream[: stream.index(b"event: message_delta")]
    answer = read_answer(MESSAGES, closed)
    assert answer.closed
    asked = json.loads(
        continued_body(MESSAGES, {"messages": HI, "max_tokens": 20, "stop_sequences": ["abc"]}, answer, LAST)
    )
    assert asked["max_tokens"] == 3, "as many as the stop string has at most"
