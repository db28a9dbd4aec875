from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gorgo.apps.traces.rows import TraceRequest
from gorgo.apps.traces.text import BLOCK_BYTES, block_text, prompt_text, request_text


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
