"""One response from its source to the client: buffered up to the first token, then passed on chunk by chunk.

Owns buffering, the first token, the gaps between chunks and the usage at the end. Leaves retries and records to the
exchange. Bytes are never decoded, split or joined, except that the buffer is sent in one piece.

Theory of operation: up to the first token (of an event stream) or the end (of any other body) nothing has been sent. A
response that fails before can be replaced by another replica's without the client's notice. A 4xx is not sent at all:
`refusal` has it for the Router's decision. Beyond `BUFFER_BYTES` the response is sent as it is.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from math import ceil
from time import monotonic

from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.stream import FirstTokenDetector, StreamState, Usage, UsageEventFilter, UsageReader, read_usage
from gorgo.proxy.exchange.refusal import Refusal
from gorgo.proxy.http.headers import Header, downstream_headers, find, is_encoded, is_event_stream
from gorgo.proxy.http.response_writer import ResponseWriter
from gorgo.proxy.http.timeout import ResettableTimeout
from gorgo.proxy.upstream.client import ResponseSource, UpstreamError

#: Buffer of one response: above any preamble of an engine, small enough for thousands of responses at once.
BUFFER_BYTES = 64 * 1024
#: Bytes of a stream without a token after which other tasks run between chunks: events of ten bytes take a hundred
#: times an ordinary one's time per byte, and a fast replica has the next chunk ready.
YIELD_BYTES = 8 * 1024
#: Gaps recorded per response for its p95; the first 4,096 stand for longer responses.
MAX_GAPS = 4096
#: Events of a dialect's end that carry no token, at most: a finish reason, usage, `[DONE]` and the like.
END_EVENTS = 4
#: A longer chunk at the end counts as tokens.
END_CHUNK_BYTES = 4 * 1024
#: Routes on which each event of a stream has a name.
_NAMED_EVENTS = frozenset({"/v1/responses", "/v1/messages"})


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """Options of one relay.

    Parameters
    ----------
    route:
        Path of the request, on which the form of a token depends.
    own_headers:
        Sent after the replica's.
    chunk_limit_s:
        Longest silence between two chunks after the first token, comments aside, and longest stall of the client.
    strip_usage:
        Remove the usage event: the proxy requested it, not the client.
    passed_headers:
        Allowed by an operator beside those that always pass.
    on_content:
        Called once, at the first token, before it is sent.
    on_commit:
        Called before anything is sent: from then on no other attempt may respond.
    on_head:
        Called with the first bytes that are sent.
    """

    route: str
    own_headers: Sequence[Header]
    chunk_limit_s: float
    strip_usage: bool
    on_content: Callable[[], None]
    on_commit: Callable[[], None]
    on_head: Callable[[bytes], None] | None = None
    passed_headers: frozenset[bytes] = frozenset()


class Relay:
    """Relays one response. `run` returns its outcome; a failure of the source is raised through it."""

    __slots__ = ("_filter", "_gaps", "_options", "_recent", "_source", "_tail", "_timeout", "_writer", "refusal")

    def __init__(
        self, source: ResponseSource, writer: ResponseWriter, timeout: ResettableTimeout, options: RelayOptions
    ) -> None:
        self._source = source
        self._writer = writer
        self._timeout = timeout
        self._options = options
        self._gaps = array("d")
        #: The last chunks that have a gap.
        self._recent: deque[bytes] = deque(maxlen=END_EVENTS)
        self._tail = UsageReader()
        self._filter: UsageEventFilter | None = None
        #: A complete 4xx that has not been sent.
        self.refusal: Refusal | None = None

    async def run(self) -> Outcome:
        async with self._source.chunks() as chunks:
            if self._source.status >= 300 or not is_event_stream(self._source.headers):
                return await self._buffered(chunks, BUFFER_BYTES)
            if is_encoded(self._source.headers):
                # Unreadable, and its client waits for events: not buffered.
                return await self._buffered(chunks, 0)
            return await self._events(chunks)

    async def _events(self, chunks: AsyncIterator[bytes]) -> Outcome:
        """Relay an event stream, buffered up to its first token."""
        scanner = FirstTokenDetector(self._options.route)
        buffered: list[bytes] = []
        size = 0
        scan = StreamState.WAITING
        async for chunk in chunks:
            buffered.append(chunk)
            size += len(chunk)
            scan = scanner.feed(chunk)
            if scan is not StreamState.WAITING or size > BUFFER_BYTES:
                break
            if size > YIELD_BYTES:
                await asyncio.sleep(0)
        if scan is StreamState.ERROR:
            if (failure := _failed(scanner.error_status)) is not None:
                return failure
            async for chunk in chunks:
                buffered.append(chunk)
                size += len(chunk)
                if size > BUFFER_BYTES:
                    break
            else:
                return self._refused(b"".join(buffered), scanner.error_status)
        if scan is StreamState.CONTENT:
            self._options.on_content()
        elif scan is StreamState.WAITING and size <= BUFFER_BYTES and not scanner.ended:
            raise UpstreamError("no_content")
        await self._commit(b"".join(buffered))
        if scan is StreamState.WAITING:
            await self._stream_to_first_token(chunks, scanner)
        await self._stream(chunks)
        self._drop_end_gaps()
        return self._outcome(_result_of_stream(scanner.error_status), scanner.error_status)

    async def _stream_to_first_token(self, chunks: AsyncIterator[bytes], scanner: FirstTokenDetector) -> None:
        """Relay a stream that outgrew the buffer before its first token, and detect that token."""
        async for chunk in chunks:
            scan = scanner.feed(chunk)
            if scan is StreamState.CONTENT:
                self._options.on_content()
            await self._forward(chunk)
            if scan is not StreamState.WAITING:
                return
            await asyncio.sleep(0)

    async def _stream(self, chunks: AsyncIterator[bytes]) -> None:
        """Relay the rest: the hot loop. `_forward` is inlined, because every event pays for each call."""
        timeout, gaps, limit_s = self._timeout, self._gaps, self._options.chunk_limit_s
        writer, try_write, strip, feed_tail = self._writer, self._writer.try_write, self._filter, self._tail.feed
        recent = self._recent
        last = monotonic()
        timeout.extend(limit_s)
        async for chunk in chunks:
            if chunk[:1] != b":" or b"data:" in chunk:
                now = monotonic()
                timeout.deadline = now + limit_s
                if len(gaps) < MAX_GAPS:
                    gaps.append(now - last)
                    recent.append(chunk)
                last = now
            # Else a comment, which keeps a connection alive and is no part of the response.
            feed_tail(chunk)
            passed = chunk if strip is None else strip.feed(chunk)
            if passed is not chunk:
                await asyncio.sleep(0)  # the chunk was split into its events
            if passed and not try_write(passed):
                writer.sending = True
                await writer.write(passed)
                writer.sending = False
        await writer.finish(b"" if strip is None else strip.flush())

    def _drop_end_gaps(self) -> None:
        """Remove the gaps of the last chunks without a token. Done once per stream, to keep the hot loop short."""
        if len(self._gaps) == MAX_GAPS:
            return
        while self._recent:
            chunk = self._recent.pop()
            if len(chunk) > END_CHUNK_BYTES:
                return
            if FirstTokenDetector(self._options.route).feed(chunk) is StreamState.CONTENT:
                return
            self._gaps.pop()

    async def _forward(self, chunk: bytes) -> None:
        self._tail.feed(chunk)
        if self._filter is not None:
            chunk = self._filter.feed(chunk)
        if chunk:
            self._writer.sending = True
            await self._writer.write(chunk)
            self._writer.sending = False

    async def _commit(self, head: bytes) -> None:
        """Send the buffer. Called for readable events only, of which a usage event can be removed."""
        if self._options.strip_usage:
            self._filter = UsageEventFilter()
        await self._start(with_length=not self._options.strip_usage)
        self._report_head(head)
        await self._forward(head)

    async def _buffered(self, chunks: AsyncIterator[bytes], limit: int) -> Outcome:
        """Relay anything but readable events, buffered up to its end or `limit`.

        No first token is recorded: the bytes come after the last token.
        """
        buffered: list[bytes] = []
        size = 0
        async for chunk in chunks:
            buffered.append(chunk)
            size += len(chunk)
            if size > limit:
                return await self._oversized(b"".join(buffered), chunks)
        body = b"".join(buffered)
        if self._source.status >= 400:
            return self._refused(body)
        await self._start()
        self._report_head(body)
        self._timeout.extend(self._options.chunk_limit_s)
        await self._writer.finish(body)
        return self._outcome(self._result_of_buffered(), usage=read_usage(body))

    def _refused(self, body: bytes, status: int | None = None) -> Outcome:
        headers = downstream_headers(self._source.headers, passed=self._options.passed_headers)
        self.refusal = Refusal(self._source.status, [*headers, *self._options.own_headers], body)
        status = self._source.status if status is None else status
        return Outcome(AttemptResult.UPSTREAM_4XX, status=status, unsent=True)

    async def _oversized(self, head: bytes, chunks: AsyncIterator[bytes]) -> Outcome:
        await self._start()
        self._report_head(head)
        self._timeout.extend(self._options.chunk_limit_s)
        await self._forward(head)
        await self._stream(chunks)
        # Pieces of one body are not tokens.
        del self._gaps[:]
        return self._outcome(self._result_of_buffered())

    def _result_of_buffered(self) -> AttemptResult:
        return AttemptResult.COMPLETED if self._source.status < 400 else AttemptResult.UPSTREAM_4XX

    async def _start(self, *, with_length: bool = True) -> None:
        self._options.on_commit()
        # A 204 has no body: a client that reads its length would wait for one.
        with_length = with_length and self._source.status != 204
        headers = downstream_headers(self._source.headers, with_length=with_length, passed=self._options.passed_headers)
        headers.extend(self._options.own_headers)
        named = self._options.route in _NAMED_EVENTS
        await self._writer.start(self._source.status, headers, names_events=named)

    def _report_head(self, head: bytes) -> None:
        if self._options.on_head is not None:
            self._options.on_head(head)

    def _outcome(self, result: AttemptResult, status: int | None = None, *, usage: Usage | None = None) -> Outcome:
        usage = usage or (None if self._filter is None else self._filter.usage) or self._tail.usage()
        return Outcome(
            result,
            status=self._source.status if status is None else status,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            cached_tokens=None if usage is None else usage.cached_tokens,
            output_tokens=None if usage is None else usage.output_tokens,
            itl_s_p95=_p95(self._gaps),
        )


def failure_of(status: int, headers: Sequence[Header] = ()) -> Outcome | None:
    """Return the outcome of an error status before any content: busy or failed; None for a response to relay."""
    if status in (429, 503):
        retry_after_s = _seconds(find(headers, b"retry-after") or b"")
        return Outcome(AttemptResult.BUSY, status=status, error=f"status_{status}", retry_after_s=retry_after_s)
    if not 200 <= status < 300 and not 400 <= status < 500:
        # Redirects too: they are not followed.
        return Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=status, error=f"status_{status}")
    return None


def _result_of_stream(error_status: int | None) -> AttemptResult:
    """Return the result of a complete stream; `error_status` is that of an error event before any content."""
    if error_status is None:
        return AttemptResult.COMPLETED
    return AttemptResult.UPSTREAM_4XX if failure_of(error_status) is None else AttemptResult.FAILED_AFTER_CONTENT


def _failed(error_status: int | None) -> Outcome | None:
    return failure_of(500 if error_status is None else error_status)


def _seconds(retry_after: bytes) -> float | None:
    """Return the seconds of a `Retry-After`; `None` without one, or for a date."""
    return float(retry_after) if retry_after.isdigit() and len(retry_after) < 10 else None


def _p95(gaps: array[float]) -> float | None:
    return sorted(gaps)[ceil(0.95 * len(gaps)) - 1] if gaps else None
