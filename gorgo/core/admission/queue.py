"""The fair queue: requests that wait at the proxy, in the order in which they are offered a replica.

Theory of operation. The order is by priority, then fair between clients, then shortest first. Fair means start-time
fair queueing over predicted prefill seconds: each client has a virtual time, the engine time that it was given while
others waited. Its requests are tagged from that time on, shortest first, and the least tag is served first. So a client
with a thousand queued requests delays another with one request by one of its own at most, and a lone client has its
shortest request served first. A client that returns starts at the present virtual time and saves nothing up. Strict
priority can starve low priorities; deadlines and the bound on the queue limit that.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge
from math import inf

from gorgo.core.dispatch.in_flight import RequestState

_Rank = tuple[float, int]
#: Clients whose virtual time is retained while none of their requests is queued.
MAX_CLIENTS = 4096


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One queued request.

    `prefill_s` is the prediction at its arrival: it orders the request and is charged to the client. `preferred` is the
    replica of the last evaluation, at `evaluated_s`. At `shed_at_s` the request may be infeasible; infinite without a
    deadline.
    """

    state: RequestState
    prefill_s: float
    enqueued_s: float
    number: int = 0
    preferred: str | None = None
    evaluated_s: float = -inf
    shed_at_s: float = inf
    #: Start of the time without a candidate.
    no_replica_since_s: float | None = None

    @property
    def request_id(self) -> str:
        return self.state.request.request_id

    @property
    def _rank(self) -> _Rank:
        return self.prefill_s, self.number


@dataclass(slots=True)
class _ClientQueue:
    """Queued requests of one client at one priority, shortest first."""

    items: list[tuple[float, int, QueuedRequest]] = field(default_factory=list)


class FairQueue:
    """Queued requests by priority, client and length.

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
        #: By id. Read-only elsewhere: every event asks whether it is empty, and a call of `__len__` takes its time.
        self.requests: dict[str, QueuedRequest] = {}
        self._clients: dict[tuple[int, str | None], _ClientQueue] = {}
        self._virtual_s: dict[str | None, float] = {}
        self._now_s = 0.0
        self._numbers = 0
        self._prefill_s = 0.0

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.requests

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Yield the requests in order; the queue must not change meanwhile."""
        for priority in sorted({priority for priority, _ in self._clients}, reverse=True):
            client_queues = [(client, queue) for (of, client), queue in self._clients.items() if of == priority]
            if len(client_queues) == 1:
                yield from (queued for _, _, queued in client_queues[0][1].items)
            else:
                yield from (
                    queued for _, _, queued in merge(*(self._tag(client, queue) for client, queue in client_queues))
                )

    @property
    def prefill_s(self) -> float:
        """Predicted prefill of all queued requests."""
        return max(0.0, self._prefill_s)

    def get(self, request_id: str) -> QueuedRequest | None:
        return self.requests.get(request_id)

    def add(self, queued: QueuedRequest) -> None:
        request = queued.state.request
        assert queued.request_id not in self.requests, "a request is queued once"
        self._numbers += 1
        queued.number = self._numbers
        self.requests[queued.request_id] = queued
        if not any(client == request.client for _, client in self._clients):
            # An idle client saves nothing up: it starts at the present virtual time.
            self._virtual_s[request.client] = max(self._now_s, self._virtual_s.get(request.client, 0.0))
        client_queue = self._clients.setdefault((request.priority, request.client), _ClientQueue())
        insort(client_queue.items, (queued.prefill_s, queued.number, queued))
        self._prefill_s += queued.prefill_s

    def pop(self, queued: QueuedRequest) -> None:
        """Remove a request that is dispatched, and charge its client."""
        client = queued.state.request.client
        start_s = self._virtual_s[client]
        self._now_s = max(self._now_s, start_s)
        self._virtual_s[client] = start_s + queued.prefill_s
        self.remove(queued)

    def remove(self, queued: QueuedRequest) -> None:
        """Remove a request."""
        request = queued.state.request
        key = request.priority, request.client
        items = self._clients[key].items
        del items[bisect_left(items, queued._rank)]  # a shorter tuple sorts before the item itself
        del self.requests[queued.request_id]
        if not items:
            del self._clients[key]
        self._prefill_s -= queued.prefill_s
        if request.client not in {client for _, client in self._clients} and (
            self._virtual_s[request.client] <= self._now_s or len(self._virtual_s) > MAX_CLIENTS
        ):
            del self._virtual_s[request.client]
        if not self.requests:
            # All clients are equal again, and sums of floats drift.
            self._virtual_s.clear()
            self._now_s = self._prefill_s = 0.0

    def check(self) -> None:
        """Assert every invariant; for tests."""
        items = [item for queue in self._clients.values() for item in queue.items]
        assert sorted(id(queued) for _, _, queued in items) == sorted(id(queued) for queued in self.requests.values())
        assert all(queue.items == sorted(queue.items, key=lambda item: item[:2]) for queue in self._clients.values())
        assert abs(sum(item[0] for item in items) - self._prefill_s) < 1e-6
        assert {client for _, client in self._clients} <= set(self._virtual_s)

    def _tag(self, client: str | None, client_queue: _ClientQueue) -> Iterator[tuple[float, int, QueuedRequest]]:
        tag_s = self._virtual_s[client]
        for prefill_s, number, queued in client_queue.items:
            yield tag_s, number, queued
            tag_s += prefill_s
