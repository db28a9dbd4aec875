"""`Lru`: a mapping with a bound, from which the entry that was not used for the longest time is evicted.

What a client, a peer or an engine can name without end is stored here: models, responses, sessions, routers. Leaves the
age of entries to their owners.

An order without a bound of its own stays an `OrderedDict`: idle connections and a window of requests are emptied by
age, an index of prefixes by the capacity of its replica, and marks and routes share one bound over several orders.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Lru(OrderedDict[Key, Value]):
    """Entries in the order of their use, the latest last. `get` and `in` count as no use.

    A subclass, so that reading takes no call of Python code: these mappings are read once per request.

    Parameters
    ----------
    limit:
        Most entries, or with `weigh` the largest sum of weights.
    weigh:
        Weight of a value, for a bound on memory in bytes. Entries of such a mapping leave by eviction alone,
        because nothing else takes their weight from the sum.

    Example
    -------
    >>> places = Lru[str, int](2)
    >>> places.put("a", 1), places.put("b", 2), places.use("a")
    ((), (), 1)
    >>> places.put("c", 3), list(places)
    (('b',), ['a', 'c'])
    """

    def __init__(self, limit: int, *, weigh: Callable[[Value], int] | None = None) -> None:
        super().__init__()
        self._limit = limit
        self._weigh = weigh
        self._weight = 0

    def use(self, key: Key) -> Value | None:
        """Return the value of `key` and count the use; `None` if there is none."""
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value

    def put(self, key: Key, value: Value) -> tuple[Key, ...]:
        """Set the value of `key` as the latest use; return the keys that were evicted for it.

        A value heavier than the limit evicts all others and itself.
        """
        if self._weigh is not None:
            return self._put_weighed(key, value, self._weigh)
        self[key] = value
        self.move_to_end(key)
        if len(self) <= self._limit:
            return ()
        return (self.popitem(last=False)[0],)

    def check(self) -> None:
        """Assert the bound, and the sum of weights."""
        if self._weigh is None:
            assert len(self) <= self._limit, "the number is bounded"
        else:
            assert self._weight == sum(map(self._weigh, self.values())) <= self._limit, "the weight is bounded"

    def _put_weighed(self, key: Key, value: Value, weigh: Callable[[Value], int]) -> tuple[Key, ...]:
        if key in self:
            self._weight -= weigh(self[key])
        self[key] = value
        self.move_to_end(key)
        self._weight += weigh(value)
        evicted = []
        while self._weight > self._limit:
            oldest, left = self.popitem(last=False)
            self._weight -= weigh(left)
            evicted.append(oldest)
        return tuple(evicted)
