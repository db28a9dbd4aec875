"""The prefix index: matches, shares of replicas, memory, and what is evicted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gorgo.core.prefix.index import CLIENT_SHARE, PrefixIndex, slots_of
from gorgo.core.prefix.residency import RadixNode, RadixTree


def index_of(*capacities: int | None, max_blocks: int = 1000, bounded: bool = True) -> PrefixIndex:
    index = PrefixIndex(max_blocks=max_blocks, bounded=bounded)
    for slot, capacity in enumerate(capacities):
        index.add_replica(slot, capacity_blocks=capacity)
    return index


def test_match_tells_the_common_prefix_per_replica() -> None:
    index = index_of(None, None, None)
    index.insert(as_blocks((1, 2, 3, 4)), 0)
    index.insert(as_blocks((1, 2, 9)), 1)
    assert index.match(as_blocks((1, 2, 3, 7)), 3).tolist() == [3, 2, 0]


def test_match_of_an_empty_prompt_is_nothing() -> None:
    index = index_of(None)
    index.insert(as_blocks((1,)), 0)
    assert index.match(b"", 1).tolist() == [0]


def test_match_leaves_the_order_of_use_alone() -> None:
    index = index_of(4)
    index.insert(as_blocks((1, 1)), 0)
    index.insert(as_blocks((2, 2)), 0)
    index.match(as_blocks((1, 1)), 1)
    index.insert(as_blocks((3,)), 0)
    assert index.match(as_blocks((1, 1)), 1).tolist() == [0]


@pytest.mark.parametrize("n_slots", [1, 15, 17, 64, 65, 512])
def test_match_answers_for_any_number_of_replicas(n_slots: int) -> None:
    index = index_of(*[None] * n_slots, max_blocks=10_000)
    for slot in range(n_slots):
        index.insert(as_blocks(tuple(range(slot % 5))), slot)
    index.check()
    assert index.match(as_blocks(tuple(range(9))), n_slots).tolist() == [slot % 5 for slot in range(n_slots)]
    assert index.match(as_blocks(tuple(range(9))), n_slots).dtype == np.float64


def test_slots_past_the_asked_ones_are_left_out() -> None:
    index = index_of(None, None, None)
    index.insert(as_blocks((1, 2)), 2)
    index.insert(as_blocks((1,)), 0)
    assert index.match(as_blocks((1, 2)), 2).tolist() == [1, 0]


def test_shared_start_outlives_the_branches_used_before_it() -> None:
    index = index_of(5)
    for branch in (1, 2, 3):
        index.insert(as_blocks((7, 7, branch)), 0)
    index.insert(as_blocks((8,)), 0)
    matches = {branch: index.match(as_blocks((7, 7, branch)), 1)[0] for branch in (1, 2, 3)}
    assert matches == {1: 2, 2: 3, 3: 3}


def test_prompt_longer_than_the_capacity_leaves_what_fits() -> None:
    index = index_of(3)
    index.insert(as_blocks((1, 2, 3, 4, 5)), 0)
    index.check()
    assert index.match(as_blocks((1, 2, 3, 4, 5)), 1).tolist() == [3]


def test_unbounded_index_ignores_capacities_until_it_is_bounded() -> None:
    index = index_of(2, bounded=False)
    index.insert(as_blocks((1, 2, 3)), 0)
    index.insert(as_blocks((4,)), 0)
    index.insert(as_blocks((5, 6)), 0)
    assert index.resident_blocks(0) == 5
    index.bounded = True
    index.check()
    assert (index.bounded, index.resident_blocks(0)) == (True, 2)


def test_one_prompt_is_bounded_by_the_capacity_of_an_unbounded_index_too() -> None:
    index = index_of(2, bounded=False)
    index.confirm(as_blocks((1, 2, 3)), 0)
    assert index.match(as_blocks((1, 2, 3)), 1).tolist() == [2]


def test_global_bound_evicts_the_oldest_of_any_replica() -> None:
    index = index_of(None, None, max_blocks=4, bounded=False)
    index.insert(as_blocks((1, 1)), 0)
    index.insert(as_blocks((2,)), 1)
    index.insert(as_blocks((3, 3)), 1)
    index.check()
    assert (index.resident_blocks(0), index.resident_blocks(1)) == (0, 3)


def test_smaller_bound_evicts_the_oldest_at_once_and_a_larger_one_makes_room() -> None:
    index = index_of(None, None, max_blocks=6, bounded=False)
    for word in range(3):
        index.insert(as_blocks((word, word)), word % 2)
    index.resize(2)
    index.check()
    assert [index.match(as_blocks((word, word)), 2).sum() for word in range(3)] == [0, 0, 2]
    index.resize(4)
    index.insert(as_blocks((7, 7)), 1)
    assert index.stored_blocks == 4


def test_failure_takes_back_only_what_was_never_confirmed() -> None:
    index = index_of(None)
    index.confirm(as_blocks((1, 2)), 0)
    index.insert(as_blocks((1, 2, 3, 4)), 0)
    index.retract(as_blocks((1, 2, 3, 4)), 0)
    index.check()
    assert index.match(as_blocks((1, 2, 3, 4)), 1).tolist() == [2]


def test_withdrawing_from_one_replica_leaves_the_others() -> None:
    index = index_of(None, None)
    index.insert(as_blocks((1, 2)), 0)
    index.insert(as_blocks((1, 2)), 1)
    index.retract(as_blocks((1, 2)), 0)
    assert index.match(as_blocks((1, 2)), 2).tolist() == [0, 2]


def test_a_belief_is_the_confirmed_prefix_and_its_last_use() -> None:
    """Uses are numbered by twos, and one more where the replica has shown the use."""
    index = index_of(None)
    long, short = as_blocks((1, 2, 3)), as_blocks((1, 2))
    assert index.insert(long, 0) == (0, 0)
    index.confirm(long, 0)
    assert index.insert(as_blocks((1, 2, 3, 4)), 0) == (3, 5)
    index.confirm(short, 0)
    assert index.insert(as_blocks((1, 2, 9)), 0) == (2, 9), "the start was used after the branch"
    index.confirm(long, 0)
    assert index.insert(short, 0) == (2, 13), "the branch was used after the start"
    assert index.insert(as_blocks((7,)), 0) == (0, 0)


def test_an_estimated_use_is_no_confirmed_one() -> None:
    index = index_of(None)
    index.confirm(as_blocks((1, 2)), 0)
    assert index.insert(as_blocks((1, 2)), 0) == (2, 3)
    assert index.insert(as_blocks((1, 2)), 0) == (2, 0), "by the dispatch of a sibling"


def test_the_published_index_knows_of_no_use() -> None:
    index = index_of(None, bounded=False)
    index.confirm(as_blocks((1, 2)), 0)
    assert index.insert(as_blocks((1, 2)), 0) == (0, 0)


def test_a_correction_evicts_earlier_uses_and_stops_at_unconfirmed_blocks() -> None:
    index = index_of(None)
    for word in (1, 2, 3):
        index.confirm(as_blocks((word,)), 0)
    index.evict_older(0, before=5)
    assert [index.match(as_blocks((word,)), 1)[0] for word in (1, 2, 3)] == [0, 1, 1]
    index.insert(as_blocks((4,)), 0)
    index.confirm(as_blocks((5,)), 0)
    index.insert(as_blocks((2,)), 0)
    index.insert(as_blocks((3,)), 0)
    index.evict_older(0, before=1000)
    assert [index.match(as_blocks((word,)), 1)[0] for word in (2, 3, 4, 5)] == [1, 1, 1, 1]
    index.check()


def test_removed_replica_leaves_nothing_behind() -> None:
    index = index_of(None, None)
    index.insert(as_blocks((1, 2)), 0)
    index.insert(as_blocks((1, 3)), 1)
    index.remove_replica(0)
    index.add_replica(0)
    index.check()
    assert (index.stored_blocks, index.match(as_blocks((1, 3)), 2).tolist()) == (2, [0, 2])


def test_flush_of_all_empties_the_index() -> None:
    index = index_of(None, None)
    index.insert(as_blocks((1, 2)), 0)
    index.insert(as_blocks((1, 3)), 1)
    index.flush()
    index.check()
    assert (index.stored_blocks, index.nodes) == (0, 0)


@pytest.mark.parametrize("length", [1, 3])
def test_endless_unique_prompts_stay_within_the_bounds(length: int) -> None:
    index = index_of(50, None, 70, max_blocks=300)
    for number in range(3000):
        index.insert(as_blocks(tuple(number * 10 + k for k in range(1, length + 1))), number % 3)
    index.check()
    assert index.stored_blocks <= 300


def test_every_length_of_one_prompt_stays_within_the_bounds() -> None:
    index = index_of(None, None, max_blocks=100, bounded=False)
    key = tuple(range(1, 90))
    for number in range(2000):
        index.confirm(as_blocks((number % 7, *key[: number * 31 % 90])), number % 2)
    index.check()


def test_an_index_without_replicas_is_sound_and_evicts_nothing() -> None:
    index = index_of()
    index.check()
    index.resize(0)
    index.flush()
    assert (index.stored_blocks, index.nodes, list(index.match(as_blocks((1, 2)), 0))) == (0, 0, [])


MAX_BLOCKS = 20
#: With a common start, so that prompts of both clients share, part and continue each other.
PROMPTS = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(tuple)


def index_of_shares(replicas: int, max_blocks: int = MAX_BLOCKS) -> PrefixIndex:
    index = PrefixIndex(max_blocks=max_blocks, bounded=True)
    for slot in range(replicas):
        index.add_replica(slot)
    return index


def test_a_flood_of_one_client_leaves_the_prompts_of_another() -> None:
    index = index_of_shares(2)
    index.confirm(as_blocks((1, 2, 3, 4, 5)), 0, "alice")
    for number in range(1000):
        index.confirm(as_blocks((100 + number, 1, 2)), number % 2, "bob")
        index.check()
    assert index.match(as_blocks((1, 2, 3, 4, 5)), 2).tolist() == [5, 0]
    assert index.match(as_blocks((1099, 1, 2)), 2).tolist() == [0, 3]


def test_a_client_that_continues_anothers_prompts_replaces_its_own_continuations() -> None:
    index = index_of_shares(1)
    index.confirm(as_blocks((1, 2, 3)), 0, "alice")
    for number in range(100):
        index.confirm(as_blocks((1, 2, 3, 100 + number)), 0, "bob")
    index.check()
    assert index.match(as_blocks((1, 2, 3, 199)), 1).tolist() == [4]
    assert index.match(as_blocks((1, 2, 3, 100)), 1).tolist() == [3]


def test_small_prompts_on_every_replica_are_bounded_by_their_pairs() -> None:
    index = index_of_shares(10)
    index.confirm(as_blocks((1, 2, 3, 4, 5)), 0, "alice")
    for number in range(50):
        for slot in range(10):
            index.confirm(as_blocks((100 + number,)), slot, "bob")
    index.check()
    assert index.match(as_blocks((1, 2, 3, 4, 5)), 1).tolist() == [5]


def test_a_client_alone_and_requests_without_a_name_may_use_the_whole_index() -> None:
    for client in ("alice", None):
        index = index_of_shares(1)
        for number in range(100):
            index.confirm(as_blocks((number, 0)), 0, client)
        index.check()
        assert index.stored_blocks == MAX_BLOCKS
        assert index.match(as_blocks((90, 0)), 1).tolist() == [2]


def test_blocks_whose_client_owns_no_leaf_are_evicted_as_the_oldest_are() -> None:
    index = index_of_shares(1, max_blocks=4)
    index.confirm(as_blocks((1, 2, 3)), 0, "alice")
    index.confirm(as_blocks((1, 2, 3, 4)), 0, "bob")
    index.confirm(as_blocks((9,)), 0, "alice")
    index.check()
    assert index.stored_blocks <= 4


def test_a_client_without_blocks_has_no_share_to_keep() -> None:
    index = index_of_shares(1)
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
    index = index_of_shares(3)
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


SYSTEM = (1, 2, 3, 4)


def discounts(index: PrefixIndex, prompt: tuple[int, ...], n_slots: int, *, tokens: float = 10.0) -> list[float]:
    """Of replicas that have what the index says, for a prompt of its blocks and nothing more."""
    matched, shared = index.match_runs(as_blocks(prompt), n_slots, block_tokens=tokens)
    if shared is None:
        return [0.0] * n_slots
    return [round(one, 6) for one in shared.discounts(matched, len(prompt) * tokens).tolist()]


def test_a_copy_of_what_others_went_on_from_is_paid_by_those_who_will_use_it() -> None:
    """Four sessions went on from the system prompt of four blocks on replica 0: 4 / (4 + 1 + 1) of a copy is theirs."""
    index = index_of(None, None)
    for session in range(4):
        index.insert(as_blocks((*SYSTEM, 10 + session, 20 + session)), 0)
    assert discounts(index, (*SYSTEM, 90, 91, 92, 93), 2) == [0.0, round(-40 * 4 / 6 / 80, 6)]
    index.insert(as_blocks(SYSTEM), 1)
    assert discounts(index, (*SYSTEM, 90, 91, 92, 93), 2) == [0.0, 0.0], "there is a copy everywhere"


def test_turns_of_one_session_owe_their_copy_in_full() -> None:
    index = index_of(None, None)
    for turns in range(1, 5):
        index.insert(as_blocks(tuple(range(3 * turns))), 0)
    assert discounts(index, tuple(range(15)), 2) == [0.0, 0.0]


def test_the_next_turn_of_a_session_owes_its_own_turns_and_shares_the_system_prompt() -> None:
    """Three others went on from the four shared blocks; the eight of its own behind them are nobody else's."""
    index = index_of(None, None)
    own = (*SYSTEM, *range(10, 18))
    for session in (own, (*SYSTEM, 30), (*SYSTEM, 40), (*SYSTEM, 50)):
        index.insert(as_blocks(session), 0)
    assert discounts(index, (*own, 18), 2) == [0.0, round(-40 * 3 / 5 / 130, 6)]


