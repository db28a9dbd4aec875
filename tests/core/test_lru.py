"""The bounded mapping does what a list in the order of use does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.lru import Lru

KEYS = st.integers(0, 5)
STEPS = st.lists(st.tuples(st.sampled_from(["put", "use", "get"]), KEYS, st.integers(0, 7)), max_size=60)


@given(STEPS, st.integers(0, 4))
def test_the_longest_unused_entry_is_evicted(steps: list[tuple[str, int, int]], limit: int) -> None:
    entries, twin = Lru[int, int](limit), list[tuple[int, int]]()
    for verb, key, value in steps:
        known = dict(twin).get(key)
        if verb == "put":
            twin = [*(pair for pair in twin if pair[0] != key), (key, value)]
            gone, twin = twin[: max(0, len(twin) - limit)], twin[max(0, len(twin) - limit) :]
            assert entries.put(key, value) == tuple(key for key, _ in gone)
        elif verb == "use":
            assert entries.use(key) == known
            twin.sort(key=lambda pair: pair[0] == key)
        else:
            assert entries.get(key) == known
        assert list(entries.items()) == twin
        entries.check()


@given(STEPS, st.integers(0, 9))
def test_a_bound_on_weight_evicts_until_the_new_entry_fits(steps: list[tuple[str, int, int]], limit: int) -> None:
    entries, twin = Lru[int, int](limit, weigh=abs), list[tuple[int, int]]()
    for _, key, value in steps:
        twin = [*(pair for pair in twin if pair[0] != key), (key, value)]
        gone = []
        while sum(value for _, value in twin) > limit:
            gone.append(twin.pop(0)[0])
        assert entries.put(key, value) == tuple(gone)
        assert list(entries.items()) == twin
        entries.check()


def test_an_entry_heavier_than_the_limit_leaves_the_mapping_empty() -> None:
    entries = Lru[str, bytes](10, weigh=len)
    entries.put("a", b"small")
    assert entries.put("b", b"more than ten") == ("a", "b")
    assert not entries
