"""The share of one client: its prompts replace those of others up to there, then its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.prefix.index import PrefixIndex
from gorgo.core.prefix.shares import CLIENT_SHARE
from tests.core.prefix_twin import as_blocks

MAX_BLOCKS = 20
#: With a common start, so that prompts of both clients share, part and continue each other.
PROMPTS = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(tuple)


def index_of(replicas: int, max_blocks: int = MAX_BLOCKS) -> PrefixIndex:
    index = PrefixIndex(max_blocks=max_blocks, bounded=True)
    for slot in range(replicas):
        index.add_replica(slot)
    return index


def test_a_flood_of_one_client_leaves_the_prompts_of_another() -> None:
    index = index_of(2)
    index.confirm(as_blocks((1, 2, 3, 4, 5)), 0, "alice")
    for number in range(1000):
        index.confirm(as_blocks((100 + number, 1, 2)), number % 2, "bob")
        index.check()
    assert index.match(as_blocks((1, 2, 3, 4, 5)), 2).tolist() == [5, 0]
    assert index.match(as_blocks((1099, 1, 2)), 2).tolist() == [0, 3]


def test_a_client_that_continues_anothers_prompts_replaces_its_own_continuations() -> None:
    index = index_of(1)
    index.confirm(as_blocks((1, 2, 3)), 0, "alice")
    for number in range(100):
        index.confirm(as_blocks((1, 2, 3, 100 + number)), 0, "bob")
    index.check()
    assert index.match(as_blocks((1, 2, 3, 199)), 1).tolist() == [4]
    assert index.match(as_blocks((1, 2, 3, 100)), 1).tolist() == [3]


def test_small_prompts_on_every_replica_are_bounded_by_their_pairs() -> None:
    index = index_of(10)
    index.confirm(as_blocks((1, 2, 3, 4, 5)), 0, "alice")
    for number in range(50):
        for slot in range(10):
            index.confirm(as_blocks((100 + number,)), slot, "bob")
    index.check()
    assert index.match(as_blocks((1, 2, 3, 4, 5)), 1).tolist() == [5]


def test_a_client_alone_and_requests_without_a_name_may_use_the_whole_index() -> None:
    for client in ("alice", None):
        index = index_of(1)
        for number in range(100):
            index.confirm(as_blocks((number, 0)), 0, client)
        index.check()
        assert index.stored_blocks == MAX_BLOCKS
        assert index.match(as_blocks((90, 0)), 1).tolist() == [2]


def test_blocks_whose_client_owns_no_leaf_are_evicted_as_the_oldest_are() -> None:
    index = index_of(1, max_blocks=4)
    index.confirm(as_blocks((1, 2, 3)), 0, "alice")
    index.confirm(as_blocks((1, 2, 3, 4)), 0, "bob")
    index.confirm(as_blocks((9,)), 0, "alice")
    index.check()
    assert index.stored_blocks <= 4


def test_a_client_without_blocks_has_no_share_to_keep() -> None:
    index = index_of(1)
    index.insert(as_blocks((1, 2)), 0, "alice")
    index.retract(as_blocks((1, 2)), 0)
    index.check()
    assert len(index._shares) == 0


@given(
    PROMPTS,
    st.lists(st.tuples(PROMPTS, st.integers(0, 2), st.sampled_from(["insert", "confirm", "retract"])), max_size=60),
)
def test_whatever_a_client_does_another_has_what_it_had(
    prompt: tuple[int, ...], flood: list[tuple[tuple[int, ...], int, str]]
) -> None:
    index = index_of(3)
    own = as_blocks((7, *prompt))
    assert len(own) // 8 <= MAX_BLOCKS * (1 - CLIENT_SHARE)
    index.confirm(own, 0, "alice")
    for number, (other, slot, what) in enumerate(flood):
        key = as_blocks((*other, number) if number % 2 else other)
        if what == "retract":
            index.retract(key, slot)
        else:
            getattr(index, what)(key, slot, "bob")
        index.check()
    assert index.match(own, 1).tolist() == [len(own) // 8]
