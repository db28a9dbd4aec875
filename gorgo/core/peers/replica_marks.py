"""The marks of one replica, by origin, each origin in the order of use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import inf

from gorgo.core.prefix.origin import Origin

#: Blocks since the mark before it, tick and time of the last use; infinite if no first token has confirmed it.
Mark = tuple[int, int, float]
#: Origins of marks, the first one evicted first.
ORIGINS = (Origin.REMOTE, Origin.LOCAL)


class ReplicaMarks:
    """Marks by hash. One that this router confirmed is local, whoever uses it afterwards."""

    __slots__ = ("blocks", "local", "remote")

    def __init__(self) -> None:
        self.remote: OrderedDict[int, Mark] = OrderedDict()
        self.local: OrderedDict[int, Mark] = OrderedDict()
        #: Sum over all marks.
        self.blocks = 0

    def __len__(self) -> int:
        return len(self.remote) + len(self.local)

    def __bool__(self) -> bool:
        return bool(self.remote or self.local)

    def __iter__(self) -> Iterator[int]:
        yield from self.remote
        yield from self.local

    def of(self, origin: Origin) -> OrderedDict[int, Mark]:
        """Return the marks of an origin, the one used last at the end."""
        return self.local if origin is Origin.LOCAL else self.remote

    def get(self, word: int) -> Mark | None:
        """Return a mark."""
        return self.local.get(word) or self.remote.get(word)

    def use(self, spans: Sequence[tuple[int, int]], origin: Origin, *, tick: int, now: float) -> list[int]:
        """Add the marks of a prompt, the last one used last; return those that are new."""
        own, other = (self.local, self.remote) if origin is Origin.LOCAL else (self.remote, self.local)
        new = []
        for word, blocks in spans:
            target, known = own, own.pop(word, None)
            if known is None:
                known = other.pop(word, None)
                if known is None:
                    new.append(word)
                elif other is self.local:
                    target = other
            # One that is only sent proves nothing, and takes no proof away.
            target[word] = blocks, tick, now if known is None or now < inf else known[2]
            self.blocks += blocks if known is None else blocks - known[0]
        return new

    def oldest(self) -> tuple[Origin, int] | None:
        """Return the origin and tick of the mark that was used before all others."""
        found = None
        for origin in ORIGINS:
            for _, tick, _ in self.of(origin).values():
                if found is None or tick < found[1]:
                    found = origin, tick
                break
        return found

    def evict(self, origin: Origin) -> int:
        """Remove and return the oldest mark of an origin."""
        word, (blocks, _, _) = self.of(origin).popitem(last=False)
        self.blocks -= blocks
        return word

    def withdraw(self, word: int) -> bool:
        """Remove a mark of other routers that no first token confirmed; return whether there was one."""
        known = self.remote.get(word)
        if known is None or known[2] < inf:
            return False
        del self.remote[word]
        self.blocks -= known[0]
        return True

    def check(self) -> None:
        """Assert the sum, one origin per mark, and the order of use."""
        assert self.blocks == sum(blocks for order in (self.remote, self.local) for blocks, _, _ in order.values())
        assert not self.remote.keys() & self.local.keys()
        for order in (self.remote, self.local):
            ticks = [tick for _, tick, _ in order.values()]
            assert ticks == sorted(ticks), "marks are in order of use"