def test_a_run_is_worth_at_least_as_much_as_those_below_it() -> None:
    """Two groups part behind the first block; twelve prompts went on from the second run of one of them."""
    index = index_of(None, None)
    for session in range(12):
        index.insert(as_blocks((1, 2, 100 + session)), 0)
    index.insert(as_blocks((1, 3)), 0)
    assert discounts(index, (1, 2, 90, 91), 2) == [0.0, round(-20 * 12 / 14 / 40, 6)]


def test_a_prompt_that_parts_within_a_run_has_one_other_that_went_on() -> None:
    index = index_of(None, None)
    index.insert(as_blocks((1, 2, 3, 4)), 0)
    assert discounts(index, (1, 2, 9, 9), 2) == [0.0, round(-20 * 1 / 3 / 40, 6)]


def test_where_engines_find_a_part_of_a_prefix_a_copy_is_worth_as_much() -> None:
    index = index_of(None, None)
    for session in range(4):
        index.insert(as_blocks((*SYSTEM, 10 + session)), 0)
    shared = index.match_runs(as_blocks((*SYSTEM, 90)), 2, block_tokens=10.0)[1]
    assert shared is not None
    quarter = shared.found(0.25)
    assert quarter.discounts_of_rows([10.0, 0.0], 50) == pytest.approx([0.0, -0.25 * 40 * 4 / 6 / 50])


