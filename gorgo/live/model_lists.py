"""Lists of models that replicas answer, where the configuration and the monitors know none.

Theory of operation. Clients with the same key share one answer for a few seconds, and one fetch: a client's key passes
to the replica, which may list other models for another key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from gorgo.core.lru import Lru
from gorgo.live.clock import Clock
from gorgo.live.http.headers import KEYS, Header

#: Models come and go with replicas, and a client that polls does it once a minute.
FRESH_S = 5.0
#: Keys with an answer each; 64 answers of an engine are some 100 kB.
MAX_LISTS = 64

_Credentials = tuple[Header, ...]


class ModelLists:
    """Answers by the credentials of clients.

    Parameters
    ----------
    clock:
        Monotonic seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lists = Lru[_Credentials, tuple[float, asyncio.Task[bytes]]](MAX_LISTS)

    def clear(self) -> None:
        """Forget all answers, after a change of the fleet."""
        self._lists.clear()

    async def get(self, headers: Iterable[Header], fetch: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the answer for the credentials in `headers`, fetched if there is no fresh one. Raises as `fetch`."""
        key = tuple(pair for pair in headers if pair[0] in KEYS)
        expiry_s, task = self._lists.get(key, (float("-inf"), None))
        failed = task is not None and task.done() and (task.cancelled() or task.exception() is not None)
        if task is None or failed or (task.done() and self._clock() >= expiry_s):
            task = asyncio.ensure_future(fetch())
            self._lists.put(key, (self._clock() + FRESH_S, task))
        return await asyncio.shield(task)  # a client that leaves ends no other's fetch
