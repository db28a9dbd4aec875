"""A request's body: read within limits of size and time, and counted among all buffered bytes.

Owns the statuses 408 and 413, the reservations of buffered bytes with their 503 (`RequestBuffer`), and the timer of all
requests (`ResettableTimeout`). See `gorgo.live.parsing` for what the bytes mean.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from io import BytesIO
from math import inf
from time import monotonic
from types import TracebackType
from typing import Any

from gorgo.config.model import LimitsConfig
from gorgo.core.limits import GRACE_S, Buffer, BufferBudget
from gorgo.core.messages.actions import Reject
from gorgo.core.router import Router
from gorgo.live.http.errors import HttpError, Message, Receive, error_of
from gorgo.live.http.headers import Header, find

# One timer per event loop for the timeouts of all requests, each extended by assigning a float.
#
# Theory of operation. Nearly no timeout expires, and a timer of its own costs a request as much as reading its head.
# So one timer is set to the earliest deadline. When it fires, it reads all deadlines, of which most have moved or
# ended, and is set to the earliest one: about once per deadline's length.


class ResettableTimeout:
    """Cancels a task's wait, the current one's by default, once `deadline` (monotonic s) has passed, and turns it into
    `TimeoutError`.

    Used as a context manager. A later `deadline` may just be assigned. `extend(limit_s)` may also move it nearer.
    `last` (monotonic s) bounds every `deadline`. `on_deadline` is called at one: it returns a later one, or `None`.
    """

    __slots__ = ("_cancelling", "_task", "_timer", "deadline", "expired", "last", "on_deadline")

    def __init__(self, limit_s: float, *, last: float = inf, task: asyncio.Task[Any] | None = None) -> None:
        self.deadline = monotonic() + limit_s
        self.last = last
        self.expired = False
        self.on_deadline: Callable[[float], float | None] | None = None
        self._task = task
        self._timer: _SharedTimer | None = None
        self._cancelling = 0

    @property
    def timed_out(self) -> bool:
        """Whether it expired because of `last`."""
        return self.expired and monotonic() >= self.last

    def extend(self, limit_s: float) -> None:
        """Set the deadline to `limit_s` from now."""
        self.deadline = deadline = monotonic() + limit_s
        if self._timer is not None and deadline < self._timer.due_s:
            self._timer.set(deadline)

    def __enter__(self) -> ResettableTimeout:
        if self._task is None:
            self._task = asyncio.current_task()
        assert self._task is not None, "a timeout belongs to a task"
        self._cancelling = self._task.cancelling()
        # The task knows its loop; the running one is looked up by a system call in Python 3.11.
        self._timer = timer = _timer_of(self._task.get_loop())
        timer.entered.add(self)
        due_s = self.deadline if self.deadline < self.last else self.last
        if due_s < timer.due_s:
            timer.set(due_s)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.entered.discard(self)
            self._timer = None
        if not self.expired or self._task is None:
            return
        # If the task was also cancelled by another (the client disconnected), that cancellation passes.
        if self._task.uncancel() <= self._cancelling and exc_type is asyncio.CancelledError:
            raise TimeoutError from exc

    def expire(self) -> None:
        """Cancel the task's wait."""
        self.expired = True
        assert self._task is not None, "it is entered"
        self._task.cancel()


