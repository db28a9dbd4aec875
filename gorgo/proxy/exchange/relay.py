"""One response from its source to the client: buffered up to the first token, then passed on chunk by chunk.

Owns buffering, the first token, the gaps between chunks and the usage at the end. Leaves retries and records to the
exchange. Bytes are never decoded, split or joined, except that the buffer is sent in one piece.

Theory of operation: up to the first token (of an event stream) or the end (of any other body) nothing has been sent. A
response that fails before can be replaced by another replica's without the client's notice. A 4xx is not sent at all:
`refusal` has it for the Router's decision. Beyond `BUFFER_BYTES` the response is sent as it is. With `withhold` a short
stream is treated like a 4xx, and one that breaks off like any failure.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from time import monotonic

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
    is_json,
    is_short,
    read_usage,
)
from gorgo.proxy.exchange.judgement import failure_of, failure_of_event, p95, result_of_stream
from gorgo.proxy.exchange.refusal import Refusal
from gorgo.proxy.exchange.relay_options import SHORT_BYTES, WITHHELD_BYTES, RelayOptions
from gorgo.proxy.http.headers import downstream_headers, is_encoded, is_event_stream
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
        size, full = 0, False
        scan = StreamState.WAITING
        async for chunk in chunks:
            buffered.append(chunk)
            size += len(chunk)
            scan = scanner.feed(chunk)
            if scan is not StreamState.WAITING:
                break
            full = size > BUFFER_BYTES or not self._options.buffer.grow(len(chunk))
            if full:
                break
            if size > YIELD_BYTES:
                await asyncio.sleep(0)
        if scan is StreamState.ERROR:
            if (failure := failure_of_event(scanner.error_status)) is not None:
                return failure
            async for chunk in chunks:
                buffered.append(chunk)
                size += len(chunk)
                if size > BUFFER_BYTES or not self._options.buffer.grow(len(chunk)):
                    break
            else:
                return self._refused(b"".join(buffered), scanner.error_status)
        if scan is StreamState.WAITING and not full and not scanner.ended:
            raise UpstreamError("no_content")
        if self._options.withhold and scan is not StreamState.ERROR:
            withheld = await self._withhold(buffered, chunks)
            if withheld is not None:
                return withheld
        if scan is StreamState.CONTENT:
            self._options.on_content()
        await self._commit(b"".join(buffered))
        if scan is StreamState.WAITING:
            await self._stream_to_first_token(chunks, scanner)
        await self._stream(chunks)
        self._drop_end_gaps()
        if scanner.error_status is not None:
            await self._finish()
            return self._outcome(result_of_stream(scanner.error_status), scanner.error_status)
        return await self._end()

    async def _withhold(self, buffered: list[bytes], chunks: AsyncIterator[bytes]) -> Outcome | None:
        """Buffer an answer to its end; return the outcome of a short or failed one, `None` for one to send."""
        size = sum(map(len, buffered))
        async for chunk in chunks:
            buffered.append(chunk)
            size += len(chunk)
            self._timeout.extend(self._options.chunk_limit_s)
            if size > WITHHELD_BYTES or not self._options.buffer.grow(len(chunk)):
                return None
        stream = b"".join(buffered)
        end = end_of_stream(self._options.route, stream)
        if end is not StreamEnd.COMPLETE:
            raise UpstreamError("truncated" if end is StreamEnd.MISSING else "error_event")
        self._tail.feed(stream)
        if not self._is_short(stream, self._tail.usage()):
            self._tail = UsageReader()
            return None
        if self._options.strip_usage:
            self._filter = UsageEventFilter()
            stream = self._filter.feed(stream) + self._filter.flush()
        return self._hold(stream)

    async def _end(self) -> Outcome:
        """End a stream that began without an error; raise `UpstreamError` for one that has no end."""
        tail = self._tail.tail
        end = end_of_stream(self._options.route, tail)
        if end is StreamEnd.MISSING:
            raise UpstreamError("truncated")
        await self._finish()
        if end is StreamEnd.ERROR:
            return replace(self._outcome(AttemptResult.FAILED_AFTER_CONTENT), error="error_event")
        usage = self._tail.usage()
        return self._outcome(AttemptResult.COMPLETED, usage=usage, short=self._is_short(tail, usage))

    def _is_short(self, stream: bytes, usage: Usage | None) -> bool | None:
        if len(stream) > SHORT_BYTES or not is_short(self._options.route, stream, usage):
            return False
        return True if self._options.may_be_short else None

    async def _finish(self) -> None:
        await self._writer.finish(b"" if self._filter is None else self._filter.flush())

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
        try_write, strip, feed_tail = self._writer.try_write, self._filter, self._tail.feed
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
                await self._write(passed)

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
        if chunk and not self._writer.try_write(chunk):
            await self._write(chunk)

    async def _write(self, chunk: bytes) -> None:
        self._writer.sending = True
        with self._options.buffer.stalled(self._timeout):
            await self._writer.write(chunk)
        self._writer.sending = False

    async def _commit(self, head: bytes) -> None:
        """Send the buffer. Called for readable events only, of which a usage event can be removed."""
        if self._options.strip_usage:
            self._filter = UsageEventFilter()
        await self._start(with_length=not self._options.strip_usage, head=head)
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
            if size > limit or not self._options.buffer.grow(len(chunk)):
                return await self._oversized(b"".join(buffered), chunks)
        body = b"".join(buffered)
        if self._source.status >= 400:
            return self._refused(body)
        if not body or not is_encoded(self._source.headers):
            if not is_json(body):
                return self._hold(body)
            error_status = error_of_body(body)
            if error_status is not None:
                return failure_of(error_status) or self._refused(body, error_status)
        usage = read_usage(body)
        tokens = None if usage is None else usage.output_tokens
        short = (True if self._options.may_be_short else None) if tokens is not None and tokens <= 1 else False
        if short and self._options.withhold:
            return self._hold(body, usage=usage)
        await self._start(head=body)
        self._timeout.extend(self._options.chunk_limit_s)
        await self._writer.finish(body)
        return self._outcome(AttemptResult.COMPLETED, usage=usage, short=short)

    def _hold(self, body: bytes, *, usage: Usage | None = None) -> Outcome:
        """Retain a doubtful answer for the Router's decision."""
        self._retain(body)
        return replace(self._outcome(AttemptResult.COMPLETED, usage=usage), short=True, unsent=True)

    def _refused(self, body: bytes, status: int | None = None) -> Outcome:
        self._retain(body)
        return Outcome(AttemptResult.UPSTREAM_4XX, status=status or self._source.status, unsent=True)

    def _retain(self, body: bytes) -> None:
        # A 204 has no body: a client that reads its length would wait for one.
        stripped = self._filter is not None or self._source.status == 204
        headers = downstream_headers(
            self._source.headers, with_length=not stripped, passed=self._options.passed_headers
        )
        self.refusal = Refusal(self._source.status, [*headers, *self._options.own_headers], body)

    async def _oversized(self, head: bytes, chunks: AsyncIterator[bytes]) -> Outcome:
        await self._start(head=head)
        self._timeout.extend(self._options.chunk_limit_s)
        await self._forward(head)
        await self._stream(chunks)
        await self._finish()
        # Pieces of one body are not tokens.
        del self._gaps[:]
        return self._outcome(AttemptResult.COMPLETED if self._source.status < 400 else AttemptResult.UPSTREAM_4XX)

    async def _start(self, *, head: bytes, with_length: bool = True) -> None:
        self._options.on_commit()
        headers = downstream_headers(self._source.headers, with_length=with_length, passed=self._options.passed_headers)
        headers.extend(self._options.own_headers)
        named = self._options.route in _NAMED_EVENTS
        await self._writer.start(self._source.status, headers, names_events=named)
        if self._options.on_head is not None:
            self._options.on_head(head)

    def _outcome(
        self,
        result: AttemptResult,
        status: int | None = None,
        *,
        usage: Usage | None = None,
        short: bool | None = False,
    ) -> Outcome:
        usage = usage or (None if self._filter is None else self._filter.usage) or self._tail.usage()
        return Outcome(
            result,
            status=self._source.status if status is None else status,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            cached_tokens=None if usage is None else usage.cached_tokens,
            output_tokens=None if usage is None else usage.output_tokens,
            itl_s_p95=p95(self._gaps),
            short=short,
        )