def test_a_prompt_that_is_cached_as_a_whole_has_nothing_to_divide() -> None:
    index = index_of(None, None)
    for session in range(2):
        index.insert(as_blocks((*SYSTEM, 10 + session)), 0)
    assert discounts(index, SYSTEM, 1) == [0.0]


def test_fill_is_the_share_of_a_known_capacity() -> None:
    index = index_of(8, None, 0)
    for slot in range(3):
        index.insert(as_blocks((1, 2)), slot)
    assert [index.fill(slot) for slot in range(3)] == [0.25, 0.0, 0.0]
    assert index.fill(0, blocks=4) == 0.5, "prompts of other routers"
    assert index.fill(0, blocks=100) == 1.0


def test_a_slot_that_is_used_again_is_empty() -> None:
    index = index_of(4)
    index.insert(as_blocks((1, 2, 3, 4)), 0)
    index.remove_replica(0)
    index.add_replica(0, capacity_blocks=4)
    assert index.fill(0) == 0.0


WORDS = st.lists(st.text("ab", min_size=1, max_size=8), max_size=12)


def tree_of(words: list[str], item_bytes: int = 2) -> RadixTree[RadixNode]:
    """Each letter is an item of `item_bytes` bytes."""
    tree = RadixTree(RadixNode, item_bytes=item_bytes)
    for word in words:
        add(tree, spell(word, item_bytes))
    return tree


