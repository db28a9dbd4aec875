""""""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.lab.traces import TraceRequest as TraceRequest_traces
from gorgo.lab.traces.rows import TraceRequest
from gorgo.lab.traces.text import (
    BLOCK_BYTES,
    beginning,
    block_text,
    is_keyed,
    largest_share,
    prompt_text,
    request_text,
    warning,
)
from gorgo.policies.registry import POLICIES, make_policy


def test_the_text_of_a_block_never_changes() -> None:
    """Other machines and later versions must make the same prompts: results are compared across them."""
    assert block_text(0)[:32] == b"nos pit den bes wir bat ton rar "


@given(st.integers(1, 5000))
def test_a_prompt_has_four_ascii_bytes_a_token(tokens: int) -> None:
    text = prompt_text(range(-(-tokens // 512)), tokens)
    assert len(text) == 4 * tokens
    assert text.isascii()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_prompts_share_exactly_the_blocks_that_their_ids_share(left: list[int], right: list[int]) -> None:
    texts = [prompt_text(ids, 512 * len(ids)) for ids in (left, right)]
    for number, (a, b) in enumerate(zip(left, right, strict=False)):
        part = slice(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES)
        assert (texts[0][part] == texts[1][part]) == (a == b)


def test_an_id_may_be_any_integer() -> None:
    assert len({prompt_text([hash_id], 512) for hash_id in (-1, 0, 2**64, 2**64 + 1)}) == 4


def test_what_no_id_covers_is_shared_with_nobody() -> None:
    one, other = (request_text(TraceRequest(index, 0.0, 600, 1, (5,))) for index in (1, 2))
    assert one[:BLOCK_BYTES] == other[:BLOCK_BYTES]
    assert one[BLOCK_BYTES:] != other[BLOCK_BYTES:]
    assert len(one) == 2400


def test_session_affinity_alone_is_keyed_by_the_session() -> None:
    assert [name for name in POLICIES if is_keyed(make_policy(name))] == ["simple-session-affinity"]


def asked(number: int, text: str) -> TraceRequest_traces:
    return TraceRequest_traces(number, 0.0, 10, 1, (), {"messages": [{"role": "user", "content": text}]})


def test_requests_begin_alike_by_their_first_block_or_by_their_first_256_tokens() -> None:
    ids = [TraceRequest_traces(number, 0.0, 2000, 1, (7, 100 + number)) for number in range(3)]
    assert largest_share(map(beginning, [*ids, TraceRequest_traces(9, 0.0, 2000, 1, (8,))])) == 0.75
    system = "You are a helpful assistant. " * 50
    assert largest_share(map(beginning, [asked(0, system + "a"), asked(1, system + "b")])) == 1.0
    assert largest_share(map(beginning, [asked(0, "a"), asked(1, "b")])) == 0.5
    assert largest_share(map(beginning, [TraceRequest_traces(n, 0.0, 9, 1) for n in range(4)])) == 0.25
    assert largest_share([]) == 0.0


@pytest.mark.parametrize("share", [None, 0.0, 0.5])
def test_keys_that_are_spread_are_nothing_to_warn_of(share: float | None) -> None:
    assert warning("p", share) is None


def test_a_key_of_most_requests_is_warned_of() -> None:
    assert (warning("p", 1.0) or "").startswith(
        "p: no request has a session id and 100% begin with the same tokens: they share one key"
    )
