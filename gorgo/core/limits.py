"""Every bound of the Router, with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field

from gorgo.core.admission.deadline import OverloadLimits
from gorgo.core.dispatch.hedging import HedgeLimits
from gorgo.core.fleet.outlier import OutlierLimits
from gorgo.core.quotas import ClientRules


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """Every bound of the Router.

    Parameters
    ----------
    max_attempts:
        Replicas that one request may be sent to, the first included.
    max_in_flight:
        Open attempts; a request beyond is told to come back.
    stale_after_s:
        Age at which a probe or a scrape counts as unknown.
    rtt_ewma_alpha:
        Weight of a new probe in the smoothed round trip; with 0.3 half of the memory is gone after two probes.
    max_index_blocks:
        Blocks in the prefix index over all replicas; bounds memory.
    block_tokens:
        Tokens of one block, to turn a replica's KV capacity into blocks.
    max_decisions, max_samples:
        Newest decisions (with every candidate's terms) and samples held for a reader.
    panic_threshold:
        Share of healthy replicas under which those ejected for failed attempts are tried again soon (`Fleet`).
    outlier:
        When a replica is ejected and for how long.
    overload:
        Who waits at the proxy and who is turned away.
    hedging:
        When a request is sent to a second replica.
    retry_budget_ratio, retry_budget_minimum, retry_budget_window_s:
        Retries that there may be: this share of the requests of the last so many seconds, and this many in any case.
        Where all replicas are ill, everything would else be sent `max_attempts` times. What never
        reached a replica does not count, nor a connection that broke while others are in good standing.
    slow_start_s:
        How long a replica that joins or is readmitted is given more by and by; 0 is not at all.
    region_window_s:
        All replicas of a region that fail a probe within this are cut off together.
    clients:
        What each client may do.
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
