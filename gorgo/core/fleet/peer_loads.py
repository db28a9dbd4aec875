"""Load that other routers report, beside the Router's own: columns per slot, added up for decisions.

Owns the cells of each peer and their sums. The fleet's own columns stay exact; `core.peers` fills these.

Theory of operation. Every report replaces the cells of its router; a router that was silent for `FADE_S` counts
nothing. Cells are whole numbers, seconds in microseconds, so that sums by addition and subtraction are exact. They are
never negative: a report makes no replica look less loaded than by the own counts.

An engine serves all routers in one line. So the prefill that waits there for others moves the end of the own queue,
and the time at which the own head is late. While the own queue is not empty, its clock alone advances; else theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from math import inf
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gorgo.core.fleet.replica import Columns
from gorgo.core.numeric import FEW, Floats

#: Silence after which a router's load counts no longer, s: twenty reports, or one restart of a store's client.
FADE_S = 2.0
#: Most routers counted; others are ignored.
MAX_PEERS = 1000
#: Cells of a slot, in this order.
CELLS = (
    "requests",
    "prompt_tokens",
    "waiting_requests",
    "waiting_tokens",
    "uncached_tokens",
    "prefill_us",
    "decoded_ms",
)
_PLACES = {name: index for index, name in enumerate(CELLS)}
#: Steps of the offset by which a router breaks near ties, below one request: multiples of 1 / 64 add up exactly. And
#: the prompt tokens that stand for that request: a short prompt.
_SALT_STEPS, _SALT_STEP = 32, 1.0 / 64.0
_SALT_TOKENS = 256.0


_CELLS_OF_A_SLOT = np.arange(len(CELLS), dtype=np.intp)


@dataclass(slots=True)
class _Peer:
    slots: NDArray[np.intp]
    #: Its cells, slot after slot, and where they are among the sums.
    cells: Floats
    places: NDArray[np.intp]
    #: Where requests of it wait for a first token.
    waiting: NDArray[np.intp]
    heard_s: float

    @classmethod
    def of(cls, slots: NDArray[np.intp], cells: Floats, before: _Peer | None, *, now: float) -> _Peer:
        """Return the cells of a report; `before` is what they replace."""
        if before is not None and before.slots.tobytes() == slots.tobytes():
            places = before.places
        else:
            places = (slots[:, None] * len(CELLS) + _CELLS_OF_A_SLOT).ravel()
        cells = cells.ravel()
        waiting = slots[cells[_PLACES["waiting_requests"] :: len(CELLS)] > 0.0]
        return cls(slots, cells, places, waiting, now)


@dataclass(slots=True)
class PeerLoads:
    """Cells of all peers.

    Parameters
    ----------
    name:
        The own router's: the source of its tie-breaks.
    columns:
        The fleet's own.
    """

    name: str
    columns: Columns
    _peers: dict[str, _Peer] = field(default_factory=dict)
    #: Cells of all peers, slot after slot: one dimension takes a fifth of the time of two.
    _sums: Floats = field(default_factory=lambda: np.zeros(0))
    #: Last report about each slot, and the own router's fraction of a request there.
    received_s: Floats = field(default_factory=lambda: np.zeros(0))
    #: Until when requests of others waited there for a first token; those of the last report still do.
    waited_s: Floats = field(default_factory=lambda: np.zeros(0))
    salt: Floats = field(default_factory=lambda: np.zeros(0))
    _fades_s: float = inf
    #: What is added to a column until the next report, and the columns to which nothing is added.
    _added: dict[str, Floats] = field(default_factory=dict)
    _plain: dict[str, Any] = field(default_factory=dict)

    @property
    def routers(self) -> Mapping[str, float]:
        """When each router that counts has last reported."""
        return {name: peer.heard_s for name, peer in self._peers.items()}

    def replace(self, router: str, slots: NDArray[np.intp], cells: Floats, *, now: float) -> None:
        """Replace the cells of a router, a row per slot of `slots`, which has each once; it has nothing elsewhere."""
        self.expire(now=now)
        if router not in self._peers and len(self._peers) >= MAX_PEERS:
            return
        self._fit()
        before = self._peers.get(router)
        self._peers[router] = peer = _Peer.of(slots, cells, before, now=now)
        sums, places = self._sums, slots * len(CELLS) + _PLACES["prompt_tokens"]
        tokens = sums[places]
        if before is not None:
            self.waited_s[before.waiting] = now
            sums[before.places] -= before.cells
        self.waited_s[peer.waiting] = now
        sums[peer.places] += peer.cells
        # More than before: one may have come and have its first token since.
        self.waited_s[slots[sums[places] > tokens]] = now
        self.received_s[slots] = now
        self._fades_s = min(self._fades_s, now + FADE_S)
        self._added.clear()

    def forget(self, router: str) -> None:
        """Count nothing of a router any longer."""
        self._subtract(router)
        self._peers.pop(router, None)

    def clear_slots(self, slots: list[int]) -> None:
        """Remove what is counted for replicas that have left."""
        self._fit()
        for router, peer in self._peers.items():
            stays = ~np.isin(peer.slots, slots)
            cells = peer.cells.reshape(-1, len(CELLS))[stays]
            self._peers[router] = _Peer.of(peer.slots[stays], cells, None, now=peer.heard_s)
        self._sums.reshape(-1, len(CELLS))[slots] = 0.0
        self.waited_s[slots] = -inf
        self._draw_salt()
        self._added.clear()

    def expire(self, *, now: float) -> None:
        """Drop routers that are silent."""
        if now < self._fades_s:
            return
        for router in [name for name, peer in self._peers.items() if now - peer.heard_s >= FADE_S]:
            self.forget(router)
        self._fades_s = min((peer.heard_s + FADE_S for peer in self._peers.values()), default=inf)

    def added_to_own(self, *, now: float) -> Columns:
        """Return the fleet's columns with the load of all routers; the own ones where no other counts."""
        if now >= self._fades_s:
            self.expire(now=now)
        if not self._peers:
            return self.columns
        self._fit()
        if self._plain.get("salt") is not self.columns.salt:  # there are more slots
            names = {item.name for item in fields(Columns)} - _ADDED.keys() - {"drained_at_s"}
            self._plain = {name: getattr(self.columns, name) for name in names}
        return cast(Columns, _AllRouters(self, now))

    def added(self, name: str) -> Floats:
        """Return what is added to a column, per slot, until the next report."""
        column = self._added.get(name)
        if column is None:
            column = self._added[name] = _ADDED[name](self)
        return column

    def cells(self, name: str) -> Floats:
        """Return the sums of a cell over all peers, per slot."""
        column: Floats = self._sums[_PLACES[name] :: len(CELLS)]
        return column

    def requests(self, slot: int) -> float:
        """Return the requests that others have in flight there, as of the last decision or report."""
        return self._cell("requests", slot)

    def prefill_s(self, slot: int) -> float:
        """Return the prefill that waits there for others, as of the last decision or report."""
        return self._cell("prefill_us", slot) / 1e6

    def left_s(self, slot: int, *, own: bool, now: float) -> float:
        """Return the prefill left there for others now; `own`: the engine has been at the own queue since."""
        left_s = self.prefill_s(slot)
        return left_s if own or not left_s else max(0.0, left_s - (now - self.received_s.item(slot)))

    def waited_until_s(self, slot: int, *, now: float) -> float:
        """Return until when a request of another router waited there for its first token; `now` while one does."""
        if self._cell("waiting_requests", slot):
            return now
        return self.waited_s.item(slot) if slot < len(self.waited_s) else -inf

    def check(self) -> None:
        """Assert that the sums are those of the peers."""
        sums = np.zeros_like(self._sums)
        for peer in self._peers.values():
            assert peer.cells.min(initial=0.0) >= 0.0, "a peer only adds"
            sums[peer.places] += peer.cells
        assert np.array_equal(sums, self._sums)
        assert self._fades_s <= min((peer.heard_s + FADE_S for peer in self._peers.values()), default=inf)

    def _cell(self, name: str, slot: int) -> float:
        index = slot * len(CELLS) + _PLACES[name]
        return self._sums.item(index) if index < len(self._sums) else 0.0

    def _subtract(self, router: str) -> None:
        peer = self._peers.get(router)
        if peer is not None:
            self._sums[peer.places] -= peer.cells
            self._added.clear()

    def _fit(self) -> None:
        """Cover the slots of the fleet."""
        missing = len(self.columns.salt) - len(self.received_s)
        if missing:
            self._sums = np.pad(self._sums, (0, missing * len(CELLS)))
            self.received_s = np.pad(self.received_s, (0, missing))
            self.waited_s = np.pad(self.waited_s, (0, missing), constant_values=-inf)
            self._draw_salt()
            self._added.clear()

    def _draw_salt(self) -> None:
        name_hash = np.uint64(int.from_bytes(blake2b(self.name.encode(), digest_size=8).digest(), "little"))
        mixed = (self.columns.salt ^ name_hash) * np.uint64(0x9E37_79B9_7F4A_7C15)
        self.salt = ((mixed >> np.uint64(32)) % np.uint64(_SALT_STEPS)).astype(np.float64) * _SALT_STEP


