"""One response from its source to the client: buffered up to the first token, then passed on chunk by chunk.

Owns which of two kinds a response is, an event stream or any other body; when it is sent, withheld or retained; and how
it ended. Leaves bytes, gaps and usage to `Passage`, retries and records to the exchange. Bytes are never decoded, split
or joined, except that the buffer is sent in one piece.

Theory of operation: up to the first token (of an event stream) or the end (of any other body) nothing has been sent. A
response that fails before can be replaced by another replica's without the client's notice. A 4xx is not sent at all:
the passage keeps it for the Router's decision. Beyond `BUFFER_BYTES` the response is sent as it is, and a JSON answer
beyond `MAX_RETAINED_BYTES`: no client reads a part of it, and one that breaks off is asked for anew. With `withhold` a
short stream is treated like a 4xx, and one that breaks off like any failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Protocol

from gorgo.core.continuation import (
    MAX_EVENT_BYTES,
    MOST_PAUSE_S,
    RECHECK_S,
    STALL_GAPS,
    STALL_S,
    Seam,
    first_error,
    lacks_last_event,
    last_event,
    whole_events,
)
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.stream import (
    FirstTokenDetector,
    StreamEnd,
    StreamState,
    Usage,
    UsageEventFilter,
    UsageReader,
    end_of_stream,
    error_of_body,
    has_end,
    is_json,
    lacks_answer,
    may_have_error,
    read_usage,
)
from gorgo.live.http.body import RequestBuffer, ResettableTimeout
from gorgo.live.http.errors import Message, Send
from gorgo.live.http.headers import (
    EncodedHeaders,
    Header,
    ResponseTraits,
    client_headers,
    find,
    is_encoded,
    is_event_stream,
    read_response,
)
from gorgo.live.request.parse import (
    Gaps,
    exceeds_context,
    failure_of,
    failure_of_event,
    is_comment,
    is_short_stream,
    is_short_usage,
    result_of_stream,
)
from gorgo.live.upstream.client import ResponseSource, UpstreamError
from gorgo.live.upstream.target import RunningStream

# The response of one exchange to its client, over ASGI: status, headers, chunks, end.


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


# The client's end of one relay: head, chunks and end, and what is measured on their way.
#
# Owns the hot loop, the gaps between chunks, the usage at the end, and an answer that is retained instead of sent.
# When what is sent is decided by `relay`.
#
# Theory of operation: after the first token each read of the replica's connection calls `_pass`, which counts the
# chunk and writes it to the client's connection in the same step. The task of the request sleeps meanwhile. It wakes
# to wait for a client that does not read, to let others run between the parts of a chunk, and at the end.


#: The reason of a continuation: no stream of the replica has had an event for a while.
STALLED = "stalled"
#: The reason of an attempt whose engine sent an error in the middle of its answer, and of one that ended there.
ERROR_EVENT = "error_event"
TRUNCATED = "truncated"
#: Retained of one answer that may have to be continued, and by how much the reservation grows: 5,000 events of an
#: ordinary size, and those of some seconds.
MAX_RETAINED_BYTES = 1024 * 1024
KEEP_STEP_BYTES = 32 * 1024
#: Held of a stream that is moved: 100 tokens/s for `MOST_PAUSE_S`.
MOST_PAUSED_BYTES = 256 * 1024
#: A chunk with the same last bytes as one that has been searched ends as that one did: a token's event, and no error,
#: which is the last event of its stream. Longer than what objects of all kinds share (`null}]}`).
END_BYTES = 16


def end_of_token(chunk: bytes) -> bytes:
    """Return the last bytes of a chunk by which another one that ends with a token is known.

    They begin with the finish reason: an answer that its engine breaks off may end as its tokens do. They are the last
    few where text stands behind that, which is another for each token.

    >>> end_of_token(b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null,"token_ids":null}]}')
    b'"finish_reason":null,"token_ids":null}]}'
    """
    end = chunk[at:] if (at := chunk.rfind(b'"finish_reason"')) >= 0 else b""
    return chunk[-END_BYTES:] if not end or b'"content"' in end or b'"text"' in end else end


#: Routes on which each event of a stream has a name.
_NAMED_EVENTS = frozenset({"/v1/responses", "/v1/messages"})


@dataclass(frozen=True, slots=True)
class Refusal:
    """A whole answer that waits for the Router: a 4xx response, or a stream of nothing but such an error.

    It is kept until another replica answers the request, or sent to the client unchanged.
    """

    status: int
    #: For the client.
    headers: Sequence[Header]
    body: bytes

    async def send(self, writer: ResponseWriter) -> None:
        await writer.start(self.status, self.headers)
        await writer.finish(self.body)


class CutEndError(UpstreamError):
    """A stream ended behind its finish reason and before its last event: the answer is whole, but for what is between.

    The engines whose answers can be continued send that event always.
    """

    def __init__(self, reason: str, outcome: Outcome) -> None:
        super().__init__(reason)
        self.outcome = outcome


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


class Passage:
    """Passes one response on.

    It is made while the replica works on the request; `source` is set once there is a response.

    Parameters
    ----------
    writer, timeout, buffer:
        Of the request. Without memory for more of an answer, what is buffered is sent as it is.
    route:
        Path of the request, on which the form of a token depends.
    own_headers:
        Sent after the replica's.
    chunk_limit_s:
        Longest silence between two chunks after the first token, comments aside, and longest stall of the client.
    strip_usage:
        Remove the usage event: the proxy requested it, not the client.
    on_content:
        Called once, at the first token: when it is sent, or has to wait for the client.
    on_commit:
        Called before anything is sent: from then on no other attempt may respond.
    on_head:
        Called with the first bytes that are sent.
    on_keep:
        Called before an answer with a first token is sent, to `keep` it; `None` if it is not continued.
    withhold:
        Withhold a doubtful answer up to a bound instead of sending it.
    may_be_short:
        Whether one token is less than the request asks for.
    passed_headers:
        Allowed by an operator beside those that always pass.
    """

    __slots__ = (
        "_length",
        "_others",
        "_owner",
        "_paused",
        "_plain_end",
        "_plain_size",
        "_rest_bytes",
        "_rest_limit",
        "_resuming",
        "_silence_s",
        "_stays",
        "_try_write",
        "_unsent",
        "_unsent_bytes",
        "buffer",
        "chunk_limit_s",
        "failure_body",
        "filter",
        "gaps",
        "has_error",
        "may_be_short",
        "on_commit",
        "on_content",
        "on_head",
        "on_keep",
        "own_headers",
        "passed_headers",
        "refusal",
        "route",
        "seam",
        "source",
        "strip_usage",
        "tail",
        "timeout",
        "traits",
        "whole_only",
        "withheld",
        "withhold",
        "writer",
    )
    source: ResponseSource
    #: What its headers say.
    traits: ResponseTraits

    def __init__(
        self,
        writer: ResponseWriter,
        timeout: ResettableTimeout,
        buffer: RequestBuffer,
        *,
        route: str,
        own_headers: EncodedHeaders,
        chunk_limit_s: float,
        strip_usage: bool,
        on_content: Callable[[], None],
        on_commit: Callable[[], None],
        on_head: Callable[[bytes], None] | None = None,
        on_keep: Callable[[Passage], None] | None = None,
        withhold: bool = False,
        may_be_short: bool = False,
        passed_headers: frozenset[bytes] = frozenset(),
    ) -> None:
        self.writer = writer
        self.timeout = timeout
        self.buffer = buffer
        self.route = route
        self.own_headers = own_headers
        self.chunk_limit_s = chunk_limit_s
        self.strip_usage = strip_usage
        self.on_content = on_content
        self.on_commit = on_commit
        self.on_head = on_head
        self.on_keep = on_keep
        self.withhold = withhold
        self.may_be_short = may_be_short
        self.passed_headers = passed_headers
        self.tail = UsageReader()
        #: Of the rest of an answer.
        self.seam: Seam | None = None
        #: Set where the usage event is removed.
        self.filter: UsageEventFilter | None = None
        #: What the replica says of a failure before any content.
        self.failure_body = b""
        #: A complete answer that has not been sent.
        self.refusal: Refusal | None = None
        self.gaps = Gaps()
        #: Pass whole events alone, so that the answer can go on behind the last of them, and none that is an error.
        self.whole_only = False
        #: Longest silence where `chunk_limit_s` is the time of the next check.
        self._silence_s = chunk_limit_s
        #: What is not passed yet: the beginning of an event, or from an error event on.
        self.withheld = b""
        #: The engine has sent an error in the middle of its answer, which is withheld.
        self.has_error = False
        self._owner: AnswerOwner | None = None
        self._others: Iterable[RunningStream] = ()
        #: Set while another replica is asked for the rest of the answer.
        self._paused: PausedStream | None = None
        #: It was held back for as long as that may last: it is not moved again.
        self._stays = False
        #: Set while what was held is written by another task.
        self._resuming: asyncio.Event | None = None
        #: How the last chunk ended, if it was whole events without an error and nothing before it waits to be passed.
        self._plain_end = b""
        self._plain_size = END_BYTES
        self._try_write = writer.try_write
        #: A chunk for which the client's connection had no room.
        self._unsent = b""
        #: Bytes of the stream that it was made of.
        self._unsent_bytes = 0
        #: Of the rest of an answer: what the client has, and how much of it there is memory for.
        self._rest_bytes = self._rest_limit = 0

    def begin(self, source: ResponseSource) -> None:
        """Take the response that is passed on."""
        self.source = source
        self.traits, self._length = read_response(source.headers, passed=self.passed_headers)

    # -- what is sent

    async def send_head(self, *, head: bytes, with_length: bool = True, has_events: bool = True) -> None:
        """Send the head of the response. `head` is the first part of its body, which is sent next.

        Without `has_events` it is known to be no stream of them.
        """
        self.on_commit()
        traits, length = self.traits, self._length if with_length else None
        headers = client_headers(traits, self.own_headers, length)
        carries_events = has_events and traits.is_events and not traits.is_encoded and length is None
        # A filter may withhold all of it.
        follows = bool(head) and self.filter is None
        names_events = self.route in _NAMED_EVENTS
        await self.writer.start(
            self.source.status, headers, names_events=names_events, body_follows=follows, carries_events=carries_events
        )
        self._try_write = self.writer.try_write
        if self.on_head is not None:
            self.on_head(head)

    async def forward(self, chunk: bytes, *, record: Callable[[], None] | None = None) -> None:
        """Send a part of the body. Call `record` once that is done, or as soon as it has to wait for the client."""
        if self.whole_only:
            if self.withheld or chunk[-2:] != b"\n\n" or may_have_error(chunk):
                chunk = self._whole_events(chunk)
        elif self.withheld:
            chunk, self.withheld = self.withheld + chunk, b""
        passed = chunk if self.filter is None else self.filter.feed(chunk)
        is_sent = not passed or self._try_write(passed)
        self.tail.feed(chunk)
        if record is not None:
            record()
        if not is_sent:
            await self._write(passed)

    async def pass_rest(self) -> None:
        """Send the rest of the body as it comes."""
        self.timeout.extend(self.chunk_limit_s)
        self.gaps.last_s = monotonic()
        while not self.has_error and not await self.source.pipe(self._pass):
            unsent, self._unsent, self._unsent_bytes = self._unsent, b"", 0
            if unsent:
                await self._write(unsent)
            else:
                await asyncio.sleep(0)  # the chunk was split into its events
        if self.has_error:
            raise UpstreamError(ERROR_EVENT)
        if self.withheld:
            self.whole_only = False
            rest, self.withheld = self.withheld, b""
            await self.forward(rest)

    def keep(self, owner: AnswerOwner, others: Iterable[RunningStream]) -> None:
        """Retain what is passed of an answer that may have to go on at another replica, and `follow` it."""
        self.whole_only = True
        self.tail.keep(self._keep_more)
        self.follow(owner, others)

    def follow(self, owner: AnswerOwner, others: Iterable[RunningStream]) -> None:
        """Check a stream for stalls from here on, and let it be moved.

        `others` are the streams of its replica, this one included.
        """
        self._owner, self._others = owner, others
        self.timeout.on_deadline = self._check_stall
        self._silence_s = self.chunk_limit_s
        if self.chunk_limit_s > STALL_S:
            self.chunk_limit_s = STALL_S

    def release(self) -> None:
        """Forget who owns the answer, and its bytes: both would wait for the garbage collector."""
        self._paused = None
        self._stop_keeping()

    def _stop_keeping(self) -> None:
        self.whole_only, self._owner, self._others = False, None, ()
        self.tail.stop_keeping()
        self.timeout.on_deadline = None
        self.chunk_limit_s = self._silence_s

    def give_up(self) -> None:
        """Pass the rest of the answer as it comes: it can no longer go on elsewhere."""
        is_checked = self.timeout.on_deadline is not None
        self._stop_keeping()
        if is_checked:  # else it waits for its client, whose time is another
            self.timeout.extend(self._silence_s)

    def move(self, reason: str) -> bool:
        """Ask another replica for the rest of the answer; return whether one was asked.

        Until it begins, what comes is held, and is passed on if that replica fails or this stream ends before.
        """
        return not self._stays and self._continue_beside(reason, MOST_PAUSED_BYTES)

    def _continue_beside(self, reason: str, most_bytes: int) -> bool:
        owner = self._owner
        # The answer so far is what the client has: while a part of it waits for the client, a later call finds it sent.
        if self._paused is not None or self._unsent_bytes or self.writer.sending or owner is None:
            return False
        if not owner.continue_beside(reason):
            return False
        self._paused = PausedStream(owner, monotonic(), most_bytes)
        self._try_write = self._hold
        return True

    def _hold(self, chunk: bytes) -> bool:
        """Take the place of `try_write` while another replica is asked for the rest."""
        paused = self._paused
        if paused is None:  # another replica has the answer
            return True
        if is_comment(chunk):  # which says nothing of the answer, and need not be sent
            self.writer.try_write(chunk)
            return True
        return paused.add(chunk)

    async def resume(self) -> None:
        """Pass on what was held, and what follows: the stream has the answer. For another task than the stream's."""
        if self._paused is None:
            return
        self._resuming = asyncio.Event()
        try:
            await self._write_now(self._end_pause())
        finally:
            self._resuming.set()
            self._resuming = None
        if self._owner is not None:
            self.timeout.extend(min(RECHECK_S, self._silence_s))

    def _end_pause(self) -> bytes:
        """End the hold; return what was held. The pause counts as a gap."""
        paused, self._paused = self._paused, None
        assert paused is not None, "it is paused"
        self._try_write = self.writer.try_write
        if paused.chunks:
            self.gaps.add_pause(paused.chunks[-1], monotonic() - paused.since_s)
        paused.owner.resume()
        return b"".join(paused.chunks)

    def _check_stall(self, now: float) -> float | None:
        """Return when to check again, `None` to end a stream that stands still with all others of its replica."""
        last_s = self.gaps.last_s
        if not last_s or now - last_s >= self._silence_s:
            return None
        if self._paused is not None:
            return last_s + self._silence_s
        stall_s = max(STALL_S, STALL_GAPS * (self.gaps.median() or 0.0))
        if now - last_s < stall_s:
            return min(last_s + stall_s, last_s + self._silence_s)
        others_go_on = any(now - other.last_s < stall_s / 2 for other in self._others if other is not self)
        if not others_go_on and self._continue_beside(STALLED, 0):
            return last_s + self._silence_s
        # An answer that cannot be continued is given up by then, and waited for to the end of its time.
        return last_s + self._silence_s if self._owner is None else min(now + RECHECK_S, last_s + self._silence_s)

    @property
    def last_s(self) -> float:
        """When its last event came (monotonic s)."""
        return self.gaps.last_s

    def _keep_more(self, size: int) -> int:
        owner = self._owner
        if owner is not None and size < MAX_RETAINED_BYTES and owner.retain(size + KEEP_STEP_BYTES):
            return size + KEEP_STEP_BYTES
        return 0

    def _whole_events(self, chunk: bytes) -> bytes:
        """Return the whole events so far, up to an error event; withhold the rest."""
        data = self.withheld + chunk
        size = whole_events(data)
        if may_have_error(data) and (error := first_error(data[:size])) is not None:
            self.has_error, size = True, error
        elif len(data) - size > MAX_EVENT_BYTES:
            # Too long to wait for, and to copy with each part of it: the answer is not continued.
            self.give_up()
            size = len(data)
        self.withheld = data[size:]
        return data[:size]

    async def end_with_error(self) -> None:
        """Send the error event that was withheld, as the end of the body."""
        rest, self.withheld = self.withheld, b""
        await self.writer.finish(rest if self.filter is None else self.filter.feed(rest) + self.filter.flush())

    async def end_body(self) -> None:
        """Send the end of the body."""
        await self.end_pause()
        await self.writer.finish(b"" if self.filter is None else self.filter.flush())

    async def end_pause(self) -> None:
        """Send what was held back of a stream that has ended."""
        if self._paused is not None:
            await self._write(b"")

    async def end_cut(self, counts: bytes = b"") -> None:
        """Send the end of a body that ended behind its finish reason: `counts`, and its last event if it has none.

        Of an engine that is not known to send one, and behind a part of an event, it is the end alone.
        """
        is_whole = self.seam is not None or lacks_last_event(self.route, self.tail.tail)
        if self.on_keep is not None and is_whole and not (self.seam is not None and self.seam.ended):
            await self.write_rest(counts + last_event(self.route))
        await self.end_body()

    def _pass(self, chunk: bytes) -> bool:
        """Send a chunk, and count it; return whether the next one may come in the same step. The hot loop."""
        if chunk[-self._plain_size :] != self._plain_end or not (self.filter is None or chunk.find(b'"usage"') < 0):
            return self._pass_checked(chunk)
        now = monotonic()
        self.timeout.deadline = now + self.chunk_limit_s
        self.gaps.add(chunk, now)
        self.tail.feed(chunk)
        if self._try_write(chunk):
            return True
        self._unsent, self._unsent_bytes = chunk, len(chunk)
        return False

    def _pass_checked(self, chunk: bytes) -> bool:
        """Do the same with a chunk that does not end as the one before it: it is searched."""
        self._plain_end = b""
        if chunk[:1] != b":" or not is_comment(chunk):
            now = monotonic()
            self.timeout.deadline = now + self.chunk_limit_s
            self.gaps.add(chunk, now)
            is_plain = not self.withheld and chunk[-2:] == b"\n\n" and not may_have_error(chunk)
        else:
            is_plain = False
        if self.whole_only and not is_plain:
            chunk = self._whole_events(chunk)
            if self.has_error and self._paused is not None:
                return False  # the answer goes on elsewhere, from where that was asked for
            if not chunk and not self.has_error:
                return True
        elif self.withheld:
            chunk, self.withheld = self.withheld + chunk, b""
        self.tail.feed(chunk)
        passed = chunk if self.filter is None else self.filter.feed(chunk)
        if self.has_error:
            self._unsent, self._unsent_bytes = passed, len(chunk)
            return False
        if is_plain and (self.filter is None or (passed == chunk and not self.filter.pending)):
            self._plain_end = end_of_token(chunk)
            self._plain_size = len(self._plain_end)
        if passed and not self._try_write(passed):
            self._unsent, self._unsent_bytes = passed, len(chunk)
            return False
        return passed is chunk

    @property
    def sent_stream(self) -> bytes | None:
        """What the client has of the stream, if all of it is retained."""
        whole = self.tail.whole
        return whole if whole is None or not self._unsent_bytes else whole[: -self._unsent_bytes]

    async def write_rest(self, events: bytes) -> None:
        """Send events of the rest of an answer."""
        if not self._try_write(events):
            await self._write(events)
        self._rest_bytes += len(events)
        if self._owner is not None and self._rest_bytes > self._rest_limit:
            self._rest_limit = self._keep_more(self._rest_bytes)
            if self._rest_limit <= self._rest_bytes:
                self._owner.drop()

    async def _write(self, chunk: bytes) -> None:
        if self._paused is not None:
            self._stays = self._paused.most_bytes > 0
            chunk = self._end_pause() + chunk
        if self._resuming is not None:
            await self._resuming.wait()
        await self._write_now(chunk)

    async def _write_now(self, chunk: bytes) -> None:
        if not chunk or self._try_write(chunk):
            return
        self.writer.sending = True
        # The wait is for the client: the replica is not checked meanwhile.
        check, self.timeout.on_deadline = self.timeout.on_deadline, None
        goes_on = check is not None and bool(self.gaps.last_s)
        if goes_on:
            self.timeout.extend(self._silence_s)
        with self.buffer.stalled(self.timeout):
            await self.writer.write(chunk)
        self.timeout.on_deadline = None if self._owner is None else check
        if goes_on:
            self.timeout.extend(self.chunk_limit_s)
        self.writer.sending = False

    # -- what is retained

    @property
    def may_be_retained(self) -> bool:
        """Whether the body may be small enough."""
        return self._length is None or self._length <= MAX_RETAINED_BYTES

    def retain(self, body: bytes) -> None:
        """Retain a whole answer for the Router's decision."""
        # A 204 has no body: a client that reads its length would wait for one.
        stripped = self.filter is not None or self.source.status == 204
        headers = client_headers(self.traits, self.own_headers, None if stripped else self._length)
        self.refusal = Refusal(self.source.status, headers, body)

    def hold(self, body: bytes, *, usage: Usage | None = None) -> Outcome:
        """Retain a doubtful answer; return its outcome."""
        self.retain(body)
        return replace(self.outcome(AttemptResult.COMPLETED, usage=usage), short=True, unsent=True)

    def refused(self, body: bytes, status: int | None = None) -> Outcome:
        """Retain a refusal; return its outcome."""
        self.retain(body)
        status = status or self.source.status
        return Outcome(AttemptResult.UPSTREAM_4XX, status=status, unsent=True, too_long=exceeds_context(status, body))

    def failed(self, body: bytes, failure: Outcome) -> Outcome:
        """Retain the answer of a failure; return its outcome. The client gets it if other replicas fail alike."""
        self.retain(body)
        self.failure_body = body
        return replace(failure, unsent=True)

    # -- what is measured

    def outcome(
        self,
        result: AttemptResult,
        status: int | None = None,
        *,
        usage: Usage | None = None,
        short: bool | None = False,
        answer_bytes: int | None = None,
    ) -> Outcome:
        """Return the outcome, with what the response reports and what was measured."""
        usage = usage or (None if self.filter is None else self.filter.usage) or self.tail.usage()
        return Outcome(
            result,
            status=self.source.status if status is None else status,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            cached_tokens=None if usage is None else usage.cached_tokens,
            output_tokens=None if usage is None else usage.output_tokens,
            itl_s_p95=self.gaps.p95(),
            short=short,
            answer_bytes=answer_bytes or self.tail.size or None,
        )

    def outcome_of_rest(self, seam: Seam) -> Outcome:
        """Return the outcome of the rest of an answer.

        That it is whole counts for its replica as a whole answer does: of two replicas that break off half of their
        answers each has as many rests as it leaves to the other.
        """
        usage = Usage(seam.usage.prompt, seam.usage.cached, seam.usage.output)
        outcome = self.outcome(AttemptResult.COMPLETED, usage=usage, short=seam.short)
        return replace(outcome, partial_tokens=seam.tokens_before)

    def outcome_of_end(self) -> Outcome | None:
        """Return the outcome of a stream whose end has been sent to the client, though the body goes on; else None."""
        if self._unsent_bytes or self._paused or self.writer.sending:
            return None
        if self.seam is not None:
            return self.outcome_of_rest(self.seam) if self.seam.has_sent_end else None
        tail = self.tail.tail
        if not has_end(self.route, tail):
            return None
        self.gaps.drop_end(self.route)
        return _whole(self, tail)


