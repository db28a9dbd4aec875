"""Requests that wait at the proxy, bounded, in the order in which they are to be offered a replica.

Owns the order and the bound. Who may go is `front_door`.

Theory of operation. The order is by priority, then fair between clients, then shortest first. Fair means start-time
fair queueing over predicted prefill seconds: each client has a virtual time, which is how much of the engines' time it
has been given while others waited. Its requests are tagged, shortest first, from that time onwards, and the least tag
goes first. So a client with a thousand waiting requests delays one with a single request by one of its own at most, and
a lone client has its shortest request served first. A client that comes back starts where the others are: nobody saves
up. Strict priority can starve who is low; a deadline bounds that, and so does the room.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge
from math import inf

from gorgo.core.dispatch.in_flight import RequestState

_Rank = tuple[float, int]
#: Clients whose turn is remembered while nothing of theirs waits.
MAX_CLIENTS = 4096


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One request that waits.

    `prefill_s` is the prediction at its arrival, which orders and charges it. `wanted` is the replica that was cheapest
    when it was last looked at, at `evaluated_s`. `drop_s` is when it is to be looked at because its time may be over;
    infinite if it may wait for ever.
    """

    state: RequestState
    prefill_s: float
    enqueued_s: float
    number: int = 0
    preferred: str | None = None
    evaluated_s: float = -inf
    shed_at_s: float = inf
    #: Since when nobody could have taken it, open or not.
    no_replica_since_s: float | None = None

    @property
    def request_id(self) -> str:
        return self.state.request.request_id

    @property
    def _rank(self) -> _Rank:
        return self.prefill_s, self.number


@dataclass(slots=True)
class _ClientQueue:
    """What one client has waiting at one priority, shortest first."""

    items: list[tuple[float, int, QueuedRequest]] = field(default_factory=list)


class FairQueue:
    """Requests that wait.

    Example
    -------
    >>> from gorgo.core.messages.request import RouteRequest
    >>> def state(name, client):
    ...     return RequestState(RouteRequest(name, 0.0, 1, b"", 64.0, 0, client=client))
    >>> queue = FairQueue()
    >>> for name, client, prefill_s in (("a1", "a", 1.0), ("a2", "a", 0.5), ("b1", "b", 2.0), ("a3", "a", 9.0)):
    ...     queue.add(QueuedRequest(state(name, client), prefill_s, enqueued_s=0.0))
    >>> [queued.request_id for queued in queue]  # a's shortest, then b's, because a would have had its turn
    ['a2', 'b1', 'a1', 'a3']
    """

    def __init__(self) -> None:
        self._requests: dict[str, QueuedRequest] = {}
        self._clients: dict[tuple[int, str | None], _ClientQueue] = {}
        self._virtual_s: dict[str | None, float] = {}
        self._now_s = 0.0
        self._numbers = 0
        self._prefill_s = 0.0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[QueuedRequest]:
        """In order. Whoever changes the room while it walks takes the list first."""
        for priority in sorted({priority for priority, _ in self._clients}, reverse=True):
            lines = [(client, line) for (of, client), line in self._clients.items() if of == priority]
            if len(lines) == 1:
                yield from (held for _, _, held in lines[0][1].items)
            else:
                yield from (held for _, _, held in merge(*(self._tag(client, line) for client, line in lines)))

    @property
    def prefill_s(self) -> float:
        """Predicted prefill of all who wait."""
        return max(0.0, self._prefill_s)

    def get(self, request_id: str) -> QueuedRequest | None:
        return self._requests.get(request_id)

    def add(self, held: QueuedRequest) -> None:
        request = held.state.request
        assert held.request_id not in self._requests, "a request waits once"
        self._numbers += 1
        held.number = self._numbers
        self._requests[held.request_id] = held
        if not any(client == request.client for _, client in self._clients):
            # Nobody saves up: who has nothing waiting starts where the others are.
            self._virtual_s[request.client] = max(self._now_s, self._virtual_s.get(request.client, 0.0))
        line = self._clients.setdefault((request.priority, request.client), _ClientQueue())
        insort(line.items, (held.prefill_s, held.number, held))
        self._prefill_s += held.prefill_s

    def pop(self, held: QueuedRequest) -> None:
        """It goes to a replica: its client is charged."""
        client = held.state.request.client
        start_s = self._virtual_s[client]
        self._now_s = max(self._now_s, start_s)
        self._virtual_s[client] = start_s + held.prefill_s
        self.remove(held)

    def remove(self, held: QueuedRequest) -> None:
        """It waits no longer."""
        request = held.state.request
        key = request.priority, request.client
        items = self._clients[key].items
        del items[bisect_left(items, held._rank)]  # a shorter tuple sorts before the item itself
        del self._requests[held.request_id]
        if not items:
            del self._clients[key]
        self._prefill_s -= held.prefill_s
        if request.client not in {client for _, client in self._clients} and (
            self._virtual_s[request.client] <= self._now_s or len(self._virtual_s) > MAX_CLIENTS
        ):
            del self._virtual_s[request.client]
        if not self._requests:
            # Everybody is equal again, and sums of floats drift.
            self._virtual_s.clear()
            self._now_s = self._prefill_s = 0.0

    def check(self) -> None:
        """Assert every invariant; for tests."""
        items = [item for line in self._clients.values() for item in line.items]
        assert sorted(id(held) for _, _, held in items) == sorted(id(held) for held in self._requests.values())
        assert all(line.items == sorted(line.items, key=lambda item: item[:2]) for line in self._clients.values())
        assert abs(sum(item[0] for item in items) - self._prefill_s) < 1e-6
        assert {client for _, client in self._clients} <= set(self._virtual_s)

    def _tag(self, client: str | None, line: _ClientQueue) -> Iterator[tuple[float, int, QueuedRequest]]:
        tag_s = self._virtual_s[client]
        for prefill_s, number, held in line.items:
            yield tag_s, number, held
            tag_s += prefill_s
