"""The process that decodes large messages of KV events: a message in, its pieces or the reason why it is none out.

Owns the pieces too: batches of events that each take little time to apply.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gorgo.core.messages.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch
from gorgo.engines.kv_events import decode_message
from gorgo.live.helper_worker import Work, run_worker

#: Data of this process: ten times the largest message and what is decoded of it.
MAX_MEMORY_BYTES = 1024 * 1024 * 1024


def decoder(_: None) -> Work:
    """Return what decodes one message."""

    def decode(message: bytes) -> Iterator[KvEventBatch | str]:
        try:
            yield from pieces(decode_message(message))
        except ValueError as error:
            yield str(error)

    return decode


#: Blocks applied in one turn of the event loop: about a millisecond. An event without blocks counts as one.
PIECE_BLOCKS = 512


def pieces(batch: KvEventBatch) -> Iterator[KvEventBatch]:
    """Yield the events of `batch` in their order, at most `PIECE_BLOCKS` blocks at a time; once at least.

    >>> removed = BlocksRemoved(tuple(range(PIECE_BLOCKS + 1)), tier=None)
    >>> [len(piece.events[0].hashes) for piece in pieces(KvEventBatch(None, 0, (removed,), rejected=1))]
    [512, 1]
    """
    if sum(map(_blocks, batch.events)) <= PIECE_BLOCKS:
        yield batch
        return
    events: list[KvEvent] = []
    blocks = 0
    first = batch
    for event in batch.events:
        for part in _parts(event):
            size = _blocks(part)
            if events and blocks + size > PIECE_BLOCKS:
                yield replace(first, events=tuple(events))
                first, events, blocks = KvEventBatch(batch.sent_s, batch.rank, ()), [], 0
            events.append(part)
            blocks += size
    yield replace(first, events=tuple(events))


def until_cleared(batch: KvEventBatch) -> Iterator[tuple[KvEventBatch, bool]]:
    """Yield the events before the first `CacheCleared` and those from it on, and whether they are these.

    >>> removed = BlocksRemoved((7,), tier=None)
    >>> batch = KvEventBatch(None, 0, (removed, CacheCleared(), removed), rejected=1)
    >>> [(len(part.events), part.rejected, clears) for part, clears in until_cleared(batch)]
    [(1, 1, False), (2, 0, True)]
    """
    first = next((place for place, event in enumerate(batch.events) if isinstance(event, CacheCleared)), None)
    if first is None:
        yield batch, False
        return
    if first:
        yield replace(batch, events=batch.events[:first]), False
        batch = KvEventBatch(batch.sent_s, batch.rank, batch.events[first:])
    yield batch, True


def _blocks(event: KvEvent) -> int:
    return max(1, len(event.hashes)) if isinstance(event, BlocksStored | BlocksRemoved) else 1


def _parts(event: KvEvent) -> Iterator[KvEvent]:
    if not isinstance(event, BlocksStored | BlocksRemoved) or len(event.hashes) <= PIECE_BLOCKS:
        yield event
        return
    block_bytes = len(event.tokens) // len(event.hashes) if isinstance(event, BlocksStored) else 0
    for start in range(0, len(event.hashes), PIECE_BLOCKS):
        end = start + PIECE_BLOCKS
        if isinstance(event, BlocksRemoved):
            yield replace(event, hashes=event.hashes[start:end])
            continue
        extra = {place - start: keys for place, keys in event.extra.items() if start <= place < end}
        parent = event.hashes[start - 1] if start else event.parent
        tokens = event.tokens[start * block_bytes : end * block_bytes]
        yield replace(event, hashes=event.hashes[start:end], parent=parent, tokens=tokens, extra=extra)


def main() -> None:
    """Decode messages until the standard input ends."""
    run_worker(decoder, frames=1, max_memory_bytes=MAX_MEMORY_BYTES)


if __name__ == "__main__":
    main()
