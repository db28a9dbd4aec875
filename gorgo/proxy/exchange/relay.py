"""One response from its source to the client: buffered up to the first token, then passed on chunk by chunk.

Owns which of three kinds a response is, an event stream, any other body, or the rest of an answer behind what the
client has of it; when it is sent, withheld or retained; and how it ended. Leaves bytes, gaps and usage to `Passage`,
the events of a rest to `gorgo.core.continuation.Seam`, retries and records to the exchange.

Theory of operation: up to the first token (of an event stream) or the end (of any other body) nothing has been sent. A
response that fails before can be replaced by another replica's without the client's notice. A 4xx is not sent at all:
the passage keeps it for the Router's decision. Beyond `BUFFER_BYTES` the response is sent as it is, and a JSON answer
beyond `MAX_RETAINED_BYTES`: no client reads a part of it, and one that breaks off is asked for anew. With `withhold` a
short stream is treated like a 4xx, and one that breaks off like any failure. Until the rest of an answer has an event
for the client its replica may fail as before any answer. A replica that cannot say the rest, or the counts that are all
that is asked for, has not failed: it says so, and another one is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from time import monotonic
from typing import Any

from gorgo.core.continuation import Seam, lacks_last_event
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.stream import (
    FirstTokenDetector,
    StreamEnd,
    StreamState,
    UsageEventFilter,
    UsageReader,
    end_of_stream,
    error_of_body,
    has_end,
    is_json,
    lacks_answer,
    read_usage,
)
from gorgo.live.http.body import RequestBuffer
from gorgo.live.http.headers import is_encoded, is_event_stream
from gorgo.live.request.parse import failure_of, failure_of_event, is_comment, is_short_usage, result_of_stream
from gorgo.live.upstream.client import ResponseSource, UpstreamError
from gorgo.proxy.exchange.passage import ERROR_EVENT, MAX_RETAINED_BYTES, Passage

#: The reason of an attempt whose answer ended in the middle.
TRUNCATED = "truncated"
#: Buffer of one response: above any preamble of an engine, small enough for thousands of responses at once.
BUFFER_BYTES = 64 * 1024
#: Buffer of a withheld answer: forty tokens, so that no long answer waits for its end.
WITHHELD_BYTES = 8 * 1024
#: Bytes of a stream without a token after which other tasks run between chunks: events of ten bytes take a hundred
#: times an ordinary one's time per byte, and a fast replica has the next chunk ready.
YIELD_BYTES = 8 * 1024


class CutEndError(UpstreamError):
    """A stream ended behind its finish reason and before its last event: the answer is whole, but for what is between.

    The engines whose answers can be continued send that event always.
    """

    def __init__(self, reason: str, outcome: Outcome) -> None:
        super().__init__(reason)
        self.outcome = outcome


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
            passage.stream.extend()
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
    if not passage.is_short(stream, tail.usage()):
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
        await passage.stream.end_pause()
        raise CutEndError(reason, passage.outcome_of_whole(tail))
    await passage.end_body()
    if end is StreamEnd.ERROR:
        return replace(passage.outcome(AttemptResult.FAILED_AFTER_CONTENT), error="error_event")
    return passage.outcome_of_whole(tail)


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
    passage.stream.extend()
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
        passage.stream.extend()
        await passage.forward(head[at : at + BUFFER_BYTES])
    if not is_whole:
        await passage.pass_rest()
    await passage.end_body()
    passage.gaps.drop_all()
    return passage.outcome(AttemptResult.COMPLETED if passage.source.status < 400 else AttemptResult.UPSTREAM_4XX)


async def relay_rest(passage: Passage, source: ResponseSource, seam: Seam, note: bytes) -> Outcome:
    """Relay the rest of an answer behind what the client has; `note` is sent before its first event.

    Raises `UpstreamError` for one that breaks off.
    """
    passage.source, passage.seam = source, seam
    refused = Outcome(AttemptResult.UPSTREAM_4XX, status=source.status, error="not_continued", sent=True)
    if source.status != 200 or not is_event_stream(source.headers) or is_encoded(source.headers):
        return failure_of(source.status, source.headers) or refused
    made: list[bytes] = []

    def take(chunk: bytes) -> bool:
        if chunk[:1] != b":" or not is_comment(chunk):
            now = monotonic()
            passage.stream.timeout.deadline = now + passage.stream.chunk_limit_s
            passage.gaps.add(chunk, now)
        made.append(seam.feed(chunk))
        return False

    begun = False
    cut: UpstreamError | None = None
    while not seam.ended and seam.error is None:
        try:
            is_end = await source.pipe(take)
        except UpstreamError as failure:
            cut, is_end = failure, True
        events = b"".join(made)
        made.clear()
        if seam.begun and not begun:
            begun = True
            passage.on_content()
            passage.stream.extend()
            events = note + events
        if events:
            await passage.write_rest(events)
        seam.on_sent()
        if is_end:
            break
    if seam.error is not None:
        cut = UpstreamError(ERROR_EVENT)
    outcome = passage.outcome_of_rest(seam)
    if seam.unfit and not begun:
        return refused
    if seam.ended:
        await passage.end_body()
    elif not begun and seam.answered:
        return refused  # its engine ends before the counts
    else:
        cut = cut or UpstreamError(TRUNCATED)
        raise CutEndError(cut.reason, outcome) if seam.finished and begun else cut
    return outcome
