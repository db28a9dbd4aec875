"""Answers that an engine caches behind their prompts, so that the next turn of a conversation finds them too.

Owns the lengths of answers by the last full block of their prompt, and the share of them that each replica finds. The
index knows prompts alone: an answer's text is not hashed, and a next turn that repeats it is longer by it.

Theory of operation. A prompt whose longest match ends in the last full block of an earlier prompt goes on with that
prompt's answer if a message begins where it ended, and is about as long as the answer. A prompt without known messages
is not compared: others may have a shared beginning in common with it. Not every engine caches what it generates, and
one finds whole blocks alone. So the tokens behind the match count less those that the last reports of that replica
missed, in the median, or by the share found where that is small, and not at all before `LEAST_REPORTS`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median_low
from typing import NamedTuple

from gorgo.core.lru import Lru
from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats
from gorgo.core.prefix.residency import BLOCK_HASH_BYTES
from gorgo.core.record import record

#: Prompts with a remembered answer: the open conversations of a large fleet, some 500 bytes each.
MAX_PROMPTS = 32_768
#: Reports that a share is the median of, and from which on there is one.
WINDOW = 16
LEAST_REPORTS = 3
#: Share from which on a replica finds answers but for their last block.
MOSTLY = 0.5
#: Fewer tokens behind a match say nothing: an engine finds whole blocks.
LEAST_TOKENS = 32.0
#: A length that is estimated from bytes differs by so much from one request to the next.
SLACK_SHARE = 0.02
#: A message is an earlier answer if it has at least this share of its tokens, and at most the inverse. Its template
#: adds some, and its text is counted in bytes.
ALIKE = 0.5


@record
class GivenAnswer:
    """What a replica was left with: tokens of a prompt, and of its answer."""

    prompt_tokens: int
    output_tokens: int


class Behind(NamedTuple):
    """Of one replica: the match of a prompt, and tokens behind it that may be cached as an answer."""

    matched_tokens: float
    answer_tokens: float


class _FoundPart(NamedTuple):
    """The share of an answer that an engine found, and the tokens of it that it did not."""

    share: float
    missed_tokens: float


class Answers:
    """Answers of all replicas.

    Example
    -------
    >>> import numpy as np
    >>> first, next_turn = (
    ...     RouteRequest("", 0.0, prompt_tokens=ends[-1], blocks=b, block_tokens=64.0, prefix_hash=0, boundaries=ends)
    ...     for ends, b in (((70,), b"block--1"), ((70, 200, 300), b"block--1block--2"))
    ... )
    >>> answers = Answers()
    >>> answers.add(0, first, 130)
    >>> behind = answers.behind(next_turn, np.array([64.0]), 64.0)
    >>> behind
    {0: Behind(matched_tokens=64.0, answer_tokens=136.0)}
    >>> for _ in range(3):
    ...     answers.on_report(0, behind[0], found_tokens=200.0)
    >>> answers.found_tokens(0, behind[0])
    136.0
    """

    def __init__(self) -> None:
        #: By the hash of a prompt's last full block, the latest last, and by slot.
        self._prompts = Lru[bytes, dict[int, GivenAnswer]](MAX_PROMPTS)
        self._reports: dict[int, deque[_FoundPart]] = {}
        self._usual: dict[int, _FoundPart] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def remove_replica(self, slot: int) -> None:
        """Forget a replica that has left."""
        self._reports.pop(slot, None)
        self._usual.pop(slot, None)
        for key, by_slot in list(self._prompts.items()):
            by_slot.pop(slot, None)
            if not by_slot:
                del self._prompts[key]

    def add(self, slot: int, request: RouteRequest, output_tokens: int) -> None:
        """Record a whole answer; that of a prompt without known messages is not found again."""
        key = request.blocks[-BLOCK_HASH_BYTES:]
        if key and request.boundaries:
            self.add_by_hash(slot, key, GivenAnswer(request.prompt_tokens, output_tokens))

    def add_by_hash(self, slot: int, key: bytes, answer: GivenAnswer) -> None:
        """Record a whole answer by the hash of its prompt's last full block."""
        if answer.output_tokens < 1:
            return
        by_slot = self._prompts.use(key)
        if by_slot is None:
            self._prompts.put(key, {slot: answer})
        else:
            by_slot[slot] = answer

    def behind(self, request: RouteRequest, matched: Floats, most: float) -> dict[int, Behind] | None:
        """Return what may be cached behind the longest match, by slot; `None` where nothing is.

        `matched` are the tokens of each slot by the index, `most` the most of them, above 0.
        """
        end = round(most / request.block_tokens) * BLOCK_HASH_BYTES
        by_slot = self._prompts.get(request.blocks[end - BLOCK_HASH_BYTES : end])
        if by_slot is None or most >= request.prompt_tokens:
            return None
        found = {}
        for slot, answer in by_slot.items():
            if slot < len(matched) and matched.item(slot) == most:
                tokens = _end_of(answer, request) - most
                if tokens >= LEAST_TOKENS:
                    found[slot] = Behind(most, tokens)
        return found or None

    def found_tokens(self, slot: int, behind: Behind) -> float:
        """Return how many of the tokens behind a match the replica is likely to find."""
        usual = self._usual.get(slot)
        if usual is None:
            return 0.0
        tokens = behind.answer_tokens
        return max(0.0, tokens - usual.missed_tokens if usual.share >= MOSTLY else tokens * usual.share)

    def on_report(self, slot: int, behind: Behind, *, found_tokens: float) -> None:
        """Apply a report of all cached tokens; one below the match says nothing of the answer."""
        tokens = behind.answer_tokens
        found = found_tokens - behind.matched_tokens
        if found < 0.0:
            return
        reports = self._reports.get(slot)
        if reports is None:
            reports = self._reports[slot] = deque(maxlen=WINDOW)
        reports.append(_FoundPart(min(found / tokens, 1.0), max(tokens - found, 0.0)))
        if len(reports) >= LEAST_REPORTS:
            shares, missed = zip(*reports, strict=True)
            self._usual[slot] = _FoundPart(median_low(shares), median_low(missed))


def _end_of(answer: GivenAnswer, request: RouteRequest) -> float:
    """Return the prompt tokens up to the end of the earlier answer; 0 if the request does not go on with it."""
    prompt, output = answer.prompt_tokens, answer.output_tokens
    ends = request.boundaries
    place = bisect_left(ends, prompt)
    if place == len(ends) or (place and prompt - ends[place - 1] <= ends[place] - prompt):
        place -= 1
    slack = request.block_tokens + SLACK_SHARE * prompt
    if not 0 <= place < len(ends) - 1 or abs(ends[place] - prompt) > slack:
        return 0.0
    length = ends[place + 1] - ends[place]
    if not ALIKE * output <= length <= output / ALIKE + slack:
        return 0.0
    return ends[place] + min(length, output)
