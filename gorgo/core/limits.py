"""Every bound of the Router, with its reason; the quotas of clients, and the bytes that the proxy buffers.

Imports no other part of the core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class OutlierLimits:
    """Outlier detection: when a replica is ejected, and for how long.

    Parameters
    ----------
    failures:
        Failures in a row that eject a healthy replica. One or two happen to a healthy engine (a reset idle connection,
        a restart of a sidecar); three rarely.
    base_s, max_s:
        First back-off, doubled each time up to `max_s`, s.
    """

    failures: int = 3
    base_s: float = 5.0
    max_s: float = 60.0


@dataclass(frozen=True, slots=True)
class OverloadLimits:
    """Queueing and shedding. Off by default: a shell has to carry it out.

    Parameters
    ----------
    queue_enabled:
        Queue a request while its replica is saturated, under a policy that predicts. A request without any eligible
        replica is queued under any policy.
    queue_every_policy:
        Queue under policies that do not predict too, shortest prompt first; for comparisons, where a queue must be
        under every policy or under none.
    queue_max_requests:
        Most queued requests; one more is rejected. Each occupies memory for its body.
    max_backlog_s:
        A replica with more prefill than this is saturated, s: long enough to keep it busy for a round trip, short
        enough that queued requests can still be reordered.
    max_concurrency_per_replica:
        A replica with so many requests in flight is saturated; `None`: its `max_running_requests`.
    slo_ttft_s:
        Deadline of requests that bring none, s; `None`: none.
    shed_on_objective:
        Under a policy that takes objectives, a request's own first-token objective is its deadline too.
    slo_e2e_s:
        Target for the last token, s: a replica with slow answers is saturated at a lower concurrency. Sheds no request.
        `None`: no target.
    infeasible_max_wait_s:
        Longest queue time of a request that is infeasible on an idle fleet, s.
    no_replica_wait_s:
        Longest queue time without any eligible replica, s: a probation trial or a reload may end it.
    """

    queue_enabled: bool = False
    queue_every_policy: bool = False
    queue_max_requests: int = 1000
    max_backlog_s: float = 0.2
    max_concurrency_per_replica: int | None = None
    slo_ttft_s: float | None = None
    shed_on_objective: bool = False
    slo_e2e_s: float | None = None
    infeasible_max_wait_s: float = 0.3
    no_replica_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HedgeLimits:
    """When and how often a request is hedged. Off by default: a shell has to carry it out.

    Parameters
    ----------
    budget_ratio:
        Hedges as a ratio of the requests of the last `window_s`; 0 turns hedging off.
    budget_minimum:
        Hedges in a window however few requests there were.
    window_s:
        Long enough that a burst of late requests finds the budget that quiet minutes have left, s.
    delay_s:
        Later than predicted by this, or by the prediction, is evidence, s.
    grace_s:
        Delay after the evidence, s: tokens of one step of an engine come together, in any order.
    """

    budget_ratio: float = 0.0
    budget_minimum: int = 0
    window_s: float = 300.0
    delay_s: float = 0.5
    grace_s: float = 0.1


#: What a client may use at once of its rate, s.
BURST_S = 10.0


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Quota of one client; `None` is no bound.

    `burst` requests may come at once before `requests_per_s` counts; by default as many as in ten seconds.
    `tokens_per_s` bounds prompt and output tokens together, with ten seconds' worth at once.
    """

    max_in_flight: int | None = None
    requests_per_s: float | None = None
    burst: float | None = None
    tokens_per_s: float | None = None

    @property
    def bucket(self) -> float:
        """Requests of a full bucket."""
        if self.burst is not None:
            return self.burst
        return max(1.0, BURST_S * (self.requests_per_s or 0.0))

    @property
    def most_tokens(self) -> float:
        """Tokens of a full allowance."""
        return BURST_S * (self.tokens_per_s or 0.0)


