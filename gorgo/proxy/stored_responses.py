"""Which replica holds which stored response, so that `previous_response_id` goes back there.

Owns a bounded map; the least recently used answer is forgotten first, and a request that refers to it gets a clear 404
instead of a replica that never heard of it.
"""

from __future__ import annotations

import re
from collections import OrderedDict

#: About 20 MB; engines themselves keep far fewer.
MAX_RESPONSES = 100_000

#: The id of the response object; ids of its items have other prefixes.
_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')


class StoredResponses:
    """Response id to replica name.

    Example
    -------
    >>> stored = StoredResponses()
    >>> stored.record(b'data: {"response": {"id": "resp_1"}}', "eu-0")
    >>> stored.find("resp_1"), stored.find("resp_2")
    ('eu-0', None)
    """

    def __init__(self, limit: int = MAX_RESPONSES) -> None:
        self._limit = limit
        self._replicas: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def record(self, head: bytes, replica: str) -> None:
        """Take the id out of the first bytes of an answer, a stream or not."""
        match = _ID.search(head)
        if match is None:
            return
        key = match[1].decode("ascii")
        self._replicas[key] = replica
        self._replicas.move_to_end(key)
        if len(self._replicas) > self._limit:
            self._replicas.popitem(last=False)

    def forget(self, replica: str) -> None:
        """The replica, or the process that it was, is gone and with it what it stored."""
        for key in [key for key, home in self._replicas.items() if home == replica]:
            del self._replicas[key]

    def find(self, response_id: str) -> str | None:
        home = self._replicas.get(response_id)
        if home is not None:
            self._replicas.move_to_end(response_id)
        return home
