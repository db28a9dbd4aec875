"""One response on its way from a replica to the client: what of it is passed, retained, and measured.

Owns the hot loop, whole events, the usage at the end, and an answer that is retained instead of sent. Leaves when a
chunk is written to `ClientStream`, and when the response is sent at all to `gorgo.proxy.exchange.relay`. Bytes are
never decoded, split or joined, except that the buffer is sent in one piece.

Theory of operation: after the first token each read of the replica's connection calls `_pass`, which counts the
chunk and writes it to the client's connection in the same step. The task of the request sleeps meanwhile. It wakes
to wait for a client that does not read, to let others run between the parts of a chunk, and at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from gorgo.core.continuation import (
    MAX_EVENT_BYTES,
    Seam,
    first_error,
    lacks_last_event,
    last_event,
    whole_events,
)
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.stream import Usage, UsageEventFilter, UsageReader, has_end, may_have_error
from gorgo.live.http.body import RequestBuffer, ResettableTimeout
from gorgo.live.http.headers import EncodedHeaders, Header, ResponseTraits, client_headers, read_response
from gorgo.live.request.parse import Gaps, exceeds_context, is_comment, is_short_stream
from gorgo.live.upstream.client import ResponseSource, UpstreamError
from gorgo.live.upstream.target import RunningStream
from gorgo.proxy.exchange.response import AnswerOwner, ClientStream, ResponseWriter

#: The reason of an attempt whose engine sent an error in the middle of its answer.
ERROR_EVENT = "error_event"
#: Retained of one answer that may have to be continued, and by how much the reservation grows: 5,000 events of an
#: ordinary size, and those of some seconds.
MAX_RETAINED_BYTES = 1024 * 1024
KEEP_STEP_BYTES = 32 * 1024
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
        "_plain_end",
        "_plain_size",
        "_rest_bytes",
        "_rest_limit",
        "buffer",
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
        "stream",
        "strip_usage",
        "tail",
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
        self.buffer = buffer
        self.route = route
        self.own_headers = own_headers
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
        self.stream = ClientStream(writer, timeout, buffer, self.gaps, chunk_limit_s=chunk_limit_s)
        #: Pass whole events alone, so that the answer can go on behind the last of them, and none that is an error.
        self.whole_only = False
        #: What is not passed yet: the beginning of an event, or from an error event on.
        self.withheld = b""
        #: The engine has sent an error in the middle of its answer, which is withheld.
        self.has_error = False
        #: How the last chunk ended, if it was whole events without an error and nothing before it waits to be passed.
        self._plain_end = b""
        self._plain_size = END_BYTES
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
        self.stream.head_sent()
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
        is_sent = not passed or self.stream.try_write(passed)
        self.tail.feed(chunk)
        if record is not None:
            record()
        if not is_sent:
            await self.stream.write(passed)

    async def pass_rest(self) -> None:
        """Send the rest of the body as it comes."""
        self.stream.extend()
        self.gaps.last_s = monotonic()
        while not self.has_error and not await self.source.pipe(self._pass):
            if not await self.stream.write_unsent():
                await asyncio.sleep(0)  # the chunk was split into its events
        if self.has_error:
            raise UpstreamError(ERROR_EVENT)
        if self.withheld:
            self.whole_only = False
            rest, self.withheld = self.withheld, b""
            await self.forward(rest)

    def keep(self, owner: AnswerOwner, others: Iterable[RunningStream]) -> None:
        """Retain what is passed of an answer that may have to go on at another replica, and follow its stream."""
        self.whole_only = True
        self.tail.keep(self._keep_more)
        self.stream.follow(owner, others)

    def release(self) -> None:
        """Forget who owns the answer, and its bytes: both would wait for the garbage collector."""
        self._stop_keeping()
        self.stream.release()

    def give_up(self) -> None:
        """Pass the rest of the answer as it comes: it can no longer go on elsewhere."""
        self._stop_keeping()
        self.stream.give_up()

    def _stop_keeping(self) -> None:
        self.whole_only = False
        self.tail.stop_keeping()

    def _keep_more(self, size: int) -> int:
        owner = self.stream.owner
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
        if self.stream.is_paused:
            await self.stream.end_pause()
        await self.writer.finish(b"" if self.filter is None else self.filter.flush())

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
        stream, now = self.stream, monotonic()
        stream.timeout.deadline = now + stream.chunk_limit_s
        self.gaps.add(chunk, now)
        self.tail.feed(chunk)
        if stream.try_write(chunk):
            return True
        stream.unsent, stream.unsent_bytes = chunk, len(chunk)
        return False

    def _pass_checked(self, chunk: bytes) -> bool:
        """Do the same with a chunk that does not end as the one before it: it is searched."""
        self._plain_end = b""
        stream = self.stream
        if chunk[:1] != b":" or not is_comment(chunk):
            now = monotonic()
            stream.timeout.deadline = now + stream.chunk_limit_s
            self.gaps.add(chunk, now)
            is_plain = not self.withheld and chunk[-2:] == b"\n\n" and not may_have_error(chunk)
        else:
            is_plain = False
        if self.whole_only and not is_plain:
            chunk = self._whole_events(chunk)
            if self.has_error and stream.is_paused:
                return False  # the answer goes on elsewhere, from where that was asked for
            if not chunk and not self.has_error:
                return True
        elif self.withheld:
            chunk, self.withheld = self.withheld + chunk, b""
        self.tail.feed(chunk)
        passed = chunk if self.filter is None else self.filter.feed(chunk)
        if self.has_error:
            stream.unsent, stream.unsent_bytes = passed, len(chunk)
            return False
        if is_plain and (self.filter is None or (passed == chunk and not self.filter.pending)):
            self._plain_end = end_of_token(chunk)
            self._plain_size = len(self._plain_end)
        if passed and not stream.try_write(passed):
            stream.unsent, stream.unsent_bytes = passed, len(chunk)
            return False
        return passed is chunk

    @property
    def sent_stream(self) -> bytes | None:
        """What the client has of the stream, if all of it is retained."""
        whole, unsent_bytes = self.tail.whole, self.stream.unsent_bytes
        return whole if whole is None or not unsent_bytes else whole[:-unsent_bytes]

    async def write_rest(self, events: bytes) -> None:
        """Send events of the rest of an answer."""
        stream = self.stream
        if not stream.try_write(events):
            await stream.write(events)
        self._rest_bytes += len(events)
        if stream.owner is not None and self._rest_bytes > self._rest_limit:
            self._rest_limit = self._keep_more(self._rest_bytes)
            if self._rest_limit <= self._rest_bytes:
                stream.owner.drop()

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
        if self.stream.is_behind:
            return None
        if self.seam is not None:
            return self.outcome_of_rest(self.seam) if self.seam.has_sent_end else None
        tail = self.tail.tail
        if not has_end(self.route, tail):
            return None
        self.gaps.drop_end(self.route)
        return self.outcome_of_whole(tail)

    def outcome_of_whole(self, tail: bytes) -> Outcome:
        """Return the outcome of a stream that has its end, by its last bytes."""
        usage = self.tail.usage()
        return self.outcome(AttemptResult.COMPLETED, usage=usage, short=self.is_short(tail, usage))

    def is_short(self, stream: bytes, usage: Usage | None) -> bool | None:
        """Return whether an answer has less than its request asks for, by its last bytes; `None` is unknown."""
        return is_short_stream(self.route, stream, usage, may_be_short=self.may_be_short)
