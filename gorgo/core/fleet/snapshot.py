"""The fleet as an operator reads it: one frozen row per replica, for `/admin/fleet` and `gorgo status`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.replica import Columns, HealthState, Replica, one_way_s
from gorgo.core.fleet.request_filter import SlowStart
from gorgo.core.numeric import none_if_nan

#: Overdue requests of one replica that are named.
OVERDUE_NAMED = 3


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """State of one replica; `None` is unknown or stale. Ages are at the time of the snapshot."""

    name: str
    region: str
    models: tuple[str, ...]
    #: As configured.
    accelerator: str | None
    #: healthy, ejected, half_open, or draining (which goes before the others).
    state: str
    #: A candidate for the next request of a model that it serves (panic included).
    eligible: bool
    #: Ejection is ignored because too few replicas are healthy.
    panic: bool
    ejected_for_s: float | None
    #: Cause of the ejection: `attempts`, `refusals`, `answers`, `busy`, `probes` or its `region`; `None` while healthy.
    ejected_by: str | None
    #: Its last failure in words, with the engine's own text; `None` while healthy.
    ejected_why: str | None
    #: Time in its state, failed trials included; `None` is since it joined.
    in_state_for_s: float | None
    #: Slow start: remaining time, and the concurrency limit.
    slow_start_for_s: float | None
    slow_start_in_flight: int | None
    failures_in_a_row: int
    #: Whether the last probe was answered; `None` before the first.
    answers: bool | None
    #: Status of 4xx by which it refuses what others answer, or its probes.
    refusal: int | None
    rtt_ms: float | None
    probe_age_s: float | None
    in_flight_requests: int
    in_flight_tokens: int
    queued_prefill_tokens: int
    #: Predicted prefill queue, and the learned factor on the prior.
    backlog_s: float
    prefill_slowdown: float
    #: The same by the engine's counters, which count where no prior was given.
    prefill_slowdown_reported: float | None
    #: Prefills that the engine does at once, as learned.
    parallel_prefills: int
    #: Linear prefill rate by the prior and the learned factor.
    prefill_tokens_per_s: float
    #: Time per output token of its last streams, the 95th percentile of their inter-token times, and the former over
    #: the median of the other replicas with its models and accelerator.
    tpot_ms: float | None
    itl_ms_p95: float | None
    decode_slowdown: float | None
    running_requests: float | None
    queued_requests: float | None
    used_tokens: float | None
    scrape_age_s: float | None
    kv_capacity_tokens: float | None
    max_running_requests: float | None
    #: Estimated cached, by the prefix index.
    index_blocks: int
    index_tokens: int
    #: Share of confirmed tokens that the last reports found; `None` without reports.
    found_share: float | None
    #: Requests there whose first token (or answer in one piece) is overdue, by how much the longest, and the first ids.
    overdue_requests: int
    overdue_for_s: float | None
    overdue: tuple[str, ...]
    #: Attempts dispatched there and those that failed, since it joined the fleet.
    attempts: int
    failures: int
    #: Detected restarts of its engine; each empties its prefix index.
    restarts: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def snapshot_replica(
    fleet: Fleet,
    slow_start: SlowStart,
    replica: Replica,
    *,
    index_blocks: int,
    block_tokens: float,
    found_share: float | None,
    overdue: Sequence[tuple[float, str]],
    decode_slowdown: float | None,
    now: float,
) -> ReplicaSnapshot:
    """Return the row of `replica`."""
    columns, health, spec = fleet.columns, replica.health, replica.spec
    models = replica.models
    eligible = fleet.eligibility.for_model(models[0] if models else "")
    slow_start_s = slow_start.remaining_s(replica, now=now)
    return ReplicaSnapshot(
        name=spec.name,
        region=spec.region,
        models=models,
        accelerator=spec.accelerator,
        state="draining" if replica.draining else health.state.value,
        eligible=replica in eligible,
        panic=eligible.panic,
        ejected_for_s=None if health.backoff_until_s is None else max(0.0, health.backoff_until_s - now),
        ejected_by=None if health.state is HealthState.HEALTHY else health.ejected_by,
        ejected_why=None if health.state is HealthState.HEALTHY else replica.last_failure,
        in_state_for_s=_in_state_s(replica, now),
        slow_start_for_s=slow_start_s,
        slow_start_in_flight=None if slow_start_s is None else int(slow_start.allowed(replica, now=now)),
        failures_in_a_row=max(health.attempt_failures, health.probe_failures),
        answers=replica.answers,
        refusal=replica.refusal or replica.probe_refusal,
        rtt_ms=_scaled(_cell(columns, "rtt_s", replica), 1e3),
        probe_age_s=None if replica.probed_s is None else now - replica.probed_s,
        in_flight_requests=int(columns.in_flight_requests[replica.slot]),
        in_flight_tokens=int(columns.in_flight_tokens[replica.slot]),
        queued_prefill_tokens=int(columns.queued_prefill_tokens[replica.slot]),
        backlog_s=max(0.0, float(columns.drained_at_s[replica.slot]) - now - one_way_s(columns, replica.slot)),
        prefill_slowdown=replica.prefill_queue.speed.factor,
        prefill_slowdown_reported=replica.reported_speed.factor,
        parallel_prefills=replica.prefill_queue.speed.parallel.count,
        prefill_tokens_per_s=replica.prior.tokens_per_s / replica.prefill_queue.speed.factor,
        tpot_ms=_scaled(replica.decode_times.tpot_s, 1e3),
        itl_ms_p95=_scaled(replica.decode_times.itl_s_p95, 1e3),
        decode_slowdown=decode_slowdown,
        running_requests=_cell(columns, "running_requests", replica),
        queued_requests=_cell(columns, "queued_requests", replica),
        used_tokens=_cell(columns, "used_tokens", replica),
        scrape_age_s=None if replica.scraped_s is None else now - replica.scraped_s,
        kv_capacity_tokens=_cell(columns, "kv_capacity_tokens", replica),
        max_running_requests=_cell(columns, "max_running_requests", replica),
        index_blocks=index_blocks,
        index_tokens=round(index_blocks * block_tokens),
        found_share=found_share,
        overdue_requests=len(overdue),
        overdue_for_s=overdue[0][0] if overdue else None,
        overdue=tuple(request_id for _, request_id in overdue[:OVERDUE_NAMED]),
        attempts=replica.attempts,
        failures=replica.failures,
        restarts=replica.restarts.count,
    )


def _in_state_s(replica: Replica, now: float) -> float | None:
    health = replica.health
    unhealthy_s = health.changed_s if health.ejected_since_s is None else health.ejected_since_s
    since_s = replica.drained_s if replica.draining else unhealthy_s
    return None if since_s is None or since_s == float("-inf") else now - since_s


def _cell(columns: Columns, name: str, replica: Replica) -> float | None:
    return none_if_nan(getattr(columns, name)[replica.slot])


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
