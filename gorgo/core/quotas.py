"""Quotas: requests in flight, requests per second and tokens per second of each client. Pure, on the caller's clock.

Theory of operation. Requests are paid before: a bucket is emptied by one. Tokens are paid afterwards, because the
length of an answer is not known before: a prompt is charged on arrival, the rest at the end, and the allowance may be
negative. A client with none left waits until it has some again, so its rate holds in the long run, and a prompt may be
larger than an allowance.

Memory is bounded: a client with nothing in flight and a full bucket is like one that never came.
"""

from __future__ import annotations

from dataclasses import dataclass

from gorgo.core.limits import ClientLimits, ClientRules

#: Clients counted before those with a full bucket are dropped; a list of keys has a quarter of it.
MAX_CLIENTS = 4096
#: Retry-After of a client with too many in flight, s: the end of one of its requests is not predicted.
IN_FLIGHT_RETRY_S = 1.0
#: Of a time that counts from the epoch: a client that comes at its Retry-After is admitted.
_NOISE = 1e-6


@dataclass(frozen=True, slots=True)
class QuotaExceeded:
    """Why a client's request is rejected, and its Retry-After, s.

    Not a `Reject`: that is the answer to one request in the Router, with its id and status. A shell also asks for
    requests that never reach the Router.
    """

    code: str
    message: str
    retry_after_s: float


@dataclass(slots=True)
class _Quota:
    requests: float
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
        """Replace the limits for requests from now on; requests in flight that were not counted stay so."""
        self._rules, self._counting = rules, rules.has_limits

    def counts(self, client: str | None) -> bool:
        """Return whether a request of `client` is counted now, and so has to be released."""
        return client is not None and self._counting

    def acquire(self, client: str | None, *, now: float, tokens: int = 0) -> QuotaExceeded | None:
        """Count one more request of `client` with a prompt of `tokens`, or return the quota that it exceeds."""
        if client is None or not self._counting:
            return None
        exceeded = self.check(client)
        if exceeded is not None:
            return exceeded
        limits = self._rules.for_client(client)
        quota = self._quota(client, limits, now)
        exceeded = _exceeded(quota, limits)
        if exceeded is not None:
            return exceeded
        if limits.requests_per_s is not None:
            quota.requests -= 1.0
        if limits.tokens_per_s is not None:
            quota.tokens -= tokens
        quota.in_flight += 1
        return None

    def count(self, client: str | None, *, now: float) -> QuotaExceeded | None:
        """Count a request that needs no replica's work, against the rates alone; return the one that it exceeds."""
        if client is None or not self._counting:
            return None
        limits = self._rules.for_client(client)
        quota = self._quota(client, limits, now)
        exceeded = _exceeded(quota, limits)
        if exceeded is None and limits.requests_per_s is not None:
            quota.requests -= 1.0
        return exceeded

    def check(self, client: str, *, coming: int = 0) -> QuotaExceeded | None:
        """Return the quota that one more request in flight exceeds; `coming` are not counted yet. Counts nothing."""
        most = self._rules.for_client(client).max_in_flight
        if most is None or self.in_flight(client) + coming < most:
            return None
        return QuotaExceeded(
            "client_concurrency", f"{most} requests of this key are in flight, its limit", IN_FLIGHT_RETRY_S
        )

    def in_flight(self, client: str) -> int:
        """Return the requests of `client` in flight."""
        quota = self._quotas.get(client)
        return 0 if quota is None else quota.in_flight

    def release(self, client: str | None, *, tokens: int = 0, used: int = 0) -> None:
        """Release a counted request of `client`: `tokens` were charged on arrival, `used` is what it has used."""
        self.on_released(client)
        self.charge(client, tokens=tokens, used=used)

    def on_released(self, client: str | None) -> None:
        """Count a request of `client` as no longer in flight, before what it has used is known."""
        quota = None if client is None else self._quotas.get(client)
        if quota is not None and quota.in_flight:
            quota.in_flight -= 1

    def charge(self, client: str | None, *, tokens: int, used: int) -> None:
        """Charge a request that is no longer in flight. Parameters as in `release`."""
        quota = None if client is None else self._quotas.get(client)
        if quota is None or client is None:
            return
        limits = self._rules.for_client(client)
        if limits.tokens_per_s is not None:
            quota.tokens = min(limits.most_tokens, quota.tokens + tokens - used)

    def _quota(self, client: str, limits: ClientLimits, now: float) -> _Quota:
        quota = self._quotas.get(client)
        if quota is None:
            if len(self._quotas) >= MAX_CLIENTS:
                self._forget(now)
            quota = self._quotas[client] = _Quota(limits.bucket, limits.most_tokens, now)
        passed_s = max(0.0, now - quota.filled_s)
        quota.requests = min(limits.bucket, quota.requests + (limits.requests_per_s or 0.0) * passed_s)
        quota.tokens = min(limits.most_tokens, quota.tokens + (limits.tokens_per_s or 0.0) * passed_s)
        quota.filled_s = max(quota.filled_s, now)
        return quota

    def _forget(self, now: float) -> None:
        for name in list(self._quotas):
            quota, limits = self._quotas[name], self._rules.for_client(name)
            full_s = max(
                _refill_s(limits.bucket - quota.requests, limits.requests_per_s),
                _refill_s(limits.most_tokens - quota.tokens, limits.tokens_per_s),
            )
            if not quota.in_flight and now - quota.filled_s >= full_s:
                del self._quotas[name]


def _exceeded(quota: _Quota, limits: ClientLimits) -> QuotaExceeded | None:
    """Return the rate that one more request exceeds."""
    if limits.requests_per_s is not None and quota.requests < 1.0 - _NOISE:
        message = f"this key may send {limits.requests_per_s * 60:g} requests a minute"
        return QuotaExceeded("client_rate", message, _refill_s(1.0 - quota.requests, limits.requests_per_s))
    if limits.tokens_per_s is not None and quota.tokens <= -_NOISE:
        message = f"this key may use {limits.tokens_per_s * 60:g} tokens a minute, prompts and answers together"
        return QuotaExceeded("client_tokens", message, _refill_s(-quota.tokens, limits.tokens_per_s))
    return None


def _refill_s(missing: float, per_s: float | None) -> float:
    """Return the time until `missing` has come back; 0 without a rate, where nothing is counted."""
    return 0.0 if per_s is None else max(0.0, missing / per_s)