@dataclass(frozen=True, slots=True)
class ClientRules:
    """Quotas: the default, and those of named clients."""

    default: ClientLimits = field(default_factory=ClientLimits)
    named: Mapping[str, ClientLimits] = field(default_factory=dict)

    def for_client(self, client: str) -> ClientLimits:
        return self.named.get(client, self.default)

    @property
    def has_limits(self) -> bool:
        """Return whether any client has a bound."""
        return bool(self.named) or self.default != ClientLimits()


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """Every bound of the Router.

    Parameters
    ----------
    max_attempts:
        Most attempts of one request, the first included.
    continuations:
        How often one answer that breaks off may be continued at another replica; 0: never.
    max_in_flight:
        Most open attempts and queued requests; one more is rejected with 429.
    stale_after_s:
        Age at which a probe or a scrape counts as unknown.
    rtt_ewma_alpha:
        Weight of a new probe in the smoothed round trip.
    max_index_blocks:
        Blocks in the prefix index over all replicas; bounds memory.
    block_tokens:
        Tokens of one block, to turn a replica's KV capacity into blocks.
    max_decisions, max_samples:
        Newest decisions (with every candidate's terms) and samples retained for a reader; with 0 no sample is made.
    panic_threshold:
        Share of healthy replicas below which those ejected for failed attempts are tried again soon (`Fleet`).
    outlier:
        Outlier detection.
    overload:
        Queueing and shedding.
    hedging:
        Second attempts of late requests.
    retry_budget_ratio, retry_budget_minimum, retry_budget_window_s:
        Retry budget: a ratio of the requests of the last seconds, and at least this number. Without it a fleet that
        fails would get everything `max_attempts` times. An attempt that never reached a replica does not count, nor a
        lost connection while other replicas are healthy.
    slow_start_s:
        Slow-start duration of a replica that joins or is readmitted; 0 disables it.
    region_window_s:
        A region is unreachable when all its replicas fail a probe within this window.
    clients:
        Quotas.
    fallbacks:
        Next best replicas in each Dispatch, for a gateway that retries by itself; 0 where the Router retries.
    explore:
        Share of requests whose first attempt goes to any eligible replica, by chance (`core.dispatch.dispatcher`).
    sampled_replicas:
        Candidates that a policy with a cost compares where there are more than sixteen times as many
        (`core.dispatch.dispatcher`).
    max_routes, route_ttl_s:
        Routes that a policy with routes of its own stores, and the time without use after which one is void, s. Both
        are Ranvier's: a route is some 250 bytes, and engines have evicted a prefix that is unused for an hour.
    """

    max_attempts: int = 3
    continuations: int = 2
    max_in_flight: int = 4096
    stale_after_s: float = 90.0
    rtt_ewma_alpha: float = 0.3
    max_index_blocks: int = 4_000_000
    block_tokens: float = 64.0
    max_decisions: int = 1000
    max_samples: int = 10_000
    panic_threshold: float = 0.5
    outlier: OutlierLimits = field(default_factory=OutlierLimits)
    overload: OverloadLimits = field(default_factory=OverloadLimits)
    hedging: HedgeLimits = field(default_factory=HedgeLimits)
    retry_budget_ratio: float = 0.2
    retry_budget_minimum: int = 20
    retry_budget_window_s: float = 10.0
    slow_start_s: float = 0.0
    region_window_s: float = 30.0
    clients: ClientRules = field(default_factory=ClientRules)
    fallbacks: int = 0
    explore: float = 0.0
    sampled_replicas: int = 128
    max_routes: int = 100_000
    route_ttl_s: float = 3600.0


# Quotas: requests in flight, requests per second and tokens per second of each client. Pure, on the caller's clock.
#
# Theory of operation. Requests are paid before: a bucket is emptied by one. Tokens are paid afterwards, because the
# length of an answer is not known before: a prompt is charged on arrival, the rest at the end, and the allowance may
# be negative. A client with none left waits until it has some again, so its rate holds in the long run, and a prompt
# may be larger than an allowance.
#
# Memory is bounded: a client with nothing in flight and a full bucket is like one that never came.


