"""Reservations of buffered bytes by the shell: of a request from its head to its end, and of a fetch.

Owns the errors of a refused or evicted upload, and what counts. Leaves who gets how much to `core.buffer_budget`.

What counts. A body counts twice from its declaration, or as its chunks come, until the response begins: as it is
stored for retries, and as the joined or changed copy that is sent. The start of an answer counts while it is buffered,
a large fetch while it is read, and the buffers of both connections while a client does not read its answer. Buffers of
other connections do not count.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic

from gorgo.core.buffer_budget import GRACE_S, BufferBudget
from gorgo.live.http.errors import HttpError, Message
from gorgo.live.http.timeout import ResettableTimeout

#: Buffers of an answer that its client does not read, in both connections: measured 0.6 MB.
STALLED_BYTES = 640 * 1024
#: Times that a body counts.
BODY_COPIES = 2
#: Of a refused or evicted upload: by then slow ones can be evicted.
_RETRY = ((b"retry-after", b"%d" % GRACE_S),)


class RequestBuffer:
    """The buffered bytes of one request.

    Parameters
    ----------
    budget:
        Of the proxy.
    client:
        Name of its key, or its address: each has a share.
    """

    __slots__ = ("_body", "_budget", "_buffer")

    def __init__(self, budget: BufferBudget, client: str) -> None:
        self._budget = budget
        self._buffer = budget.new_buffer(client, now=monotonic())
        self._body = 0

    @property
    def evicted(self) -> bool:
        """Whether the upload was ended for the sake of others."""
        return self._buffer.evicted

    @property
    def body_limit(self) -> int:
        """The largest body that can ever be buffered."""
        return self._budget.size_limit // BODY_COPIES

    def begin_upload(self, on_evict: Callable[[], None]) -> None:
        """Let the upload be evicted, by `on_evict`, until `end_upload`. It began with this object."""
        self._buffer.on_evict = on_evict

    def end_upload(self) -> None:
        self._buffer.on_evict = None

    def reserve_body(self, size: int) -> None:
        """Reserve a body of `size` bytes in all. Raises `HttpError` (503) if refused."""
        if size > self._body:
            if not self._budget.reserve(self._buffer, size * BODY_COPIES, now=monotonic()):
                message = "the proxy has no memory for this body now, or this client's share of it is used up"
                raise HttpError(503, "buffers_full", message, headers=_RETRY)
            self._body = size

    def release_body(self) -> None:
        """Release the body, which no attempt needs any more."""
        self._budget.shrink(self._buffer, self._buffer.size - self._body * BODY_COPIES)
        self._body = 0

    def received(self, count: int, size: int) -> None:
        """Count received bytes of the body, `size` with those before, and reserve them.

        Raises `HttpError`: 408 if the upload was evicted, 503 if the reservation is refused.
        """
        if self._buffer.evicted:
            raise self.eviction()
        if count:
            self._buffer.received(count, now=monotonic())
        if size > self._body:
            self.reserve_body(size)

    def eviction(self) -> HttpError:
        """Return the error of an evicted upload."""
        message = "the upload was slow, and others needed its memory"
        return HttpError(408, "upload_evicted", message, headers=_RETRY)

    def grow(self, count: int) -> bool:
        """Reserve `count` more bytes, of an answer. Return False if refused."""
        return self._budget.reserve(self._buffer, self._buffer.size + count, now=monotonic())

    @contextmanager
    def stalled(self, timeout: ResettableTimeout) -> Iterator[None]:
        """Count the buffers of both connections while the client does not read; `timeout` ends an evicted answer.

        Without memory for them the client has the grace of an upload to read on.
        """
        size, now = self._buffer.size, monotonic()
        if not self._budget.reserve(self._buffer, size + STALLED_BYTES, now=now):
            timeout.extend(GRACE_S)
        self._buffer.make_evictable(partial(timeout.extend, 0.0), now=now)
        try:
            yield
        finally:
            self._buffer.on_evict = None
            self._budget.shrink(self._buffer, size)

    def release(self) -> None:
        """Release everything."""
        self._budget.close(self._buffer)


def buffer_client(scope: Message) -> str:
    """Return the client that a request's bytes count for: its key's name, or where it has none its address.

    An IPv6 host has a network of 64 bits, which counts as one client.
    """
    name: str | None = scope.get("gorgo.client")
    if name is not None:
        return name
    peer = scope.get("client")
    host: str = peer[0] if peer else ""
    if ":" in host:
        network = ipaddress.ip_network((host.split("%")[0], 64), strict=False)
        return f"address {network.network_address}"
    return f"address {host}"
