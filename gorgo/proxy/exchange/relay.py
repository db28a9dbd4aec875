"""One response from its source to the client: buffered up to the first token, then passed on chunk by chunk.

Owns which of two kinds a response is, and the relay of anything but readable events. Leaves those to `event_stream`,
bytes and usage to `passage`, retries and records to the exchange. Bytes are never decoded, split or joined, except that
the buffer is sent in one piece.

Theory of operation: up to the first token (of an event stream) or the end (of any other body) nothing has been sent. A
response that fails before can be replaced by another replica's without the client's notice. A 4xx is not sent at all:
`passage` keeps it for the Router's decision. Beyond `BUFFER_BYTES` the response is sent as it is. With `withhold` a
short stream is treated like a 4xx, and one that breaks off like any failure.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.stream import error_of_body, is_json, read_usage
from gorgo.live.http.headers import is_encoded, is_event_stream
from gorgo.live.request.judgement import failure_of, is_short_usage
from gorgo.live.upstream.client import ResponseSource
from gorgo.proxy.exchange.event_stream import BUFFER_BYTES, relay_events
from gorgo.proxy.exchange.passage import Passage


def relay(passage: Passage, source: ResponseSource) -> Coroutine[Any, Any, Outcome]:
    """Relay a response; return its outcome. A failure of the source is raised through it."""
    passage.source = source
    if source.status >= 300 or not is_event_stream(source.headers):
        return relay_body(passage, BUFFER_BYTES)
    if is_encoded(source.headers):
        # Unreadable, and its client waits for events: not buffered.
        return relay_body(passage, 0)
    return relay_events(passage)


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
    # Else it takes no memory beyond this step, most often the one in which it came.
    if source.status >= 400:
        return passage.refused(body)
    if not body or not is_encoded(source.headers):
        if not is_json(body):
            return passage.hold(body)
        error_status = error_of_body(body)
        if error_status is not None:
            return failure_of(error_status) or passage.refused(body, error_status)
    usage = read_usage(body)
    short = is_short_usage(usage, may_be_short=passage.may_be_short)
    if short and passage.withhold:
        return passage.hold(body, usage=usage)
    await passage.send_head(head=body, has_events=False)
    passage.timeout.extend(passage.chunk_limit_s)
    await passage.writer.finish(body)
    return passage.outcome(AttemptResult.COMPLETED, usage=usage, short=short)


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


async def _send_as_it_comes(passage: Passage, head: bytes) -> Outcome:
    await passage.send_head(head=head)
    passage.timeout.extend(passage.chunk_limit_s)
    await passage.forward(head)
    await passage.pass_rest()
    await passage.end_body()
    passage.gaps.drop_all()
    return passage.outcome(AttemptResult.COMPLETED if passage.source.status < 400 else AttemptResult.UPSTREAM_4XX)