class _AllRouters:
    """The fleet's columns, where those of a load have the others' added; each on first use."""

    def __init__(self, peers: PeerLoads, now: float) -> None:
        self.__dict__.update(peers._plain)
        self._peers, self._now = peers, now

    def __getattr__(self, name: str) -> Floats:
        peers = self._peers
        column: Floats = getattr(peers.columns, name)
        if name == "drained_at_s":
            column = _with_work_of_others(column, peers, self._now)
        else:
            column = column + peers.added(name)
        self.__dict__[name] = column
        return column


def _with_work_of_others(own_end_s: Floats, peers: PeerLoads, now: float) -> Floats:
    """Move the end of the own queue by the others' prefill, less what was done of it while the engine was at it."""
    columns, waiting_s = peers.columns, peers.added("waiting_prefill_s")
    if len(own_end_s) <= FEW:
        # numpy takes as long for one row as for fifty.
        waiting, shared = waiting_s.tolist(), columns.shared_s.tolist()
        if not (any(waiting) or any(shared)):
            return own_end_s
        rows = zip(
            own_end_s.tolist(),
            shared,
            columns.head_shared_s.tolist(),
            columns.head_began_s.tolist(),
            waiting,
            peers.received_s.tolist(),
            strict=True,
        )
        return np.array([_moved_end_s(now, *row) for row in rows])
    if not (np.count_nonzero(waiting_s) or np.count_nonzero(columns.shared_s)):
        return own_end_s
    at_theirs_s = columns.head_shared_s - np.clip(now - columns.head_began_s, 0.0, columns.head_shared_s)
    own_end_s = own_end_s - (columns.shared_s - columns.head_shared_s + at_theirs_s)
    done_s = np.where((at_theirs_s > 0.0) | (own_end_s <= now), now - peers.received_s, 0.0)
    left_s = np.maximum(waiting_s - done_s, 0.0)
    return np.where(left_s > 0.0, np.maximum(own_end_s, now) + left_s, own_end_s)


