from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.prompt.boundaries import MAX_BOUNDARIES, Marks, bounded, message_ends, token_boundaries
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.core.prompt.parse import read_prompt

CHAT = "/v1/chat/completions"


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
