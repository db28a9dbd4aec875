"""A ring of rows against a plain list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gorgo.learning.buffers.rings import RowRing
from tests.learning.outcomes import numbered, numbers


@given(st.integers(1, 100), st.lists(st.integers(0, 150), max_size=12))
def test_ring_is_the_end_of_a_list(capacity: int, batches: list[int]) -> None:
    ring, twin, first = RowRing(("prompt_tokens",), capacity), list[int](), 0
    for count in batches:
        left = ring.append(numbered(count, first))
        twin += range(first, first + count)
        assert numbers(left) == twin[: max(0, len(twin) - capacity)]
        twin, first = twin[-capacity:], first + count
        assert numbers(ring.stored()) == twin
        assert len(ring) == len(twin)
        assert ring.allocated <= capacity


def test_memory_grows_with_the_rows() -> None:
    ring = RowRing(("prompt_tokens",), 5000)
    ring.append(numbered(10))
    assert ring.allocated <= 64
    ring.append(numbered(10_000))
    assert ring.allocated == 5000


def test_rows_returned_are_copies() -> None:
    ring = RowRing(("prompt_tokens",), 5)
    ring.append(numbered(3))
    ring.stored().features[:] = 9.0
    assert numbers(ring.stored()) == [0, 1, 2]
