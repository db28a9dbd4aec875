"""The client's end of one exchange: what it is sent, and when.

Owns the head, chunks and end of the response, when a chunk is written, waited with or held, when a stream stands still,
and what the proxy itself says to the client. Leaves what the chunks are to `gorgo.proxy.exchange.passage`, another
replica's attempt to the owner of the answer, and bytes on a connection to the listener.

Theory of operation: a stream that stands still while others of its replica go on, or that an operator moves, stays open
while another replica is asked for the rest. What it brings meanwhile is held. It goes on with that if the other replica
fails, if it ends, or if it brings more than may be held: for a stall that is its first event. Else the other replica
has the answer, and what was held is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from time import monotonic
from typing import Protocol

from gorgo.core.continuation import MOST_PAUSE_S, RECHECK_S, STALL_GAPS, STALL_S
from gorgo.core.messages.actions import Dispatch
from gorgo.live.http.body import RequestBuffer, ResettableTimeout
from gorgo.live.http.errors import HttpError, Message, Send, error_event, send_error
from gorgo.live.http.headers import EncodedHeaders, Header, encode_lines, find, is_encoded, is_event_stream
from gorgo.live.request.parse import Gaps, is_comment
from gorgo.live.request.record import RETRY_SOON, RequestRecord, record_refusal, refusal_headers
from gorgo.live.state import LiveState
from gorgo.live.upstream.target import RunningStream

#: The reason of a continuation: no stream of the replica has had an event for a while.
STALLED = "stalled"
#: Held of a stream that is moved: 100 tokens/s for `MOST_PAUSE_S`.
MOST_PAUSED_BYTES = 256 * 1024
#: Headers made once: of a large fleet under a new version of the weights each minute, those of the last ones.
MAX_FIXED = 1024
#: For an error event to a client that may have stopped reading.
_ERROR_EVENT_TIMEOUT_S = 5.0

#: Writes a chunk of a body without a length in one call that never waits; False if it was not written, because the
#: client is behind or has disconnected. The chunk is then for `send`, which waits.
TryWrite = Callable[[bytes], bool]


def no_direct_write(chunk: bytes) -> bool:  # noqa: ARG001 - a `TryWrite`
    """Decline every chunk."""
    return False


def direct_write(scope: Message) -> TryWrite:
    """Return the `TryWrite` of a request's connection. CORS wraps `send` alone: it changes heads, never a body."""
    write: TryWrite = scope.get("extensions", {}).get("gorgo.write", no_direct_write)
    return write


class ResponseWriter:
    """Writes one response.

    `sending` is true while a chunk waits for the client to read: a timeout is then the client's. `carries_events`: an
    error can be sent in the stream itself. `names_events`: events have names there. `try_write(chunk)` sends a chunk
    without waiting, by `direct`; False means that `write` has to.
    """

    __slots__ = (
        "_direct",
        "_send",
        "carries_events",
        "finished",
        "names_events",
        "sending",
        "started",
        "status",
        "try_write",
    )

    def __init__(self, send: Send, direct: TryWrite = no_direct_write) -> None:
        self._send = send
        self._direct = direct
        self.started = False
        self.finished = False
        self.sending = False
        self.carries_events = False
        self.names_events = False
        self.status = 0
        self.try_write: TryWrite = no_direct_write

    async def start(
        self,
        status: int,
        headers: Sequence[Header],
        *,
        names_events: bool = False,
        body_follows: bool = False,
        carries_events: bool | None = None,
    ) -> None:
        """Send the head. Neither failover nor another status is possible afterwards.

        `body_follows`: bytes of the body are sent in the same step. `carries_events`: the body is a stream of events
        without a length; `None` if the headers have to say so.
        """
        if carries_events is None:
            carries_events = (
                is_event_stream(headers) and not is_encoded(headers) and not find(headers, b"content-length")
            )
        self.started = True
        self.names_events = names_events
        self.status = status
        self.carries_events = carries_events
        self.sending = True
        message: Message = {"type": "http.response.start", "status": status, "headers": headers}
        if body_follows:
            message["gorgo.body_follows"] = True
        await self._send(message)
        self.sending = False
        # Event streams only: other bodies have few chunks, and a length or an encoding.
        if self.carries_events and status == 200:
            self.try_write = self._direct

    def write(self, chunk: bytes) -> Awaitable[None]:
        """Send a chunk. No coroutine of its own, to keep the hot loop fast; the caller sets `sending`."""
        return self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, chunk: bytes = b"") -> None:
        """Send the last chunk. Without it the response is cut, which the client sees."""
        self.finished = True
        self.try_write = no_direct_write
        self.sending = True
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})
        self.sending = False