#: Buffer of one response: above any preamble of an engine, small enough for thousands of responses at once.
BUFFER_BYTES = 64 * 1024
#: Buffer of a withheld answer: forty tokens, so that no long answer waits for its end.
WITHHELD_BYTES = 8 * 1024
#: Bytes of a stream without a token after which other tasks run between chunks: events of ten bytes take a hundred
#: times an ordinary one's time per byte, and a fast replica has the next chunk ready.
YIELD_BYTES = 8 * 1024


async def relay_events(passage: Passage) -> Outcome:
    """Relay an event stream. Raises `UpstreamError` for one that breaks off, or has no end."""
    error_status, outcome = await _begin(passage)
    if outcome is not None:
        return outcome
    reason = TRUNCATED
    try:
        await passage.pass_rest()
    except UpstreamError as failure:
        # An engine that ends may break its connection behind the end of an answer, without the end of its body.
        if error_status is not None or not has_end(passage.route, passage.tail.tail):
            raise
        reason = failure.reason
    passage.gaps.drop_end(passage.route)
    if error_status is not None:
        await passage.end_body()
        return passage.outcome(result_of_stream(error_status), error_status)
    return await _end(passage, reason)


class _Beginning:
    """The beginning of a stream: buffered, and searched for its first token as it comes."""

    __slots__ = ("_buffer", "chunks", "full", "scan", "scanner", "size")

    def __init__(self, route: str, buffer: RequestBuffer) -> None:
        self.scanner = FirstTokenDetector(route)
        self.scan = StreamState.WAITING
        self.chunks: list[bytes] = []
        self.size = 0
        #: There is no memory for more of it.
        self.full = False
        self._buffer = buffer

    async def read(self, source: ResponseSource) -> None:
        """Read up to the first token or error, to the bound of the buffer, or to the end."""
        while True:
            ended = await source.pipe(self._take)
            if ended or self.full or self.scan is not StreamState.WAITING:
                return
            await asyncio.sleep(0)

    def add(self, chunk: bytes, limit: int) -> bool:
        """Buffer a chunk; return whether there is memory for another."""
        self.chunks.append(chunk)
        self.size += len(chunk)
        return self.size <= limit and self._buffer.grow(len(chunk))

    def _take(self, chunk: bytes) -> bool:
        self.scan = self.scanner.feed(chunk)
        if self.scan is not StreamState.WAITING:
            self.chunks.append(chunk)
            self.size += len(chunk)
            return False
        self.full = not self.add(chunk, BUFFER_BYTES)
        return not self.full and self.size <= YIELD_BYTES