def add(tree: RadixTree[RadixNode], key: bytes) -> None:
    path, matched = tree.match_path(key)
    if path and matched < path[-1].end:
        path[-1] = tree.split(path[-1], matched)
    rest = key[matched * tree.item_bytes :]
    if rest:
        tree.append(path[-1] if path else tree.root, rest)


def spell(word: str, item_bytes: int) -> bytes:
    return b"".join(letter.encode().rjust(item_bytes, b"-") for letter in word)


def common(one: str, other: str) -> int:
    return max(k for k in range(min(len(one), len(other)) + 1) if one[:k] == other[:k])


@given(words=WORDS, asked=st.text("ab", max_size=10), item_bytes=st.sampled_from([1, 2, 4, 8]))
def test_walk_finds_the_longest_common_prefix(words: list[str], asked: str, item_bytes: int) -> None:
    path, matched = tree_of(words, item_bytes).match_path(spell(asked, item_bytes))
    assert matched == max((common(word, asked) for word in words), default=0)
    spelt = b"".join(node.edge for node in path)[: matched * item_bytes]
    assert spelt == spell(asked[:matched], item_bytes)


@given(words=WORDS)
def test_depths_add_up_along_every_path(words: list[str]) -> None:
    tree = tree_of(words)
    for node in tree.descendants():
        assert node.parent is not None
        assert node.end == node.parent.end + len(node.edge) // tree.item_bytes
        assert node.parent.children[node.edge[: tree.item_bytes]] is node