def _moved_end_s(
    now: float, own_s: float, shared_s: float, head_shared_s: float, began_s: float, waiting_s: float, received_s: float
) -> float:
    """Return the same of one replica, to the last bit."""
    passed_s = now - began_s
    at_theirs_s = head_shared_s - (0.0 if passed_s < 0.0 else head_shared_s if passed_s > head_shared_s else passed_s)
    own_s -= shared_s - head_shared_s + at_theirs_s
    left_s = waiting_s - (now - received_s if at_theirs_s > 0.0 or own_s <= now else 0.0)
    return (own_s if own_s > now else now) + left_s if left_s > 0.0 else own_s


def _decoding(peers: PeerLoads) -> Floats:
    return peers.cells("requests") - peers.cells("waiting_requests")


def _prefill_s(peers: PeerLoads) -> Floats:
    return peers.cells("prefill_us") / 1e6


#: By column. A fraction of a request of the own router is added too: equal replicas are different ones to different
#: routers.
_ADDED: Mapping[str, Callable[[PeerLoads], Floats]] = {
    "in_flight_requests": lambda peers: peers.cells("requests") + peers.salt,
    "in_flight_tokens": lambda peers: peers.cells("prompt_tokens") + peers.salt * _SALT_TOKENS,
    "queued_prefill_tokens": lambda peers: peers.cells("waiting_tokens").copy(),
    "uncached_prefill_tokens": lambda peers: peers.cells("uncached_tokens").copy(),
    "decoding_requests": _decoding,
    "first_tokens_s": lambda peers: _decoding(peers) * peers.received_s - peers.cells("decoded_ms") / 1e3,
    "head_due_s": _prefill_s,
    "waiting_prefill_s": _prefill_s,
}
