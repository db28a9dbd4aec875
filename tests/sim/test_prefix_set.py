"""Prefixes that came by, against a set of all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gorgo.sim.prefix_set import PrefixSet

WORDS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=10)


def spell(word: str) -> bytes:
    """Each letter is an item of two bytes."""
    return b"".join(b"-" + letter.encode() for letter in word)


@given(words=WORDS, asked=st.text("ab", max_size=8))
def test_as_many_leading_items_are_seen_as_the_longest_prefix_of_any_key_has(words: list[str], asked: str) -> None:
    seen, twin = PrefixSet(item_bytes=2), {""}
    for word in words:
        seen.add(spell(word))
        twin |= {word[:end] for end in range(len(word) + 1)}
    assert seen.items(spell(asked)) == max(end for end in range(len(asked) + 1) if asked[:end] in twin)