def test_items_that_differ_only_in_a_late_byte_part_there() -> None:
    tree = RadixTree(RadixNode, item_bytes=4)
    add(tree, b"aaaabbbbcccc")
    path, matched = tree.match_path(b"aaaabbbXcccc")
    assert (len(path), matched) == (1, 1)


def test_removed_leaf_is_not_found_again() -> None:
    tree = tree_of(["ab"])
    leaf = tree.match_path(spell("ab", 2))[0][-1]
    tree.remove(leaf)
    assert tree.match_path(spell("ab", 2)) == ([], 0)
    assert list(tree.descendants()) == []


def test_split_keeps_what_hangs_below() -> None:
    tree = tree_of(["abab", "ababb"])
    upper = tree.split(tree.match_path(spell("abab", 2))[0][0], 1)
    assert (upper.end, [node.end for node in tree.match_path(spell("ababb", 2))[0]]) == (1, [1, 4, 5])


@given(words=WORDS, key=st.text("ab", min_size=1, max_size=8))
def test_a_key_matched_again_is_matched_in_the_tree_as_it_is(words: list[str], key: str) -> None:
    tree = tree_of([])
    for word in (*words, key):
        before = tree.match_path(spell(key, 2))
        assert tree.match_path(spell(key, 2)) == before
        add(tree, spell(word, 2))
        assert tree.match_path(spell(key, 2)) == tree.match_below(tree.root, spell(key, 2))
    leaf = tree.match_path(spell(key, 2))[0][-1]
    if not leaf.children:
        tree.remove(leaf)
        assert tree.match_path(spell(key, 2)) == tree.match_below(tree.root, spell(key, 2))