class AnswerOwner(Protocol):
    """Who can have an answer go on at another replica."""

    def retain(self, answer_bytes: int) -> bool:
        """Reserve memory for so much of the answer in all; False: there is none."""
        ...

    def continue_beside(self, reason: str) -> bool:
        """Ask another replica for the rest of the answer, while the stream stays open; return whether one was asked."""
        ...

    def resume(self) -> None:
        """Cancel that: the stream has the answer."""
        ...

    def drop(self) -> None:
        """Give up what is retained: there is no memory for more of it."""
        ...


@dataclass(slots=True)
class PausedStream:
    """What a stream brings while another replica is asked for the rest of its answer, from `since_s` (monotonic s).

    `most_bytes` is 0 for a stream that stood still: with its first event it goes on.
    """

    owner: AnswerOwner
    since_s: float
    most_bytes: int
    chunks: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(self, chunk: bytes) -> bool:
        """Hold a chunk; False if the stream has to go on with it."""
        if self.size + len(chunk) > self.most_bytes or monotonic() - self.since_s > MOST_PAUSE_S:
            return False
        self.chunks.append(chunk)
        self.size += len(chunk)
        return True


class ClientStream:
    """Writes the chunks of one response in time.

    `try_write(chunk)` writes or holds a chunk without waiting; False means that it has to wait: for `write`.

    Parameters
    ----------
    writer, timeout, buffer:
        Of the request.
    gaps:
        Of the chunks as they come.
    chunk_limit_s:
        Longest silence between two chunks after the first token, comments aside, and longest stall of the client.
    """

    __slots__ = (
        "_buffer",
        "_gaps",
        "_others",
        "_pause",
        "_resuming",
        "_silence_s",
        "_stays",
        "chunk_limit_s",
        "owner",
        "timeout",
        "try_write",
        "unsent",
        "unsent_bytes",
        "writer",
    )

    def __init__(
        self,
        writer: ResponseWriter,
        timeout: ResettableTimeout,
        buffer: RequestBuffer,
        gaps: Gaps,
        *,
        chunk_limit_s: float,
    ) -> None:
        self.writer = writer
        self.timeout = timeout
        self._buffer = buffer
        self._gaps = gaps
        #: The time of the next check, where a stall is checked for before `_silence_s`.
        self.chunk_limit_s = chunk_limit_s
        self._silence_s = chunk_limit_s
        #: Of an answer that can go on elsewhere.
        self.owner: AnswerOwner | None = None
        self._others: Iterable[RunningStream] = ()
        #: Set while another replica is asked for the rest of the answer.
        self._pause: PausedStream | None = None
        #: It was held for as long as that may last: it is not moved again.
        self._stays = False
        #: Set while what was held is written by another task.
        self._resuming: asyncio.Event | None = None
        self.try_write = writer.try_write
        #: A chunk for which the client's connection had no room, and bytes of the replica's stream that it was made of.
        self.unsent = b""
        self.unsent_bytes = 0

    # -- chunks

    def head_sent(self) -> None:
        """Note that chunks may be written without waiting from here on, if the client's connection can do that."""
        self.try_write = self.writer.try_write

    def extend(self) -> None:
        """Give the next chunk its whole time."""
        self.timeout.extend(self.chunk_limit_s)

    @property
    def is_behind(self) -> bool:
        """Whether the client does not have all that has come."""
        return self.unsent_bytes > 0 or self._pause is not None or self.writer.sending

    async def write_unsent(self) -> bool:
        """Write the chunk that had no room; return whether there was one."""
        unsent, self.unsent, self.unsent_bytes = self.unsent, b"", 0
        if unsent:
            await self.write(unsent)
        return bool(unsent)

    async def write(self, chunk: bytes) -> None:
        """Write a chunk, behind what was held, and wait for the client."""
        if self._pause is not None:
            self._stays = self._pause.most_bytes > 0
            chunk = self._end_pause() + chunk
        if self._resuming is not None:
            await self._resuming.wait()
        await self._write_now(chunk)

    async def end_pause(self) -> None:
        """Write what was held of a stream that has ended."""
        if self._pause is not None:
            await self.write(b"")

    async def _write_now(self, chunk: bytes) -> None:
        if not chunk or self.try_write(chunk):
            return
        self.writer.sending = True
        # The wait is for the client: the replica is not checked meanwhile.
        check, self.timeout.on_deadline = self.timeout.on_deadline, None
        goes_on = check is not None and bool(self._gaps.last_s)
        if goes_on:
            self.timeout.extend(self._silence_s)
        with self._buffer.stalled(self.timeout):
            await self.writer.write(chunk)
        self.timeout.on_deadline = None if self.owner is None else check
        if goes_on:
            self.extend()
        self.writer.sending = False

    # -- stalls and moves

    def follow(self, owner: AnswerOwner, others: Iterable[RunningStream]) -> None:
        """Check for stalls from here on, and let the stream be moved.

        `others` are the streams of its replica, this one included.
        """
        self.owner, self._others = owner, others
        self.timeout.on_deadline = self._check_stall
        self._silence_s = self.chunk_limit_s
        if self.chunk_limit_s > STALL_S:
            self.chunk_limit_s = STALL_S

    def unfollow(self) -> None:
        """Let the stream be: its answer stays with it, or is with another."""
        self.owner, self._others = None, ()
        self.timeout.on_deadline = None
        self.chunk_limit_s = self._silence_s

    def give_up(self) -> None:
        """Let the stream be, with its whole time again."""
        is_checked = self.timeout.on_deadline is not None
        self.unfollow()
        if is_checked:  # else it waits for its client, whose time is another
            self.timeout.extend(self._silence_s)

    def release(self) -> None:
        """Forget what is held, and who owns the answer: both would wait for the garbage collector."""
        self._pause = None
        self.unfollow()

    @property
    def last_s(self) -> float:
        """When its last event came (monotonic s)."""
        return self._gaps.last_s

    @property
    def is_paused(self) -> bool:
        """Whether another replica is asked for the rest of the answer."""
        return self._pause is not None

    def move(self, reason: str) -> bool:
        """Ask another replica for the rest of the answer; return whether one was asked.

        Until it begins, what comes is held, and is passed on if that replica fails or this stream ends before.
        """
        return not self._stays and self._continue_beside(reason, MOST_PAUSED_BYTES)

    async def resume(self) -> None:
        """Write what was held, and what follows: the stream has the answer. For another task than the stream's."""
        if self._pause is None:
            return
        self._resuming = asyncio.Event()
        try:
            await self._write_now(self._end_pause())
        finally:
            self._resuming.set()
            self._resuming = None
        if self.owner is not None:
            self.timeout.extend(min(RECHECK_S, self._silence_s))

    def _continue_beside(self, reason: str, most_bytes: int) -> bool:
        owner = self.owner
        # The answer so far is what the client has: while a part of it waits for the client, a later call finds it sent.
        if self.is_behind or owner is None or not owner.continue_beside(reason):
            return False
        self._pause = PausedStream(owner, monotonic(), most_bytes)
        self.try_write = self._hold
        return True

    def _hold(self, chunk: bytes) -> bool:
        """Take the place of `try_write` while another replica is asked for the rest."""
        pause = self._pause
        if pause is None:  # another replica has the answer
            return True
        if is_comment(chunk):  # which says nothing of the answer, and need not be sent
            self.writer.try_write(chunk)
            return True
        return pause.add(chunk)

    def _end_pause(self) -> bytes:
        """End the hold; return what was held. The pause counts as a gap."""
        pause, self._pause = self._pause, None
        assert pause is not None, "it is paused"
        self.try_write = self.writer.try_write
        if pause.chunks:
            self._gaps.add_pause(pause.chunks[-1], monotonic() - pause.since_s)
        pause.owner.resume()
        return b"".join(pause.chunks)

    def _check_stall(self, now: float) -> float | None:
        """Return when to check again, `None` to end a stream that stands still with all others of its replica."""
        last_s = self._gaps.last_s
        if not last_s or now - last_s >= self._silence_s:
            return None
        if self._pause is not None:
            return last_s + self._silence_s
        stall_s = max(STALL_S, STALL_GAPS * (self._gaps.median() or 0.0))
        if now - last_s < stall_s:
            return min(last_s + stall_s, last_s + self._silence_s)
        others_go_on = any(now - other.last_s < stall_s / 2 for other in self._others if other is not self)
        if not others_go_on and self._continue_beside(STALLED, 0):
            return last_s + self._silence_s
        # An answer that cannot be continued is given up by then, and waited for to the end of its time.
        return last_s + self._silence_s if self.owner is None else min(now + RECHECK_S, last_s + self._silence_s)