async def _begin(passage: Passage) -> tuple[int | None, Outcome | None]:
    """Buffer and send the beginning; return the status of an error in it, and the outcome if nothing was sent."""
    source = passage.source
    begun = _Beginning(passage.route, passage.buffer)
    await begun.read(source)
    scan, error_status = begun.scan, begun.scanner.error_status
    if scan is StreamState.ERROR:
        if (failure := failure_of_event(error_status)) is not None:
            passage.failure_body = b"".join(begun.chunks)
            return None, failure
        while (chunk := await _next_chunk(source)) is not None:
            if not begun.add(chunk, BUFFER_BYTES):
                break
        else:
            return None, passage.refused(b"".join(begun.chunks), error_status)
    if scan is StreamState.WAITING and not begun.full and not begun.scanner.ended:
        raise UpstreamError("no_content")
    if passage.withhold and scan is not StreamState.ERROR:
        withheld = await _withhold(passage, begun)
        if withheld is not None:
            return None, withheld
    await _commit(passage, b"".join(begun.chunks), has_content=scan is StreamState.CONTENT)
    if scan is StreamState.WAITING:
        error_status = await _send_to_first_token(passage, begun.scanner)
    return error_status, None


async def _withhold(passage: Passage, begun: _Beginning) -> Outcome | None:
    """Buffer an answer to its end; return the outcome of a short or failed one, `None` for one to send."""
    try:
        while (chunk := await _next_chunk(passage.source)) is not None:
            passage.timeout.extend(passage.chunk_limit_s)
            if not begun.add(chunk, WITHHELD_BYTES):
                return None
    except UpstreamError:
        if not has_end(passage.route, b"".join(begun.chunks)):
            raise
    stream = b"".join(begun.chunks)
    end = end_of_stream(passage.route, stream)
    if end is not StreamEnd.COMPLETE:
        raise UpstreamError(TRUNCATED if end is StreamEnd.MISSING else ERROR_EVENT)
    tail = UsageReader()
    tail.feed(stream)
    if not _is_short(passage, stream, tail.usage()):
        return None
    passage.tail = tail
    if passage.strip_usage:
        passage.filter = UsageEventFilter()
        stream = passage.filter.feed(stream) + passage.filter.flush()
    return passage.hold(stream)


