"""The prefix index: which replica is estimated to have which blocks, in one radix tree over block hashes.

Owns the estimates and their bounds. See `core.prefix.residency` for the tree, one replica's blocks and their LRU
order, `core.prompt.fingerprint` for blocks of a prompt.

- `ClientShares` has what each client stored, and which of it was used least recently.
- `PrefixIndex` has the estimates of all replicas.
- `Origin` orders the sources of knowledge by trust.

Theory of operation. A node's `residents` is an integer with one bit per slot, so that one descent answers for every
replica. Residency is closed under prefixes (a replica with a node has its parent), so along a path the sets only
shrink; the same is true of `confirmed`. A replica evicts least recently used blocks first, leaves first.

The bound over all replicas evicts the oldest leaf of any of them, or the oldest of a client beyond its share
(`ClientShares`). A replica's oldest tick only ever grows, so a heap with one entry per replica, corrected when it
comes to the top, finds it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from heapq import heapify, heappush, heapreplace
from statistics import median_low
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gorgo.core.lru import Lru
from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats
from gorgo.core.prefix.residency import (
    BLOCK_HASH_BYTES,
    NO_PREFIX,
    ConfirmedPrefix,
    Node,
    RadixTree,
    Residency,
    SharedRuns,
)
from gorgo.core.record import record

# Shares of clients: what each client stored in the prefix index, and which of it was used least recently.
#
# Owns the sums and the orders by client; the index evicts. A node belongs to the client whose prompt stored it first.
# A request without a client's name belongs to no share.
#
# Theory of operation. While the index is full, a client beyond its share replaces its own blocks, and any other the
# oldest of all. So one client's prompts evict those of others until it has its share, and no further. An order has
# each leaf of its client; an entry with children is obsolete, and dropped at the front. A parent that becomes a leaf
# is used as long ago as the leaf that was evicted below it, so it comes to the front.


#: Of the index. One client alone may use half of it; two that flood it leave no room to a third, whatever the share.
CLIENT_SHARE = 0.5


class _ClientBlocks:
    """Blocks of one client, the pairs of a node and a resident replica, and its leaves by their last use."""

    __slots__ = ("blocks", "order", "pairs")

    def __init__(self) -> None:
        self.blocks = 0
        self.pairs = 0
        self.order: OrderedDict[Node, None] = OrderedDict()


class ClientShares:
    """Nodes by the client that stored them."""

    def __init__(self) -> None:
        self._shares: dict[str, _ClientBlocks] = {}

    def __len__(self) -> int:
        return len(self._shares)

    def store(self, node: Node, client: str) -> None:
        """Give a new leaf to `client`."""
        node.owner = client
        share = self._shares.setdefault(client, _ClientBlocks())
        share.blocks += len(node.edge) // BLOCK_HASH_BYTES
        share.order[node] = None

    def count_pairs(self, node: Node, pairs: int) -> None:
        """Add pairs of the node and a resident replica."""
        if node.owner is not None:
            self._shares[node.owner].pairs += pairs

    def use(self, node: Node) -> None:
        """Record `node` as the end of the latest use."""
        if node.owner is not None:
            order = self._shares[node.owner].order
            order[node] = None
            order.move_to_end(node)

    def remove(self, node: Node) -> None:
        """Forget a leaf that left the tree."""
        if node.owner is not None:
            share = self._shares[node.owner]
            share.blocks -= len(node.edge) // BLOCK_HASH_BYTES
            share.order.pop(node, None)
            if not share.blocks:
                del self._shares[node.owner]
        parent = node.parent
        if parent is not None and parent.owner is not None and not parent.children:
            order = self._shares[parent.owner].order
            if parent not in order:
                order[parent] = None
                order.move_to_end(parent, last=False)

    def oldest_beyond(self, client: str | None, limit: float) -> Node | None:
        """Return the least recently used leaf of a client with more than `limit` blocks or pairs; `None` for others."""
        share = None if client is None else self._shares.get(client)
        if share is None or max(share.blocks, share.pairs) <= limit:
            return None
        while share.order:
            node = next(iter(share.order))
            if not node.children:
                return node
            del share.order[node]
        return None  # others' prompts continue all of its own

    def check(self, nodes: Iterable[Node]) -> None:
        """Assert every invariant, given all nodes of the tree."""
        blocks: dict[str, int] = {}
        pairs: dict[str, int] = {}
        leaves: dict[str, set[Node]] = {}
        owned: dict[str, set[Node]] = {}
        for node in nodes:
            if node.owner is not None:
                blocks[node.owner] = blocks.get(node.owner, 0) + len(node.edge) // BLOCK_HASH_BYTES
                pairs[node.owner] = pairs.get(node.owner, 0) + node.residents.bit_count()
                owned.setdefault(node.owner, set()).add(node)
                if not node.children:
                    leaves.setdefault(node.owner, set()).add(node)
        assert blocks == {client: share.blocks for client, share in self._shares.items()}
        assert pairs == {client: share.pairs for client, share in self._shares.items()}
        for client, share in self._shares.items():
            assert leaves.get(client, set()) <= share.order.keys() <= owned[client], "every leaf can be evicted"


# Sets of slots as integers, one bit per slot.


#: Below so many set bits a loop over them is faster than unpacking the whole mask (measured: about 20).
_FEW_BITS = 16
#: Sets whose slots are remembered: the replicas that share a prefix are the same from request to request.
_MASKS = 1024


def set_bits(depths: NDArray[np.float64], mask: int, depth: float) -> None:
    """Write `depth` where `mask` has a bit."""
    if mask.bit_count() <= _FEW_BITS:
        for slot in slots_of(mask):
            depths[slot] = depth
        return
    depths[_cells_of(mask, len(depths))] = depth


@lru_cache(_MASKS)
def _cells_of(mask: int, size: int) -> NDArray[np.bool_]:
    """Return a cell per slot, true where `mask` has a bit: a byte per slot is what remembering one takes."""
    packed = np.frombuffer(mask.to_bytes((size + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)


@lru_cache(_MASKS)
def slots_of(mask: int) -> tuple[int, ...]:
    """Return the slots of `mask`, lowest first."""
    slots = []
    while mask:
        low = mask & -mask
        slots.append(low.bit_length() - 1)
        mask ^= low
    return tuple(slots)


class PrefixIndex:
    """Blocks estimated to be cached, per replica, in one tree.

    Parameters
    ----------
    max_blocks:
        Bound on memory: of the blocks stored, and of the pairs of a node and a resident replica.
    bounded:
        Whether each replica is bounded by its capacity too; one without is bounded by `max_blocks` alone. One prompt
        is bounded by the capacity in any case.

    Example
    -------
    >>> index = PrefixIndex(max_blocks=1000, bounded=True)
    >>> index.add_replica(0, capacity_blocks=100)
    >>> index.add_replica(1)
    >>> index.insert(b"block--1block--2", 1)
    ConfirmedPrefix(blocks=0, tick=0)
    >>> index.match(b"block--1block--2block--3", 2)
    array([0., 2.])
    """

    def __init__(self, *, max_blocks: int, bounded: bool) -> None:
        self.max_blocks = max_blocks
        self.stored_blocks = 0
        self.nodes = 0
        self._bounded = bounded
        self._tree = RadixTree(Node, item_bytes=BLOCK_HASH_BYTES)
        self._residencies: dict[int, Residency] = {}
        self._shares = ClientShares()
        self._resident_nodes = 0
        self.tick = 0  # of the latest use
        #: Replicas whose fill, the share of a known capacity, has changed since it was last read, one bit per slot.
        self.changed = 0
        #: (a tick not after the replica's oldest, slot), one per replica.
        self._oldest: list[tuple[int, int]] = []

    @property
    def bounded(self) -> bool:
        return self._bounded

    @bounded.setter
    def bounded(self, bounded: bool) -> None:
        self._bounded = bounded
        for residency in self._residencies.values():
            self._trim_replica(residency)

    def resize(self, max_blocks: int) -> None:
        """Replace the bound on memory, and evict what exceeds it."""
        self.max_blocks = max_blocks
        for residency in self._residencies.values():
            self._trim_replica(residency)
        self._trim_total()

    def add_replica(self, slot: int, *, capacity_blocks: int | None = None) -> None:
        assert slot not in self._residencies, f"slot {slot} is taken"
        self._residencies[slot] = Residency(slot, capacity_blocks)
        heappush(self._oldest, (0, slot))

    def set_capacity(self, slot: int, capacity_blocks: int | None) -> None:
        residency = self._residencies[slot]
        residency.capacity = capacity_blocks
        self.changed |= residency.bit
        self._trim_replica(residency)

    def remove_replica(self, slot: int) -> None:
        """Remove the replica and its blocks."""
        self.flush(slot)
        self.changed &= ~self._residencies[slot].bit
        del self._residencies[slot]
        self._list_oldest()

    def flush(self, slot: int | None = None) -> None:
        """Remove the blocks of one replica or of all."""
        for residency in self._residencies.values() if slot is None else (self._residencies[slot],):
            self._evict(residency, 0)

    def flush_some(self, slot: int, *, blocks: int) -> int:
        """Remove about `blocks` blocks of a replica, the oldest first; return how many."""
        residency = self._residencies[slot]
        before = residency.blocks
        self._evict(residency, max(0, before - blocks))
        return before - residency.blocks

    def resident_blocks(self, slot: int) -> int:
        return self._residencies[slot].blocks

    def fill(self, slot: int, *, blocks: int = 0) -> float:
        """Return the share of a replica's capacity that its blocks take, or `blocks` if these are more; 0 if that is
        unknown.
        """
        residency = self._residencies[slot]
        if not residency.capacity:
            return 0.0
        fill = max(residency.blocks, blocks) / residency.capacity
        return fill if fill < 1.0 else 1.0

    def match(self, blocks: bytes, n_slots: int, *, block_tokens: float = 1.0) -> NDArray[np.float64]:
        """Return the leading blocks estimated on each of the first `n_slots` slots, in tokens where a block has
        `block_tokens`. The order of use stays.
        """
        return self.match_runs(blocks, n_slots, block_tokens=block_tokens)[0]

    def match_runs(
        self, blocks: bytes, n_slots: int, *, block_tokens: float = 1.0
    ) -> tuple[NDArray[np.float64], SharedRuns | None]:
        """Return the same, and what copies of the matched runs are worth to other prompts; `None` if nothing."""
        matched = np.zeros(n_slots)
        path, depth = self._tree.match_path(blocks)
        all_slots = (1 << n_slots) - 1
        deeper = others = own_child = 0
        having, copies = 0, 1
        worth = 0.0
        depths: list[float] = []
        worths: list[float] = []
        for node in reversed(path):
            if node.residents != having:
                having = node.residents
                copies = having.bit_count() + 1
                residents = having & all_slots
                if residents != deeper:
                    set_bits(matched, residents ^ deeper, depth * block_tokens)
                    deeper = residents
            # The prompt parts from another one within the last run, or behind it. Else one of the children is its own.
            here = len(node.children) - own_child if node.end <= depth else 1
            own_child = 1
            start = 0 if node.parent is None else node.parent.end
            if here > others:
                others = here
            if others:
                if not worth:
                    depths.append(depth * block_tokens)
                    worths.append(0.0)
                worth += (depth - start) * block_tokens * others / (others + copies)
                depths.append(start * block_tokens)
                worths.append(worth)
            depth = start
        return matched, SharedRuns(depths, worths) if worth else None

    def insert(self, blocks: bytes, slot: int, client: str | None = None) -> ConfirmedPrefix:
        """Add `blocks` of a request of `client` to `slot`, unconfirmed and used last.

        Return the prefix that was confirmed there before; none unless `bounded`, where alone it can be corrected.
        """
        residency = self._residencies[slot]
        path = self._path_within(blocks, residency, client)
        confirmed = residency.confirmed_prefix(path) if self._bounded else NO_PREFIX
        self._add(path, residency, client, confirmed=False)
        return confirmed

    def confirm(self, blocks: bytes, slot: int, client: str | None = None) -> None:
        """Add `blocks` of a request of `client` to `slot`, confirmed and used last."""
        residency = self._residencies[slot]
        bit = residency.bit
        path = self._path_within(blocks, residency, client)
        self._add(path, residency, client, confirmed=True)
        for node in reversed(path):
            if node.confirmed & bit:
                break
            node.confirmed = node.confirmed | bit if node.confirmed else bit

    def retract(self, blocks: bytes, slot: int) -> None:
        """Remove the unconfirmed part of `blocks` with all below it; the rest counts as used."""
        residency = self._residencies[slot]
        last: Node | None = None
        for node in self._tree.match_path(blocks)[0]:
            if not node.residents & residency.bit:
                return
            if not node.confirmed & residency.bit:
                for dropped in residency.remove_below(node):
                    self._dropped(dropped, residency)
                if last is not None:
                    self.tick += 2
                    residency.touch(last, self.tick)
                return
            last = node

    def evict_older(self, slot: int, *, before: int) -> None:
        """Remove blocks last used before tick `before`, leaves first: the engine had evicted one of that age.

        Stop at an unconfirmed block: it has not been prefilled yet, so it cannot have been evicted.
        """
        residency = self._residencies[slot]
        while (oldest := residency.oldest_tick()) is not None and oldest < before:
            if not next(iter(residency.recent)).confirmed & residency.bit:
                return
            self._dropped(residency.evict(oldest), residency)

    def check(self) -> None:
        """Assert every invariant; visits the whole tree."""
        stored = nodes = 0
        below: dict[int, dict[Node, int]] = {slot: {} for slot in self._residencies}
        nodes_by_slot: dict[int, list[Node]] = {slot: [] for slot in self._residencies}
        for node in self._tree.descendants():
            stored += len(node.edge) // BLOCK_HASH_BYTES
            nodes += 1
            parent = node.parent
            assert parent is not None
            assert node.residents, "every node has a resident"
            assert not node.confirmed & ~node.residents, "only a resident is confirmed"
            if parent is not self._tree.root:
                assert not node.residents & ~parent.residents, "residency is closed under prefixes"
                assert not node.confirmed & ~parent.confirmed, "confirmation is closed under prefixes"
            for slot in slots_of(node.residents):
                nodes_by_slot[slot].append(node)
                below[slot][parent] = below[slot].get(parent, 0) + 1
        assert (stored, nodes) == (self.stored_blocks, self.nodes)
        self._shares.check(self._tree.descendants())
        assert max(stored, self._resident_nodes) <= self.max_blocks
        assert self._resident_nodes == sum(map(len, nodes_by_slot.values()))
        assert sorted(slot for _, slot in self._oldest) == sorted(self._residencies)
        for slot, residency in self._residencies.items():
            below[slot].pop(self._tree.root, None)
            residency.check(nodes_by_slot[slot], below[slot])
            assert residency.blocks <= self._max_blocks(residency)

    # -- helpers

    def _path_within(self, blocks: bytes, residency: Residency, client: str | None) -> list[Node]:
        """Return the nodes that spell `blocks`, cut to the replica's capacity: the engine has no room for more."""
        most, capacity = self.max_blocks, residency.capacity
        if capacity is not None and capacity < most:
            most = capacity if capacity > 0 else 0
        blocks = blocks[: most * BLOCK_HASH_BYTES]
        return self._path_to(blocks, client) if blocks else []

    def _add(self, path: list[Node], residency: Residency, client: str | None, *, confirmed: bool) -> None:
        """Add the path to the replica, used now."""
        if not path:
            return
        added = not path[-1].residents & residency.bit
        for node in reversed(path) if added else ():
            if node.residents & residency.bit:
                break
            residency.add(node)
            self._resident_nodes += 1
            if node.owner is not None:
                self._shares.count_pairs(node, 1)
        self.tick += 2
        last = path[-1]
        residency.touch(last, self.tick + confirmed)
        if last.owner is not None:
            self._shares.use(last)
        if added:
            if residency.capacity is not None:
                self.changed |= residency.bit
            self._trim_replica(residency)
        if self.stored_blocks > self.max_blocks or self._resident_nodes > self.max_blocks:
            self._trim_total(client)

    def _path_to(self, blocks: bytes, client: str | None) -> list[Node]:
        """Return the nodes that spell `blocks`; make missing ones."""
        path, matched = self._tree.match_path(blocks)
        if path and matched < path[-1].end:
            path[-1] = self._split(path[-1], matched)
        rest = blocks[matched * BLOCK_HASH_BYTES :]
        if rest:
            path.append(self._tree.append(path[-1] if path else self._tree.root, rest))
            if client is not None:
                self._shares.store(path[-1], client)
            self.nodes += 1
            self.stored_blocks += len(rest) // BLOCK_HASH_BYTES
        return path

    def _split(self, node: Node, at: int) -> Node:
        upper = self._tree.split(node, at)
        self.nodes += 1
        for slot in slots_of(upper.residents):
            self._residencies[slot].split(upper)
        self._resident_nodes += upper.residents.bit_count()
        self._shares.count_pairs(upper, upper.residents.bit_count())
        return upper

    def _dropped(self, node: Node, residency: Residency) -> None:
        """Count a node that a replica dropped, and remove it without residents."""
        if residency.capacity is not None:
            self.changed |= residency.bit
        self._resident_nodes -= 1
        self._shares.count_pairs(node, -1)
        if not node.residents:
            self._tree.remove(node)
            self._shares.remove(node)
            self.nodes -= 1
            self.stored_blocks -= len(node.edge) // BLOCK_HASH_BYTES

    def _max_blocks(self, residency: Residency) -> int:
        """Return the replica's bound."""
        if not self._bounded or residency.capacity is None:
            return self.max_blocks
        return max(0, min(residency.capacity, self.max_blocks))

    def _trim_replica(self, residency: Residency) -> None:
        limit = self._max_blocks(residency)
        if residency.blocks > limit:
            self._evict(residency, limit)

    def _evict(self, residency: Residency, limit: int) -> None:
        """Evict the replica's least recently used blocks until at most `limit` are left."""
        while residency.blocks > limit:
            oldest = residency.oldest_tick()
            assert oldest is not None
            self._dropped(residency.evict(oldest), residency)

    def _trim_total(self, client: str | None = None) -> None:
        """Evict what exceeds the bound on memory: blocks of the `client` that adds, where it is beyond its share."""
        while self.stored_blocks > self.max_blocks or self._resident_nodes > self.max_blocks:
            node = self._shares.oldest_beyond(client, CLIENT_SHARE * self.max_blocks)
            if node is None:
                self._evict_oldest_of_all()
                continue
            for slot in slots_of(node.residents):
                self.tick += 2
                self._residencies[slot].evict_early(node, self.tick)
                self._dropped(node, self._residencies[slot])

    def _evict_oldest_of_all(self) -> None:
        bound, slot = self._oldest[0]
        residency = self._residencies[slot]
        oldest = residency.oldest_tick()
        if oldest == bound:
            self._dropped(residency.evict(oldest), residency)
        else:
            heapreplace(self._oldest, (self.tick + 1 if oldest is None else oldest, slot))

    def _list_oldest(self) -> None:
        self._oldest = [(0, slot) for slot in self._residencies]
        heapify(self._oldest)