class ClientResponse:
    """The client's end of one exchange.

    Parameters
    ----------
    state:
        The running proxy.
    send:
        The ASGI callable of the request.
    request_id:
        As the client knows it.
    record:
        Of the request: status and error code.
    route:
        Its path, which decides the form of errors.
    direct:
        Writes chunks of a stream without waiting.
    """

    __slots__ = ("_record", "_route", "_send", "_state", "disconnected", "had_end", "request_id", "writer")

    def __init__(
        self,
        state: LiveState,
        send: Send,
        request_id: str,
        record: RequestRecord,
        route: str = "",
        direct: TryWrite = no_direct_write,
    ) -> None:
        self._state = state
        self._send = send
        self._record = record
        self._route = route
        self.request_id = request_id
        self.writer = ResponseWriter(send, direct)
        #: The client has disconnected, or does not read.
        self.disconnected = False
        #: It had the end of its answer before.
        self.had_end = False

    async def send_error(self, error: HttpError) -> None:
        """Send an error of the proxy's own."""
        assert not self.writer.started, "a response has begun"
        # A client that disconnects from here on has had its response.
        self.writer.finished = True
        record_refusal(self._state.telemetry, self._record, error)
        own_fields = refusal_headers(self._state.routing, self.request_id)
        await send_error(self._send, error, own_fields, path=self._route)

    async def abort(self) -> None:
        """End the response because the proxy stops; nothing for a client that has disconnected."""
        if self.disconnected or self.writer.finished:
            return
        if self.writer.started:
            await self.end_stream(503, "stopping", "the proxy is stopping")
        else:
            await self.send_error(HttpError(503, "stopping", "the proxy is stopping", headers=RETRY_SOON))

    async def end_stream(self, status: int, code: str, message: str) -> None:
        """Send the error as an event of the stream. A response without events is cut, which the client sees."""
        self._record.status, self._record.code = status, code
        if not self.writer.carries_events:
            return
        try:
            async with asyncio.timeout(_ERROR_EVENT_TIMEOUT_S):
                event = error_event(status, code, message, named=self.writer.names_events, path=self._route)
                await self.writer.finish(event)
        except TimeoutError:
            self.disconnected = True


