"""The client's end of one relay: head, chunks and end, and what is measured on their way.

Owns the hot loop, the gaps between chunks, the usage at the end, and an answer that is retained instead of sent. When
what is sent is decided by `event_stream` and `whole_body`.

Theory of operation: after the first token each read of the replica's connection calls `_pass`, which counts the chunk
and writes it to the client's connection in the same step. The task of the request sleeps meanwhile. It wakes to wait
for a client that does not read, to let others run between the parts of a chunk, and at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.stream import Usage, UsageEventFilter, UsageReader
from gorgo.live.http.headers import downstream_headers
from gorgo.live.http.timeout import ResettableTimeout
from gorgo.live.request.gaps import Gaps, is_comment
from gorgo.live.upstream.client import ResponseSource
from gorgo.proxy.exchange.refusal import Refusal
from gorgo.proxy.exchange.relay_options import RelayOptions
from gorgo.proxy.http.response_writer import ResponseWriter

#: Routes on which each event of a stream has a name.
_NAMED_EVENTS = frozenset({"/v1/responses", "/v1/messages"})


class Passage:
    """Passes one response on."""

    __slots__ = (
        "_chunk_limit_s",
        "_try_write",
        "_unsent",
        "filter",
        "gaps",
        "options",
        "refusal",
        "source",
        "tail",
        "timeout",
        "writer",
    )

    def __init__(
        self, source: ResponseSource, writer: ResponseWriter, timeout: ResettableTimeout, options: RelayOptions
    ) -> None:
        self.source = source
        self.writer = writer
        self.timeout = timeout
        self.options = options
        self.tail = UsageReader()
        #: Set where the usage event is removed.
        self.filter: UsageEventFilter | None = None
        #: A complete answer that has not been sent.
        self.refusal: Refusal | None = None
        self.gaps = Gaps()
        self._chunk_limit_s = options.chunk_limit_s
        self._try_write = writer.try_write
        #: A chunk for which the client's connection had no room.
        self._unsent = b""

    # -- what is sent

    async def send_head(self, *, head: bytes, with_length: bool = True, has_events: bool = True) -> None:
        """Send the head of the response. `head` is the first part of its body, which is sent next.

        Without `has_events` it is known to be no stream of them.
        """
        options, source = self.options, self.source
        options.on_commit()
        headers = downstream_headers(source.headers, with_length=with_length, passed=options.passed_headers)
        headers.extend(options.own_headers)
        # A filter may withhold all of it.
        follows = bool(head) and self.filter is None
        names_events = options.route in _NAMED_EVENTS
        await self.writer.start(
            source.status, headers, names_events=names_events, body_follows=follows, has_events=has_events
        )
        self._try_write = self.writer.try_write
        if options.on_head is not None:
            options.on_head(head)

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
        self.timeout.extend(self._chunk_limit_s)
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
            self.timeout.deadline = now + self._chunk_limit_s
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
        with self.options.buffer.stalled(self.timeout):
            await self.writer.write(chunk)
        self.writer.sending = False

    # -- what is retained

    def retain(self, body: bytes) -> None:
        """Retain a whole answer for the Router's decision."""
        # A 204 has no body: a client that reads its length would wait for one.
        stripped = self.filter is not None or self.source.status == 204
        headers = downstream_headers(self.source.headers, with_length=not stripped, passed=self.options.passed_headers)
        self.refusal = Refusal(self.source.status, [*headers, *self.options.own_headers], body)

    def hold(self, body: bytes, *, usage: Usage | None = None) -> Outcome:
        """Retain a doubtful answer; return its outcome."""
        self.retain(body)
        return replace(self.outcome(AttemptResult.COMPLETED, usage=usage), short=True, unsent=True)

    def refused(self, body: bytes, status: int | None = None) -> Outcome:
        """Retain a refusal; return its outcome."""
        self.retain(body)
        return Outcome(AttemptResult.UPSTREAM_4XX, status=status or self.source.status, unsent=True)

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
