"""One answer on its way from a source to a sink: withheld until it is worth committing to, then passed as it comes.

Owns withholding, the first content, the gaps between chunks and the usage at the end. Leaves retries and accounting to
the exchange, connections to `upstream`, and the server to `sink`. Bytes are never decoded, split or joined on the way,
except that what was withheld goes out in one piece.

Theory of operation: up to the first content (of an event stream) or to the end (of anything else), nothing has been
sent, so an answer that breaks off can be replaced by another replica's without the client's notice. At most
`BUFFER_BYTES` are held; beyond, the answer is committed to as it is.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from math import ceil
from time import monotonic

from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.stream import FirstTokenDetector, StreamState, Usage, UsageEventFilter, UsageReader, read_usage
from gorgo.proxy.http.headers import Header, downstream_headers, is_encoded, is_event_stream
from gorgo.proxy.http.response_writer import ResponseWriter
from gorgo.proxy.http.timeout import ResettableTimeout
from gorgo.proxy.upstream.client import Source, UpstreamError

#: Withheld per answer at most: past any preamble of an engine, little enough for thousands of answers at once.
BUFFER_BYTES = 64 * 1024
#: Gaps kept per answer for its p95; the first 4,096 stand for longer answers.
MAX_GAPS = 4096
#: Events of a dialect's end that carry no token, at most: a finish reason, usage, `[DONE]` and the like.
END_EVENTS = 4
#: Routes on which each event of a stream has a name.
_NAMED_EVENTS = frozenset({"/v1/responses", "/v1/messages"})


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """What a relay needs to know beyond its two ends.

    Parameters
    ----------
    route:
        Path of the request, which says what content is.
    own_headers:
        Put after the replica's own.
    chunk_limit_s:
        Longest silence between two chunks once content has come, comments aside, and longest stall of the client.
    strip_usage:
        The usage event of the stream was asked for by the proxy, not by the client.
    on_content:
        Called once, when the first content is there and before it is sent.
    on_commit:
        Called before the first thing is sent; after it nobody else may answer.
    on_head:
        Called with the first bytes of an answer that is committed to.
    """

    route: str
    own_headers: Sequence[Header]
    chunk_limit_s: float
    strip_usage: bool
    on_content: Callable[[], None]
    on_commit: Callable[[], None]
    on_head: Callable[[bytes], None] | None = None


class Relay:
    """Carries one answer. `run` returns how it ended; a source that breaks off raises through it."""

    __slots__ = ("_filter", "_gaps", "_options", "_recent", "_sink", "_source", "_tail", "_timeout")

    def __init__(self, source: Source, sink: ResponseWriter, dog: ResettableTimeout, plan: RelayOptions) -> None:
        self._source = source
        self._sink = sink
        self._timeout = dog
        self._options = plan
        self._gaps = array("d")
        #: The last chunks that have a gap.
        self._recent: deque[bytes] = deque(maxlen=END_EVENTS)
        self._tail = UsageReader()
        self._filter: UsageEventFilter | None = None

    async def run(self) -> Outcome:
        async with self._source.chunks() as chunks:
            if self._source.status >= 300 or not is_event_stream(self._source.headers):
                return await self._buffered(chunks, BUFFER_BYTES)
            if is_encoded(self._source.headers):
                # Nothing can be read in it, and its client waits for events: nothing is withheld.
                return await self._buffered(chunks, 0)
            return await self._events(chunks)

    async def _events(self, chunks: AsyncIterator[bytes]) -> Outcome:
        """An event stream: withheld until its first content."""
        scanner = FirstTokenDetector(self._options.route)
        held: list[bytes] = []
        size = 0
        scan = StreamState.WAITING
        async for chunk in chunks:
            held.append(chunk)
            size += len(chunk)
            scan = scanner.feed(chunk)
            if scan is not StreamState.WAITING or size > BUFFER_BYTES:
                break
        if scan is StreamState.ERROR and (failure := _failed(scanner.error_status)) is not None:
            return failure
        if scan is StreamState.CONTENT:
            self._options.on_content()
        elif scan is StreamState.WAITING and size <= BUFFER_BYTES and not scanner.ended:
            raise UpstreamError("no_content")
        await self._commit(b"".join(held))
        if scan is StreamState.WAITING:
            await self._stream_to_first_token(chunks, scanner)
        await self._stream(chunks)
        self._drop_end_gaps()
        return self._outcome(_result_of_stream(scanner.error_status), scanner.error_status)

    async def _stream_to_first_token(self, chunks: AsyncIterator[bytes], scanner: FirstTokenDetector) -> None:
        """Committed by size before any content came: pass on, still looking for it."""
        async for chunk in chunks:
            scan = scanner.feed(chunk)
            if scan is StreamState.CONTENT:
                self._options.on_content()
            await self._forward(chunk)
            if scan is not StreamState.WAITING:
                return

    async def _stream(self, chunks: AsyncIterator[bytes]) -> None:
        """The hot loop. What `_pass` does is written out, because each call in it is paid for by every event."""
        dog, gaps, limit_s = self._timeout, self._gaps, self._options.chunk_limit_s
        sink, push, strip, keep_tail = self._sink, self._sink.try_write, self._filter, self._tail.feed
        recent = self._recent
        last = monotonic()
        dog.extend(limit_s)
        async for chunk in chunks:
            if chunk[:1] != b":" or b"data:" in chunk:
                now = monotonic()
                dog.deadline = now + limit_s
                if len(gaps) < MAX_GAPS:
                    gaps.append(now - last)
                    recent.append(chunk)
                last = now
            # Else a comment: it keeps a connection alive, by whatever hand, and says nothing of the answer.
            keep_tail(chunk)
            passed = chunk if strip is None else strip.feed(chunk)
            if passed and not push(passed):
                sink.sending = True
                await sink.write(passed)
                sink.sending = False
        await sink.finish(b"" if strip is None else strip.flush())

    def _drop_end_gaps(self) -> None:
        """Remove the gaps of the last chunks without a token. Done once per stream, to keep the hot loop short."""
        if len(self._gaps) == MAX_GAPS:
            return
        while self._recent:
            if FirstTokenDetector(self._options.route).feed(self._recent.pop()) is StreamState.CONTENT:
                return
            self._gaps.pop()

    async def _forward(self, chunk: bytes) -> None:
        self._tail.feed(chunk)
        if self._filter is not None:
            chunk = self._filter.feed(chunk)
        if chunk:
            self._sink.sending = True
            await self._sink.write(chunk)
            self._sink.sending = False

    async def _commit(self, head: bytes) -> None:
        """Send what was withheld. A usage event can be taken out only of bytes that are not encoded."""
        if self._options.strip_usage:
            self._filter = UsageEventFilter()
        await self._start(length_kept=not self._options.strip_usage)
        self._report_head(head)
        # Watched from here on as any chunk: a client that does not read may not hold the replica.
        await self._forward(head)

    async def _buffered(self, chunks: AsyncIterator[bytes], withheld: int) -> Outcome:
        """Anything but a stream of readable events: withheld until it is complete or too large for that.

        It has no first content: its bytes come when the last token is there, and taking that for TTFT would be a lie.
        """
        held: list[bytes] = []
        size = 0
        async for chunk in chunks:
            held.append(chunk)
            size += len(chunk)
            if size > withheld:
                return await self._oversized(b"".join(held), chunks)
        body = b"".join(held)
        await self._start()
        self._report_head(body)
        self._timeout.extend(self._options.chunk_limit_s)
        await self._sink.finish(body)
        return self._outcome(self._result_of_buffered(), usage=read_usage(body))

    async def _oversized(self, head: bytes, chunks: AsyncIterator[bytes]) -> Outcome:
        await self._start()
        self._report_head(head)
        self._timeout.extend(self._options.chunk_limit_s)
        await self._forward(head)
        await self._stream(chunks)
        # Pieces of one body are not tokens: their gaps say nothing.
        del self._gaps[:]
        return self._outcome(self._result_of_buffered())

    def _result_of_buffered(self) -> AttemptResult:
        return AttemptResult.COMPLETED if self._source.status < 400 else AttemptResult.UPSTREAM_4XX

    async def _start(self, *, length_kept: bool = True) -> None:
        self._options.on_commit()
        # With status 204 a length is no word about this answer, and its reader would wait for so much.
        length_kept = length_kept and self._source.status != 204
        headers = downstream_headers(self._source.headers, length_kept=length_kept)
        headers.extend(self._options.own_headers)
        named = self._options.route in _NAMED_EVENTS
        await self._sink.start(self._source.status, headers, names_events=named)

    def _report_head(self, head: bytes) -> None:
        if self._options.on_head is not None:
            self._options.on_head(head)

    def _outcome(self, ending: AttemptResult, status: int | None = None, *, usage: Usage | None = None) -> Outcome:
        usage = usage or (None if self._filter is None else self._filter.usage) or self._tail.usage()
        return Outcome(
            ending,
            status=self._source.status if status is None else status,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            cached_tokens=None if usage is None else usage.cached_tokens,
            output_tokens=None if usage is None else usage.output_tokens,
            itl_s_p95=_p95(self._gaps),
        )


def failure_of(status: int) -> Outcome | None:
    """What a status means before any content: busy, broken, or (`None`) an answer to pass on."""
    if status in (429, 503):
        return Outcome(AttemptResult.BUSY, status=status, error=f"status_{status}")
    if not 200 <= status < 300 and not 400 <= status < 500:
        # A redirect too: neither the proxy nor its client goes where a replica points.
        return Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=status, error=f"status_{status}")
    return None


def _result_of_stream(error_status: int | None) -> AttemptResult:
    """Of a stream that has gone to the client to its end, and told of an error (or not) before any content."""
    if error_status is None:
        return AttemptResult.COMPLETED
    return AttemptResult.UPSTREAM_4XX if failure_of(error_status) is None else AttemptResult.FAILED_AFTER_CONTENT


def _failed(error_status: int | None) -> Outcome | None:
    return failure_of(500 if error_status is None else error_status)


def _p95(gaps: array[float]) -> float | None:
    return sorted(gaps)[ceil(0.95 * len(gaps)) - 1] if gaps else None
