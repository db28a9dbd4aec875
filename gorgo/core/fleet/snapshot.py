"""The fleet as an operator reads it: one frozen row per replica, for `/admin/fleet` and `gorgo status`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gorgo.core.fleet.columns import Columns
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.network import one_way_s
from gorgo.core.fleet.outlier import HealthState
from gorgo.core.fleet.replica import Replica
from gorgo.core.fleet.slow_start import SlowStart


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """What the Router knows of one replica; `None` is unknown or stale. Ages count back from the moment of the view."""

    name: str
    region: str
    models: tuple[str, ...]
    #: healthy, ejected, half_open, or draining (which goes before the others).
    state: str
    #: A candidate for the next request of a model that it serves (panic included).
    eligible: bool
    #: Ejection is ignored because too few replicas are healthy.
    panic: bool
    ejected_for_s: float | None
    #: What ejected it: `attempts`, `probes` or its whole `region`; `None` while it is healthy.
    ejected_by: str | None
    #: How long it has been in its state, trials that failed included; `None` is since it joined.
    in_state_for_s: float | None
    #: Slow start: how long yet, and how many requests may be in flight there until then.
    slow_start_for_s: float | None
    slow_start_in_flight: int | None
    failures_in_a_row: int
    rtt_ms: float | None
    probe_age_s: float | None
    in_flight_requests: int
    in_flight_tokens: int
    queued_prefill_tokens: int
    #: Busy clock: prefill still to do there, and how many times longer prefills take than the prior says.
    backlog_s: float
    prefill_slowdown: float
    #: The same by the engine's own counters of prefill, which count where no prior was given.
    prefill_slowdown_reported: float | None
    #: The linear rate of prefills by the prior and what was learned.
    prefill_tokens_per_s: float
    running_requests: float | None
    queued_requests: float | None
    used_tokens: float | None
    scrape_age_s: float | None
    kv_capacity_tokens: float | None
    max_running_requests: float | None
    #: What the prefix index believes cached there.
    index_blocks: int
    index_tokens: int
    #: Attempts dispatched there and those that failed, since it joined the fleet.
    attempts: int
    failures: int
    #: How often its engine was seen to have started again, which empties what is believed cached there.
    restarts: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def snapshot_replica(
    fleet: Fleet, slow_start: SlowStart, member: Replica, *, index_blocks: int, block_tokens: float, now: float
) -> ReplicaSnapshot:
    """The row of `member`."""
    columns, health, spec = fleet.columns, member.health, member.spec
    eligible = fleet.eligibility.for_model(spec.models[0] if spec.models else "")
    slow_start_s = slow_start.remaining_s(member, now=now)
    return ReplicaSnapshot(
        name=spec.name,
        region=spec.region,
        models=spec.models,
        state="draining" if member.draining else health.state.value,
        eligible=spec.name in eligible.names,
        panic=eligible.panic,
        ejected_for_s=None if health.backoff_until_s is None else max(0.0, health.backoff_until_s - now),
        ejected_by=None if health.state is HealthState.HEALTHY else health.ejected_by,
        in_state_for_s=_in_state_s(member, now),
        slow_start_for_s=slow_start_s,
        slow_start_in_flight=None if slow_start_s is None else int(slow_start.allowed(member, now=now)),
        failures_in_a_row=max(health.attempt_failures, health.probe_failures),
        rtt_ms=_scaled(_cell(columns, "rtt_s", member), 1e3),
        probe_age_s=None if member.probed_s is None else now - member.probed_s,
        in_flight_requests=int(columns.in_flight_requests[member.slot]),
        in_flight_tokens=int(columns.in_flight_tokens[member.slot]),
        queued_prefill_tokens=int(columns.queued_prefill_tokens[member.slot]),
        backlog_s=max(0.0, float(columns.drained_at_s[member.slot]) - now - one_way_s(columns, member.slot)),
        prefill_slowdown=member.prefill_queue.speed.factor,
        prefill_slowdown_reported=member.reported_speed.factor,
        prefill_tokens_per_s=member.prior.tokens_per_s / member.prefill_queue.speed.factor,
        running_requests=_cell(columns, "running_requests", member),
        queued_requests=_cell(columns, "queued_requests", member),
        used_tokens=_cell(columns, "used_tokens", member),
        scrape_age_s=None if member.scraped_s is None else now - member.scraped_s,
        kv_capacity_tokens=_cell(columns, "kv_capacity_tokens", member),
        max_running_requests=_cell(columns, "max_running_requests", member),
        index_blocks=index_blocks,
        index_tokens=round(index_blocks * block_tokens),
        attempts=member.attempts,
        failures=member.failures,
        restarts=member.restarts.count,
    )


def _in_state_s(member: Replica, now: float) -> float | None:
    health = member.health
    sick_s = health.changed_s if health.ejected_since_s is None else health.ejected_since_s
    since_s = member.drained_s if member.draining else sick_s
    return None if since_s is None or since_s == float("-inf") else now - since_s


def _cell(columns: Columns, name: str, member: Replica) -> float | None:
    value = float(getattr(columns, name)[member.slot])
    return None if value != value else value


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
