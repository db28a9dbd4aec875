"""Reports of peers as bytes, and the marks that order them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.core.peers.codec import MAX_BYTES, decode_report, encode_report
from gorgo.core.peers.marks import GroupPrefixes, MarkedPrompt, used_before
from gorgo.core.peers.records import (
    MARK_KINDS,
    MAX_COUNT,
    MAX_MARKS,
    LearnedSpeed,
    MarkKind,
    PeerReport,
    PeerStatus,
    PrefixMarks,
    ReplicaLoad,
    SharedAnswer,
    SharedCacheReport,
    StartedPrefill,
)
from gorgo.core.prefix.index import Origin
from gorgo.core.prefix.residency import NO_PREFIX
from gorgo.errors import BadReport
from tests.core.routers import a_request, blocks_of

REPORT = PeerReport(
    "eu/boot-1",
    7,
    "a1b2",
    loads=(ReplicaLoad("a", 3, 3000, 2, 2000, 1500, 1.25, 0.5),),
    prefixes=(
        PrefixMarks("a", "m", (1, 4), b"hash---1hash---4"),
        PrefixMarks("b", None, (), b"hash---2", "evicted"),
        PrefixMarks("b", None, (1,), b"hash---3", "sent"),
    ),
    cache_reports=(SharedCacheReport("a", None, 512.0, 0.0),),
    answers=(SharedAnswer("a", b"hash---4", 256, 128),),
    prefills=(StartedPrefill("a", 1.25),),
    speeds=(LearnedSpeed("a", 3.5, 2.0),),
    status=PeerStatus("gorgo-ms", 4, True, "12", ("b",), ("c",)),
)

names = st.text(max_size=8)
counts = st.integers(0, MAX_COUNT)
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=40,
)


def wire(**changes: object) -> bytes:
    """The wire form of `REPORT` with some of its fields replaced."""
    fields = json.loads(encode_report(REPORT))
    places = [
        "format",
        "router",
        "seq",
        "key_id",
        "loads",
        "prefixes",
        "cache_reports",
        "answers",
        "prefills",
        "speeds",
        "status",
    ]
    for name, value in changes.items():
        fields[places.index(name)] = value
    return json.dumps(fields).encode()


def test_a_report_comes_back_from_its_wire_form() -> None:
    assert decode_report(encode_report(REPORT)) == REPORT


@given(
    st.lists(st.tuples(names, st.lists(counts, min_size=5, max_size=5), st.integers(0, 10**6)), max_size=4),
    st.lists(
        st.tuples(names, st.none() | names, st.sets(st.integers(1, 10**6), max_size=5), st.sampled_from(MARK_KINDS)),
        max_size=4,
    ),
)
def test_every_report_within_the_bounds_comes_back(
    loads: list[tuple[str, list[int], int]], prefixes: list[tuple[str, str | None, set[int], MarkKind]]
) -> None:
    report = PeerReport(
        "r",
        1,
        loads=tuple(
            ReplicaLoad(name, max(n), max(n), min(n), max(n), min(n), micros / 1e6) for name, n, micros in loads
        ),
        prefixes=tuple(
            PrefixMarks(
                name,
                model,
                () if kind in ("withdrawn", "evicted") else tuple(sorted(depths)),
                b"12345678" * len(depths),
                kind,
            )
            for name, model, depths, kind in prefixes
        ),
    )
    assert decode_report(encode_report(report)) == report


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{}", "report is no array of 11 values"),
        (b"\xff", "no JSON text"),
        (b"[" * 100_000, "no JSON text"),
        (b" " * (MAX_BYTES + 1), "bytes; expected at most"),
        (wire(format=1), "format 1; expected 2"),
        (wire(seq=-1), "seq has -1"),
        (wire(seq=True), "seq has True"),
        (wire(router="x" * 257), "longer than 256 bytes"),
        (wire(loads=[["a", -1, 0, 0, 0, 0, 0.0, 0.0]]), r"loads\[0\] has -1"),
        (wire(loads=[["a", 1, 0, 0, 0, 0, -0.1, 0.0]]), r"loads\[0\] has -0.1"),
        (wire(loads=[["a", 1, 0, 0, 0, 0, float("nan"), 0.0]]), r"loads\[0\] has nan"),
        (wire(loads=[["a", 1, 0, 0, 0, 0, 1e300, 0.0]]), r"loads\[0\] has 1e\+300"),
        (wire(loads=[["a", 10**400, 0, 0, 0, 0, 0.0, 0.0]]), r"loads\[0\] has 1000"),
        (wire(loads=[["a", 1, 5, 2, 5, 5, 0.0, 0.0]]), "before a first token than in flight"),
        (wire(loads=7), "loads is no array"),
        (wire(prefixes=[["a", None, [1], "AAAA", 0]]), "3 bytes of hashes for 1 depths"),
        (wire(prefixes=[["a", None, [2, 1], "AAAAAAAAAAAAAAAAAAAAAA==", 0]]), "do not ascend"),
        (wire(prefixes=[["a", None, [0], "AAAAAAAAAAA=", 0]]), "do not ascend"),
        (wire(prefixes=[["a", None, list(range(1, MAX_MARKS + 2)), "", 0]]), "at most 96"),
        (wire(prefixes=[["a", None, [1], "no base64", 0]]), "no base64"),
        (wire(prefixes=[["a", None, [], "AAAA", 3]]), "is evicted; expected no depths"),
        (wire(prefixes=[["a", None, [1], "AAAAAAAAAAA=", 3]]), "is evicted; expected no depths"),
        (wire(prefixes=[["a", None, [], "", 4]]), "kind 4; expected at most 3"),
        (wire(prefixes=[["a", None, [], "", True]]), "has True; expected a whole number"),
        (wire(cache_reports=[["a", None, 0.0, 0.0]]), "no confirmed tokens"),
        (wire(answers=[["a", "AAAA", 1, 1]]), "3 bytes of a prompt's hash; expected 8"),
        (wire(answers=[["a", "AAAAAAAAAAA=", 1, -1]]), r"answers\[0\] has -1"),
        (wire(prefills=[["a", 60.1]]), r"prefills\[0\] has 60.1; expected a number from 0 to 60"),
        (wire(prefills=[["a", float("nan")]]), r"prefills\[0\] has nan"),
        (wire(status=["p", 1, False, None, [], [3]]), r"ejected\[0\] has 3; expected a text"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(text: bytes, message: str) -> None:
    with pytest.raises(BadReport, match=message):
        decode_report(text)


@given(st.binary(max_size=200) | any_json.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=300)
def test_no_text_does_more_than_to_be_refused(text: bytes) -> None:
    with pytest.raises(BadReport):
        decode_report(text)


@given(st.data())
@settings(max_examples=300)
def test_a_report_with_any_part_replaced_is_refused_or_within_the_bounds(data: st.DataObject) -> None:
    fields = json.loads(encode_report(REPORT))
    part: list[object] = fields
    while True:
        place = data.draw(st.integers(0, len(part) - 1))
        inner = part[place]
        if not (isinstance(inner, list) and inner and data.draw(st.booleans())):
            break
        part = inner
    part[place] = data.draw(any_json)
    try:
        report = decode_report(json.dumps(fields).encode())
    except BadReport:
        return
    for load in report.loads:
        assert load.requests >= load.waiting_requests >= 0
        assert load.prompt_tokens >= load.waiting_tokens >= load.uncached_tokens >= 0
        assert load.prefill_s >= 0.0 <= load.decoded_s
    assert decode_report(encode_report(report)).loads is not None


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
    words = [word_of(blocks[8 * depth - 8 : 8 * depth]) for depth in depths]
    oldest = marks.use(slot, depths, words, origin, tick=tick, now=float(tick), capacity_blocks=capacity)
    marks.check()
    return oldest


def word_of(block: bytes) -> int:
    return int.from_bytes(block, "little")


def test_the_deepest_mark_of_a_prompt_counts_for_each_replica() -> None:
    marks = GroupPrefixes()
    add(marks, 0, PROMPT, 1, 3)
    add(marks, 2, PROMPT, 1)
    assert matched(marks) == [3.0, 0.0, 1.0]
    assert matched(marks, blocks_of(1, 9)) == [1.0, 0.0, 1.0]


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
    words = [word_of(blocks[8:16]) for blocks in prompts]
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
    add(marks, 0, PROMPT, 2, 3, tick=6)
    prompt = MarkedPrompt.of(a_request(blocks=PROMPT))
    known = marks.deepest(0, prompt)
    assert (known[0], marks.deepest(1, prompt)) == (3, (0, None))
    assert used_before(*known, 7.0) == (3, 6)
    assert used_before(*known, 6.0) == used_before(0, None, 7.0) == NO_PREFIX


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


class NaiveMarks:
    """Twin of a replica's marks: an entry for each, and a use steps through all before it."""

    def __init__(self) -> None:
        #: By mark: the one before it, tick and time of the last use, and depth.
        self.marks: dict[int, tuple[int | None, int, float, int]] = {}

    def use(self, depths: Sequence[int], words: Sequence[int], *, tick: int, now: float) -> None:
        known = max((place for place, word in enumerate(words) if word in self.marks), default=-1)
        before = word = words[known] if known >= 0 else None
        while word is not None:
            parent, _, used_s, depth = self.marks[word]
            self.marks[word] = parent, tick, used_s if now == inf else now, depth
            word = parent
        for depth, word in list(zip(depths, words, strict=True))[known + 1 :]:
            self.marks[word] = before, tick, now, depth
            before = word

    def evict_older(self, before: int) -> list[int]:
        evicted: list[int] = []
        while leaves := self.marks.keys() - {parent for parent, *_ in self.marks.values()}:
            oldest = min(leaves, key=lambda word: self.marks[word][1])
            if self.marks[oldest][1] >= before:
                break
            del self.marks[oldest]
            evicted.append(oldest)
        return evicted

    def used_before(self, word: int | None, time_s: float) -> tuple[int, int]:
        while word is not None and self.marks[word][2] >= time_s:
            word = self.marks[word][0]
        return (0, 0) if word is None else (self.marks[word][3], self.marks[word][1])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["confirmed", "sent", "evicted"]),
            st.lists(st.integers(0, 2), min_size=1, max_size=5),
            st.sets(st.integers(1, 5)),
            st.integers(0, 40),
        ),
        max_size=40,
    )
)
def test_runs_of_marks_are_used_and_evicted_as_single_marks_are(
    steps: list[tuple[str, list[int], set[int], int]],
) -> None:
    marks, twin = GroupPrefixes(), NaiveMarks()
    for tick, (kind, numbers, some, before) in enumerate(steps):
        blocks = blocks_of(*numbers)
        prompt = MarkedPrompt.of(a_request(blocks=blocks))
        if kind == "evicted":
            assert marks.evict_older(0, before=before) == twin.evict_older(before)
        else:
            depths = sorted(depth for depth in some | {len(numbers)} if depth <= len(numbers))
            words, now = prompt.words_at(depths), float(tick) if kind == "confirmed" else inf
            marks.use(0, depths, words, Origin.REMOTE, tick=tick, now=now, capacity_blocks=None)
            twin.use(depths, words, tick=tick, now=now)
        marks.check()
        depth, run = marks.deepest(0, prompt)
        found = max((place for place, word in enumerate(prompt.every, 1) if word in twin.marks), default=0)
        assert depth == found
        word = prompt.every[found - 1] if found else None
        for time_s in (0.0, tick / 2, inf):
            assert used_before(depth, run, time_s) == twin.used_before(word, time_s)
        assert len(marks) == len(twin.marks)


