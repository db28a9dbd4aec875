"""Short messages of plain events, decoded at once: a third of the time of `kv_events`, which decodes all others.

Owns the form that both engines send today: an array of maps with integer hashes and no keys beside tokens. A message of
any other form, or with any bad field, is none of these.
"""

from __future__ import annotations

from typing import Literal

from msgspec import DecodeError, Struct
from msgspec.msgpack import Decoder

from gorgo.core.messages.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch
from gorgo.core.prefix.kv_chain import token_bytes
from gorgo.engines.kv_wire import INDEXED_KINDS, LOW_64_BITS, MAX_RANK, TIERS

#: The engines' names for memories: one of a few takes no memory of its own. A message with another is not plain.
_Medium = Literal["GPU", "CPU", "CPU_PINNED", "DISK", "EXTERNAL", "STORAGE"]

#: Longest message that is decoded at once: its values take at most some megabytes.
MAX_PLAIN_BYTES = 64 * 1024


class _Stored(Struct, tag_field="type", tag="BlockStored", gc=False):
    block_hashes: list[int]
    parent_block_hash: int | None = None
    token_ids: list[int] | None = None
    block_size: int | None = None
    lora_id: None = None
    medium: _Medium | None = None
    lora_name: None = None
    extra_keys: list[None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None


class _Removed(Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: list[int]
    medium: _Medium | None = None
    group_idx: int | None = None


class _Cleared(Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


class _Batch(Struct, array_like=True, gc=False):
    ts: float | None
    events: list[_Stored | _Removed | _Cleared]
    rank: int | None = None


_BATCH = Decoder(_Batch)
_CLEARED = CacheCleared()


def decode_plain(message: bytes) -> KvEventBatch | None:
    """Return the events of a short message; `None` if it is not plain.

    >>> from msgspec.msgpack import encode
    >>> decode_plain(encode([1.5, [{"type": "BlockRemoved", "block_hashes": [-1]}]])).events[0].hashes
    (18446744073709551615,)
    """
    if len(message) > MAX_PLAIN_BYTES:
        return None
    try:
        batch = _BATCH.decode(message)
        events, skipped = _decoded(batch.events)
    except (DecodeError, ValueError, OverflowError, RecursionError):
        return None
    rank = batch.rank or 0
    if not 0 <= rank <= MAX_RANK:
        return None
    return KvEventBatch(batch.ts, rank, tuple(events), skipped, merged=len(batch.events) - len(events) - skipped)


def _decoded(sent: list[_Stored | _Removed | _Cleared]) -> tuple[list[KvEvent], int]:
    """Return the events, and how many are of no use.

    Removals in a row from one cache are one event: engines remove block by block.
    """
    events: list[KvEvent] = []
    skipped = 0
    row: _Removed | None = None
    removed: list[int] = []
    for event in sent:
        if type(event) is _Removed:
            if row is None or event.medium != row.medium or event.group_idx != row.group_idx:
                if row is not None:
                    events.append(_removed(removed, row))
                row, removed = event, []
            removed += event.block_hashes
            continue
        if row is not None:
            events.append(_removed(removed, row))
            row = None
        if type(event) is not _Stored:
            events.append(_CLEARED)
        elif event.kv_cache_spec_kind in INDEXED_KINDS:
            events.append(_stored(event))
        else:
            skipped += 1
    if row is not None:
        events.append(_removed(removed, row))
    return events, skipped


def _removed(hashes: list[int], row: _Removed) -> BlocksRemoved:
    return BlocksRemoved(_low_bits(hashes), TIERS.get(row.medium), row.group_idx or 0)


def _stored(event: _Stored) -> BlocksStored:
    ids = event.token_ids
    if ids and len(ids) != len(event.block_hashes) * (event.block_size or 0):
        raise ValueError("tokens of other blocks")
    parent = event.parent_block_hash
    return BlocksStored(
        hashes=_low_bits(event.block_hashes),
        parent=None if parent is None else parent & LOW_64_BITS,
        tokens=token_bytes(ids) if ids else b"",
        block_tokens=event.block_size if ids else None,
        tier=TIERS.get(event.medium),
        group=event.group_idx or 0,
        cache_salt=event.cache_salt,
    )


def _low_bits(hashes: list[int]) -> tuple[int, ...]:
    if hashes and min(hashes) < 0:
        return tuple([value & LOW_64_BITS for value in hashes])
    return tuple(hashes)
