"""Entries of all members' streams, in the order in which the store took them.

Owns the position in each stream and what was read and not yet applied. Leaves reading and applying to the service.

Theory of operation. Marks of prefixes are ordered by their use, so a router that joins applies the entries of all
streams in one order. A read returns at most `PAGE` entries of a stream. Beyond the last entry of a full page there may
be more, so entries are applied up to the earliest such end; those after it wait. A stream with waiting entries is not
read, so at most one page of each is in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

#: Entries of one stream in a read: some seconds of a router.
PAGE = 64
#: A position so far after the store's clock is of another store: it was replaced, or its clock was set back.
_AHEAD_MS = 1000


class EntryId(NamedTuple):
    """Time by the store, in ms, and the number within it."""

    ms: int
    number: int

    def __str__(self) -> str:
        return f"{self.ms}-{self.number}"


class Entry(NamedTuple):
    """One report as it is in the store."""

    id: EntryId
    member: str
    report: bytes | None


@dataclass(slots=True)
class _Stream:
    position: EntryId
    waiting: deque[Entry] = field(default_factory=deque)
    full: bool = False


class Incoming:
    """Streams of the members."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def follow(self, members: Iterable[str], *, now_ms: int, since_ms: int) -> None:
        """Follow these members alone: new ones from `since_ms` on, the others from where they are."""
        start = EntryId(since_ms, 0)
        streams = {}
        for member in members:
            stream = self._streams.get(member)
            if stream is None or stream.position.ms > now_ms + _AHEAD_MS:
                stream = _Stream(start)
            streams[member] = stream
        self._streams = streams

    def positions(self) -> dict[str, EntryId]:
        """Return where to read on, by member."""
        return {member: stream.position for member, stream in self._streams.items() if not stream.waiting}

    @property
    def behind(self) -> bool:
        """Whether streams have more than was read: a read may not block then."""
        return any(stream.full or stream.waiting for stream in self._streams.values())

    def add(self, found: Mapping[str, Sequence[tuple[EntryId, bytes | None]]]) -> None:
        """Add what a read found, by member; members without anything new included."""
        for member, entries in found.items():
            stream = self._streams.get(member)
            if stream is None:
                continue
            stream.full = len(entries) >= PAGE
            if entries:
                stream.waiting.extend(Entry(entry_id, member, report) for entry_id, report in entries)
                stream.position = entries[-1][0]

    def take_entries(self) -> list[Entry]:
        """Return the entries that no unread one comes before, in order."""
        ends = [stream.waiting[-1].id for stream in self._streams.values() if stream.full and stream.waiting]
        end = min(ends, default=None)
        taken: list[Entry] = []
        for stream in self._streams.values():
            while stream.waiting and (end is None or stream.waiting[0].id <= end):
                taken.append(stream.waiting.popleft())
        taken.sort(key=lambda entry: (entry.id, entry.member))
        return taken


def read_id(text: bytes) -> EntryId:
    """Return the id of an entry.

    >>> read_id(b"1700000000000-3").ms
    1700000000000
    """
    ms, _, number = text.partition(b"-")
    return EntryId(int(ms), int(number or 0))
