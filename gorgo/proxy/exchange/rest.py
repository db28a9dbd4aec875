"""The rest of an answer from another replica: relayed behind what the client has of the answer.

Owns when the rest has begun, and what its end says of its replica. Leaves the events to `core.continuation.Seam`, which
makes each of them anew, their way to the client to `Passage`, and the next attempt to the exchange.

Theory of operation: until the rest has an event for the client its replica may fail as before any answer. A replica
that cannot say the rest, or the counts that are all that is asked for, has not failed: it says so, and another one is
asked.
"""

from __future__ import annotations

from time import monotonic

from gorgo.core.continuation import Seam
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.live.http.headers import is_encoded, is_event_stream
from gorgo.live.request.parse import failure_of, is_comment
from gorgo.live.upstream.client import ResponseSource, UpstreamError
from gorgo.proxy.exchange.relay import ERROR_EVENT, TRUNCATED, CutEndError, Passage


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
            passage.timeout.deadline = now + passage.chunk_limit_s
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
            passage.timeout.extend(passage.chunk_limit_s)
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
