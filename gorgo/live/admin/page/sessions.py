"""Sessions of the page: a browser cannot send a bearer token by itself, so a cookie stands for it.

The cookie allows the page alone. HTTP Basic would send the token with every request to this origin, cross-site ones
included, without a way to sign out. The token is not the cookie: a session expires and is worthless elsewhere.
"""

from __future__ import annotations

import secrets
from hashlib import sha256

from gorgo.core.lru import Lru
from gorgo.live.clock import Clock

#: Length of a session: a shift.
SESSION_S = 12 * 3600.0
#: Sessions at once; one more ends the oldest.
SESSIONS = 64


class Sessions:
    """The sessions of one process; a restart ends them.

    Parameters
    ----------
    clock:
        When a session is over.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: End of each session by the hash of its key: the time of a lookup says nothing about a key.
        self._ends = Lru[bytes, float](SESSIONS)

    def __len__(self) -> int:
        return len(self._ends)

    def open(self) -> str:
        """Return the key of a new session, for a client that has shown the token."""
        key = secrets.token_urlsafe(32)
        self._ends.put(_hash(key), self._clock() + SESSION_S)
        return key

    def holds(self, key: str | None) -> bool:
        """Return whether `key` is of a valid session."""
        if key is None:
            return False
        end_s = self._ends.get(_hash(key))
        return end_s is not None and self._clock() < end_s

    def end(self, key: str | None) -> None:
        """End a session."""
        if key is not None:
            self._ends.pop(_hash(key), None)


def _hash(key: str) -> bytes:
    return sha256(key.encode()).digest()
