from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.peers.marks import GroupPrefixes, marks_of_prompt
from gorgo.core.peers.records import PrefixMarks
from gorgo.core.prefix.index import Origin
from gorgo.core.prefix.residency import NO_PREFIX
from tests.core.routers import a_request, blocks_of

PROMPT = blocks_of(1, 2, 3, 4)


def matched(marks: GroupPrefixes, blocks: bytes = PROMPT, *, own: tuple[float, ...] = (0.0, 0.0, 0.0)) -> list[float]:
    request = a_request(blocks=blocks)
    raised = marks.raise_matches(np.array(own), request) / request.block_tokens
    return [float(depth) for depth in raised]


def add(
    marks: GroupPrefixes,
    slot: int,
    blocks: bytes,
    *depths: int,
    capacity: int | None = None,
    tick: int = 0,
    origin: Origin = Origin.REMOTE,
) -> int:
    prompt = PrefixMarks("a", None, depths, marks_of_prompt(blocks, depths))
    oldest = marks.use(slot, prompt, origin, tick=tick, now=float(tick), capacity_blocks=capacity)
    marks.check()
    return oldest


def word_of(block: bytes) -> int:
    return int.from_bytes(block, "little")


def test_the_deepest_mark_of_a_prompt_counts_for_each_replica() -> None:
    marks = GroupPrefixes()
    add(marks, 0, PROMPT, 1, 3)
    add(marks, 2, PROMPT, 2)
    assert matched(marks) == [3.0, 0.0, 2.0]
    assert matched(marks, blocks_of(1, 9)) == [1.0, 0.0, 0.0]


def test_a_mark_never_lowers_what_the_index_has() -> None:
    marks = GroupPrefixes()
    add(marks, 0, PROMPT, 1)
    own = np.array([400.0, 0.0])
    assert marks.raise_matches(own, a_request(blocks=PROMPT)).tolist() == [400.0, 0.0]
    assert own.tolist() == [400.0, 0.0]


def test_marks_beyond_the_capacity_are_evicted_oldest_and_deepest_first() -> None:
    marks = GroupPrefixes()
    add(marks, 0, PROMPT, 2, 4, capacity=6)
    add(marks, 0, blocks_of(7, 8, 9, 10), 4, capacity=6)
    assert matched(marks) == [2.0, 0.0, 0.0]
    assert matched(marks, blocks_of(7, 8, 9, 10)) == [4.0, 0.0, 0.0]


def test_marks_older_than_a_tick_are_evicted_oldest_first() -> None:
    marks = GroupPrefixes()
    prompts = [blocks_of(1, 2), blocks_of(3, 4), blocks_of(5, 6)]
    for tick, blocks in enumerate(prompts):
        add(marks, 0, blocks, 2, tick=tick)
    words = [word_of(marks_of_prompt(blocks, (2,))) for blocks in prompts]
    assert marks.evict_older(0, before=2) == words[:2]
    marks.check()
    assert [matched(marks, blocks)[0] for blocks in prompts] == [0.0, 0.0, 2.0]
    assert marks.evict_older(7, before=2) == []


def test_the_age_of_evicted_marks_is_their_median_so_that_one_used_again_does_not_count() -> None:
    marks = GroupPrefixes()
    prompts = [blocks_of(word) for word in range(4)]
    for tick, blocks in enumerate(prompts):
        add(marks, 0, blocks, 1, tick=10 + tick)
    add(marks, 0, prompts[0], 1, tick=99)
    named = [*map(word_of, prompts[:3]), 77]
    assert marks.median_tick(0, named) == 12
    assert marks.median_tick(0, [77]) == marks.median_tick(5, named) == 0


def test_a_full_cache_tells_the_tick_before_which_nothing_is_left() -> None:
    marks = GroupPrefixes()
    assert add(marks, 0, blocks_of(1, 2), 2, capacity=4, tick=6) == 0
    assert add(marks, 0, blocks_of(3, 4), 2, capacity=4, tick=8) == 0
    assert add(marks, 0, blocks_of(1, 2), 2, capacity=4, tick=9) == 0
    assert add(marks, 0, blocks_of(5, 6), 2, capacity=4, tick=10) == 9


