"""One answer on its way from a source to a sink: withheld until it is worth committing to, then passed as it comes.

Owns withholding, the first content, the gaps between chunks and the usage at the end. Leaves retries and accounting to
the exchange, connections to `upstream`, and the server to `sink`. Bytes are never decoded, split or joined on the way,
except that what was withheld goes out in one piece.

Theory of operation: up to the first content (of an event stream) or to the end (of anything else), nothing has been
sent, so an answer that breaks off can be replaced by another replica's without the client's notice. At most
`WITHHELD_BYTES` are held; beyond, the answer is committed to as it is.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from math import ceil
from time import monotonic

from gorgo.core.request import Ending, Outcome
from gorgo.core.sse import ContentScanner, Scan, Usage, UsageEventFilter, UsageTail, read_usage
from gorgo.proxy.headers import Header, downstream_headers, is_encoded, is_event_stream
from gorgo.proxy.sink import Sink
from gorgo.proxy.upstream import Source, UpstreamError
from gorgo.proxy.watchdog import Watchdog

#: Withheld per answer at most: past any preamble of an engine, little enough for thousands of answers at once.
WITHHELD_BYTES = 64 * 1024
#: Gaps kept per answer for its p95; the first 4,096 stand for longer answers.
MAX_GAPS = 4096
#: Routes on which each event of a stream has a name.
_NAMED_EVENTS = frozenset({"/v1/responses", "/v1/messages"})


@dataclass(frozen=True, slots=True)
class RelayPlan:
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

    __slots__ = ("_dog", "_filter", "_gaps", "_plan", "_sink", "_source", "_tail")

    def __init__(self, source: Source, sink: Sink, dog: Watchdog, plan: RelayPlan) -> None:
        self._source = source
        self._sink = sink
        self._dog = dog
        self._plan = plan
        self._gaps = array("d")
        self._tail = UsageTail()
        self._filter: UsageEventFilter | None = None

    async def run(self) -> Outcome:
        async with self._source.chunks() as chunks:
            if self._source.status >= 300 or not is_event_stream(self._source.headers):
                return await self._whole(chunks, WITHHELD_BYTES)
            if is_encoded(self._source.headers):
                # Nothing can be read in it, and its client waits for events: nothing is withheld.
                return await self._whole(chunks, 0)
            return await self._events(chunks)

    async def _events(self, chunks: AsyncIterator[bytes]) -> Outcome:
        """An event stream: withheld until its first content."""
        scanner = ContentScanner(self._plan.route)
        held: list[bytes] = []
        size = 0
        scan = Scan.WAITING
        async for chunk in chunks:
            held.append(chunk)
            size += len(chunk)
            scan = scanner.feed(chunk)
            if scan is not Scan.WAITING or size > WITHHELD_BYTES:
                break
        if scan is Scan.ERROR and (failure := _failed(scanner.error_status)) is not None:
            return failure
        if scan is Scan.CONTENT:
            self._plan.on_content()
        elif scan is Scan.WAITING and size <= WITHHELD_BYTES and not scanner.ended:
            raise UpstreamError("no_content")
        await self._commit(b"".join(held))
        if scan is Scan.WAITING:
            await self._stream_to_content(chunks, scanner)
        await self._stream(chunks)
        return self._outcome(_ending_of_stream(scanner.error_status), scanner.error_status)

    async def _stream_to_content(self, chunks: AsyncIterator[bytes], scanner: ContentScanner) -> None:
        """Committed by size before any content came: pass on, still looking for it."""
        async for chunk in chunks:
            scan = scanner.feed(chunk)
            if scan is Scan.CONTENT:
                self._plan.on_content()
            await self._pass(chunk)
            if scan is not Scan.WAITING:
                return

    async def _stream(self, chunks: AsyncIterator[bytes]) -> None:
        """The hot loop. What `_pass` does is written out, because each call in it is paid for by every event."""
        dog, gaps, limit_s = self._dog, self._gaps, self._plan.chunk_limit_s
        sink, push, strip, keep_tail = self._sink, self._sink.push, self._filter, self._tail.feed
        last = monotonic()
        dog.push(limit_s)
        async for chunk in chunks:
            if chunk[:1] != b":" or b"data:" in chunk:
                now = monotonic()
                dog.deadline = now + limit_s
                if len(gaps) < MAX_GAPS:
                    gaps.append(now - last)
                last = now
            # Else a comment: it keeps a connection alive, by whatever hand, and says nothing of the answer.
            keep_tail(chunk)
            passed = chunk if strip is None else strip.feed(chunk)
            if passed and not push(passed):
                sink.sending = True
                await sink.write(passed)
                sink.sending = False
        await sink.finish(b"" if strip is None else strip.flush())

    async def _pass(self, chunk: bytes) -> None:
        self._tail.feed(chunk)
        if self._filter is not None:
            chunk = self._filter.feed(chunk)
        if chunk:
            self._sink.sending = True
            await self._sink.write(chunk)
            self._sink.sending = False

    async def _commit(self, head: bytes) -> None:
        """Send what was withheld. A usage event can be taken out only of bytes that are not encoded."""
        if self._plan.strip_usage:
            self._filter = UsageEventFilter()
        await self._start(length_kept=not self._plan.strip_usage)
        self._tell_head(head)
        # Watched from here on as any chunk: a client that does not read may not hold the replica.
        await self._pass(head)

    async def _whole(self, chunks: AsyncIterator[bytes], withheld: int) -> Outcome:
        """Anything but a stream of readable events: withheld until it is complete or too large for that.

        It has no first content: its bytes come when the last token is there, and taking that for TTFT would be a lie.
        """
        held: list[bytes] = []
        size = 0
        async for chunk in chunks:
            held.append(chunk)
            size += len(chunk)
            if size > withheld:
                return await self._large(b"".join(held), chunks)
        body = b"".join(held)
        await self._start()
        self._tell_head(body)
        self._dog.push(self._plan.chunk_limit_s)
        await self._sink.finish(body)
        return self._outcome(self._ending_of_whole(), usage=read_usage(body))

    async def _large(self, head: bytes, chunks: AsyncIterator[bytes]) -> Outcome:
        await self._start()
        self._tell_head(head)
        self._dog.push(self._plan.chunk_limit_s)
        await self._pass(head)
        await self._stream(chunks)
        # Pieces of one body are not tokens: their gaps say nothing.
        del self._gaps[:]
        return self._outcome(self._ending_of_whole())

    def _ending_of_whole(self) -> Ending:
        return Ending.COMPLETED if self._source.status < 400 else Ending.REFUSED

    async def _start(self, *, length_kept: bool = True) -> None:
        self._plan.on_commit()
        # With status 204 a length is no word about this answer, and its reader would wait for so much.
        length_kept = length_kept and self._source.status != 204
        headers = downstream_headers(self._source.headers, length_kept=length_kept)
        headers.extend(self._plan.own_headers)
        named = self._plan.route in _NAMED_EVENTS
        await self._sink.start(self._source.status, headers, names_events=named)

    def _tell_head(self, head: bytes) -> None:
        if self._plan.on_head is not None:
            self._plan.on_head(head)

    def _outcome(self, ending: Ending, status: int | None = None, *, usage: Usage | None = None) -> Outcome:
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
        return Outcome(Ending.BUSY, status=status, error=f"status_{status}")
    if not 200 <= status < 300 and not 400 <= status < 500:
        # A redirect too: neither the proxy nor its client goes where a replica points.
        return Outcome(Ending.FAILED_BEFORE_CONTENT, status=status, error=f"status_{status}")
    return None


def _ending_of_stream(error_status: int | None) -> Ending:
    """Of a stream that has gone to the client to its end, and told of an error (or not) before any content."""
    if error_status is None:
        return Ending.COMPLETED
    return Ending.REFUSED if failure_of(error_status) is None else Ending.FAILED_AFTER_CONTENT


def _failed(error_status: int | None) -> Outcome | None:
    return failure_of(500 if error_status is None else error_status)


def _p95(gaps: array[float]) -> float | None:
    return sorted(gaps)[ceil(0.95 * len(gaps)) - 1] if gaps else None