# Where knowledge of a replica's cache comes from.


class Origin(IntEnum):
    """A source, the more trusted the greater."""

    #: Another router.
    REMOTE = 0
    #: A report of an engine.
    PUSH = 1
    #: An answer through this router.
    LOCAL = 2


# Answers that an engine caches behind their prompts, so that the next turn of a conversation finds them too.
#
# Owns the lengths of answers by the last full block of their prompt, and the share of them that each replica finds.
# The index knows prompts alone: an answer's text is not hashed, and a next turn that repeats it is longer by it.
#
# Theory of operation. A prompt whose longest match ends in the last full block of an earlier prompt goes on with that
# prompt's answer if a message begins where it ended, and is about as long as the answer. A prompt without known
# messages is not compared: others may have a shared beginning in common with it. Not every engine caches what it
# generates, and one finds whole blocks alone. So the tokens behind the match count less those that the last reports of
# that replica missed, in the median, or by the share found where that is small, and not at all before `LEAST_REPORTS`.


#: Prompts with a remembered answer: the open conversations of a large fleet, some 500 bytes each.
MAX_PROMPTS = 32_768
#: Reports that a share is the median of, and from which on there is one.
WINDOW = 16
LEAST_REPORTS = 3
#: Share from which on a replica finds answers but for their last block.
MOSTLY = 0.5
#: Fewer tokens behind a match say nothing: an engine finds whole blocks.
LEAST_TOKENS = 32.0
#: A length that is estimated from bytes differs by so much from one request to the next.
SLACK_SHARE = 0.02
#: A message is an earlier answer if it has at least this share of its tokens, and at most the inverse. Its template
#: adds some, and its text is counted in bytes.
ALIKE = 0.5