async def _commit(passage: Passage, head: bytes, *, has_content: bool) -> None:
    """Send the buffer, and then record a first token in it: the client does not wait for the records.

    Called for readable events only, of which a usage event can be removed.
    """
    strip_usage = passage.strip_usage
    if strip_usage:
        passage.filter = UsageEventFilter()
    on_keep = passage.on_keep if has_content else None
    if on_keep is not None:
        on_keep(passage)
    # An answer that goes on at another replica has another length than the engine said.
    await passage.send_head(with_length=not strip_usage and on_keep is None, head=head)
    await passage.forward(head, record=passage.on_content if has_content else None)


async def _send_to_first_token(passage: Passage, scanner: FirstTokenDetector) -> int | None:
    """Relay a stream that outgrew the buffer before its first token, and detect that token or an error's status."""
    while (chunk := await _next_chunk(passage.source)) is not None:
        scan = scanner.feed(chunk)
        await passage.forward(chunk, record=passage.on_content if scan is StreamState.CONTENT else None)
        if scan is not StreamState.WAITING:
            break
        await asyncio.sleep(0)
    return scanner.error_status


async def _end(passage: Passage, reason: str) -> Outcome:
    """End a stream that began without an error; raise `UpstreamError` for one that has no end, or not its last event.

    `reason`: why it may lack that.
    """
    tail = passage.tail.tail
    end = end_of_stream(passage.route, tail)
    if end is StreamEnd.MISSING:
        raise UpstreamError(TRUNCATED)
    if end is StreamEnd.COMPLETE and passage.on_keep is not None and lacks_last_event(passage.route, tail):
        await passage.end_pause()
        raise CutEndError(reason, _whole(passage, tail))
    await passage.end_body()
    if end is StreamEnd.ERROR:
        return replace(passage.outcome(AttemptResult.FAILED_AFTER_CONTENT), error="error_event")
    return _whole(passage, tail)