@given(words=WORDS, key=st.text("ab", min_size=1, max_size=8))
def test_a_match_below_a_node_is_the_rest_of_the_whole_one(words: list[str], key: str) -> None:
    tree = tree_of(words)
    path, matched = tree.match_path(spell(key, 2))
    for number, node in enumerate(path):
        if matched >= node.end:
            assert tree.match_below(node, spell(key, 2)) == (path[number + 1 :], matched)


# --- The prefix index against a naive twin, step by step.


# --- The prefix index written the slow and obvious way: every prefix of every prompt is an entry of its own.


Key = tuple[int, ...]


def as_blocks(key: Key) -> bytes:
    """A key of small numbers as 8-byte hashes."""
    return b"".join(number.to_bytes(8, "little") for number in key)


@dataclass
class TwinReplica:
    capacity: int | None
    #: Tick of the last use of each prefix held.
    ticks: dict[Key, int] = field(default_factory=dict)
    confirmed: set[Key] = field(default_factory=set)
    #: Tick at which the replica last showed to hold each prefix.
    shown: dict[Key, int] = field(default_factory=dict)


class PrefixTwin:
    """Same contract as `PrefixIndex`; each answer is found by looking at everything.

    `cuts` are the stored prefixes at which a prompt ended or two prompts parted: between two cuts lies what the index
    keeps as one node and evicts as a whole.
    """

    def __init__(self, *, max_blocks: int, bounded: bool) -> None:
        self.max_blocks = max_blocks
        self.bounded = bounded
        self.replicas: dict[int, TwinReplica] = {}
        self.cuts: set[Key] = set()
        self.tick = 0

    @property
    def stored(self) -> set[Key]:
        return {prefix for replica in self.replicas.values() for prefix in replica.ticks}

    @property
    def pairs(self) -> int:
        return sum(len(self.cuts & replica.ticks.keys()) for replica in self.replicas.values())

    def room(self, replica: TwinReplica) -> int:
        bounded = self.bounded and replica.capacity is not None
        return min(replica.capacity or 0, self.max_blocks) if bounded else self.max_blocks

    def match(self, key: Key, slot: int) -> int:
        return max((k for k in range(1, len(key) + 1) if key[:k] in self.replicas[slot].ticks), default=0)

    def worth_behind(self, key: Key, depth: int) -> float:
        """What copies of the matched blocks of `key` behind `depth` are worth to other prompts, block by block."""
        stored = self.stored
        matched = max((k for k in range(1, len(key) + 1) if key[:k] in stored), default=0)
        others = [len({p[k] for p in stored if len(p) > k and p[:k] == key[:k]}) for k in range(matched + 1)]
        others = [count - (k < matched) for k, count in enumerate(others)]
        worth = 0.0
        for k in range(depth + 1, matched + 1):
            most = max(others[k:])
            copies = sum(key[:k] in replica.ticks for replica in self.replicas.values())
            worth += most / (most + copies + 1)
        return worth

    def insert(self, key: Key, slot: int, *, shown: bool = False) -> Key:
        replica = self.replicas[slot]
        key = key[: self.room(replica) if replica.capacity is None else min(replica.capacity, self.max_blocks)]
        if not key:
            return key
        stored = self.stored
        self.cuts |= {key[: max((k for k in range(1, len(key) + 1) if key[:k] in stored), default=0)], key} - {()}
        self.touch(key, replica, shown=shown)
        self.fit()
        return key

    def touch(self, key: Key, replica: TwinReplica, *, shown: bool = False) -> None:
        """Even ticks are believed, odd ones shown."""
        self.tick += 2
        for k in range(1, len(key) + 1):
            replica.ticks[key[:k]] = self.tick + shown
            if shown:
                replica.shown[key[:k]] = self.tick + 1

    def confirm(self, key: Key, slot: int) -> None:
        key = self.insert(key, slot, shown=True)
        self.replicas[slot].confirmed |= {key[:k] for k in range(1, len(key) + 1)}

    def withdraw(self, key: Key, slot: int) -> None:
        replica = self.replicas[slot]
        for k in range(1, len(key) + 1):
            if key[:k] not in replica.ticks:
                return
            if key[:k] not in replica.confirmed:
                self.forget([held for held in replica.ticks if held[:k] == key[:k]], replica)
                if k > 1:
                    self.touch(key[: k - 1], replica)
                return

    def believed(self, key: Key, slot: int) -> Key:
        """The part of `key` that the replica has shown to hold."""
        replica = self.replicas[slot]
        key = key[: self.room(replica)]
        return next((key[:k] for k in range(len(key), 0, -1) if key[:k] in replica.confirmed), ())

    def correct(self, slot: int, before: int) -> None:
        replica = self.replicas[slot]
        while replica.ticks:
            tick, prefix, _ = oldest = min(self.leaves(replica))
            if tick >= before or prefix not in replica.confirmed:
                return
            self.evict(oldest)

    def flush(self, slot: int) -> None:
        self.forget(list(self.replicas[slot].ticks), self.replicas[slot])

    def remove(self, slot: int) -> None:
        self.flush(slot)
        del self.replicas[slot]

    def forget(self, prefixes: list[Key], replica: TwinReplica) -> None:
        for prefix in prefixes:
            del replica.ticks[prefix]
            replica.confirmed.discard(prefix)
            replica.shown.pop(prefix, None)
        self.cuts &= self.stored

    def fit(self) -> None:
        for replica in self.replicas.values():
            while len(replica.ticks) > self.room(replica):
                self.evict(min(self.leaves(replica)))
        while len(self.stored) > self.max_blocks or self.pairs > self.max_blocks:
            self.evict(min(leaf for replica in self.replicas.values() for leaf in self.leaves(replica)))

    def leaves(self, replica: TwinReplica) -> list[tuple[int, Key, int]]:
        """(tick, prefix, slot) of each cut below which the replica holds nothing."""
        slot = next(slot for slot, other in self.replicas.items() if other is replica)
        held = replica.ticks
        inner = {prefix[:k] for prefix in held for k in range(len(prefix))}
        return [(held[prefix], prefix, slot) for prefix in held if prefix not in inner]

    def evict(self, leaf: tuple[int, Key, int]) -> None:
        _, prefix, slot = leaf
        run = [prefix]
        while run[-1][:-1] and run[-1][:-1] not in self.cuts:
            run.append(run[-1][:-1])
        self.forget(run, self.replicas[slot])


