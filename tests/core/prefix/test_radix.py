from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.prefix.residency import RadixNode, RadixTree

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