def test_another_replica_has_the_first_marks_of_the_one_that_has_most() -> None:
    marks, prompt = GroupPrefixes(), blocks_of(*range(30))
    add(marks, 0, prompt, *range(1, 31))
    add(marks, 1, prompt, *range(1, 18))
    add(marks, 2, prompt, *range(1, 4))
    assert matched(marks, prompt) == [30.0, 17.0, 3.0]
    assert matched(marks, prompt, own=(0.0, 20 * 64.0, 0.0)) == [30.0, 20.0, 3.0]


def test_of_a_prompt_whose_last_block_is_known_that_one_alone_is_named() -> None:
    request = replace(a_request(blocks=blocks_of(*range(20)), prompt_tokens=1280), boundaries=(200, 1000, 1280))
    prompt = MarkedPrompt.of(request)
    assert [prompt.marks_from(depth)[0] for depth in (0, 8, 20)] == [[3, 8, 15, 16, 20], [8, 15, 16, 20], [20]]
    long = replace(request, blocks=blocks_of(*range(300)), boundaries=tuple(range(64, 64 * 301, 64)))
    named, words = MarkedPrompt.of(long).marks_from(50)
    assert (named[:3], named[31:35], named[-1]) == ([50, 51, 52], [81, 82, 238, 239], 300)
    assert len(named) == len(words) == MAX_MARKS
