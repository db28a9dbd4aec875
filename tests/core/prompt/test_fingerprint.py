""""""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.prompt.fingerprint import _KNOWN_MARKS, MAX_BLOCKS, Fingerprinter, depths_of
from gorgo.core.prompt.parse import Prompt, read_prompt

BLOCK = 16
FINGERPRINTER = Fingerprinter(key=1, block_bytes=BLOCK)


def blocks_of(prompt: Prompt, fingerprinter: Fingerprinter = FINGERPRINTER) -> list[bytes]:
    blocks = fingerprinter(prompt).blocks
    return [blocks[at : at + 8] for at in range(0, len(blocks), 8)]


def common(one: list[bytes], other: list[bytes]) -> int:
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


PROMPTS = st.builds(
    lambda text, marks: Prompt(text, tuple(sorted((offset, role) for offset, role in marks if offset <= len(text)))),
    st.binary(max_size=100),
    st.lists(st.tuples(st.integers(0, 100), st.sampled_from(["user", "assistant", "\ud800"])), max_size=5),
)


def cut(prompt: Prompt, end: int) -> Prompt:
    return Prompt(prompt.text[:end], tuple(mark for mark in prompt.message_starts if mark[0] < end))


@given(prompt=PROMPTS, end=st.integers(0, 100))
def test_hash_depends_only_on_what_comes_before_its_end(prompt: Prompt, end: int) -> None:
    full = end // BLOCK
    assert blocks_of(cut(prompt, end))[:full] == blocks_of(prompt)[: min(full, len(prompt.text) // BLOCK)]


@given(one=PROMPTS, other=PROMPTS)
def test_blocks_are_equal_exactly_as_far_as_text_and_marks_are(one: Prompt, other: Prompt) -> None:
    shorter = min(len(one.text), len(other.text)) // BLOCK
    alike = max(k for k in range(shorter + 1) if cut(one, k * BLOCK) == cut(other, k * BLOCK))
    assert common(blocks_of(one), blocks_of(other)) == alike


def test_only_full_blocks_are_hashed() -> None:
    assert [len(blocks_of(Prompt(b"x" * size, ()))) for size in (0, 15, 16, 31, 32)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("change", [lambda text: text[::-1], lambda text: text[16:32] + text[:16] + text[32:]])
def test_order_of_blocks_and_bytes_counts(change: Callable[[bytes], bytes]) -> None:
    text = bytes(range(64))
    assert common(blocks_of(Prompt(text, ())), blocks_of(Prompt(change(text), ()))) == 0


@pytest.mark.parametrize("bit", [0, 7, 31, 63, 127])
def test_every_bit_counts(bit: int) -> None:
    number = int.from_bytes(bytes(range(48)), "little")
    flipped = (number ^ (1 << bit)).to_bytes(48, "little")
    assert common(blocks_of(Prompt(bytes(range(48)), ())), blocks_of(Prompt(flipped, ()))) == 0


def test_top_bits_flipped_in_pairs_do_not_cancel() -> None:
    text = bytearray(32)
    seen = {FINGERPRINTER(Prompt(bytes(text), ())).blocks[-8:]}
    for one in range(0, 32):
        for other in range(one):
            changed = bytearray(text)
            changed[one] ^= 0x80
            changed[other] ^= 0x80
            seen.add(FINGERPRINTER(Prompt(bytes(changed), ())).blocks[-8:])
    assert len(seen) == 1 + 32 * 31 // 2


def test_key_decides_the_hashes_and_equal_keys_agree() -> None:
    prompt = Prompt(b"x" * 64, ((0, "user"),))
    assert Fingerprinter(key=2)(prompt) == Fingerprinter(key=2)(prompt)
    assert common(blocks_of(prompt, Fingerprinter(key=2)), blocks_of(prompt, Fingerprinter(key=3))) == 0


def test_hash_for_affinity_is_the_same_under_every_key() -> None:
    """So that a restart, which draws another secret, moves no session."""
    prompt = Prompt(b"x" * 64, ((0, "user"),))
    for adapter in (None, "tuned"):
        hashes = {Fingerprinter(key=key)(prompt, adapter=adapter).prefix_hash for key in (2, 3)}
        assert len(hashes) == 1


def test_role_of_a_message_counts() -> None:
    prompts = [Prompt(b"x" * 32, marks) for marks in ((), ((0, "user"),), ((0, "system"),), ((1, "user"),))]
    prompts.append(Prompt(b"x" * 32, ((0, "user"), (0, "system"))))
    prompts.append(Prompt(b"x" * 32, ((0, "system"), (0, "user"))))
    assert len({FINGERPRINTER(prompt).blocks for prompt in prompts}) == len(prompts)
    assert len({FINGERPRINTER(prompt).prefix_hash for prompt in prompts}) == len(prompts)


def test_next_turn_extends_the_conversation() -> None:
    first = [{"role": "system", "content": "s" * 500}, {"role": "user", "content": "u" * 300}]
    then = [*first, {"role": "assistant", "content": "a" * 99}, {"role": "user", "content": "v" * 700}]
    fingerprinter = Fingerprinter(key=1)
    one, two = (
        fingerprinter(read_prompt("/v1/chat/completions", {"messages": messages})) for messages in (first, then)
    )
    assert two.blocks.startswith(one.blocks)
    assert two.text_bytes == 1599


def test_head_stays_when_a_long_prompt_grows() -> None:
    heads = [
        FINGERPRINTER(Prompt(b"x" * size, ((0, "user"), (1024, "user")))).prefix_hash
        for size in (1023, 1024, 1025, 9000)
    ]
    assert heads[0] != heads[1] == heads[2] == heads[3]


def test_very_long_prompt_and_very_many_messages_are_hashed() -> None:
    size = 2000 * BLOCK
    prompt = Prompt(b"x" * size, tuple((offset, "user") for offset in range(size)))
    assert len(set(blocks_of(prompt))) == 2000


@pytest.mark.parametrize("block_bytes", [0, -4, 6])
def test_block_size_must_be_whole_words(block_bytes: int) -> None:
    with pytest.raises(ValueError, match="expected a positive multiple of 4"):
        Fingerprinter(key=1, block_bytes=block_bytes)


def test_prompt_longer_than_the_bound_has_the_blocks_of_its_start_and_its_whole_length() -> None:
    fingerprinter = Fingerprinter(key=1, block_bytes=4)
    start = b"abcd" * MAX_BLOCKS
    longer = Prompt(start + b"efgh", ((0, "user"), (len(start) + 4, "user")))
    assert len(fingerprinter(longer).blocks) == 8 * MAX_BLOCKS
    assert fingerprinter(longer).blocks == fingerprinter(Prompt(start, ((0, "user"),))).blocks
    assert fingerprinter(longer).text_bytes == len(start) + 4


@given(prompt=PROMPTS)
def test_few_blocks_and_marks_are_hashed_as_many_are(prompt: Prompt) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gorgo.core.prompt.fingerprint.FEW", 0)
        as_many = FINGERPRINTER(prompt)
    assert FINGERPRINTER(prompt) == as_many


def test_marks_are_the_same_from_memory_which_is_bounded() -> None:
    fingerprinter = Fingerprinter(key=1, block_bytes=BLOCK)
    prompts = [Prompt(bytes(64), ((0, "system"), (offset, role))) for offset in range(2) for role in ("user", "x")]
    first, again = ([blocks_of(prompt, fingerprinter) for prompt in prompts] for _ in range(2))
    assert first == again == [blocks_of(prompt, Fingerprinter(key=1, block_bytes=BLOCK)) for prompt in prompts]
    assert sorted(fingerprinter._known_marks) == [(0, 0, "system"), (1, 0, "user"), (1, 1, "user")]
    for offset in range(_KNOWN_MARKS):
        fingerprinter(Prompt(bytes(BLOCK * 1024), ((offset, "user"),)))
    assert len(fingerprinter._known_marks) <= _KNOWN_MARKS


@pytest.mark.parametrize(
    ("full_blocks", "block_tokens", "depths"),
    [(1, 64.0, ()), (2, 64.0, (2,)), (5, 64.0, (2, 4)), (3, 512.0, (1, 2, 3)), (16, 16.0, (8, 16)), (4, 69.0, (2, 4))],
)
def test_depths_are_128_tokens_apart_in_whole_blocks(
    full_blocks: int, block_tokens: float, depths: tuple[int, ...]
) -> None:
    assert depths_of(full_blocks, block_tokens) == depths


def test_a_longer_prompt_has_all_depths_of_a_shorter_one() -> None:
    longest = depths_of(MAX_BLOCKS, 64.0)
    assert all(
        depths_of(blocks, 64.0) == longest[: len(depths_of(blocks, 64.0))] for blocks in range(0, MAX_BLOCKS, 97)
    )


def test_the_distance_doubles_after_each_64_depths_of_it() -> None:
    longest = depths_of(MAX_BLOCKS, 64.0)
    assert longest[62:67] == (126, 128, 132, 136, 140)
    assert longest[-1] == MAX_BLOCKS
    assert len(longest) < 300
