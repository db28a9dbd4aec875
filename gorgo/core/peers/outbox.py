"""What happened since the last report: prefixes confirmed and found evicted, reports of cached tokens, and answers.

Owns which depths of a prompt are marked. Bounded: of a burst the oldest entries are dropped, and their number counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gorgo.core.dispatch.in_flight import Attempt
from gorgo.core.lru import Lru
from gorgo.core.messages.request import RouteRequest
from gorgo.core.peers.marks import marks_of_prompt
from gorgo.core.peers.records import (
    MAX_ANSWERS,
    MAX_CACHE_REPORTS,
    MAX_MARKS,
    MAX_PREFIXES,
    MarkKind,
    PrefixMarks,
    SharedAnswer,
    SharedCacheReport,
)
from gorgo.core.prefix.cache_feedback import CacheReport
from gorgo.core.prefix.residency import BLOCK_HASH_BYTES
from gorgo.core.prompt.depths import marked_depths

#: Marks near a prompt's beginning where it has more than `MAX_MARKS`; the others are its deepest.
_SHALLOW_MARKS = MAX_MARKS // 3
#: A dispatched prefill of so many seconds is reported at once: within 100 ms others would add theirs to it.
URGENT_PREFILL_S = 0.2


@dataclass(slots=True)
class Outbox:
    """Entries for the next report."""

    dropped: int = 0
    _prefixes: deque[PrefixMarks] = field(default_factory=lambda: deque(maxlen=MAX_PREFIXES))
    #: Of prompts sent since the last report that still wait, by attempt.
    _sent: Lru[str, PrefixMarks] = field(default_factory=lambda: Lru(MAX_PREFIXES))
    _cache_reports: deque[SharedCacheReport] = field(default_factory=lambda: deque(maxlen=MAX_CACHE_REPORTS))
    _answers: deque[SharedAnswer] = field(default_factory=lambda: deque(maxlen=MAX_ANSWERS))

    def on_confirmed(self, attempt: Attempt) -> PrefixMarks | None:
        """Add and return the prefixes of a prompt that a first token confirmed; `None` for one without a full block."""
        self._sent.pop(attempt.attempt_id, None)
        marks = _marks_of(attempt, "confirmed")
        if marks is not None:
            self._add(marks)
        return marks

    def on_sent(self, attempt: Attempt) -> None:
        """Add the prefixes of a prompt that waits for its first token."""
        marks = _marks_of(attempt, "sent")
        if marks is not None:
            attempt.prefix_reported = True
            self.dropped += len(self._sent.put(attempt.attempt_id, marks))

    def on_withdrawn(self, attempt: Attempt) -> None:
        """Add that a prompt that was reported as sent will have no first token."""
        if not attempt.prefix_reported or self._sent.pop(attempt.attempt_id, None) is not None:
            return
        marks = _marks_of(attempt, "withdrawn")
        if marks is not None:
            self._add(marks)

    def on_evicted(self, replica: str, marks: Sequence[int]) -> None:
        """Add marks that are no longer on a replica, oldest first: the newest of them say how old."""
        if marks:
            words = b"".join([mark.to_bytes(BLOCK_HASH_BYTES, "little") for mark in marks[-MAX_MARKS:]])
            self._add(PrefixMarks(replica, None, (), words, "evicted"))

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

    def on_answered(self, attempt: Attempt, output_tokens: int) -> None:
        """Add a whole answer of which a next turn may find the tokens cached."""
        request = attempt.state.request
        prompt = request.blocks[-BLOCK_HASH_BYTES:]
        if prompt and request.boundaries and output_tokens > 0:
            self.dropped += len(self._answers) == MAX_ANSWERS
            answer = SharedAnswer(attempt.replica.spec.name, prompt, request.prompt_tokens, output_tokens)
            self._answers.append(answer)

    def __bool__(self) -> bool:
        return bool(self._prefixes or self._sent or self._cache_reports or self._answers)

    def take_entries(
        self,
    ) -> tuple[tuple[PrefixMarks, ...], tuple[SharedCacheReport, ...], tuple[SharedAnswer, ...]]:
        """Return the entries since the last call."""
        for sent in self._sent.values():
            self._add(sent)
        self._sent.clear()
        taken = tuple(self._prefixes), tuple(self._cache_reports), tuple(self._answers)
        for entries in (self._prefixes, self._cache_reports, self._answers):
            entries.clear()
        return taken

    def _add(self, marks: PrefixMarks) -> None:
        self.dropped += len(self._prefixes) == MAX_PREFIXES
        self._prefixes.append(marks)


def _marks_of(attempt: Attempt, kind: MarkKind) -> PrefixMarks | None:
    """Return the marks of a prompt; `None` without a full block."""
    request = attempt.state.request
    depths = _marked_depths(request)
    if not depths:
        return None
    hashes, shown = marks_of_prompt(request.blocks, depths), () if kind == "withdrawn" else tuple(depths)
    return PrefixMarks(attempt.replica.spec.name, request.recorded_model, shown, hashes, kind)


def _marked_depths(request: RouteRequest) -> list[int]:
    """Return the depths of a prompt's marks, ascending: of too many the shallowest and the deepest."""
    full_blocks = len(request.blocks) // BLOCK_HASH_BYTES
    depths = marked_depths(full_blocks, request.block_tokens, request.boundaries)
    return depths if len(depths) <= MAX_MARKS else depths[:_SHALLOW_MARKS] + depths[_SHALLOW_MARKS - MAX_MARKS :]