class _SharedTimer:
    """Expires the timeouts of one event loop that are entered; `due_s` is when it looks for them next."""

    __slots__ = ("_handle", "due_s", "entered", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.entered: set[ResettableTimeout] = set()
        self.due_s = inf
        self._handle: asyncio.TimerHandle | None = None

    def set(self, due_s: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self.due_s = due_s
        self._handle = self.loop.call_later(max(0.0, due_s - monotonic()), self._fire)

    def _fire(self) -> None:
        self._handle, self.due_s = None, inf
        now, next_s = monotonic(), inf
        for timeout in tuple(self.entered):
            due_s = min(timeout.deadline, timeout.last)
            if due_s <= now < timeout.last and timeout.on_deadline is not None:
                later_s = timeout.on_deadline(now)
                if later_s is not None and later_s > now:
                    timeout.deadline = later_s
                    due_s = min(later_s, timeout.last)
            if due_s > now:
                next_s = min(next_s, due_s)
            else:
                self.entered.discard(timeout)
                timeout.expire()
        if next_s < inf:
            self.set(next_s)


#: Of the loop that entered a timeout last; an entered timeout has a reference of its own. A process has one loop.
_latest: _SharedTimer | None = None


def _timer_of(loop: asyncio.AbstractEventLoop) -> _SharedTimer:
    global _latest
    timer = _latest
    if timer is None or timer.loop is not loop:
        timer = _latest = _SharedTimer(loop)
    return timer


# Reservations of buffered bytes by the shell: of a request from its head to its end, and of a fetch. `core.limits`
# decides who gets how much.
#
# What counts. A body counts twice from its declaration, or as its chunks come, until the response begins: as it is
# stored for retries, and as the joined or changed copy that is sent. The start of an answer counts while it is
# buffered, a large fetch while it is read, and the buffers of both connections while a client does not read its
# answer. Buffers of other connections do not count.


#: Buffers of an answer that its client does not read, in both connections: measured 0.6 MB.
STALLED_BYTES = 640 * 1024
#: The client that requests and answers count for which are kept in case the answer breaks off.
RETAINED_ANSWERS = "answers that the proxy retains"
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

    __slots__ = ("_body", "_budget", "_buffer", "_retained", "client")

    def __init__(self, budget: BufferBudget, client: str) -> None:
        self.client = client
        self._budget = budget
        self._buffer = budget.new_buffer(client, now=monotonic())
        self._body = 0
        #: Of what is kept in case the answer breaks off.
        self._retained: Buffer | None = None

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

    def keep(self, size: int, on_evict: Callable[[], None]) -> bool:
        """Reserve `size` bytes in all for what would be needed if the answer broke off. Return False if refused.

        They are no client's, and make way for an upload that needs the memory: `on_evict` is called then.
        """
        if self._retained is None:
            self._retained = self._budget.new_buffer(RETAINED_ANSWERS, now=monotonic())
            self._retained.spare, self._retained.on_evict = True, on_evict
        return self._budget.reserve(self._retained, size, now=monotonic())

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
        if self._retained is not None:
            self._retained.on_evict = None
            self._budget.close(self._retained)


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


#: Longest pause between two pieces of a body: several retransmissions of a lossy path.
IDLE_TIMEOUT_S = 15.0
#: Longest pause of a client that is still writing a rejected body.
_LINGER_S = 0.5
#: Pieces of a larger body are copied as they come: to join 32 MiB at the end would hold the event loop for 20 ms.
JOINED_BYTES = 1024 * 1024


class ClientDisconnected(Exception):  # noqa: N818 - reads as the fact
    """The client disconnected before its request was complete."""


def body_limit(limits: LimitsConfig, buffer: RequestBuffer) -> int:
    """Return the bytes of the largest body that a request may have."""
    return min(limits.max_body_bytes, buffer.body_limit)


async def read_body(
    receive: Receive, headers: Iterable[Header], *, limits: LimitsConfig, buffer: RequestBuffer
) -> bytes:
    """Return the whole body, reserved in `buffer`.

    Raises `ClientDisconnected`, or `HttpError` for a body too large or too slow, or without memory for it.
    """
    try:
        with ResettableTimeout(min(limits.body_timeout_s, IDLE_TIMEOUT_S)) as timeout:
            buffer.begin_upload(partial(timeout.extend, 0.0))
            receive = _with_timeout(receive, timeout, limits)
            return await _gather(receive, headers, body_limit(limits, buffer), buffer)
    except TimeoutError:
        if buffer.evicted:
            raise buffer.eviction() from None
        limit = f"within {limits.body_timeout_s:g} s, with pauses of at most {IDLE_TIMEOUT_S:g} s"
        raise HttpError(408, "request_timeout", f"expected the whole body {limit}") from None


def take_whole_body(body: bytes, *, limits: LimitsConfig, buffer: RequestBuffer) -> bytes:
    """Return a body that came with its head, reserved in `buffer`. Raises `HttpError` for one too large."""
    limit = body_limit(limits, buffer)
    if len(body) > limit:
        raise _too_large(limit)
    buffer.reserve_body(len(body))
    return body


def _with_timeout(receive: Receive, timeout: ResettableTimeout, limits: LimitsConfig) -> Receive:
    """Return `receive` with a timeout for each piece, within that of the whole body."""
    end = monotonic() + limits.body_timeout_s

    async def receive_in_time() -> Message:
        message = await receive()
        timeout.deadline = min(end, monotonic() + IDLE_TIMEOUT_S)
        return message

    return receive_in_time


@asynccontextmanager
async def draining(receive: Receive) -> AsyncIterator[None]:
    """Discard the rest of the body while a response is sent that does not need it.

    The connection reads a part of a body only; unread, it does not notice that the client disconnected.
    """
    task = asyncio.create_task(discard(receive))
    try:
        yield
    finally:
        task.cancel()


async def discard(receive: Receive) -> None:
    """Receive and drop messages until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _gather(receive: Receive, headers: Iterable[Header], limit: int, buffer: RequestBuffer) -> bytes:
    is_received = False
    try:
        declared = find(headers, b"content-length")
        if declared is not None and declared.isdigit():
            size = int(declared)
            if size > limit:
                raise _too_large(limit)
            buffer.reserve_body(size)
        is_received = True
        return await _collect(receive, limit, buffer)
    except HttpError as refused:
        # A client that waits to be asked for its body sends none after the refusal.
        if refused.status != 408 and (is_received or find(headers, b"expect") is None):
            await _discard_rest(receive, limit)
        raise
    finally:
        buffer.end_upload()


async def _collect(receive: Receive, limit: int, buffer: RequestBuffer) -> bytes:
    """Return the body."""
    parts: list[bytes] = []
    joined, size = BytesIO(), 0
    try:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            buffer.received(len(chunk), size)
            if chunk:
                parts.append(chunk)
            if size > JOINED_BYTES:
                joined.writelines(parts)
                parts.clear()
            if not message.get("more_body", False):
                if size > JOINED_BYTES:
                    return joined.getvalue()
                return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        # The traceback of a failure refers to both while the error is sent.
        parts.clear()
        joined.close()


def _too_large(limit: int) -> HttpError:
    return HttpError(413, "request_too_large", f"the body is larger than {limit} bytes")


async def _discard_rest(receive: Receive, limit: int) -> None:
    """Discard up to `limit` more bytes of a refused body: some clients read only after they have written.

    A client that pauses is waiting for the response.
    """
    left, now = limit, asyncio.get_running_loop().time
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S) as pause:
            while left > 0:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    break
                pause.reschedule(now() + _LINGER_S)


# Requests whose bodies are being read, by client: open before the Router knows them. A body may take a minute. Without
# this count a single client's slow bodies would have no bound, and could use up `limits.max_in_flight`.


class UploadCounter:
    """The uploads of one proxy.

    Parameters
    ----------
    router:
        Counts the client's other requests.
    """

    __slots__ = ("_router", "_uploads")

    def __init__(self, router: Router) -> None:
        self._router = router
        self._uploads: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._uploads.total()

    def check(self, client: str | None) -> None:
        """Raise `HttpError` (429) if one more body of `client` is one too many."""
        if client is None:
            return
        excess = self._router.quotas.check(client, coming=self._uploads.get(client, 0))
        if excess is not None:
            raise error_of(Reject("", 429, excess.code, excess.message, excess.retry_after_s))

    @contextmanager
    def track(self, client: str | None) -> Iterator[None]:
        """Count a body of `client` while it is read. Raises `HttpError` (429) if it is one too many."""
        if client is None:
            yield
            return
        self.check(client)
        self._uploads[client] += 1
        try:
            yield
        finally:
            self._uploads[client] -= 1
            if not self._uploads[client]:
                del self._uploads[client]
