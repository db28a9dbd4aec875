"""Residency: the blocks that one replica is estimated to have in the prefix tree, and their order of eviction.

Owns, for one replica, the order of use and the sums over its nodes, and what one more copy of a run is worth
(`SharedRuns`). See `index` for the tree and the bounds.

Theory of operation. Eviction is least recently used, leaves first: every use gets the next tick, recorded only at the
last node of its path in `recent` (ordered by tick). A node's true last use is the latest of its own tick and those of
all that was ever below it. So when a leaf is evicted its parent takes its tick, and since the leaf was the oldest of
all, that is the front of the order. An entry at the front with a resident node below it is obsolete and dropped. So
each step is O(1), nothing is searched or sorted, and the order never has more entries than the replica has nodes.

A tick is odd when a first token confirmed the use, and even when the use is estimated. So a leaf's tick, and the one
that its parent takes, say whether an engine really had the blocks then: a report that they are not cached is compared
with it (`ConfirmedPrefix`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice
from typing import Generic, NamedTuple, Self, TypeVar

import numpy as np

from gorgo.core.messages.request import Outcome, RouteRequest
from gorgo.core.numeric import FEW, Floats
from gorgo.core.record import record

# A path-compressed radix tree over strings of fixed-size items: the descent and the split, no residency.
#
# Owns edges, children and depths. What a node *means* (its replicas, its locks) belongs to the subclasses: `Node`
# below (8-byte block hashes) and `sim.engine.kv_cache` (4-byte tokens).
#
# Theory of operation: an edge is the concatenated items as `bytes`. A whole edge is compared with one
# `bytes.startswith` (memcmp), about 60 ns whatever its length, against about 1 us for a numpy comparison; numpy is
# used once per descent at most, to find where the last edge diverges. Children are keyed by the bytes of their first
# item.


class RadixNode:
    """A node and the edge that leads to it. `end` is the depth in items at the end of its edge."""

    __slots__ = ("children", "edge", "end", "parent")

    def __init__(self, edge: bytes, end: int, parent: Self | None) -> None:
        self.edge = edge
        self.end = end
        self.parent = parent
        self.children: dict[bytes, Self] = {}

    def path_items(self) -> bytes:
        """Return the items from the root to the end of the edge."""
        edges, node = [self.edge], self
        while (parent := node.parent) is not None:
            edges.append(parent.edge)
            node = parent
        return b"".join(reversed(edges))

    def inherit(self, lower: Self) -> None:
        """Called on the new upper node of a split: copy what is also true of a prefix of `lower`. Here: nothing."""


NodeT = TypeVar("NodeT", bound=RadixNode)


class RadixTree(Generic[NodeT]):
    """The tree. `root` has an empty edge and no meaning of its own."""

    def __init__(self, node_type: type[NodeT], *, item_bytes: int) -> None:
        self.node_type = node_type
        self.item_bytes = item_bytes
        self.root = node_type(b"", 0, None)
        #: The latest descent, until the tree changes: a key is matched to choose a replica and again to add it there.
        self._matched: tuple[bytes, list[NodeT], int] | None = None

    def match_path(self, key: bytes) -> tuple[list[NodeT], int]:
        """Return the nodes along `key` and the number of matching items.

        All nodes but the last match over their whole edge; the last one matches at least in its first item, so
        `matched < path[-1].end` says that the descent stopped inside its edge.
        """
        if self._matched is not None and self._matched[0] == key:
            return self._matched[1:]
        path, items = self.match_below(self.root, key)
        self._matched = key, path, items
        return path, items

    def match_below(self, node: NodeT, key: bytes) -> tuple[list[NodeT], int]:
        """Return the nodes along `key` below `node`, with whose prefix it begins, and the number of matching items."""
        size, position = self.item_bytes, node.end * self.item_bytes
        path: list[NodeT] = []
        while True:
            child = node.children.get(key[position : position + size])
            if child is None:
                return path, position // size
            path.append(child)
            if not key.startswith(child.edge, position):
                return path, position // size + _common_items(child.edge, key, position, size)
            position += len(child.edge)
            node = child

    def descendants(self) -> Iterator[NodeT]:
        """Every node but the root, parents before their children."""
        pending = list(self.root.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def split(self, node: NodeT, at: int) -> NodeT:
        """Cut `node`'s edge at depth `at` (items, strictly inside the edge); return the new upper node."""
        self._matched = None
        parent = node.parent
        assert parent is not None, "the root has no edge to cut"
        cut = len(node.edge) - (node.end - at) * self.item_bytes
        assert 0 < cut < len(node.edge), "a cut lies strictly inside the edge"
        size = self.item_bytes
        upper = self.node_type(node.edge[:cut], at, parent)
        parent.children[node.edge[:size]] = upper
        node.edge = node.edge[cut:]
        node.parent = upper
        upper.children[node.edge[:size]] = node
        upper.inherit(node)
        return upper

    def append(self, parent: NodeT, items: bytes) -> NodeT:
        """Add a new leaf with edge `items` (not empty) below `parent`."""
        self._matched = None
        child = self.node_type(items, parent.end + len(items) // self.item_bytes, parent)
        parent.children[items[: self.item_bytes]] = child
        return child

    def remove(self, node: NodeT) -> None:
        """Remove a leaf."""
        self._matched = None
        assert not node.children, "only a leaf can be removed"
        assert node.parent is not None, "the root stays"
        del node.parent.children[node.edge[: self.item_bytes]]


def _common_items(edge: bytes, key: bytes, position: int, size: int) -> int:
    """Items that `edge` shares with `key` from `position` on, when they are known to differ somewhere."""
    count = min(len(edge), len(key) - position) // size
    mine = np.frombuffer(edge, dtype=np.uint8, count=count * size)
    other = np.frombuffer(key, dtype=np.uint8, count=count * size, offset=position)
    differing = mine != other
    first = int(differing.argmax())
    return first // size if differing[first] else count


#: Bytes of one block hash.
BLOCK_HASH_BYTES = 8
#: Children searched for a resident one; thousands may branch off a shared start.
_FEW_CHILDREN = 64


class ConfirmedPrefix(NamedTuple):
    """The prefix of a prompt that was confirmed on a replica when the prompt was dispatched there.

    The last of `blocks` was used at `tick` or later; 0 is unknown.
    """

    blocks: int = 0
    tick: int = 0


NO_PREFIX = ConfirmedPrefix()


class Node(RadixNode):
    """A run of blocks with the same replicas. Bit `slot` of `residents` and `confirmed` stands for a replica."""

    __slots__ = ("confirmed", "owner", "residents")

    def __init__(self, edge: bytes, end: int, parent: Node | None) -> None:
        super().__init__(edge, end, parent)
        self.residents = 0
        self.confirmed = 0
        #: The client that stored it.
        self.owner: str | None = None

    def inherit(self, lower: Node) -> None:
        self.residents = lower.residents
        self.confirmed = lower.confirmed
        self.owner = lower.owner


class Residency:
    """Nodes of one replica.

    Parameters
    ----------
    slot:
        The replica's bit in the nodes.
    capacity:
        Most blocks, `None` if unknown. May be replaced.
    """

    __slots__ = ("bit", "blocks", "capacity", "children", "nodes", "recent")

    def __init__(self, slot: int, capacity: int | None) -> None:
        self.bit = 1 << slot
        self.capacity = capacity
        self.blocks = 0
        self.nodes = 0
        #: Last ticks, oldest first. Every leaf is here; an inner node is where a prompt ended there.
        self.recent: OrderedDict[Node, int] = OrderedDict()
        #: Resident children of each inner node; leaves and the root are absent.
        self.children: dict[Node, int] = {}

    def add(self, node: Node) -> None:
        """Add `node`; its parent is resident or is added next."""
        # Nodes with this resident alone share one integer: 28 to 96 bytes less each.
        node.residents = node.residents | self.bit if node.residents else self.bit
        self.blocks += len(node.edge) // BLOCK_HASH_BYTES
        self.nodes += 1
        parent = node.parent
        if parent is not None and parent.end:
            self.children[parent] = self.children.get(parent, 0) + 1

    def remove(self, node: Node) -> None:
        """Remove a leaf that is not in the order of use."""
        node.residents &= ~self.bit
        node.confirmed &= ~self.bit
        self.blocks -= len(node.edge) // BLOCK_HASH_BYTES
        self.nodes -= 1
        parent = node.parent
        if parent is not None and parent.end:
            left = self.children.pop(parent) - 1
            if left:
                self.children[parent] = left

    def split(self, upper: Node) -> None:
        """Count the new `upper` half of a resident node that was split."""
        self.nodes += 1
        self.children[upper] = 1

    def touch(self, node: Node, tick: int) -> None:
        """Record `node` as the end of the latest use."""
        self.recent[node] = tick
        self.recent.move_to_end(node)

    def oldest_tick(self) -> int | None:
        """Return the tick of the least recently used leaf, and bring it to the front."""
        recent, below = self.recent, self.children
        while recent:
            node = next(iter(recent))
            if node not in below:
                return recent[node]
            del recent[node]
        return None

    def evict(self, tick: int) -> Node:
        """Remove and return the leaf at the front, whose `tick` is the oldest."""
        leaf, _ = self.recent.popitem(last=False)
        self.remove(leaf)
        parent = leaf.parent
        assert parent is not None
        if parent.end and parent not in self.recent and parent not in self.children:
            self.recent[parent] = tick
            self.recent.move_to_end(parent, last=False)
        return leaf

    def evict_early(self, leaf: Node, tick: int) -> None:
        """Remove a leaf that is not the oldest. A parent that becomes a leaf counts as used at `tick`, the latest."""
        del self.recent[leaf]
        self.remove(leaf)
        parent = leaf.parent
        if parent is not None and parent.end and parent not in self.recent and parent not in self.children:
            self.touch(parent, tick)

    def remove_below(self, top: Node) -> list[Node]:
        """Remove `top` and all resident nodes below it; return them, leaves first."""
        going = [top]
        for node in going:
            if node in self.children:
                going.extend(child for child in node.children.values() if child.residents & self.bit)
        going.reverse()
        for node in going:
            self.recent.pop(node, None)
            self.remove(node)
        return going

    def confirmed_prefix(self, path: list[Node]) -> ConfirmedPrefix:
        """Return the confirmed prefix of a path from the root."""
        for node in reversed(path):
            if node.confirmed & self.bit:
                return ConfirmedPrefix(node.end, self._last_confirmed(node))
        return NO_PREFIX

    def check(self, nodes: list[Node], below: dict[Node, int]) -> None:
        """Assert every invariant, given the resident nodes and the number of their resident children."""
        assert self.children == below
        assert self.nodes == len(nodes)
        assert self.blocks == sum(len(node.edge) for node in nodes) // BLOCK_HASH_BYTES
        assert self.recent.keys() <= set(nodes), "only resident nodes are in the order of use"
        assert self.recent.keys() >= {node for node in nodes if node not in below}, "every leaf can be evicted"
        ticks = list(self.recent.values())
        assert ticks == sorted(set(ticks)), "oldest first"

    def _last_confirmed(self, node: Node | None) -> int:
        """Return a tick at which the replica confirmed `node`: the last one on a single path down."""
        latest, bit, recent = 0, self.bit, self.recent
        while node is not None:
            tick = recent.get(node, 0)
            if tick > latest and tick % 2:
                latest = tick
            if not node.children:
                break
            newest = islice(reversed(node.children.values()), _FEW_CHILDREN)
            node = None
            for child in newest:
                if child.confirmed & bit:
                    node = child
                    break
        return latest


# What a copy of a shared run is worth.
#
# A prompt that is sent to a replica without a run of it leaves a copy there. Of n other prompts that went on from the
# run, with k replicas that have it, some n / (k + 1) later ones will use the new copy. So this prompt owes
# 1 / (1 + n / (k + 1)) of its prefill, and the rest, n / (n + k + 1), is an investment. The turns of one conversation
# go on from each other alone: n is 0, and all of it is owed. Of a run above one with more others, n is theirs.


#: Tokens: a prompt that is cached as a whole has no uncached ones to divide by.
_TINY = 1e-6
#: As an array: numpy makes one of a Python number at each use.
_NONE = np.array(0.0)


@record
class SharedRuns:
    """The matched runs of a prompt that others went on from, the deepest first.

    A replica that has the prompt up to one of `depths`, tokens, lacks copies that are worth as many tokens to others as
    `worths` says. Discounts are negative, the part of its prefill that a prompt does not owe.

    Example
    -------
    >>> runs = SharedRuns(depths=[150.0, 100.0, 0.0], worths=[0.0, 30.0, 120.0])
    >>> [round(discount, 3) for discount in runs.discounts_of_rows([0.0, 100.0, 125.0, 150.0], prompt_tokens=200)]
    [-0.6, -0.3, -0.2, 0.0]
    """

    depths: list[float]
    worths: list[float]

    def found(self, share: float) -> SharedRuns:
        """Return the same where engines find that share of a prefix: a copy is worth as much."""
        return SharedRuns([depth * share for depth in self.depths], [worth * share for worth in self.worths])

    def discounts(self, cached: Floats, prompt_tokens: float) -> Floats:
        """Return the discount of replicas with so many cached tokens."""
        depths, worths = self.depths, self.worths
        if len(depths) > 2:
            missing = np.interp(cached, depths[::-1], worths[::-1])
        else:
            missing = np.maximum(depths[0] - cached, _NONE) * (worths[1] / depths[0])
        discounts: Floats = missing / (cached - (prompt_tokens + _TINY))
        return discounts

    def discounts_of_rows(self, cached: list[float], prompt_tokens: float) -> list[float]:
        """Return the same of a few replicas to the last bit, in less time."""
        depths, worths = self.depths, self.worths
        deepest, tokens = depths[0], prompt_tokens + _TINY
        discounts: list[float] = []
        first = worths[1] / (deepest - depths[1])
        for had in cached:
            if had >= deepest:
                discounts.append(0.0)
            elif len(depths) == 2:
                discounts.append((deepest - had) * first / (had - tokens))
            else:
                at = 1
                while depths[at] > had:
                    at += 1
                start, worth = depths[at], worths[at]
                fall = (worths[at - 1] - worth) / (depths[at - 1] - start)
                discounts.append((fall * (had - start) + worth) / (had - tokens))
        return discounts


# What reports of cached tokens teach: the share of a prefix that an engine finds, and the size of its cache.
#
# Owns the shares per replica, model and depth with the price of a prefix by them (`FoundShares`), whether a report
# contradicts the index (`CacheReport`), and the capacity that follows (`LearnedCapacity`). Leaves the change of the
# index to `dispatch.prefix_updates`. The paragraph below is the theory of the shares; that of contradictions stands
# before `CacheReport`.
#
# Theory of operation. Engines of hybrid models (linear attention) and engines with coarse pages or checkpoints find a
# part of every prefix, whatever its age. An eviction is different: it takes old prefixes alone, and a corrected index
# does not expect them again. So the share is the median of the last reports, which a minority of evictions does not
# move. Depths are classes of powers of two, because checkpoints cost a short prefix more than a long one. A class
# without reports has the share of the nearest shallower one: with checkpoints too little, which evicts nothing by
# mistake.


#: Reports that a class remembers: more than the ten in which a flush is corrected, so that these do not become a share.
WINDOW = 16
#: Reports from which a class has a share: two evictions in a row are no share.
LEAST_REPORTS = 3
#: Reports deviate from their median; so many times the median deviation are usual.
USUAL_DEVIATIONS = 3.0
#: Models with shares of their own; the others have one together, since clients choose names.
MAX_MODELS = 32
#: Least tokens of each class of depth but the first.
_DEPTHS: Floats = np.array([512.0 * 2.0**power for power in range(8)])
_DEPTHS_LIST: list[float] = _DEPTHS.tolist()
_CLASSES = len(_DEPTHS) + 1


@record
class FoundShare:
    """The median share of a confirmed prefix that is found, and the deviation from it that is usual."""

    share: float = 1.0
    deviation: float = 0.0


ALL_FOUND = FoundShare()


@record
class _Report:
    confirmed_tokens: float
    share: float


class _DepthShares:
    """The shares of one replica for one model, by class of depth."""

    __slots__ = ("_learned", "by_depth", "reports")

    def __init__(self) -> None:
        self.reports: list[deque[_Report]] = [deque(maxlen=WINDOW) for _ in range(_CLASSES)]
        self.by_depth: list[FoundShare] = [ALL_FOUND] * _CLASSES
        #: Of the classes with reports enough.
        self._learned: dict[int, FoundShare] = {}

    def add(self, depth: int, report: _Report) -> bool:
        """Add a report; return whether a share changed."""
        reports = self.reports[depth]
        before = self._learned.get(depth)
        replaces_its_like = len(reports) == WINDOW and reports[0].share == report.share
        reports.append(report)
        if replaces_its_like or (report.share == 1.0 and before == ALL_FOUND):
            return False  # the usual cases: the median stays
        if len(reports) < LEAST_REPORTS:
            return False
        now = self._learned[depth] = _median(reports)
        if now == before:
            return False
        self.by_depth = self._shares()
        return before is None or now.share != before.share

    def _shares(self) -> list[FoundShare]:
        """Return the share of each class: its own, or that of the nearest shallower one, or of the shallowest."""
        learned = self._learned
        nearest = learned[min(learned)]
        shares = []
        for depth in range(_CLASSES):
            nearest = learned.get(depth, nearest)
            shares.append(nearest)
        return shares


class FoundShares:
    """Shares of all replicas.

    Example
    -------
    >>> shares = FoundShares()
    >>> for _ in range(3):
    ...     shares.learn(0, "m", confirmed_tokens=5000.0, found_tokens=3000.0)
    >>> shares.of(0, "m", 4500.0)
    FoundShare(share=0.6, deviation=0.0)
    >>> shares.found_tokens(np.array([5000.0, 5000.0]), "m").tolist()  # of replica 1 nothing is known
    [3000.0, 5000.0]
    """

    def __init__(self) -> None:
        self._by_model: dict[str | None, dict[int, _DepthShares]] = {}
        #: Shares by slot and class, per model; a model without an entry finds everything.
        self._tables: dict[str | None, Floats] = {}

    def remove_replica(self, slot: int) -> None:
        """Drop the shares of a replica that has left."""
        for model, slots in list(self._by_model.items()):
            if slots.pop(slot, None) is not None:
                self._tabulate(model)
            if not slots:
                del self._by_model[model]

    def learn(self, slot: int, model: str | None, *, confirmed_tokens: float, found_tokens: float) -> None:
        """Apply a report on a confirmed prefix."""
        if model not in self._by_model and len(self._by_model) >= MAX_MODELS:
            model = None
        slots = self._by_model.setdefault(model, {})
        shares = slots.get(slot)
        if shares is None:
            shares = slots[slot] = _DepthShares()
        share = found_tokens / confirmed_tokens
        report = _Report(confirmed_tokens, share if share < 1.0 else 1.0)
        if shares.add(_depth(confirmed_tokens), report):
            self._tabulate_row(model, slot, shares)

    def of(self, slot: int, model: str | None, tokens: float) -> FoundShare:
        """Return the share of a prefix of so many tokens."""
        shares = self._by_model.get(self._key(model), {}).get(slot)
        return ALL_FOUND if shares is None else shares.by_depth[_depth(tokens)]

    def found_tokens(self, matched: Floats, model: str | None) -> Floats:
        """Return how many of the `matched` tokens of each slot are likely to be found."""
        key = self._key(model)
        table = self._tables.get(key)
        if table is None:
            return matched
        expected = matched.copy()
        if len(matched) <= FEW:
            # numpy takes as long for one row as for fifty.
            slots = self._by_model[key]
            for slot, tokens in enumerate(matched.tolist()):
                if tokens and (shares := slots.get(slot)) is not None:
                    expected[slot] = tokens * shares.by_depth[_depth(tokens)].share
            return expected
        covered = min(len(table), len(matched))
        classes = _DEPTHS.searchsorted(matched[:covered], side="right")
        expected[:covered] *= table[np.arange(covered), classes]
        return expected

    def recent(self, slot: int) -> float | None:
        """Return the share of confirmed tokens that the remembered reports found; `None` without any."""
        reports = list(self._reports(slot))
        if not reports:
            return None
        # From 0.0 on: compiled modules take the int 0, with which a sum begins otherwise, for the type of the whole.
        found_tokens = sum((report.share * report.confirmed_tokens for report in reports), 0.0)
        return found_tokens / sum((report.confirmed_tokens for report in reports), 0.0)

    def _reports(self, slot: int) -> Iterator[_Report]:
        for slots in self._by_model.values():
            if slot in slots:
                for reports in slots[slot].reports:
                    yield from reports

    def _key(self, model: str | None) -> str | None:
        return model if model in self._by_model else None

    def _tabulate_row(self, model: str | None, slot: int, shares: _DepthShares) -> None:
        """Write the changed row of a slot."""
        table, row = self._tables.get(model), [at_depth.share for at_depth in shares.by_depth]
        if table is None or slot >= len(table) or min(row) == 1.0:
            self._tabulate(model)
        else:
            table[slot] = row

    def _tabulate(self, model: str | None) -> None:
        """Write the model's table anew; none where everything is found, which is the usual case."""
        slots = self._by_model[model]
        table = np.ones((max(slots, default=-1) + 1, _CLASSES))
        for slot, shares in slots.items():
            table[slot] = [at_depth.share for at_depth in shares.by_depth]
        if table.size and table.min() < 1.0:
            self._tables[model] = table
        else:
            self._tables.pop(model, None)


def _depth(tokens: float) -> int:
    return bisect_right(_DEPTHS_LIST, tokens)  # a tenth of numpy's time for one number


def _median(reports: deque[_Report]) -> FoundShare:
    """Of an even number the higher one, so that as many evictions as hits do not move it."""
    shares = sorted([report.share for report in reports])
    middle = len(shares) // 2
    share = shares[middle]
    deviations = sorted([abs(other - share) for other in shares])
    return FoundShare(share, deviations[middle])


# Cache feedback: an engine's report of cached tokens, compared with the confirmed prefix at dispatch.
#
# Owns when a report contradicts the prefix index, and the KV capacity of an engine that does not report it.
#
# Theory of operation. Engines evict least recently used blocks. A block that was confirmed on a replica and then not
# cached proves that all it used before that block is evicted as well. The rest was used since, and did not all fit: an
# upper bound on the capacity. Nothing proves that the capacity is more, so an index that is full and agrees with the
# report grows a little, until the next contradiction. Unconfirmed blocks prove nothing: their prefill may not have
# begun.
#
# Some engines find a part of every prefix (`FoundShares`). For them a report is a contradiction only where it is
# clearly below the learned share, and a bound from reports before that share was known is dropped.


#: A report may fall short of the confirmed prefix by so much: an engine's page (half a thousand tokens
#: for some hybrid models), and the error of lengths that are estimated from bytes.
SLACK_TOKENS = 512
SLACK_BLOCKS = 2
SLACK_SHARE = 0.1
#: Per report that agrees while the index is full: doubles in 140 requests, and stays within some percent of the
#: capacity while every twentieth request comes from its edge.
GROWTH = 1.005


@record
class CacheReport:
    """An engine's cached tokens beside the confirmed prefix, both in the index's estimated tokens."""

    confirmed_tokens: float
    found_tokens: float
    slack_tokens: float

    @classmethod
    def of(cls, request: RouteRequest, confirmed: ConfirmedPrefix, outcome: Outcome) -> CacheReport | None:
        """Return the comparison; `None` where either is unknown."""
        if outcome.cached_tokens is None or not confirmed.tick or not request.prompt_tokens:
            return None
        # The index counts estimated tokens: the report is converted to them.
        scale = request.prompt_tokens / outcome.prompt_tokens if outcome.prompt_tokens else 1.0
        expected = confirmed.blocks * request.block_tokens
        slack = max(SLACK_TOKENS, SLACK_BLOCKS * request.block_tokens, SLACK_SHARE * expected)
        return cls(expected, outcome.cached_tokens * scale, slack)

    def is_contradiction(self, usual: FoundShare = ALL_FOUND) -> bool:
        """Return whether the engine had clearly less than the share of the prefix that it usually finds."""
        share = usual.share - USUAL_DEVIATIONS * usual.deviation
        return self.found_tokens + self.slack_tokens < self.confirmed_tokens * share


class LearnedCapacity:
    """Blocks that fit into one replica's cache, learned from reports.

    Example
    -------
    >>> capacity = LearnedCapacity()
    >>> capacity.blocks is None, capacity.learn(contradicted=True, resident_blocks=1000), capacity.blocks
    (True, True, 1000)
    >>> capacity.learn(contradicted=False, resident_blocks=998), capacity.blocks
    (True, 1004)
    """

    __slots__ = ("_bound",)

    def __init__(self) -> None:
        self._bound: float | None = None

    @property
    def blocks(self) -> int | None:
        """`None` until a report has contradicted the index: until then all may fit."""
        return None if self._bound is None else int(self._bound)

    def learn(self, *, contradicted: bool, resident_blocks: int) -> bool:
        """Apply a report, with the replica's blocks after the correction; return whether the bound changed."""
        if contradicted:
            self._bound = max(1.0, float(resident_blocks))
            return True
        if self._bound is None or resident_blocks < self._bound / GROWTH - SLACK_BLOCKS:
            return False
        self._bound *= GROWTH
        return True

    def reset(self) -> bool:
        """Drop the bound; return whether there was one."""
        had_bound, self._bound = self._bound is not None, None
        return had_bound
