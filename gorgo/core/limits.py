"""Every bound of the Router, with its reason. Imports no other part of the core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    window_s:
        Long enough that a burst of late requests finds the budget that quiet minutes have left, s.
    delay_s:
        Later than predicted by this, or by the prediction, is evidence, s.
    grace_s:
        Delay after the evidence, s: tokens of one step of an engine come together, in any order.
    """

    budget_ratio: float = 0.0
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
    sampled_replicas:
        Candidates that a policy with a cost compares where there are more than sixteen times as many
        (`core.dispatch.dispatcher`).
    """

    max_attempts: int = 3
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
    sampled_replicas: int = 128
