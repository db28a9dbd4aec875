"""The client's end of one relay: head, chunks and end, and what is measured on their way.

Owns the hot loop, the gaps between chunks, the usage at the end, and an answer that is retained instead of sent. When
what is sent is decided by `relay`.

Theory of operation: after the first token each read of the replica's connection calls `_pass`, which counts the chunk
and writes it to the client's connection in the same step. The task of the request sleeps meanwhile. It wakes to wait
for a client that does not read, to let others run between the parts of a chunk, and at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.stream import Usage, UsageEventFilter, UsageReader
from gorgo.live.http.body import RequestBuffer, ResettableTimeout
from gorgo.live.http.headers import Header, downstream_headers
from gorgo.live.request.gaps import Gaps, is_comment
from gorgo.live.upstream.client import ResponseSource
from gorgo.proxy.response_writer import ResponseWriter

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
    withhold:
        Withhold a doubtful answer up to a bound instead of sending it.
    may_be_short:
        Whether one token is less than the request asks for.
    passed_headers:
        Allowed by an operator beside those that always pass.
    """

    __slots__ = (
        "_try_write",
        "_unsent",
        "buffer",
        "chunk_limit_s",
        "filter",
        "gaps",
        "may_be_short",
        "on_commit",
        "on_content",
        "on_head",
        "own_headers",
        "passed_headers",
        "refusal",
        "route",
        "source",
        "strip_usage",
        "tail",
        "timeout",
        "withhold",
        "writer",
    )
    source: ResponseSource

    def __init__(
        self,
        writer: ResponseWriter,
        timeout: ResettableTimeout,
        buffer: RequestBuffer,
        *,
        route: str,
        own_headers: Sequence[Header],
        chunk_limit_s: float,
        strip_usage: bool,
        on_content: Callable[[], None],
        on_commit: Callable[[], None],
        on_head: Callable[[bytes], None] | None = None,
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
        self.withhold = withhold
        self.may_be_short = may_be_short
        self.passed_headers = passed_headers
        self.tail = UsageReader()
        #: Set where the usage event is removed.
        self.filter: UsageEventFilter | None = None
        #: A complete answer that has not been sent.
        self.refusal: Refusal | None = None
        self.gaps = Gaps()
        self._try_write = writer.try_write
        #: A chunk for which the client's connection had no room.
        self._unsent = b""

    # -- what is sent

    async def send_head(self, *, head: bytes, with_length: bool = True, has_events: bool = True) -> None:
        """Send the head of the response. `head` is the first part of its body, which is sent next.

        Without `has_events` it is known to be no stream of them.
        """
        source = self.source
        self.on_commit()
        headers = downstream_headers(source.headers, with_length=with_length, passed=self.passed_headers)
        headers.extend(self.own_headers)
        # A filter may withhold all of it.
        follows = bool(head) and self.filter is None
        names_events = self.route in _NAMED_EVENTS
        await self.writer.start(
            source.status, headers, names_events=names_events, body_follows=follows, has_events=has_events
        )
        self._try_write = self.writer.try_write
        if self.on_head is not None:
            self.on_head(head)

    async def forward(self, chunk: bytes, *, record: Callable[[], None] | None = None) -> None:
        """Send a part of the body. Call `record` once that is done, or as soon as it has to wait for the client."""
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
        while not await self.source.pipe(self._pass):
            unsent, self._unsent = self._unsent, b""
            if unsent:
                await self._write(unsent)
            else:
                await asyncio.sleep(0)  # the chunk was split into its events

    async def end_body(self) -> None:
        """Send the end of the body."""
        await self.writer.finish(b"" if self.filter is None else self.filter.flush())

    def _pass(self, chunk: bytes) -> bool:
        """Send a chunk, and count it; return whether the next one may come in the same step. The hot loop."""
        if chunk[:1] != b":" or not is_comment(chunk):
            now = monotonic()
            self.timeout.deadline = now + self.chunk_limit_s
            self.gaps.add(chunk, now)
        self.tail.feed(chunk)
        if self.filter is None:
            if self._try_write(chunk):
                return True
            self._unsent = chunk
            return False
        passed = self.filter.feed(chunk)
        if passed and not self._try_write(passed):
            self._unsent = passed
            return False
        return passed is chunk

    async def _write(self, chunk: bytes) -> None:
        self.writer.sending = True
        with self.buffer.stalled(self.timeout):
            await self.writer.write(chunk)
        self.writer.sending = False

    # -- what is retained

    def retain(self, body: bytes) -> None:
        """Retain a whole answer for the Router's decision."""
        # A 204 has no body: a client that reads its length would wait for one.
        stripped = self.filter is not None or self.source.status == 204
        headers = downstream_headers(self.source.headers, with_length=not stripped, passed=self.passed_headers)
        self.refusal = Refusal(self.source.status, [*headers, *self.own_headers], body)

    def hold(self, body: bytes, *, usage: Usage | None = None) -> Outcome:
        """Retain a doubtful answer; return its outcome."""
        self.retain(body)
        return replace(self.outcome(AttemptResult.COMPLETED, usage=usage), short=True, unsent=True)

    def refused(self, body: bytes, status: int | None = None) -> Outcome:
        """Retain a refusal; return its outcome."""
        self.retain(body)
        return Outcome(AttemptResult.UPSTREAM_4XX, status=status or self.source.status, unsent=True)

    def failed(self, body: bytes, failure: Outcome) -> Outcome:
        """Retain the answer of a failure; return its outcome. The client gets it if other replicas fail alike."""
        self.retain(body)
        return replace(failure, unsent=True)

    # -- what is measured

    def outcome(
        self,
        result: AttemptResult,
        status: int | None = None,
        *,
        usage: Usage | None = None,
        short: bool | None = False,
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
        )
