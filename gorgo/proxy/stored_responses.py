"""The replica of each stored response, for requests with `previous_response_id`.

Owns a bounded map. The least recently used response is evicted first; a request that continues it gets a 404 instead of
a replica without it.
"""

from __future__ import annotations

import re
from collections import OrderedDict

#: About 20 MB; engines store far fewer.
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
        """Record the id in the first bytes of a response, a stream or not."""
        match = _ID.search(head)
        if match is None:
            return
        key = match[1].decode("ascii")
        self._replicas[key] = replica
        self._replicas.move_to_end(key)
        if len(self._replicas) > self._limit:
            self._replicas.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Remove the responses of a replica that has restarted or was removed."""
        for key in [key for key, name in self._replicas.items() if name == replica]:
            del self._replicas[key]

    def find(self, response_id: str) -> str | None:
        replica = self._replicas.get(response_id)
        if replica is not None:
            self._replicas.move_to_end(response_id)
        return replica
