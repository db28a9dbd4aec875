from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.core.peers.codec import MAX_BYTES, decode_report, encode_report
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
from gorgo.errors import BadReport

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