def _whole(passage: Passage, tail: bytes) -> Outcome:
    """Return the outcome of a stream that has its end, by its last bytes."""
    usage = passage.tail.usage()
    return passage.outcome(AttemptResult.COMPLETED, usage=usage, short=_is_short(passage, tail, usage))


def _is_short(passage: Passage, stream: bytes, usage: Usage | None) -> bool | None:
    return is_short_stream(passage.route, stream, usage, may_be_short=passage.may_be_short)


async def _next_chunk(source: ResponseSource) -> bytes | None:
    """Return one chunk, `None` at the end; for parts of a stream that are rare."""
    taken: list[bytes] = []

    def take(chunk: bytes) -> bool:
        taken.append(chunk)
        return False

    await source.pipe(take)
    return taken[0] if taken else None


#: For the body of a 5xx, s: it comes with its head, and the retry waits for it.
FAILURE_BODY_S = 1.0


def relay(passage: Passage, source: ResponseSource) -> Coroutine[Any, Any, Outcome]:
    """Relay a response; return its outcome. A failure of the source is raised through it."""
    passage.begin(source)
    traits = passage.traits
    if source.status >= 300 or not traits.is_events:
        is_answer = source.status < 300 and traits.is_json and not traits.is_encoded
        return relay_body(passage, MAX_RETAINED_BYTES if is_answer and passage.may_be_retained else BUFFER_BYTES)
    if traits.is_encoded:
        # Unreadable, and its client waits for events: not buffered.
        return relay_body(passage, 0)
    return relay_events(passage)


