from __future__ import annotations

import json
from typing import Any

import pytest

from gorgo.errors import TraceError
from gorgo.lab.traces.rows import MAX_VALUES, TraceRequest, read_row

GOOD: dict[str, Any] = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [3, 9]}


def read(row: object) -> TraceRequest:
    return read_row(json.dumps(row), file="t.jsonl", line_number=4, index=2)


def test_a_mooncake_row_is_read() -> None:
    assert read(GOOD) == TraceRequest(2, 1.5, 600, 7, (3, 9), None)


def test_unknown_keys_and_fractions_of_a_millisecond_are_no_error() -> None:
    request = read({"user": "x", **GOOD, "timestamp": 0.25, "turn": None})
    assert request.timestamp_s == 0.00025


def test_string_ids_are_numbers_or_hashes_of_their_text() -> None:
    digits, other, same = (read({**GOOD, "hash_ids": ids}).hash_ids for ids in (["3", "9"], ["3", "ab"], ["3", "ab"]))
    assert digits == (3, 9)
    assert other == same != digits


def test_half_a_surrogate_pair_is_an_id_as_any_text() -> None:
    ids = read({**GOOD, "hash_ids": ["\ud800", "\udfff"]}).hash_ids
    assert len(set(ids)) == 2


def test_turns_beyond_all_numbers_are_not_told() -> None:
    assert read({**GOOD, "turn": 10**400}).turns is None


def test_a_row_with_a_body_needs_no_ids() -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    row = {"timestamp": 0, "input_length": 5000, "output_length": 1, "request": body}
    assert read(row).body == body
    assert read({**row, "hash_ids": ["a"]}).hash_ids == read({**row, "hash_ids": ["a"]}).hash_ids


def test_ids_of_full_blocks_alone_are_taken() -> None:
    assert read({**GOOD, "hash_ids": [3]}).hash_ids == (3,)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"timestamp": None}, "timestamp is null; expected milliseconds, at least 0"),
        ({"timestamp": -1}, "timestamp is -1; expected"),
        ({"timestamp": True}, "timestamp is true; expected"),
        ({"timestamp": float("nan")}, "timestamp is NaN; expected"),
        ({"timestamp": 10**400}, "timestamp is 1000"),
        ({"input_length": 0}, "input_length is 0; expected a whole number of tokens, at least 1"),
        (
            {"input_length": 10_000_001},
            "input_length is 10000001; expected a whole number of tokens",
        ),
        ({"output_length": 2**53}, "output_length is 9007199254740992; expected a whole number of tokens"),
        ({"input_length": 600.5}, "input_length is 600.5; expected"),
        ({"output_length": "7"}, "output_length is '7'; expected"),
        ({"hash_ids": None}, "hash_ids is null; expected a list of ids"),
        ({"hash_ids": [1, 2, 3]}, "expected 2 ids for input_length 600 (one per 512 tokens), not 3"),
        ({"hash_ids": []}, "expected 2 ids for input_length 600 (one per 512 tokens), not 0"),
        ({"hash_ids": [1, 2.5]}, "expected integers or strings, not 2.5"),
        ({"request": "hi"}, "request is 'hi'; expected a chat completion body with a list of messages"),
        ({"request": {"messages": "hi"}}, "expected a chat completion body with a list of messages"),
    ],
)
def test_a_wrong_value_is_named_with_file_line_and_expectation(change: dict[str, Any], said: str) -> None:
    with pytest.raises(TraceError) as raised:
        read({**GOOD, **change})
    assert str(raised.value).startswith("t.jsonl, line 4: ")
    assert said in str(raised.value)


@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(TraceError, match=f"{field} is missing; expected"):
        read({name: value for name, value in GOOD.items() if name != field})


@pytest.mark.parametrize("text", ["{", "[1]", "7", "[" * 100_000, '"' + "x" * 500])
def test_a_line_that_is_no_object_is_shown_in_short(text: str) -> None:
    with pytest.raises(TraceError, match=r"^t.jsonl, line 4: .*expected a") as raised:
        read_row(text, file="t.jsonl", line_number=4, index=0)
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize(
    ("told", "user"),
    [
        ({"user_id": "u1", "user": "u2"}, "u1"),
        ({"token_hash": 77}, "77"),
        ({"user_id": None, "token_hash": "t"}, "t"),
        ({"user": {"name": "x"}}, None),
        ({"user_id": ""}, None),
        ({}, None),
    ],
)
def test_who_asked_is_taken_where_it_is_told(told: dict[str, Any], user: str | None) -> None:
    assert read({**GOOD, **told}).user == user


def test_turns_are_as_told_or_the_questions_in_the_body() -> None:
    messages = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user")]
    body = {"messages": messages}
    assert read({**GOOD, "turn": 7}).turns == 7
    assert read({**GOOD, "request": body}).turns == 2
    assert read({**GOOD, "request": body, "turn": 9}).turns == 9
    assert read({**GOOD, "request": {"messages": []}, "turn": "many"}).turns is None
    assert read(GOOD).turns is None


def test_blocks_of_256_tokens_in_a_row_with_a_body_become_blocks_of_512() -> None:
    def ids(tokens: int, *hashes: str) -> tuple[int, ...]:
        body = {"messages": [{"role": "user", "content": "x"}]}
        row = {"timestamp": 0, "input_length": tokens, "output_length": 1, "request": body}
        return read({**row, "hash_ids": list(hashes)}).hash_ids

    short, longer = ids(1100, "a", "b", "c", "d", "e"), ids(1600, "a", "b", "c", "d", "e", "f", "g")
    assert (len(short), len(longer)) == (3, 4)
    assert short[:2] == longer[:2]
    assert short[2] != longer[2]  # its last block was not full
    other = ids(1100, "z", "b", "c", "d", "e")
    assert set(other).isdisjoint(short)  # an id stands for all before it, even if theirs did not
    assert ids(1100, "a", "b", "c", "d") == short[:2]  # full ones alone
    assert ids(1100, "7", "8", "9") == (7, 8, 9)  # blocks of 512
    assert ids(1100, "a") == ()  # of neither size: its text is its own


@pytest.mark.parametrize(
    "text",
    [
        '{"hash_ids": [' + "0," * MAX_VALUES + "0]}",
        '{"hash_ids": ' + "[" * MAX_VALUES * 2,
        '{"x": [' + "{}," * MAX_VALUES + "{}]}",
    ],
    ids=["ids", "nesting", "objects"],
)
def test_a_line_of_millions_of_values_is_refused_unread(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(_: str) -> None:
        raise AssertionError("the line was parsed")

    monkeypatch.setattr(json, "loads", parse)
    with pytest.raises(TraceError, match=r"t\.jsonl, line 4: some [\d,]+ values; expected 1,000,000 at most"):
        read_row(text, file="t.jsonl", line_number=4, index=0)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"timestamp": ' + "9" * 100_000 + "}", '{"timestamp": 1e999}', '{"timestamp": -Infinity}', "\x00"],
)
def test_a_line_that_no_writer_of_traces_makes_is_refused_by_its_place(text: str) -> None:
    with pytest.raises(TraceError, match=r"t\.jsonl, line 4: .{1,300}$"):
        read_row(text, file="t.jsonl", line_number=4, index=0)