def own_headers(request_id: str, dispatch: Dispatch, *, estimates: bool) -> EncodedHeaders:
    """Return the proxy's headers. `estimates` tell a client which prompts others have sent, and so does the replica."""
    decision = dispatch.decision
    replica, region = (dispatch.replica, dispatch.region) if estimates else ("", "")
    fixed = _fixed_headers(replica, region, decision.policy, decision.weights_version)
    encoded_id = request_id.encode()
    lines = b"x-request-id: %b\r\n%b" % (encoded_id, fixed.lines)
    headers = EncodedHeaders(((b"x-request-id", encoded_id), *fixed), lines)
    if not estimates:
        return headers
    estimated = [(b"x-gorgo-estimated-cached-tokens", b"%d" % decision.estimated_cached_tokens)]
    if decision.predicted_ttft_s is not None:
        estimated.append((b"x-gorgo-predicted-ttft-ms", b"%.1f" % (decision.predicted_ttft_s * 1e3)))
    headers.extend(estimated)
    headers.lines += encode_lines(estimated)
    return headers


@lru_cache(MAX_FIXED)
def _fixed_headers(replica: str, region: str, policy: str, weights_version: int) -> EncodedHeaders:
    """Return the headers that are the same for all responses of a replica under one policy and its weights.

    An empty name of a replica is not for the client.
    """
    named = ((b"x-gorgo-replica", replica.encode()), (b"x-gorgo-region", region.encode())) if replica else ()
    headers = (
        *named,
        (b"x-gorgo-policy", policy.encode()),
        (b"x-gorgo-weights-version", b"%d" % weights_version),
    )
    return EncodedHeaders(headers, encode_lines(headers))