async def retain_failure(passage: Passage, source: ResponseSource, failure: Outcome) -> Outcome:
    """Retain a small 5xx answer for the Router's decision; return `failure`, which says so."""
    passage.begin(source)
    try:
        async with asyncio.timeout(FAILURE_BODY_S):
            body = source.take_whole(BUFFER_BYTES)
            if body is None:
                body, complete = await _read(passage, BUFFER_BYTES)
                if not complete:
                    return failure
    except (UpstreamError, TimeoutError):
        return failure
    return passage.failed(body, failure)


async def relay_body(passage: Passage, limit: int) -> Outcome:
    """Relay a body, buffered up to `limit` bytes. Raises `UpstreamError` for one that breaks off.

    No first token is recorded: the bytes come after the last token.
    """
    source = passage.source
    body = source.take_whole(limit)
    if body is None:
        body, complete = await _read(passage, limit)
        if not complete:
            return await _send_as_it_comes(passage, body)
    if len(body) > BUFFER_BYTES and source.status < 300 and is_json(body) and body.find(b'"abort"') < 0:
        # Not parsed: a megabyte of it takes 10 ms.
        return await _send_as_it_comes(passage, body, is_whole=True)
    # Else it takes no memory beyond this step, most often the one in which it came.
    if source.status >= 400:
        return passage.refused(body)
    is_plain = not body or not passage.traits.is_encoded
    if is_plain:
        if not is_json(body):
            return passage.hold(body)
        error_status = error_of_body(body)
        if error_status is not None:
            failure = failure_of(error_status)
            return passage.refused(body, error_status) if failure is None else passage.failed(body, failure)
    usage = read_usage(body)
    short = is_short_usage(usage, may_be_short=passage.may_be_short)
    if body and is_plain and lacks_answer(passage.route, body):
        short = True
    if short and passage.withhold:
        return passage.hold(body, usage=usage)
    await passage.send_head(head=body, has_events=False)
    passage.timeout.extend(passage.chunk_limit_s)
    await passage.writer.finish(body)
    return passage.outcome(AttemptResult.COMPLETED, usage=usage, short=short, answer_bytes=len(body))


async def _read(passage: Passage, limit: int) -> tuple[bytes, bool]:
    """Return the body, or what came of it up to the bound of the buffer; and whether it is the whole one."""
    chunks: list[bytes] = []
    size, buffer = 0, passage.buffer

    def take(chunk: bytes) -> bool:
        nonlocal size
        chunks.append(chunk)
        size += len(chunk)
        return size <= limit and buffer.grow(len(chunk))

    complete = await passage.source.pipe(take)
    return b"".join(chunks), complete


async def _send_as_it_comes(passage: Passage, head: bytes, *, is_whole: bool = False) -> Outcome:
    await passage.send_head(head=head, has_events=not is_whole)
    for at in range(0, max(1, len(head)), BUFFER_BYTES):
        passage.timeout.extend(passage.chunk_limit_s)
        await passage.forward(head[at : at + BUFFER_BYTES])
    if not is_whole:
        await passage.pass_rest()
    await passage.end_body()
    passage.gaps.drop_all()
    return passage.outcome(AttemptResult.COMPLETED if passage.source.status < 400 else AttemptResult.UPSTREAM_4XX)
