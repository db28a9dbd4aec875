"""How much one client may ask: requests at a time, and per second. Pure, on the caller's clock.

Owns the count and the token bucket of each client. Who a client is, and in what order those who wait are served, is
for others. Memory is bounded: a client with nothing open and a full bucket is like one never seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from gorgo.core.limits import ClientLimits, ClientRules

#: Accounts kept before those without a debt are dropped; a list of keys has a quarter of it.
MAX_CLIENTS = 4096
#: A client with too many open has to wait for one of its own to end; nobody knows when that is, s.
IN_FLIGHT_RETRY_S = 1.0
#: Of a clock that counts from the epoch: who comes when told is let in.
_NOISE = 1e-6


@dataclass(frozen=True, slots=True)
class QuotaExceeded:
    """Why a client is turned away, and when it may come again."""

    code: str
    message: str
    retry_after_s: float


@dataclass(slots=True)
class _Quota:
    tokens: float
    filled_s: float
    in_flight: int = 0


class ClientQuotas:
    """Counts per client.

    Example
    -------
    >>> quotas = ClientQuotas(ClientRules(ClientLimits(max_in_flight=1, requests_per_s=0.5, burst=2)))
    >>> quotas.acquire("a", now=0.0), quotas.acquire("a", now=0.0).code
    (None, 'client_concurrency')
    >>> quotas.release("a")
    >>> quotas.acquire("a", now=0.0), quotas.release("a"), quotas.acquire("a", now=0.5).retry_after_s
    (None, None, 1.5)
    """

    def __init__(self, rules: ClientRules) -> None:
        self.set_rules(rules)
        self._quotas: dict[str, _Quota] = {}

    def set_rules(self, rules: ClientRules) -> None:
        """Other limits for whoever enters from now on; who is inside and was not counted is not."""
        self._rules, self._counting = rules, rules.has_limits

    def counts(self, client: str | None) -> bool:
        """Whether a request of `client` that enters now is counted, so that its end is to be told."""
        return client is not None and self._counting

    def acquire(self, client: str | None, *, now: float) -> QuotaExceeded | None:
        """Count one more request of `client`, unless that is too much."""
        if client is None or not self._counting:
            return None
        excess = self.check(client)
        if excess is not None:
            return excess
        limits = self._rules.for_client(client)
        account = self._quota(client, limits, now)
        if limits.requests_per_s is not None:
            if account.tokens < 1.0 - _NOISE:
                wait_s = (1.0 - account.tokens) / limits.requests_per_s
                message = f"this key may send {limits.requests_per_s * 60:g} requests a minute"
                return QuotaExceeded("client_rate", message, wait_s)
            account.tokens -= 1.0
        account.in_flight += 1
        return None

    def check(self, client: str, *, coming: int = 0) -> QuotaExceeded | None:
        """Why one more of `client` would be too many at a time, with `coming` that have not entered. Counts nothing."""
        most = self._rules.for_client(client).max_in_flight
        if most is None or self.in_flight(client) + coming < most:
            return None
        return QuotaExceeded(
            "client_concurrency", f"{most} requests of this key are open, the most it may have", IN_FLIGHT_RETRY_S
        )

    def in_flight(self, client: str) -> int:
        """Requests of `client` that have not ended."""
        account = self._quotas.get(client)
        return 0 if account is None else account.in_flight

    def release(self, client: str | None) -> None:
        """A request of `client` that was counted has ended."""
        account = None if client is None else self._quotas.get(client)
        if account is not None and account.in_flight:
            account.in_flight -= 1

    def _quota(self, client: str, limits: ClientLimits, now: float) -> _Quota:
        account = self._quotas.get(client)
        if account is None:
            if len(self._quotas) >= MAX_CLIENTS:
                self._forget(now)
            account = self._quotas[client] = _Quota(limits.bucket, now)
        rate = limits.requests_per_s or 0.0
        account.tokens = min(limits.bucket, account.tokens + rate * max(0.0, now - account.filled_s))
        account.filled_s = max(account.filled_s, now)
        return account

    def _forget(self, now: float) -> None:
        for name in list(self._quotas):
            account, limits = self._quotas[name], self._rules.for_client(name)
            full_s = (limits.bucket - account.tokens) / (limits.requests_per_s or float("inf"))
            if not account.in_flight and now - account.filled_s >= full_s:
                del self._quotas[name]