#: Longest wait that the counts of engines cause a client, s: one false count must not lock it out.
MAX_REPORTED_DEBT_S = 60.0
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
    #: What the other workers of this router had spent when it was last deducted here.
    spent_by_others: tuple[int, int] = (0, 0)


class CountsOfWorkers(Protocol):
    """What the workers of one router share of their clients, each by its own entry."""

    def in_flight_of_others(self, client: str) -> int:
        """Return the requests of a client in flight at the other workers."""
        ...

    def spent_by_others(self, client: str) -> tuple[int, int]:
        """Return the requests and tokens that a client has spent at the other workers since their start."""
        ...

    def allowances_of_others(self, client: str) -> Sequence[tuple[float, float, float]]:
        """Return the requests and tokens left to a client, and as of when, by each other worker that counts it."""
        ...

    def set_in_flight(self, client: str, count: int) -> None: ...

    def spend(self, client: str, *, requests: int = 0, tokens: int = 0) -> None:
        """Add to what a client has spent here."""
        ...

    def set_allowance(self, client: str, requests: float, tokens: float, filled_s: float) -> None: ...


class ClientQuotas:
    """Counts per client. With `shared` those of the other workers of the router count too.

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
        self.shared: CountsOfWorkers | None = None
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
        self._share(client, quota, requests=1, tokens=tokens)
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
            self._share(client, quota, requests=1)
        return exceeded

    def check(self, client: str, *, coming: int = 0) -> QuotaExceeded | None:
        """Return the quota that one more request in flight exceeds; `coming` are not counted yet. Counts nothing."""
        most = self._rules.for_client(client).max_in_flight if self._counting else None
        if most is None or self.in_flight(client) + coming < most:
            return None
        return QuotaExceeded(
            "client_concurrency", f"{most} requests of this key are in flight, its limit", IN_FLIGHT_RETRY_S
        )

    def is_spent(self, client: str | None, *, now: float) -> bool:
        """Return whether a client has used up its tokens. Counts nothing."""
        if client is None or not self._counting:
            return False
        limits = self._rules.for_client(client)
        return limits.tokens_per_s is not None and self._quota(client, limits, now).tokens <= -_NOISE

    def in_flight(self, client: str) -> int:
        """Return the requests of `client` in flight."""
        quota, shared = self._quotas.get(client), self.shared
        local = 0 if quota is None else quota.in_flight
        return local if shared is None else local + shared.in_flight_of_others(client)

    def release(self, client: str | None, *, tokens: int = 0, used: int = 0) -> None:
        """Release a counted request of `client`: `tokens` were charged on arrival, `used` is what it has used."""
        self.on_released(client)
        self.charge(client, tokens=tokens, used=used)

    def on_released(self, client: str | None) -> None:
        """Count a request of `client` as no longer in flight, before what it has used is known."""
        quota = None if client is None else self._quotas.get(client)
        if client is not None and quota is not None and quota.in_flight:
            quota.in_flight -= 1
            if self.shared is not None:
                self.shared.set_in_flight(client, quota.in_flight)

    def charge(self, client: str | None, *, tokens: int, used: int) -> None:
        """Charge a request that is no longer in flight. Parameters as in `release`.

        `used` is an engine's word: it leaves a debt of a minute at most. The own count on arrival has no such bound.
        """
        quota = None if client is None else self._quotas.get(client)
        if quota is None or client is None:
            return
        limits = self._rules.for_client(client)
        if limits.tokens_per_s is not None:
            least = min(quota.tokens, -MAX_REPORTED_DEBT_S * limits.tokens_per_s)
            quota.tokens = min(limits.most_tokens, max(least, quota.tokens + tokens - used))
            self._share(client, quota, tokens=used - tokens)

    def _share(self, client: str, quota: _Quota, *, requests: int = 0, tokens: int = 0) -> None:
        """Let the other workers know what a client has spent here."""
        shared = self.shared
        if shared is not None:
            shared.set_in_flight(client, quota.in_flight)
            shared.spend(client, requests=requests, tokens=tokens)
            shared.set_allowance(client, quota.requests, quota.tokens, quota.filled_s)

    def _deduct(self, client: str, quota: _Quota, shared: CountsOfWorkers, limits: ClientLimits) -> None:
        """Deduct what a client has spent at the other workers since this was done last."""
        before, spent = quota.spent_by_others, shared.spent_by_others(client)
        if spent != before:
            quota.spent_by_others = spent
            quota.requests -= spent[0] - before[0] if limits.requests_per_s is not None else 0
            quota.tokens -= spent[1] - before[1] if limits.tokens_per_s is not None else 0

    def _new_quota(self, client: str, limits: ClientLimits, now: float) -> _Quota:
        """Return the quota of a client that is new here: a full one, unless other workers know it.

        What each of them has left is the most that there is: it may lack what others spent since.
        """
        quota = _Quota(limits.bucket, limits.most_tokens, now)
        if self.shared is not None:
            for requests, tokens, filled_s in self.shared.allowances_of_others(client):
                passed_s = max(0.0, now - filled_s)
                quota.requests = min(quota.requests, requests + (limits.requests_per_s or 0.0) * passed_s)
                quota.tokens = min(quota.tokens, tokens + (limits.tokens_per_s or 0.0) * passed_s)
            quota.spent_by_others = self.shared.spent_by_others(client)
        return quota

    def _quota(self, client: str, limits: ClientLimits, now: float) -> _Quota:
        quota = self._quotas.get(client)
        if quota is None:
            if len(self._quotas) >= MAX_CLIENTS:
                self._forget(now)
            quota = self._quotas[client] = self._new_quota(client, limits, now)
        if self.shared is not None:
            self._deduct(client, quota, self.shared, limits)
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


# Bytes that the proxy buffers, in sum and by client: what is granted, and which upload makes way. Pure.
#
# Theory of operation. A client may buffer as much as is left free afterwards: one client gets half of the limit, two
# get a third each, and some is always left for another one (the dynamic threshold of shared-memory switches). A
# reservation that does not fit evicts spare ones, whose end costs no request, and then slow uploads, the slowest first.
# If all of them do not suffice, it is refused, and none is evicted.
#
# References
# ----------
# Choudhury, Hahne: Dynamic Queue Length Thresholds for Shared-Memory Packet Switches, IEEE/ACM ToN 6(2), 1998.


#: Age from which an upload can be evicted, and length of the window of its rate: several round trips of a slow path, s.
GRACE_S = 2.0
#: Uploads below this rate can be evicted: 2 Mbit/s, half of what the largest body needs to arrive in time.
SLOW_BYTES_PER_S = 256 * 1024


class Buffer:
    """The reservation of one request, or of one fetch.

    `size` is reserved; `on_evict` is set while its upload, or its unread answer, can be evicted. A `spare` one can be
    evicted at any time, before all others, and evicts none.
    """

    __slots__ = ("_before", "_received", "_since_s", "_window_s", "client", "evicted", "on_evict", "size", "spare")

    def __init__(self, client: str, now: float) -> None:
        self.client = client
        self.size = 0
        self.evicted = False
        self.spare = False
        self.on_evict: Callable[[], None] | None = None
        self._since_s = self._window_s = now
        self._received = self._before = 0

    def make_evictable(self, on_evict: Callable[[], None], *, now: float) -> None:
        """Let the reservation be evicted by `on_evict` from the grace on, unless bytes are `received`."""
        self.on_evict = on_evict
        self._since_s = self._window_s = now
        self._received = self._before = 0

    def received(self, count: int, *, now: float) -> None:
        """Count received bytes in the window of the rate."""
        passed_s = now - self._window_s
        if passed_s >= GRACE_S:
            self._before = self._received if passed_s < 2 * GRACE_S else 0
            self._received, self._window_s = 0, now
        self._received += count

    def rate(self, now: float) -> float:
        """Return the bytes per second of the last one or two windows."""
        passed_s = now - self._window_s
        if passed_s >= 2 * GRACE_S:
            return self._received / passed_s
        return (self._received + self._before) / (GRACE_S + passed_s)

    def is_evictable(self, now: float) -> bool:
        """Return whether the reservation may be evicted: a spare one, or that of a slow upload or reader."""
        if self.on_evict is None or self.spare:
            return self.spare
        return now - self._since_s >= GRACE_S and self.rate(now) < SLOW_BYTES_PER_S


class BufferBudget:
    """All reservations of one proxy.

    Parameters
    ----------
    limit_bytes:
        Of all reservations; `size_limit` is that of a single one.

    Example
    -------
    >>> budget = BufferBudget(100)
    >>> a, b = budget.new_buffer("a", now=0.0), budget.new_buffer("b", now=0.0)
    >>> budget.reserve(a, 50, now=0.0), budget.reserve(a, 51, now=0.0), budget.reserve(b, 25, now=0.0)
    (True, False, True)
    >>> budget.used_bytes, budget.close(a), budget.close(b), budget.used_bytes
    (75, None, None, 0)
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._by_client: dict[str, int] = {}
        self._buffers: dict[Buffer, None] = {}

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def size_limit(self) -> int:
        """The largest reservation that an empty proxy grants."""
        return self.limit_bytes // 2

    def new_buffer(self, client: str, *, now: float) -> Buffer:
        """Return a reservation of nothing."""
        buffer = Buffer(client, now)
        self._buffers[buffer] = None
        return buffer

    def close(self, buffer: Buffer) -> None:
        """Release a reservation. Idempotent."""
        if self._buffers.pop(buffer, buffer) is None and buffer.size:
            self._resize(buffer, 0)

    def reserve(self, buffer: Buffer, size: int, *, now: float) -> bool:
        """Grow a reservation to `size` in all; evict slow uploads where this needs it. Return False if refused."""
        more = size - buffer.size
        if buffer not in self._buffers:
            return False
        if more > 0:
            lacking = self.used_bytes + self._by_client.get(buffer.client, 0) + 2 * more - self.limit_bytes
            if lacking > 0:
                for other in self._evictable(lacking, buffer, now):
                    self._evict(other)
                    lacking = 0
            if lacking > 0:
                return False
            self._resize(buffer, size)
        return True

    def shrink(self, buffer: Buffer, size: int) -> None:
        """Reduce a reservation to `size`."""
        if buffer in self._buffers and size < buffer.size:
            self._resize(buffer, size)

    def client_bytes(self, client: str) -> int:
        """Return the bytes of a client's reservations."""
        return self._by_client.get(client, 0)

    def check(self) -> None:
        """Assert that the sums are those of the open reservations."""
        by_client: dict[str, int] = {}
        for buffer in self._buffers:
            if buffer.size:
                by_client[buffer.client] = by_client.get(buffer.client, 0) + buffer.size
        assert by_client == self._by_client, "buffered bytes by client"
        assert sum(by_client.values()) == self.used_bytes, "buffered bytes in sum"

    def _evictable(self, lacking: int, buffer: Buffer, now: float) -> list[Buffer]:
        """Return spare reservations, then slow uploads, whose end frees `lacking` for `buffer`; none if all do not."""
        if buffer.spare:
            return []
        evictable = [other for other in self._buffers if other is not buffer and other.size and other.is_evictable(now)]
        evictable.sort(key=lambda other: (not other.spare, other.rate(now)))
        chosen: list[Buffer] = []
        for other in evictable:
            # The client's own bytes count in the sum and in its share.
            lacking -= other.size * (2 if other.client == buffer.client else 1)
            chosen.append(other)
            if lacking <= 0:
                return chosen
        return []

    def _evict(self, buffer: Buffer) -> None:
        on_evict, buffer.on_evict = buffer.on_evict, None
        buffer.evicted = True
        self.close(buffer)
        if on_evict is not None:
            on_evict()

    def _resize(self, buffer: Buffer, size: int) -> None:
        more = size - buffer.size
        buffer.size = size
        self.used_bytes += more
        left = self._by_client.get(buffer.client, 0) + more
        if left:
            self._by_client[buffer.client] = left
        else:
            self._by_client.pop(buffer.client, None)
