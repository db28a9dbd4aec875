"""The replica and the client of each stored response, for requests with `previous_response_id`.

Owns a bounded map. A response is known to its own client alone: an engine has one key for all clients. The least
recently used response is evicted first; a request that continues it gets a 404 instead of a replica without it.
"""

from __future__ import annotations

import re

from gorgo.core.lru import Lru

#: About 20 MB; engines store far fewer.
MAX_RESPONSES = 100_000

#: The id of the response object; ids of its items have other prefixes.
_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')


class StoredResponses:
    """Response id to replica name, per client.

    Example
    -------
    >>> stored = StoredResponses()
    >>> stored.record(b'data: {"response": {"id": "resp_1"}}', "eu-0", client="a")
    >>> stored.find("resp_1", client="a"), stored.find("resp_1", client="b"), stored.find("resp_2", client="a")
    ('eu-0', None, None)
    """

    def __init__(self, limit: int = MAX_RESPONSES) -> None:
        self._places = Lru[str, tuple[str, str | None]](limit)

    def __len__(self) -> int:
        return len(self._places)

    def record(self, head: bytes, replica: str, *, client: str | None) -> None:
        """Record the id in the first bytes of a response to `client`, a stream or not."""
        match = _ID.search(head)
        if match is None:
            return
        self._places.put(match[1].decode("ascii"), (replica, client))

    def forget(self, replica: str) -> None:
        """Remove the responses of a replica that has restarted or was removed."""
        for key in [key for key, (name, _) in self._places.items() if name == replica]:
            del self._places[key]

    def find(self, response_id: str, *, client: str | None) -> str | None:
        """Return the replica of a response of `client`; None for an unknown one and for another client's."""
        replica, owner = self._places.get(response_id, (None, None))
        if replica is None or owner != client:
            return None
        self._places.move_to_end(response_id)
        return replica
