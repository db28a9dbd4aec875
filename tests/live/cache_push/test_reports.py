"""Bodies of pushes, right and wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.live.cache_push.reports import FIELDS, KEYS, from_json, from_query, unpacked
from gorgo.live.cache_push.source import CachePush
from gorgo.live.http.errors import HttpError

BODY: dict[str, Any] = {
    "worker_id": "r0",
    "model": "m",
    "block_tokens": 16,
    "epoch": 1,
    "sequence": 0,
    "hashes": [0, 1, 2**64 - 1],
}
QUERY = {key: str(value) for key, value in BODY.items() if key != "hashes"}


def refusal(body: dict[str, Any]) -> HttpError:
    with pytest.raises(HttpError) as refused:
        from_json(body)
    return refused.value


def test_hashes_of_64_bits_are_read_as_they_are() -> None:
    push = from_json(BODY)
    assert (push.replica, push.model, push.block_tokens, push.epoch, push.sequence) == ("r0", "m", 16, 1, 0)
    assert push.hashes.tolist() == BODY["hashes"]


def test_push_without_a_model_is_for_all_of_the_replica() -> None:
    assert from_json({**BODY, "model": None}).model is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"worker_id": None}, "worker_id"),
        ({"worker_id": ""}, "worker_id"),
        ({"worker_id": "a" * 257}, "worker_id"),
        ({"worker_id": "a\nb"}, "worker_id"),
        ({"worker_id": 7}, "worker_id"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"block_tokens": 65_537}, "block_tokens"),
        ({"block_tokens": True}, "block_tokens"),
        ({"block_tokens": 16.0}, "block_tokens"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": 2**63}, "epoch"),
        ({"sequence": "0"}, "sequence"),
        ({"sequence": None}, "sequence"),
        ({"hashes": None}, "hashes"),
        ({"hashes": {}}, "hashes"),
        ({"hashes": [-1]}, "hashes"),
        ({"hashes": [2**64]}, "hashes"),
        ({"hashes": [10**400]}, "hashes"),
        ({"hashes": [1.5]}, "hashes"),
        ({"hashes": [True]}, "hashes"),
        ({"hashes": ["7"]}, "hashes"),
        ({"hashes": [[1]]}, "hashes"),
        ({"evicted_hashes": []}, "evicted_hashes"),
    ],
)
def test_wrong_field_is_named(change: dict[str, Any], named: str) -> None:
    error = refusal(BODY | change)
    assert (error.status, error.code) == (400, "invalid_request")
    assert named in error.message


@pytest.mark.parametrize("version", [0, 2, "1", 1.5, None])
def test_another_version_is_refused_as_such(version: object) -> None:
    assert refusal(BODY | {"version": version}).code == "unsupported_version"
    assert from_json(BODY | {"version": 1}).replica == "r0"


@pytest.mark.parametrize("missing", [key for key in BODY if key != "model"])
def test_missing_field_is_named(missing: str) -> None:
    assert missing in refusal({key: value for key, value in BODY.items() if key != missing}).message


def test_query_describes_a_packed_push() -> None:
    push = from_query(QUERY.items())
    assert (push.replica, push.model, push.block_tokens, push.epoch, push.sequence) == ("r0", "m", 16, 1, 0)
    assert len(push.hashes) == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"epoch": "-1"}, "epoch"),
        ({"epoch": "1e3"}, "epoch"),
        ({"epoch": "9" * 4000}, "epoch"),
        ({"sequence": "\u0661"}, "sequence"),
        ({"block_tokens": ""}, "block_tokens"),
        ({"version": "2"}, "version"),
        ({"hashes": "1"}, "hashes"),
        ({"odd": "1"}, "odd"),
    ],
)
def test_wrong_field_of_a_query_is_named(change: dict[str, str], named: str) -> None:
    with pytest.raises(HttpError, match=named):
        from_query((QUERY | change).items())


def test_repeated_field_of_a_query_is_refused() -> None:
    with pytest.raises(HttpError, match="worker_id"):
        from_query([*QUERY.items(), ("worker_id", "r1")])


def test_packed_hashes_are_little_endian() -> None:
    assert unpacked(struct.pack("<3Q", 1, 2**63, 2**64 - 1)).tolist() == [1, 2**63, 2**64 - 1]
    assert unpacked(b"").tolist() == []


def test_packed_hash_that_is_cut_is_refused() -> None:
    with pytest.raises(HttpError, match="15 bytes"):
        unpacked(b"x" * 15)


def result(parse: Callable[[], CachePush]) -> CachePush | HttpError:
    try:
        return parse()
    except HttpError as refused:
        if refused.status != 400:
            raise
        return refused


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), json_values))
def test_any_json_object_is_a_push_or_a_refusal(body: dict[str, Any]) -> None:
    found = result(lambda: from_json(body))
    if isinstance(found, CachePush):
        assert found.hashes.dtype == np.uint64
    else:
        json.dumps(found.message)


@given(st.lists(st.tuples(st.sampled_from(FIELDS) | st.text(max_size=8), st.text(max_size=30)), max_size=8))
def test_any_query_is_a_push_or_a_refusal(query: list[tuple[str, str]]) -> None:
    result(lambda: from_query(query))