# --- The prefix index against its naive twin, step by step.


SLOTS = st.integers(0, 3)
CAPACITIES = st.none() | st.integers(0, 14)
#: Few symbols and a common start, so that prompts share, part and nest.
KEYS = st.one_of(
    st.lists(st.integers(0, 1), max_size=6).map(tuple),
    st.lists(st.integers(0, 2), max_size=4).map(lambda tail: (0, 0, 0, *tail)),
)


class IndexAndTwin(RuleBasedStateMachine):
    """Does the same to both and compares all that can be seen."""

    @initialize(max_blocks=st.integers(1, 25), bounded=st.booleans())
    def start(self, max_blocks: int, bounded: bool) -> None:
        self.index = PrefixIndex(max_blocks=max_blocks, bounded=bounded)
        self.twin = PrefixTwin(max_blocks=max_blocks, bounded=bounded)
        #: Of earlier beliefs.
        self.ticks = [0]
        #: By slot, as a reader has them who reads those that have changed alone.
        self.fills: dict[int, float] = {}
        for slot in range(4):
            self._add(slot, None)

    def _add(self, slot: int, capacity: int | None) -> None:
        self.index.add_replica(slot, capacity_blocks=capacity)
        self.twin.replicas[slot] = TwinReplica(capacity)

    @rule(key=KEYS, slot=SLOTS)
    def insert(self, key: Key, slot: int) -> None:
        believed = self.twin.believed(key, slot)
        shown = self.twin.replicas[slot].shown.get(believed, 0)
        belief = self.index.insert(as_blocks(key), slot)
        self.twin.insert(key, slot)
        if self.twin.bounded:
            assert belief.blocks == len(believed)
            assert belief.tick == 0 or (belief.tick % 2 and belief.tick <= shown), "never later than it was shown"
            self.ticks.append(belief.tick)

    @rule(key=KEYS, slot=SLOTS)
    def confirm(self, key: Key, slot: int) -> None:
        self.index.confirm(as_blocks(key), slot)
        self.twin.confirm(key, slot)

    @rule(key=KEYS, slot=SLOTS)
    def withdraw(self, key: Key, slot: int) -> None:
        self.index.retract(as_blocks(key), slot)
        self.twin.withdraw(key, slot)

    @rule(key=KEYS, tail=KEYS, slot=SLOTS)
    def fail_next_turn(self, key: Key, tail: Key, slot: int) -> None:
        """The usual way of a withdrawal: a confirmed prompt grows by a turn, and that request fails."""
        self.confirm(key, slot)
        self.insert(key + tail, slot)
        self.withdraw(key + tail, slot)

    @rule(slot=SLOTS, data=st.data())
    def correct(self, slot: int, data: st.DataObject) -> None:
        before = data.draw(st.sampled_from(self.ticks) | st.integers(0, self.twin.tick + 2))
        self.index.evict_older(slot, before=before)
        self.twin.correct(slot, before)

    @rule(slot=SLOTS)
    def flush(self, slot: int) -> None:
        self.index.flush(slot)
        self.twin.flush(slot)

    @rule(slot=SLOTS, capacity=CAPACITIES)
    def replace_replica(self, slot: int, capacity: int | None) -> None:
        self.index.remove_replica(slot)
        self.fills.pop(slot, None)  # as the fleet empties the cells of a slot
        self.twin.remove(slot)
        self._add(slot, capacity)

    @rule(slot=SLOTS, capacity=CAPACITIES)
    def set_capacity(self, slot: int, capacity: int | None) -> None:
        self.index.set_capacity(slot, capacity)
        self.twin.replicas[slot].capacity = capacity
        self.twin.fit()

    @rule(bounded=st.booleans())
    def set_bounded(self, bounded: bool) -> None:
        self.index.bounded = bounded
        self.twin.bounded = bounded
        self.twin.fit()

    @rule(key=KEYS)
    def match(self, key: Key) -> None:
        matched, shared = self.index.match_runs(as_blocks(key), 4)
        assert matched.tolist() == [self.twin.match(key, slot) for slot in range(4)]
        worths = [self.twin.worth_behind(key, depth) for depth in range(len(key) + 1)]
        if shared is None:
            assert not any(worths)
            return
        discounts = shared.discounts_of_rows([float(depth) for depth in range(len(key) + 1)], 1000)
        owed = [-worth / (1000 - depth) for depth, worth in enumerate(worths)]
        assert discounts == pytest.approx(owed, abs=1e-9)
        assert shared.discounts(np.arange(len(key) + 1.0), 1000) == pytest.approx(owed, abs=1e-9)

    @invariant()
    def every_change_of_a_fill_is_announced(self) -> None:
        changed, self.index.changed = self.index.changed, 0
        self.fills |= {slot: self.index.fill(slot) for slot in slots_of(changed)}
        for slot, replica in self.twin.replicas.items():
            expected = min(1.0, len(replica.ticks) / replica.capacity) if replica.capacity else 0.0
            assert self.fills.get(slot, 0.0) == expected

    @invariant()
    def agree(self) -> None:
        self.index.check()
        assert self.index.stored_blocks == len(self.twin.stored)
        assert self.index.nodes == len(self.twin.cuts)
        for slot, replica in self.twin.replicas.items():
            assert self.index.resident_blocks(slot) == len(replica.ticks)
        for key in self.twin.stored:
            assert self.index.match(as_blocks(key), 4).tolist() == [self.twin.match(key, slot) for slot in range(4)]


IndexAndTwin.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
TestIndexAndTwin = IndexAndTwin.TestCase
