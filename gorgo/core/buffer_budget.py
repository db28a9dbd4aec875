"""Bytes that the proxy buffers, in sum and by client: what is granted, and which upload makes way. Pure.

Theory of operation. A client may buffer as much as is left free afterwards: one client gets half of the limit, two get
a third each, and some is always left for another one (the dynamic threshold of shared-memory switches). A reservation
that does not fit evicts slow uploads, the slowest first. If all of them do not suffice, it is refused, and none is
evicted.

References
----------
Choudhury, Hahne: Dynamic Queue Length Thresholds for Shared-Memory Packet Switches, IEEE/ACM ToN 6(2), 1998.
"""

from __future__ import annotations

from collections.abc import Callable

#: Age from which an upload can be evicted, and length of the window of its rate: several round trips of a slow path, s.
GRACE_S = 2.0
#: Uploads below this rate can be evicted: 2 Mbit/s, half of what the largest body needs to arrive in time.
SLOW_BYTES_PER_S = 256 * 1024


class Buffer:
    """The reservation of one request, or of one fetch.

    `size` is reserved; `on_evict` is set while its upload, or its unread answer, can be evicted.
    """

    __slots__ = ("_before", "_received", "_since_s", "_window_s", "client", "evicted", "on_evict", "size")

    def __init__(self, client: str, now: float) -> None:
        self.client = client
        self.size = 0
        self.evicted = False
        self.on_evict: Callable[[], None] | None = None
        self._since_s = self._window_s = now
        self._received = self._before = 0

    def make_evictable(self, on_evict: Callable[[], None], *, now: float) -> None:
        """Let the reservation be evicted by `on_evict` from the grace on, unless bytes are `received`."""
        self.on_evict = on_evict
        self._since_s = self._window_s = now
        self._received = self._before = 0

    def received(self, count: int, *, now: float) -> None:
        """Count received bytes in the window of the rate."""
        passed_s = now - self._window_s
        if passed_s >= GRACE_S:
            self._before = self._received if passed_s < 2 * GRACE_S else 0
            self._received, self._window_s = 0, now
        self._received += count

    def rate(self, now: float) -> float:
        """Return the bytes per second of the last one or two windows."""
        passed_s = now - self._window_s
        if passed_s >= 2 * GRACE_S:
            return self._received / passed_s
        return (self._received + self._before) / (GRACE_S + passed_s)

    def is_slow(self, now: float) -> bool:
        """Return whether the upload may be evicted."""
        return self.on_evict is not None and now - self._since_s >= GRACE_S and self.rate(now) < SLOW_BYTES_PER_S


class BufferBudget:
    """All reservations of one proxy.

    Parameters
    ----------
    limit_bytes:
        Of all reservations; `size_limit` is that of a single one.

    Example
    -------
    >>> budget = BufferBudget(100)
    >>> a, b = budget.new_buffer("a", now=0.0), budget.new_buffer("b", now=0.0)
    >>> budget.reserve(a, 50, now=0.0), budget.reserve(a, 51, now=0.0), budget.reserve(b, 25, now=0.0)
    (True, False, True)
    >>> budget.used_bytes, budget.close(a), budget.close(b), budget.used_bytes
    (75, None, None, 0)
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._by_client: dict[str, int] = {}
        self._buffers: dict[Buffer, None] = {}

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def size_limit(self) -> int:
        """The largest reservation that an empty proxy grants."""
        return self.limit_bytes // 2

    def new_buffer(self, client: str, *, now: float) -> Buffer:
        """Return a reservation of nothing."""
        buffer = Buffer(client, now)
        self._buffers[buffer] = None
        return buffer

    def close(self, buffer: Buffer) -> None:
        """Release a reservation. Idempotent."""
        if self._buffers.pop(buffer, buffer) is None:
            self._resize(buffer, 0)

    def reserve(self, buffer: Buffer, size: int, *, now: float) -> bool:
        """Grow a reservation to `size` in all; evict slow uploads where this needs it. Return False if refused."""
        more = size - buffer.size
        if buffer not in self._buffers:
            return False
        if more > 0:
            lacking = self.used_bytes + self._by_client.get(buffer.client, 0) + 2 * more - self.limit_bytes
            if lacking > 0:
                for other in self._evictable(lacking, buffer, now):
                    self._evict(other)
                    lacking = 0
            if lacking > 0:
                return False
            self._resize(buffer, size)
        return True

    def shrink(self, buffer: Buffer, size: int) -> None:
        """Reduce a reservation to `size`."""
        if buffer in self._buffers and size < buffer.size:
            self._resize(buffer, size)

    def client_bytes(self, client: str) -> int:
        """Return the bytes of a client's reservations."""
        return self._by_client.get(client, 0)

    def check(self) -> None:
        """Assert that the sums are those of the open reservations."""
        by_client: dict[str, int] = {}
        for buffer in self._buffers:
            if buffer.size:
                by_client[buffer.client] = by_client.get(buffer.client, 0) + buffer.size
        assert by_client == self._by_client, "buffered bytes by client"
        assert sum(by_client.values()) == self.used_bytes, "buffered bytes in sum"

    def _evictable(self, lacking: int, buffer: Buffer, now: float) -> list[Buffer]:
        """Return the slowest uploads whose end frees `lacking` for `buffer`; none if all do not."""
        slow = [other for other in self._buffers if other is not buffer and other.size and other.is_slow(now)]
        slow.sort(key=lambda other: other.rate(now))
        chosen: list[Buffer] = []
        for other in slow:
            # The client's own bytes count in the sum and in its share.
            lacking -= other.size * (2 if other.client == buffer.client else 1)
            chosen.append(other)
            if lacking <= 0:
                return chosen
        return []

    def _evict(self, buffer: Buffer) -> None:
        on_evict, buffer.on_evict = buffer.on_evict, None
        buffer.evicted = True
        self.close(buffer)
        if on_evict is not None:
            on_evict()

    def _resize(self, buffer: Buffer, size: int) -> None:
        more = size - buffer.size
        buffer.size = size
        self.used_bytes += more
        left = self._by_client.get(buffer.client, 0) + more
        if left:
            self._by_client[buffer.client] = left
        else:
            self._by_client.pop(buffer.client, None)