def test_a_prompt_is_found_by_marks_that_were_used_before_a_time() -> None:
    marks = GroupPrefixes()
    add(marks, 0, PROMPT, 2, tick=4)
    assert marks.last_used(0, PROMPT, before_s=5.0) == (2, 4)
    assert marks.last_used(0, PROMPT, before_s=4.0) == marks.last_used(1, PROMPT, before_s=5.0) == NO_PREFIX


def test_a_full_table_evicts_of_the_replica_that_gets_more_than_its_share() -> None:
    marks = GroupPrefixes(max_marks=4)
    add(marks, 0, PROMPT, 4)
    for word in range(10):
        add(marks, 1, blocks_of(100 + word), 1)
    assert len(marks) == 4
    assert matched(marks) == [4.0, 0.0, 0.0]


def test_a_full_table_evicts_what_other_routers_confirmed_first() -> None:
    marks = GroupPrefixes(max_marks=4)
    for word in (1, 2):
        add(marks, 0, blocks_of(word), 1, tick=word, origin=Origin.LOCAL)
    for word in range(3, 9):
        add(marks, word % 2, blocks_of(word), 1, tick=word, origin=Origin.REMOTE)
    assert marks.marks == {Origin.LOCAL: 2, Origin.REMOTE: 2}
    assert [matched(marks, blocks_of(word))[0] for word in (1, 2)] == [1.0, 1.0]
    assert marks.evicted == {(Origin.REMOTE, "table"): 4}
    for word in range(9, 13):
        add(marks, 0, blocks_of(word), 1, tick=word, origin=Origin.LOCAL)
    assert marks.marks == {Origin.LOCAL: 4, Origin.REMOTE: 0}
    assert marks.evicted == {(Origin.REMOTE, "table"): 6, (Origin.LOCAL, "table"): 2}


def test_an_engines_capacity_evicts_in_the_order_of_use_whoever_confirmed_it() -> None:
    marks = GroupPrefixes()
    add(marks, 0, blocks_of(1), 1, tick=2, capacity=2, origin=Origin.LOCAL)
    add(marks, 0, blocks_of(2), 1, tick=4, capacity=2)
    assert add(marks, 0, blocks_of(3), 1, tick=6, capacity=2, origin=Origin.LOCAL) == 4
    assert add(marks, 0, blocks_of(4), 1, tick=8, capacity=2, origin=Origin.LOCAL) == 6
    assert marks.evicted == {(Origin.LOCAL, "capacity"): 1, (Origin.REMOTE, "capacity"): 1}


def test_a_mark_that_this_router_confirmed_stays_its_own_and_one_of_a_peer_becomes_its_own() -> None:
    marks = GroupPrefixes()
    add(marks, 0, blocks_of(1), 1, tick=2, origin=Origin.LOCAL)
    add(marks, 0, blocks_of(1), 1, tick=4)
    assert marks.marks == {Origin.LOCAL: 1, Origin.REMOTE: 0}
    add(marks, 0, blocks_of(2), 1, tick=6)
    add(marks, 0, blocks_of(2), 1, tick=8, origin=Origin.LOCAL)
    assert marks.marks == {Origin.LOCAL: 2, Origin.REMOTE: 0}
    assert marks.evict_older(0, before=9) == [word_of(blocks_of(1)), word_of(blocks_of(2))]
    assert marks.evicted == {(Origin.LOCAL, "report"): 2}


def test_the_marks_of_one_replica_can_be_removed() -> None:
    marks = GroupPrefixes()
    add(marks, 0, PROMPT, 2)
    add(marks, 1, PROMPT, 2)
    marks.flush(0)
    marks.check()
    assert matched(marks) == [0.0, 2.0, 0.0]
    marks.flush()
    assert len(marks) == 0


def test_a_replica_beyond_the_columns_is_ignored() -> None:
    marks = GroupPrefixes()
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
    marks = GroupPrefixes(max_marks=8)
    for tick, (slot, words, kind, capacity) in enumerate(steps):
        blocks = blocks_of(*words)
        if kind == 0:
            marks.evict_older(slot, before=capacity)
        elif kind == 1 and capacity == 0:
            marks.flush(slot)
        else:
            depths, origin = range(1, len(words) + 1), (Origin.LOCAL if kind == 2 else Origin.REMOTE)
            add(marks, slot, blocks, *depths, capacity=capacity or None, tick=tick, origin=origin)
        marks.check()
