"""Sources of cached tokens: what the Router's knowledge of a replica's cache comes from, and how right it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: `history`: prompts that were sent there, corrected by reports of cached tokens. `events`: the engine's KV events.
#: `push`: the engine's pushed snapshots.
CacheSource = Literal["history", "events", "push"]


@dataclass(slots=True)
class KvEventStats:
    """Blocks of a replica's events, by what became of them.

    `unknown_parents` and `without_tokens` could not be hashed; `unknown_removals` were not in the index.
    `other_block_sizes`, `other_tiers` and `excess_sources` are not indexed. `evicted` exceeded the bound.
    """

    stored: int = 0
    removed: int = 0
    unknown_parents: int = 0
    without_tokens: int = 0
    unknown_removals: int = 0
    other_block_sizes: int = 0
    other_tiers: int = 0
    excess_sources: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class CacheSourceStats:
    """The source of one replica, since it joined.

    Parameters
    ----------
    source:
        In use for prompts with exact tokens.
    complete:
        Whether the source has all blocks; of another one the better of it and the history counts.
    block_tokens:
        Tokens per block; `None` for the history.
    blocks:
        Reported as cached, each of the replica's caches counted.
    speculated_blocks:
        Dispatched and neither reported nor expired.
    age_s:
        Since the newest event or push; `None` without one.
    requests:
        Completed ones with a report of cached tokens; the sums of tokens are over these.
    estimated_tokens, reported_tokens:
        Cached by the Router's estimate at dispatch, and by the engine's usage.
    phantom_tokens, missed_tokens:
        Estimated and not reported, and the reverse, summed by request.
    events:
        Blocks of its events.
    """

    source: CacheSource
    complete: bool
    block_tokens: int | None
    blocks: int
    speculated_blocks: int
    age_s: float | None
    requests: int
    estimated_tokens: int
    reported_tokens: int
    phantom_tokens: int
    missed_tokens: int
    events: KvEventStats
