"""Check of the admin token: in constant time, with wrong ones delayed, logged and counted.

Theory of operation. The right token always passes at once, so guessing locks no operator out. After a few wrong ones
within a minute each further one is answered late. Only a few answers wait, so they do not use up the connections, and
the connection of a further one ends without an answer.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import deque
from collections.abc import Callable, Mapping

from gorgo.live.event_loop import Clock
from gorgo.live.logs import log

#: Wrong tokens within `WINDOW_S` that are answered at once: a mistyped one, a script with an old one.
FREE = 10
WINDOW_S = 60.0
DELAY_S = 1.0
#: Answers that wait at once; far fewer than the listener's connections.
WAITING = 32
#: Between two lines in the log.
LOG_S = 10.0


class NoAnswer(Exception):  # noqa: N818 - not an error of the program
    """A wrong token beyond those whose answers wait: the connection ends without an answer."""


#: Header of a 401.
CHALLENGE = ((b"www-authenticate", b"Bearer"),)


def bearer(headers: Mapping[str, str]) -> bytes | None:
    """Return the token of a request; empty for another scheme, `None` without one."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if not scheme:
        return None
    return given.strip().encode() if scheme.lower() == "bearer" else b""


class TokenCheck:
    """The admin token, and the wrong ones of the last minute.

    Parameters
    ----------
    token:
        The token; None rejects every request.
    clock:
        Monotonic seconds.
    count:
        Called once per wrong token.
    """

    def __init__(self, token: str | None, clock: Clock, count: Callable[[], None]) -> None:
        self.token = None if token is None else token.encode()
        self._clock = clock
        self._count = count
        self._wrong: deque[float] = deque(maxlen=FREE + 1)
        self._waiting = 0
        self._logged_s = float("-inf")
        self._unlogged = 0

    def is_right(self, given: bytes) -> bool:
        """Return whether `given` is the token."""
        return self.token is not None and hmac.compare_digest(given, self.token)

    def delay_s(self) -> float | None:
        """Record a wrong token; return how long its answer has to wait, and None for one that gets no answer."""
        now = self._clock()
        self._count()
        self._wrong.append(now)
        self._unlogged += 1
        if now - self._logged_s >= LOG_S:
            log("admin_refused", level=logging.WARNING, wrong_tokens=self._unlogged)
            self._logged_s, self._unlogged = now, 0
        late = len(self._wrong) > FREE and now - self._wrong[0] < WINDOW_S
        if not late:
            return 0.0
        return DELAY_S if self._waiting < WAITING else None

    async def refuse(self) -> None:
        """Record a wrong token, and return when it may be answered.

        Raises `NoAnswer` where too many answers wait: the connection is to end at once.
        """
        delay_s = self.delay_s()
        if delay_s is None:
            raise NoAnswer
        if delay_s:
            self._waiting += 1
            try:
                await asyncio.sleep(delay_s)
            finally:
                self._waiting -= 1
