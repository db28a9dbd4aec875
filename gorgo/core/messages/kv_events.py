"""Reports of engines' KV caches: which blocks a cache has stored and removed, free of any wire format.

See `gorgo.engines.kv_events` for the decoder and `gorgo.core.prefix.kv_index` for the index that applies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from gorgo.core.record import record


class KvTier(IntEnum):
    """Memory that a block is in; tiers slower than CPU memory are not indexed."""

    GPU = 0
    CPU = 1


@record
class BlocksStored:
    """Consecutive blocks that are cached now.

    Parameters
    ----------
    hashes:
        The engine's own hashes, as unsigned 64-bit integers. They identify blocks of that engine and nothing else.
    parent:
        The engine's hash of the block before the first one; `None` at the start of a prompt.
    tokens:
        Token ids of all blocks, as `core.prefix.kv_source.token_bytes` packs them; empty if the engine sent none.
    block_tokens:
        Tokens per block; `None` if the engine sent no tokens.
    tier:
        Memory of the blocks; `None` for one that is not indexed.
    group:
        KV cache group of a hybrid model: blocks of several groups have one hash.
    adapter, cache_salt:
        What separates prompts of equal tokens, at the start of a prompt.
    extra:
        Other content of a block beside its tokens (images), by the block's place in `hashes`.
    """

    hashes: tuple[int, ...]
    parent: int | None
    tokens: bytes
    block_tokens: int | None
    tier: KvTier | None
    group: int = 0
    adapter: str | None = None
    cache_salt: str | None = None
    extra: Mapping[int, bytes] = field(default_factory=dict)


@record
class BlocksRemoved:
    """Blocks that a tier evicted, one entry for each of several copies."""

    hashes: tuple[int, ...]
    tier: KvTier | None
    group: int = 0


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """An empty cache: a flush, or an engine that has started."""


KvEvent = BlocksStored | BlocksRemoved | CacheCleared


def clears(events: Iterable[KvEvent]) -> bool:
    """Return whether any event says that a cache is empty."""
    return CacheCleared in map(type, events)


@record
class KvEventBatch:
    """The events of one message.

    Parameters
    ----------
    sent_s:
        The engine's time of the message, s since 1970; `None` if unreadable.
    rank:
        Data-parallel rank of the cache; 0 if there is one alone.
    events:
        In the engine's order; removals in a row from one cache can be one event.
    skipped:
        Events of kinds that the index has no use for.
    rejected:
        Events that could not be decoded.
    error:
        The first reason of a rejection.
    merged:
        Removals that are part of the one before them.
    """

    sent_s: float | None
    rank: int
    events: tuple[KvEvent, ...]
    skipped: int = 0
    rejected: int = 0
    error: str | None = None
    merged: int = 0

    @property
    def sent_events(self) -> int:
        """The events of the message that could be decoded and are of use."""
        return len(self.events) + self.merged


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """All blocks of a cache, as an engine without events pushes them.

    Parameters
    ----------
    model:
        Served model; `None` for the only one of its replica.
    block_tokens:
        Tokens per block.
    hashes:
        Own hashes (`core.prefix.kv_source`), in any order.
    """

    model: str | None
    block_tokens: int
    hashes: Sequence[int]


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """A part of the difference between a snapshot and the one before; as in `CacheSnapshot`.

    Parameters
    ----------
    added, removed:
        Own hashes that only the new one has, and only the old one.
    whole:
        Whether this is the last part.
    """

    model: str | None
    block_tokens: int
    added: Sequence[int]
    removed: Sequence[int]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class PushedFeed:
    """The blocks that a replica has pushed of one model.

    Parameters
    ----------
    number:
        Names the feed: a feed that was dropped and made again has another one.
    reported_blocks:
        Without those that first tokens confirmed since the snapshot.
    """

    number: int
    reported_blocks: int


@dataclass(frozen=True, slots=True)
class CacheEvictions:
    """Blocks that a cache evicted since its last push; as in `CacheSnapshot`."""

    model: str | None
    block_tokens: int
    hashes: Sequence[int]