@record
class GivenAnswer:
    """What a replica was left with: tokens of a prompt, and of its answer."""

    prompt_tokens: int
    output_tokens: int


class Behind(NamedTuple):
    """Of one replica: the match of a prompt, and tokens behind it that may be cached as an answer."""

    matched_tokens: float
    answer_tokens: float


class _FoundPart(NamedTuple):
    """The share of an answer that an engine found, and the tokens of it that it did not."""

    share: float
    missed_tokens: float


class Answers:
    """Answers of all replicas.

    Example
    -------
    >>> import numpy as np
    >>> first, next_turn = (
    ...     RouteRequest("", 0.0, prompt_tokens=ends[-1], blocks=b, block_tokens=64.0, prefix_hash=0, boundaries=ends)
    ...     for ends, b in (((70,), b"block--1"), ((70, 200, 300), b"block--1block--2"))
    ... )
    >>> answers = Answers()
    >>> answers.add(0, first, 130)
    >>> behind = answers.behind(next_turn, np.array([64.0]), 64.0)
    >>> behind
    {0: Behind(matched_tokens=64.0, answer_tokens=136.0)}
    >>> for _ in range(3):
    ...     answers.on_report(0, behind[0], found_tokens=200.0)
    >>> answers.found_tokens(0, behind[0])
    136.0
    """

    def __init__(self) -> None:
        #: By the hash of a prompt's last full block, the latest last, and by slot.
        self._prompts = Lru[bytes, dict[int, GivenAnswer]](MAX_PROMPTS)
        self._reports: dict[int, deque[_FoundPart]] = {}
        self._usual: dict[int, _FoundPart] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def remove_replica(self, slot: int) -> None:
        """Forget a replica that has left."""
        self._reports.pop(slot, None)
        self._usual.pop(slot, None)
        for key, by_slot in list(self._prompts.items()):
            by_slot.pop(slot, None)
            if not by_slot:
                del self._prompts[key]

    def add(self, slot: int, request: RouteRequest, output_tokens: int) -> None:
        """Record a whole answer; that of a prompt without known messages is not found again."""
        key = request.blocks[-BLOCK_HASH_BYTES:]
        if key and request.boundaries:
            self.add_by_hash(slot, key, GivenAnswer(request.prompt_tokens, output_tokens))

    def add_by_hash(self, slot: int, key: bytes, answer: GivenAnswer) -> None:
        """Record a whole answer by the hash of its prompt's last full block."""
        if answer.output_tokens < 1:
            return
        by_slot = self._prompts.use(key)
        if by_slot is None:
            self._prompts.put(key, {slot: answer})
        else:
            by_slot[slot] = answer

    def behind(self, request: RouteRequest, matched: Floats, most: float) -> dict[int, Behind] | None:
        """Return what may be cached behind the longest match, by slot; `None` where nothing is.

        `matched` are the tokens of each slot by the index, `most` the most of them, above 0.
        """
        end = round(most / request.block_tokens) * BLOCK_HASH_BYTES
        by_slot = self._prompts.get(request.blocks[end - BLOCK_HASH_BYTES : end])
        if by_slot is None or most >= request.prompt_tokens:
            return None
        behind = {}
        tokens, ended = 0.0, None
        for slot, answer in by_slot.items():
            if slot < len(matched) and matched.item(slot) == most:
                if answer != ended:  # the replicas that have answered a prompt often have done so alike
                    tokens, ended = _end_of(answer, request) - most, answer
                if tokens >= LEAST_TOKENS:
                    behind[slot] = Behind(most, tokens)
        return behind or None

    def found_tokens(self, slot: int, behind: Behind) -> float:
        """Return how many of the tokens behind a match the replica is likely to find."""
        usual = self._usual.get(slot)
        if usual is None:
            return 0.0
        tokens = behind.answer_tokens
        return max(0.0, tokens - usual.missed_tokens if usual.share >= MOSTLY else tokens * usual.share)

    def on_report(self, slot: int, behind: Behind, *, found_tokens: float) -> None:
        """Apply a report of all cached tokens; one below the match says nothing of the answer."""
        tokens = behind.answer_tokens
        cached = found_tokens - behind.matched_tokens
        if cached < 0.0:
            return
        reports = self._reports.get(slot)
        if reports is None:
            reports = self._reports[slot] = deque(maxlen=WINDOW)
        reports.append(_FoundPart(min(cached / tokens, 1.0), max(tokens - cached, 0.0)))
        if len(reports) >= LEAST_REPORTS:
            shares, missed = zip(*reports, strict=True)
            self._usual[slot] = _FoundPart(median_low(shares), median_low(missed))


def _end_of(answer: GivenAnswer, request: RouteRequest) -> float:
    """Return the prompt tokens up to the end of the earlier answer; 0 if the request does not go on with it."""
    prompt, output = answer.prompt_tokens, answer.output_tokens
    ends = request.boundaries
    index = bisect_left(ends, prompt)
    if index == len(ends) or (index and prompt - ends[index - 1] <= ends[index] - prompt):
        index -= 1
    slack = request.block_tokens + SLACK_SHARE * prompt
    if not 0 <= index < len(ends) - 1 or abs(ends[index] - prompt) > slack:
        return 0.0
    length = ends[index + 1] - ends[index]
    if not ALIKE * output <= length <= output / ALIKE + slack:
        return 0.0
    return ends[index] + min(length, output)
