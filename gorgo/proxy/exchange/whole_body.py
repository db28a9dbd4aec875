"""The relay of anything but readable events: buffered up to its end, and sent as it is beyond the buffer.

Owns when a body is sent or retained. Bytes and usage are `passage`'s.
"""

from __future__ import annotations

from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.stream import error_of_body, is_json, read_usage
from gorgo.live.http.headers import is_encoded
from gorgo.live.request.judgement import failure_of, is_short_usage
from gorgo.proxy.exchange.passage import Passage


async def relay_body(passage: Passage, limit: int) -> Outcome:
    """Relay a body, buffered up to `limit` bytes. Raises `UpstreamError` for one that breaks off.

    No first token is recorded: the bytes come after the last token.
    """
    source, options = passage.source, passage.options
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
    short = is_short_usage(usage, may_be_short=options.may_be_short)
    if short and options.withhold:
        return passage.hold(body, usage=usage)
    await passage.send_head(head=body, has_events=False)
    passage.timeout.extend(options.chunk_limit_s)
    await passage.writer.finish(body)
    return passage.outcome(AttemptResult.COMPLETED, usage=usage, short=short)


async def _read(passage: Passage, limit: int) -> tuple[bytes, bool]:
    """Return the body, or what came of it up to the bound of the buffer; and whether it is the whole one."""
    chunks: list[bytes] = []
    size, buffer = 0, passage.options.buffer

    def take(chunk: bytes) -> bool:
        nonlocal size
        chunks.append(chunk)
        size += len(chunk)
        return size <= limit and buffer.grow(len(chunk))

    complete = await passage.source.pipe(take)
    return b"".join(chunks), complete


async def _send_as_it_comes(passage: Passage, head: bytes) -> Outcome:
    await passage.send_head(head=head)
    passage.timeout.extend(passage.options.chunk_limit_s)
    await passage.forward(head)
    await passage.pass_rest()
    await passage.end_body()
    passage.gaps.drop_all()
    return passage.outcome(AttemptResult.COMPLETED if passage.source.status < 400 else AttemptResult.UPSTREAM_4XX)
