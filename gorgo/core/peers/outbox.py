"""What happened since the last report: prefixes confirmed and found evicted, and engines' reports of cached tokens.

Owns which depths of a prompt are marked. Bounded: of a burst the oldest entries are dropped, and their number counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gorgo.core.dispatch.in_flight import Attempt
from gorgo.core.messages.request import RouteRequest
from gorgo.core.peers.marks import marks_of_prompt
from gorgo.core.peers.records import MAX_CACHE_REPORTS, MAX_MARKS, MAX_PREFIXES, PrefixMarks, SharedCacheReport
from gorgo.core.prefix.cache_feedback import CacheReport
from gorgo.core.prefix.residency import BLOCK_HASH_BYTES
from gorgo.core.prompt.depths import marked_depths

#: Marks near a prompt's beginning where it has more than `MAX_MARKS`; the others are its deepest.
_SHALLOW_MARKS = MAX_MARKS // 3


@dataclass(slots=True)
class Outbox:
    """Entries for the next report."""

    dropped: int = 0
    _prefixes: deque[PrefixMarks] = field(default_factory=lambda: deque(maxlen=MAX_PREFIXES))
    _cache_reports: deque[SharedCacheReport] = field(default_factory=lambda: deque(maxlen=MAX_CACHE_REPORTS))

    def on_confirmed(self, attempt: Attempt) -> PrefixMarks | None:
        """Add and return the prefixes of a prompt that a first token confirmed; `None` for one without a full block."""
        request = attempt.state.request
        depths = _marked_depths(request)
        if not depths:
            return None
        hashes = marks_of_prompt(request.blocks, depths)
        marks = PrefixMarks(attempt.replica.spec.name, request.recorded_model, tuple(depths), hashes)
        self._add(marks)
        return marks

    def on_evicted(self, replica: str, marks: Sequence[int]) -> None:
        """Add marks that are no longer on a replica, oldest first: the newest of them say how old."""
        if marks:
            words = b"".join([mark.to_bytes(BLOCK_HASH_BYTES, "little") for mark in marks[-MAX_MARKS:]])
            self._add(PrefixMarks(replica, None, (), words, evicted=True))

    def on_cache_report(self, attempt: Attempt, report: CacheReport) -> None:
        """Add an engine's report."""
        shared = SharedCacheReport(
            attempt.replica.spec.name,
            attempt.state.request.recorded_model,
            report.confirmed_tokens,
            report.found_tokens,
        )
        self.dropped += len(self._cache_reports) == MAX_CACHE_REPORTS
        self._cache_reports.append(shared)

    def __bool__(self) -> bool:
        return bool(self._prefixes or self._cache_reports)

    def take_entries(self) -> tuple[tuple[PrefixMarks, ...], tuple[SharedCacheReport, ...]]:
        """Return the entries since the last call."""
        taken = tuple(self._prefixes), tuple(self._cache_reports)
        self._prefixes.clear()
        self._cache_reports.clear()
        return taken

    def _add(self, marks: PrefixMarks) -> None:
        self.dropped += len(self._prefixes) == MAX_PREFIXES
        self._prefixes.append(marks)


def _marked_depths(request: RouteRequest) -> list[int]:
    """Return the depths of a prompt's marks, ascending: of too many the shallowest and the deepest."""
    full_blocks = len(request.blocks) // BLOCK_HASH_BYTES
    depths = marked_depths(full_blocks, request.block_tokens, request.boundaries)
    return depths if len(depths) <= MAX_MARKS else depths[:_SHALLOW_MARKS] + depths[_SHALLOW_MARKS - MAX_MARKS :]
