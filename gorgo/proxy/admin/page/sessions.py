"""Who has signed in to the page: a browser cannot send a bearer token by itself, so a cookie stands for it.

Owns the sessions and what the cookie allows: to look at the page and nothing else. Why no HTTP Basic: browsers then
send the token with every request to this origin, cross-site ones included, and nobody can sign out. Why not the token
as the cookie: a session ends, and is worth nothing elsewhere.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from hashlib import sha256

from gorgo.proxy.clock import Clock

#: A shift.
SESSION_S = 12 * 3600.0
#: Browsers that are signed in at once; one more ends the oldest session.
SESSIONS = 64


class Sessions:
    """The sessions of one process; a restart ends them.

    Parameters
    ----------
    token:
        The admin token.
    clock:
        When a session is over.
    """

    def __init__(self, token: bytes, clock: Clock) -> None:
        self._token = token
        self._clock = clock
        #: End of each session by the hash of its key: what is looked up does not depend on what is secret.
        self._ends: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def sign_in(self, given: bytes) -> str | None:
        """The key of a new session, if `given` is the token."""
        if not hmac.compare_digest(given, self._token):
            return None
        key = secrets.token_urlsafe(32)
        self._ends[_hash(key)] = self._clock() + SESSION_S
        if len(self._ends) > SESSIONS:
            self._ends.popitem(last=False)
        return key

    def holds(self, key: str | None) -> bool:
        """Whether `key` is of a session that is not over."""
        if key is None:
            return False
        end_s = self._ends.get(_hash(key))
        return end_s is not None and self._clock() < end_s

    def end(self, key: str | None) -> None:
        """Sign out."""
        if key is not None:
            self._ends.pop(_hash(key), None)


def _hash(key: str) -> bytes:
    return sha256(key.encode()).digest()
