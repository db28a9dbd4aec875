"""Bodies of requests: what is read of every dialect, and JSON by the quick parser and by the standard library."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.numeric import QUICK_BYTES, QUICK_OBJECTS, QUICK_VALUES, TINY_BYTES, count_values, is_quick, parse_json
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.core.prompt.media import MediaParts
from gorgo.core.prompt.parse import (
    MAX_BOUNDARIES,
    MAX_MEDIA_BYTES,
    Marks,
    Prompt,
    bounded,
    message_ends,
    read_prompt,
    token_boundaries,
)
from gorgo.errors import BadRequest

CHAT = "/v1/chat/completions"
ROUTES = [CHAT, "/v1/completions", "/generate", "/v1/embeddings", "/v1/responses", "/v1/messages"]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def chat(*messages: Any, **fields: Any) -> Prompt:
    return read_prompt(CHAT, {"messages": list(messages), **fields})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_chat_is_its_contents_in_order_with_a_mark_per_message() -> None:
    prompt = chat({"role": "system", "content": "be brief"}, user("hé"))
    assert prompt == Prompt("be briefhé".encode(), ((0, "system"), (8, "user")))


def test_text_parts_read_as_plain_text() -> None:
    assert chat(user([{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}])) == chat(user("abc"))
    assert chat(user({"type": "text", "text": "a"})) == chat(user("a"))


def test_image_enters_by_a_digest_as_long_as_its_tokens() -> None:
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAB"}}
    one, two = chat(user([IMAGE])), chat(user([other]))
    assert one.text == one.text[:16] * 256
    assert (one.media, one.media_bytes) == ((MediaParts("image", 0, 1, 1024),), 4096)
    digests = [{prompt.text[n : n + 16] for n in range(0, 4096, 16)} for prompt in (one, two)]
    assert not digests[0] & digests[1]


def test_media_beyond_the_bound_enter_by_their_digest_alone() -> None:
    several = chat(user([IMAGE] * 300))
    assert several.media == (MediaParts("image", 0, 300, 300 * 1024),)
    assert len(several.text) == several.media_bytes == MAX_MEDIA_BYTES + 44 * 16


def test_parts_of_other_shape_have_other_digests() -> None:
    values = [
        "ab",
        ["ab"],
        ["a", "b"],
        ["b", "a"],
        {"a": "b"},
        {"b": "a"},
        [["ab"]],
        {"a": ["b"]},
        {"a": {"b": 1}},
        1,
        1.5,
    ]
    values += [None, True, [1], [1, "a"], [{}], {}, [], "\ud800"]
    texts = {chat(user([{"type": "file", "data": value}])).text for value in values}
    assert len(texts) == len(values)
    assert {len(text) for text in texts} == {16}


def test_tools_come_first() -> None:
    prompt = chat(user("hi"), tools=[{"type": "function", "function": {"name": "f"}}])
    assert prompt.text.startswith(b'[{"type":"function"')
    assert [role for _, role in prompt.message_starts] == ["tools", "user"]


def test_tool_calls_and_results_are_part_of_the_prompt() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    prompt = chat(
        user("hi"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    )
    assert b"arguments" in prompt.text
    assert prompt.text.endswith(b"42")
    assert [role for _, role in prompt.message_starts] == ["user", "assistant", "tool"]


def test_reasoning_that_the_client_sends_back_is_part_of_the_prompt() -> None:
    assert chat({"role": "assistant", "reasoning_content": "so", "content": "yes"}).text == b"soyes"


@pytest.mark.parametrize(
    ("route", "field"), [("/v1/completions", "prompt"), ("/generate", "text"), ("/v1/embeddings", "input")]
)
def test_plain_text_reads_alike_on_every_route(route: str, field: str) -> None:
    assert read_prompt(route, {field: "hello"}) == Prompt(b"hello", ())


@pytest.mark.parametrize(
    ("route", "field"), [("/v1/completions", "prompt"), ("/generate", "input_ids"), ("/v1/embeddings", "input")]
)
def test_token_ids_tell_the_exact_length(route: str, field: str) -> None:
    prompt = read_prompt(route, {field: [1, 2, 70_000]})
    assert (len(prompt.text), prompt.tokens, prompt.message_starts) == (12, 3, ())
    batch = read_prompt(route, {field: [[1, 2], [3]]})
    assert (len(batch.text), batch.tokens, batch.message_starts) == (12, 3, ((8, "next"),))


@pytest.mark.parametrize(
    ("route", "field"), [("/v1/completions", "prompt"), ("/generate", "text"), ("/v1/embeddings", "input")]
)
def test_batch_of_texts_starts_like_its_first(route: str, field: str) -> None:
    assert read_prompt(route, {field: ["ab", "c"]}) == Prompt(b"abc", ((2, "next"),))


def test_media_beside_a_generate_text_come_first() -> None:
    plain = read_prompt("/generate", {"text": "what is this?"})
    shown = read_prompt("/generate", {"text": "what is this?", "image_data": "AAAA"})
    assert shown.text[4096:] == plain.text
    assert shown.message_starts == ((0, "image_data"),)
    assert read_prompt("/generate", {"input_ids": [1], "image_data": "AAAA"}).tokens is None


def test_generate_takes_embeddings_by_digest() -> None:
    assert len(read_prompt("/generate", {"input_embeds": [[0.5, 1.0]]}).text) == 16


def test_responses_takes_text_or_items() -> None:
    text = read_prompt("/v1/responses", {"instructions": "brief", "input": "hi"})
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    assert text == read_prompt("/v1/responses", {"instructions": "brief", "input": items})
    assert text == Prompt(b"briefhi", ((0, "system"), (5, "user")))


def test_responses_takes_calls_outputs_and_items_of_unknown_kind() -> None:
    items = [
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "42"},
        {"type": "item_reference", "id": "x"},
    ]
    prompt = read_prompt("/v1/responses", {"input": items})
    assert [role for _, role in prompt.message_starts] == ["function_call", "function_call_output", "item_reference"]
    assert b"42" in prompt.text


def test_responses_without_input_needs_another_source() -> None:
    assert read_prompt("/v1/responses", {"previous_response_id": "r"}).text == b""
    assert b"template" in read_prompt("/v1/responses", {"prompt": {"id": "template"}}).text
    with pytest.raises(BadRequest, match="input: expected text or a list of items, got nothing"):
        read_prompt("/v1/responses", {})


def test_messages_takes_a_system_text_and_content_blocks() -> None:
    body = {
        "system": [{"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            user("hi"),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
            user([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "42"}]}]),
            user([{"type": "image", "source": {"type": "url", "url": "http://x"}}]),
        ],
    }
    prompt = read_prompt("/v1/messages", body)
    assert prompt.text[:-4096] == b'briefhi["f",{}]42'
    assert [role for _, role in prompt.message_starts] == ["system", "user", "assistant", "user", "user"]


@pytest.mark.parametrize(
    ("route", "body", "expected"),
    [
        (
            "/v1/messages",
            {"tools": [{"name": "f"}], "system": "s", "messages": [user("hi")]},
            Prompt(b'[{"name":"f"}]shi', ((0, "tools"), (14, "system"), (15, "user"))),
        ),
        (
            "/v1/responses",
            {"tools": [{"name": "f"}], "instructions": "i", "prompt": {"id": "p"}, "input": "hi"},
            Prompt(b'[{"name":"f"}]i{"id":"p"}hi', ((0, "tools"), (14, "system"), (15, "prompt"), (25, "user"))),
        ),
        (
            CHAT,
            {"functions": [{"name": "f"}], "messages": [user("hi")]},
            Prompt(b'[{"name":"f"}]hi', ((0, "tools"), (14, "user"))),
        ),
        (
            CHAT,
            {"tools": [1], "functions": [2], "messages": [user("hi")]},
            Prompt(b"[1]hi", ((0, "tools"), (3, "user"))),
        ),
        ("/v1/messages", {"system": "", "messages": [user("hi")]}, Prompt(b"hi", ((0, "user"),))),
        ("/v1/responses", {"prompt": "p", "input": "hi"}, Prompt(b"hi", ((0, "user"),))),
        ("/v1/responses", {"input": "hi", "conversation": "c"}, Prompt(b"hi", ((0, "user"),))),
        (
            CHAT,
            {"messages": [{"role": "assistant", "reasoning": "so", "content": "yes"}]},
            Prompt(b"soyes", ((0, "assistant"),)),
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "reasoning_content": ["so"], "content": "yes", "name": "n"}]},
            Prompt(b"yes", ((0, "assistant"),)),
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            Prompt(b'{"name":"f"}', ((0, "assistant"),)),
        ),
        (
            "/v1/responses",
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            Prompt(b'["f","{}"]', ((0, "function_call"),)),
        ),
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "output": "42"}, {"type": "other", "output": 42}]},
            Prompt(b'42{"type":"other","output":42}', ((0, "function_call_output"), (2, "other"))),
        ),
        (
            "/v1/responses",
            {"input": [{"type": "message", "role": "user", "content": "hi", "output": "no"}]},
            Prompt(b"hi", ((0, "user"),)),
        ),
        ("/generate", {"text": "t", "input_ids": [1]}, Prompt(b"t", ())),
        (CHAT, {"tools": ["é"], "messages": [user("hi")]}, Prompt('["é"]hi'.encode(), ((0, "tools"), (6, "user")))),
        ("/generate", {"text": None, "input_ids": [1]}, Prompt(b"\x01\0\0\0", (), 1)),
        ("/generate", {"text": "t", "image_data": None, "audio_data": []}, Prompt(b"t", ())),
        ("/v1/completions", {"prompt": [[1], "a"]}, Prompt(b"\x01\0\0\0a", ((4, "next"),))),
        ("/v1/completions", {"prompt": {"text": "a"}}, Prompt(b"a", ())),
        ("/v1/completions", {"prompt": ""}, Prompt(b"", ())),
        (
            CHAT,
            {"messages": [user([{"type": "thinking", "thinking": "t"}, {"type": "refusal", "refusal": "r"}])]},
            Prompt(b"tr", ((0, "user"),)),
        ),
        (CHAT, {"messages": [user(None)]}, Prompt(b"", ((0, "user"),))),
        (CHAT, {"messages": [user([{"type": "tool_result", "content": "42"}])]}, Prompt(b"42", ((0, "user"),))),
    ],
)
def test_every_field_that_an_engine_templates_is_in_its_place(route: str, body: object, expected: Prompt) -> None:
    assert read_prompt(route, body) == expected


def test_media_enter_in_one_order_each_with_its_mark() -> None:
    shown = read_prompt("/generate", {"text": "t", "video_data": "v", "audio_data": "a", "image_data": "i"})
    assert [role for _, role in shown.message_starts] == ["image_data", "audio_data", "video_data"]
    assert [each.kind for each in shown.media] == ["image", "audio", "video"]
    assert (len(shown.text), shown.text[-1:], shown.tokens) == (shown.media_bytes + 1, b"t", None)
    embedded = read_prompt("/generate", {"text": "t", "input_embeds": [[0.5]], "image_data": "i"})
    assert (embedded.message_starts, len(embedded.text)) == (((0, "image_data"),), 4096 + 16)


def test_as_many_pieces_as_the_bound_are_read() -> None:
    """Each message is a piece, and so is each of its parts."""
    assert len(chat(*([user("x")] * 65_536)).message_starts) == 65_536
    with pytest.raises(BadRequest, match="at most 65536"):
        chat(*([user("x")] * 65_535), user(["x"]))


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        (CHAT, [], "body: expected a JSON object, got an empty list"),
        (CHAT, {}, "messages: expected a list of messages, got nothing"),
        (CHAT, {"messages": "hi"}, "messages: expected a list of messages, got text"),
        (CHAT, {"messages": []}, "messages: expected at least one message, got an empty list"),
        ("/v1/messages", {"messages": []}, "messages: expected at least one message, got an empty list"),
        ("/v1/completions", {"prompt": []}, "prompt: expected text or token ids, got an empty list"),
        ("/v1/completions", {"prompt": [[]]}, "prompt: expected text or token ids, got an empty list"),
        ("/v1/completions", {"prompt": ["a", []]}, r"prompt\[1\]: expected text or token ids, got an empty list"),
        ("/v1/embeddings", {"input": []}, "input: expected text or token ids, got an empty list"),
        ("/generate", {"input_ids": []}, "input_ids: expected text or token ids, got an empty list"),
        ("/v1/responses", {"input": []}, "input: expected at least one item, got an empty list"),
        (CHAT, {"messages": [1]}, r"messages\[0\]: expected an object, got a number"),
        (CHAT, {"messages": [{"content": "x"}]}, r"messages\[0\].role: expected a string, got nothing"),
        (CHAT, {"messages": [user(3)]}, r"messages\[0\].content: expected text or a list of parts, got a number"),
        (CHAT, {"messages": [user([None])]}, r"messages\[0\].content\[0\]: expected an object, got nothing"),
        ("/v1/completions", {}, "prompt: expected text or token ids, got nothing"),
        ("/v1/completions", {"prompt": [1, -1]}, "prompt: expected token ids, whole numbers from 0"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt: expected token ids"),
        ("/v1/completions", {"prompt": ["a", 1]}, r"prompt\[1\]: expected text or token ids, got a number"),
        ("/generate", {"input_ids": [1.5]}, "input_ids: expected token ids"),
        ("/generate", {}, "text: expected text or token ids, got nothing"),
        ("/generate", {"text": [{}], "input_ids": [0]}, "text: expected a string or a list of strings, got an object"),
        ("/v1/embeddings", {"input": True}, "input: expected text or token ids, got true or false"),
        ("/v1/responses", {"input": [4]}, r"input\[0\]: expected an object, got a number"),
        ("/v1/responses", {"input": [{"content": "x"}]}, r"input\[0\].role: expected a string"),
        ("/v1/other", {}, "no prompt is known for route /v1/other"),
    ],
)
def test_refusal_names_the_field_and_what_was_expected(route: str, body: object, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        read_prompt(route, body)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", lambda pieces: {"messages": [{"role": "user"}] * pieces}),
        ("/v1/chat/completions", lambda pieces: {"messages": [{"role": "user", "content": [""] * pieces}]}),
        ("/v1/chat/completions", lambda pieces: {"messages": [{"role": "user", "content": [{"a": [{}] * pieces}]}]}),
        (
            "/v1/messages",
            lambda pieces: {"messages": [{"role": "user", "content": [{"type": "tool_result"}] * pieces}]},
        ),
        ("/v1/responses", lambda pieces: {"input": [{"type": "reasoning"}] * pieces}),
        ("/v1/completions", lambda pieces: {"prompt": [[1]] * (pieces + 1)}),
        ("/generate", lambda pieces: {"text": "x", "image_data": [""] * pieces}),
    ],
)
def test_body_of_more_pieces_than_anybody_has_is_refused(route: str, body: Callable[[int], Any]) -> None:
    read_prompt(route, body(1000))
    with pytest.raises(BadRequest, match="at most 65536"):
        read_prompt(route, body(65_537))


def test_half_a_surrogate_pair_does_not_stop_a_request() -> None:
    body = json.loads(r'{"messages": [{"role": "\ud800", "content": "a\udfff"}], "tools": [{"name": "\ud801"}]}')
    assert read_prompt(CHAT, body).text.endswith(b"a\xed\xbf\xbf")


def nested(depth: int, kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value] if kind is list else {"content": value, "type": "tool_result"}
    return value


@pytest.mark.parametrize("route", ROUTES)
def test_absurdly_nested_body_is_refused_or_read_and_never_breaks(route: str) -> None:
    for deep in (nested(20_000, list), nested(20_000, dict)):
        for field in ("content", "tools", "tool_calls", "system", "input", "prompt", "text", "image_data"):
            message = {"role": "user", "content": deep if field == "content" else "x", "tool_calls": deep}
            with suppress(BadRequest):
                read_prompt(route, {"input": "x", "messages": [message], field: deep})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
WHOLE: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "s"},
        user([{"type": "text", "text": "t"}, IMAGE]),
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "42"},
    ],
    "tools": [{"function": {"name": "f"}}],
    "system": [{"type": "text", "text": "s"}],
    "prompt": ["a", "b"],
    "text": "t",
    "input_ids": [1, 2],
    "image_data": ["x"],
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}, {"type": "reasoning", "summary": []}],
    "instructions": "i",
}


def mutated(value: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """`value` with something at a random place replaced, or left out."""
    if not isinstance(value, list | dict) or not value or draw(st.integers(0, 4)) == 0:
        return draw(JSON)
    copy = list(value) if isinstance(value, list) else dict(value)
    place = draw(st.sampled_from(range(len(value)) if isinstance(value, list) else sorted(value)))
    if draw(st.integers(0, 5)) == 0:
        del copy[place]
    else:
        copy[place] = mutated(value[place], draw)
    return copy


@given(data=st.data(), route=st.sampled_from(ROUTES), times=st.integers(1, 4))
def test_mutated_body_is_read_or_refused(data: st.DataObject, route: str, times: int) -> None:
    body: Any = WHOLE
    for _ in range(times):
        body = mutated(body, data.draw)
    try:
        prompt = read_prompt(route, body)
    except BadRequest:
        return
    offsets = [offset for offset, _ in prompt.message_starts]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(prompt.text) for offset in offsets)
    assert prompt.tokens is None or len(prompt.text) == 4 * prompt.tokens


@pytest.mark.parametrize("texts", [["a", "", "bc"], ["a", "\u00e4\u20ac", "\ud800"]])
def test_many_plain_messages_read_as_one_by_one(texts: list[str]) -> None:
    messages = [{"role": f"r{number}", "content": text} for number, text in enumerate(texts * 10)]
    marked = [*messages, {"role": "user", "content": "end", "name": "n"}]
    many, one_by_one = (read_prompt("/v1/chat/completions", {"messages": each}) for each in (messages, marked))
    assert one_by_one.text == many.text + b"end"
    assert one_by_one.message_starts == (*many.message_starts, (len(many.text), "user"))


@pytest.mark.parametrize("odd", [{"role": 1, "content": "b"}, ["role", "content"], "ab"])
def test_odd_message_among_many_is_refused_by_its_number(odd: object) -> None:
    with pytest.raises(BadRequest, match=r"messages\[12\]"):
        read_prompt("/v1/chat/completions", {"messages": [*[{"role": "user", "content": "a"}] * 12, odd]})


def test_each_message_ends_where_the_next_one_starts() -> None:
    messages = [{"role": "user", "content": text} for text in ("abc", "", "defg")]
    fingerprint = Fingerprinter(key=1)(read_prompt(CHAT, {"messages": messages}))
    assert fingerprint.boundaries == (3, 7)


def test_a_prompt_without_messages_has_no_boundary() -> None:
    assert Fingerprinter(key=1)(read_prompt("/v1/completions", {"prompt": "abc"})).boundaries == ()
    assert message_ends((0,), 0) == ()


@given(st.lists(st.integers(0, 500), min_size=1, max_size=300), st.integers(0, 500), st.integers(1, 10_000))
def test_boundaries_ascend_and_end_with_the_prompt(sizes: list[int], last: int, tokens: int) -> None:
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    ends = message_ends(starts, starts[-1] + last)
    assert list(ends) == sorted(set(ends))
    assert len(ends) <= MAX_BOUNDARIES
    assert not ends or ends[-1] == starts[-1] + last
    found = token_boundaries(ends, size=starts[-1] + last, tokens=tokens)
    assert list(found) == sorted(found)
    assert not found or found[-1] == tokens


def test_the_first_and_the_last_boundaries_remain_of_many() -> None:
    found = list(bounded(range(1000)))
    assert found == [*range(MAX_BOUNDARIES // 2), *range(1000 - MAX_BOUNDARIES // 2, 1000)]
    assert list(bounded(range(MAX_BOUNDARIES))) == list(range(MAX_BOUNDARIES))


def test_marks_in_columns_are_a_sequence_of_pairs() -> None:
    pairs = ((0, "system"), (4, "user"), (4, "tool"))
    marks = Marks.of(pairs)
    assert (marks.starts, marks.roles) == ((0, 4, 4), ("system", "user", "tool"))
    assert (tuple(marks), len(marks), marks[-1], tuple(marks[1:])) == (pairs, 3, pairs[-1], pairs[1:])
    assert (marks == pairs, marks == pairs[:2], marks == [*pairs], hash(marks) == hash(pairs)) == (
        True,
        False,
        False,
        True,
    )
    assert (Marks.of(marks) is marks, repr(marks), bool(Marks.of(()))) == (True, repr(pairs), False)


# --- JSON by the quick parser and by the standard library: the same texts, the same values, the same errors.


TEXTS = [
    *(b"-0", b"-0.0", b"1e5", b"1E400", b"-1e-400", b"4.35", b"01", b"1.", b".5", b"+1", b"1e", b"9007199254740993.0"),
    *(b"9223372036854775808", b"-9223372036854775809", b"18446744073709551616", b"9" * 640, b"9" * 5000),
    *(b"2.2250738585072011e-308", b"1.7976931348623159e308", b"179769313486231570814527423731704356798070e267"),
    *(b"1.5e300", b"4.9e-324", b"1e999", b"-1.7976931348623157e308", b"1." + b"3" * 700),
    *(
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"nul",
        b"true",
        b"null",
        b"",
        b" ",
        b" 1 ",
        b"1 2",
        b"1\0",
        b"\x0b1",
        b"\x0c1",
    ),
    *(
        b'"\x01"',
        b'"\t"',
        b'"\x7f"',
        b'"a\0"',
        b'"\\u0000"',
        b'"\\x"',
        b'"\\/"',
        b'"\xe2\x80\xa8"',
        b'"\\u00e9\xc3\xa9"',
    ),
    *(b'"\\ud800"', b'{"\\ud800": 1}', b'"\\ud83d\\ude00"', b'"\xed\xa0\x80"', b'"\xff"', b'"\xc0\x80"'),
    *(b'"\xf4\x90\x80\x80"', b"\xef\xbb\xbf1", '{"a": "é"}'.encode("utf-16"), b'{"a":1,"a":2,"b":3}', b'{"":1}'),
    *(b"[1,]", b'{"a":1,}', b"{a:1}", b"{1:2}", b'{"a" :1}', b"[" * 500 + b"]" * 500, b"[" * 100_000),
]
WHOLE_JSON_TEXT = json.dumps(
    {"model": "m", "messages": [{"content": "hé\\n \U0001f600"}, {"a": [1, -2.5e10, True, None, 10**20, {}]}], "t": 0.1}
).encode()
PIECES = [
    *(bytes([byte]) for byte in range(256)),
    *[
        b'"',
        b"\\",
        b"\\u",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"0",
        b"-",
        b"e",
        b".",
        b"NaN",
        b"\\ud8",
        b"\xed\xa0\x80",
    ]
    * 12,
]


def exactly(value: object) -> object:
    """Return a value with its types, order and bits."""
    if isinstance(value, dict):
        return [(key, exactly(member)) for key, member in value.items()]
    if isinstance(value, list):
        # Nested deeper than a comparison can be.
        return "nested" if len(value) == 1 and isinstance(value[0], list) else [exactly(member) for member in value]
    return (type(value), value.hex() if isinstance(value, float) else value)


def reading(parse: object, text: bytes) -> tuple[str, object]:
    assert callable(parse)
    try:
        return "value", exactly(parse(text))
    except RecursionError:
        return "error", "nested"
    except ValueError as error:
        return "error", (type(error), str(error))


def compared(text: bytes) -> str:
    """Assert that both read `text` alike; return whether the quick parser alone would."""
    assert reading(parse_json, text) == reading(json.loads, text), text
    return reading(msgspec.json.Decoder().decode, text)[0] if text[:1] != b"[" else "nested"


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:24]))
def test_a_text_has_the_value_or_the_error_of_the_standard_library(text: bytes) -> None:
    compared(text)


def test_changed_texts_and_numbers_are_read_alike() -> None:
    rng, found = random.Random(18), Counter[str]()
    for _ in range(4000):
        text = bytearray(WHOLE_JSON_TEXT)
        for _ in range(rng.randint(1, 3)):
            place, kind = rng.randrange(len(text)), rng.random()
            text[place : place + (kind < 0.4) + 3 * (kind > 0.9)] = b"" if kind > 0.7 else rng.choice(PIECES)
        found[compared(bytes(text))] += 1
    for _ in range(4000):
        digits = ["".join(rng.choices("0123456789", k=rng.randint(1, most))) for most in (25, 25, 3)]
        number = f"{rng.choice(('', '-'))}{digits[0]}{rng.choice(('', '.' + digits[1]))}"
        found[compared(f"{number}{rng.choice(('', 'e', 'e+', 'e-'))}{digits[2]}".encode())] += 1
    assert min(found["value"], found["error"]) > 1000, "both happen"


texts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


def values_of(value: Any) -> int:
    members = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return 1 + sum(map(values_of, members))


@given(texts, st.sampled_from([None, 1]))
def test_count_is_never_less_than_the_values(value: Any, indent: int | None) -> None:
    assert count_values(json.dumps(value, indent=indent).encode()) + 1 >= values_of(value)
    assert count_values(json.dumps(value, ensure_ascii=False).encode("utf-16")) + 1 >= values_of(value)


@pytest.mark.parametrize(
    ("text", "quick"),
    [
        (b"0," * (TINY_BYTES // 2), True),
        (b'"",' * QUICK_VALUES, True),
        (b'"",' * (QUICK_VALUES + 1), False),
        (b"{}," * (TINY_BYTES // 3), True),
        (b"{}, " * QUICK_OBJECTS, True),
        (b"{}, " * QUICK_OBJECTS + b"{}", False),
        (b"0," * (QUICK_VALUES + 1), False),
        (b"[" * (QUICK_VALUES + 1), False),
        (b'"' + b"x" * (QUICK_BYTES - 2) + b'"', True),
        (b'"' + b"x" * QUICK_BYTES + b'"', False),
        (b"a, " * QUICK_VALUES + b"x" * TINY_BYTES, True),
        (b"a, " * QUICK_VALUES + b"x" * TINY_BYTES + b",", False),
    ],
)
def test_long_texts_of_many_values_are_not_quick(text: bytes, quick: bool) -> None:
    assert is_quick(text) is quick
