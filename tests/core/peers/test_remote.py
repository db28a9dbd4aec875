from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.peers.remote import RemotePrefixes, marks_of_prompt
from tests.core.routers import a_request, blocks_of

PROMPT = blocks_of(1, 2, 3, 4)


def matched(marks: RemotePrefixes, blocks: bytes = PROMPT, *, own: tuple[float, ...] = (0.0, 0.0, 0.0)) -> list[float]:
    request = a_request(blocks=blocks)
    raised = marks.raise_matches(np.array(own), request) / request.block_tokens
    return [float(depth) for depth in raised]


def add(marks: RemotePrefixes, slot: int, blocks: bytes, *depths: int, capacity: int | None = None) -> None:
    marks.add(slot, depths, marks_of_prompt(blocks, depths), capacity_blocks=capacity)
    marks.check()


def test_the_deepest_mark_of_a_prompt_counts_for_each_replica() -> None:
    marks = RemotePrefixes()
    add(marks, 0, PROMPT, 1, 3)
    add(marks, 2, PROMPT, 2)
    assert matched(marks) == [3.0, 0.0, 2.0]
    assert matched(marks, blocks_of(1, 9)) == [1.0, 0.0, 0.0]


def test_a_mark_never_lowers_what_the_index_has() -> None:
    marks = RemotePrefixes()
    add(marks, 0, PROMPT, 1)
    own = np.array([400.0, 0.0])
    assert marks.raise_matches(own, a_request(blocks=PROMPT)).tolist() == [400.0, 0.0]
    assert own.tolist() == [400.0, 0.0]


def test_marks_beyond_the_capacity_are_evicted_oldest_and_deepest_first() -> None:
    marks = RemotePrefixes()
    add(marks, 0, PROMPT, 2, 4, capacity=6)
    add(marks, 0, blocks_of(7, 8, 9, 10), 4, capacity=6)
    assert matched(marks) == [2.0, 0.0, 0.0]
    assert matched(marks, blocks_of(7, 8, 9, 10)) == [4.0, 0.0, 0.0]


def test_an_evicted_prefix_takes_all_marks_that_are_older() -> None:
    marks = RemotePrefixes()
    old, lost, new = blocks_of(1, 2), blocks_of(3, 4), blocks_of(5, 6)
    for blocks in (old, lost, new):
        add(marks, 0, blocks, 2)
    marks.evict(0, marks_of_prompt(lost, (2,)))
    marks.check()
    assert [matched(marks, blocks)[0] for blocks in (old, lost, new)] == [0.0, 0.0, 2.0]


def test_an_eviction_of_an_unknown_prefix_changes_nothing() -> None:
    marks = RemotePrefixes()
    add(marks, 0, PROMPT, 2)
    marks.evict(0, marks_of_prompt(blocks_of(8), (1,)))
    marks.evict(5, marks_of_prompt(PROMPT, (2,)))
    assert matched(marks) == [2.0, 0.0, 0.0]


def test_a_full_table_evicts_of_the_replica_that_gets_more_than_its_share() -> None:
    marks = RemotePrefixes(max_marks=4)
    add(marks, 0, PROMPT, 4)
    for word in range(10):
        add(marks, 1, blocks_of(100 + word), 1)
    assert len(marks) == 4
    assert matched(marks) == [4.0, 0.0, 0.0]


def test_the_marks_of_one_replica_can_be_removed() -> None:
    marks = RemotePrefixes()
    add(marks, 0, PROMPT, 2)
    add(marks, 1, PROMPT, 2)
    marks.flush(0)
    marks.check()
    assert matched(marks) == [0.0, 2.0, 0.0]
    marks.flush()
    assert len(marks) == 0


def test_a_replica_beyond_the_columns_is_ignored() -> None:
    marks = RemotePrefixes()
    add(marks, 5, PROMPT, 2)
    assert matched(marks) == [0.0, 0.0, 0.0]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 9)
        ),
        max_size=40,
    )
)
def test_every_invariant_holds_after_any_reports(steps: list[tuple[int, list[int], int, int]]) -> None:
    marks = RemotePrefixes(max_marks=8)
    for slot, words, kind, capacity in steps:
        blocks = blocks_of(*words)
        if kind == 0:
            marks.evict(slot, marks_of_prompt(blocks, (len(words),)))
        elif kind == 1 and capacity == 0:
            marks.flush(slot)
        else:
            add(marks, slot, blocks, *range(1, len(words) + 1), capacity=capacity or None)
        marks.check()
