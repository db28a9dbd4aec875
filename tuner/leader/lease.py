"""Leadership by a lease in the store of several routers, renewed at a third of its time.

A lease names its holder, and only the holder renews or deletes it, by scripts that compare. The time that is left is
counted here from before the last renewal was sent, by a clock that nothing sets: a process that was paused, or cannot
reach the store, stops before another one can hold the lease. Each new holder gets a higher number (the fencing token).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from gorgo.errors import LeadershipLost
from tuner.leader.candidate import Leadership

if TYPE_CHECKING:
    from redis.asyncio import Redis

#: A leader that was killed is replaced after this time; a renewal may fail twice.
LEASE_S = 10.0
#: How long before the end of the lease its holder stops: more than clocks of two hosts drift in ten seconds.
MARGIN_S = 0.5

_TAKE = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return redis.call('INCR', KEYS[2]) end
return 0
"""
_RENEW = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
_DELETE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class StoreLease(Leadership):
    """The lease of one candidate.

    Parameters
    ----------
    client:
        Of the store, with time-outs.
    group:
        Of the routers; names the key.
    lease_s:
        How long a lease lasts without a renewal.
    renew_s:
        Time between renewals; a third of `lease_s` unless given.
    clock:
        Monotonic seconds.
    """

    has_standby = True

    def __init__(
        self,
        client: Redis,
        group: str,
        *,
        lease_s: float = LEASE_S,
        renew_s: float | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.token = 0
        self._client, self._lease_s, self._now = client, lease_s, clock
        self._renew_s = lease_s / 3 if renew_s is None else renew_s
        self._keys = (f"gorgo:{group}:tuner", f"gorgo:{group}:tuner:token")
        self._holder = secrets.token_hex(16)
        self._until_s = float("-inf")
        self._renewing: asyncio.Task[None] | None = None

    async def try_to_lead(self) -> str | None:
        """Return None with the lease, otherwise why not."""
        began_s = self._now()
        try:
            token = int(await self._script(_TAKE, *self._keys, self._holder, self._lease_ms))
        except Exception as error:  # noqa: BLE001 - the client has several families of errors
            return f"the store gives no lease: {type(error).__name__} {error}"
        if not token:
            return "another process leads"
        self.token, self._until_s = token, began_s + self._lease_s
        self._renewing = asyncio.create_task(self._renew())
        return None

    async def confirm_leadership(self) -> None:
        """Compare the time that is left with the clock."""
        if self._now() >= self._until_s - MARGIN_S:
            raise LeadershipLost("the lease in the store has ended")

    async def release(self) -> None:
        """Delete the lease if it is this process's, and end the renewals."""
        self._until_s = float("-inf")
        task, self._renewing = self._renewing, None
        if task is None:
            return
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        with suppress(Exception):  # the lease ends by itself
            await self._script(_DELETE, self._keys[0], self._holder)

    async def _renew(self) -> None:
        """Renew until the lease has ended; a failed renewal is tried again."""
        while self._now() < self._until_s:
            await asyncio.sleep(self._renew_s)
            began_s = self._now()
            try:
                renewed = await self._script(_RENEW, self._keys[0], self._holder, self._lease_ms)
            except Exception:  # noqa: BLE001 - as above
                continue
            self._until_s = began_s + self._lease_s if renewed else float("-inf")

    @property
    def _lease_ms(self) -> int:
        return int(self._lease_s * 1000)

    async def _script(self, script: str, *words: str | int) -> Any:
        keys = sum(str(word).startswith("gorgo:") for word in words)
        return await self._client.eval(script, keys, *words)
