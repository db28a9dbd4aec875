"""Predicted times on a few candidates, one after the other: the same to the last bit as by columns, in half the time.

numpy takes as long for one row as for fifty. The formulas are those of `gorgo-ms`, operation by operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from gorgo.core.latency.prefill import prefill_s
from gorgo.core.latency.prefill_queue import STUCK_AFTER_S
from gorgo.core.latency.tcp import (
    INITIAL_WINDOW_BYTES,
    SEGMENT_BYTES,
    is_one_burst,
    paced_round_trips_after_idle,
    round_trips_after_idle,
)
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.cost import fill_unknown


def times_of_rows(candidates: Candidates, body_bytes: int) -> tuple[list[float], list[float], list[float]]:
    """Return N and W in seconds and P in milliseconds of each candidate."""
    table, now, prompt_tokens = candidates.table, candidates.now, candidates.prompt_tokens
    rtt_s = table.rtt_s.tolist()
    total_s = sum(rtt_s)
    if total_s != total_s:  # one is unknown
        rtt_s = fill_unknown(table.rtt_s).tolist()
    network = _network_s(candidates, body_bytes, rtt_s)
    work: list[float] = []
    prefill: list[float] = []
    late_since_s = now - STUCK_AFTER_S
    rows = zip(
        rtt_s,
        network,
        table.drained_at_s.tolist(),
        table.head_due_s.tolist(),
        table.waiting_prefill_s.tolist(),
        table.slowdown.tolist(),
        table.prefill_base_s.tolist(),
        table.prefill_token_s.tolist(),
        table.prefill_kappa_s.tolist(),
        candidates.cached_tokens.tolist(),
        strict=True,
    )
    for rtt, network_s, drained_at_s, due_s, waiting_s, slowdown, base_s, token_s, kappa_s, cached in rows:
        one_way_s = rtt * 0.5
        work_s = drained_at_s - now - (network_s - one_way_s)
        if due_s < late_since_s and (late_s := late_since_s - due_s - one_way_s) > 0.0:
            work_s = waiting_s + late_s
        elif not work_s > 0.0:
            work_s = 0.0
        work.append(work_s)
        prefill.append(slowdown * prefill_s(base_s, token_s, kappa_s, prompt_tokens - cached, cached) * 1e3)
    return network, work, prefill


def _network_s(candidates: Candidates, body_bytes: int, rtt_s: list[float]) -> list[float]:
    """Return the network's time of each candidate, s: round trips until the first byte of an answer."""
    table = candidates.table
    congestion, pace = table.cwnd_bytes.tolist(), table.pace_bytes.tolist()
    is_paced = min(pace) < inf
    if body_bytes <= (SEGMENT_BYTES if is_paced else INITIAL_WINDOW_BYTES) and 0.0 not in congestion:
        return rtt_s
    trips: list[float]
    burst = table.burst_bytes.tolist()
    if is_paced and not is_one_burst(body_bytes, min(burst)):
        pacing = zip(_connections(candidates, congestion, rtt_s), pace, burst, strict=True)
        trips = [paced_round_trips_after_idle(body_bytes, *each, *of) for each, *of in pacing]
    elif body_bytes <= INITIAL_WINDOW_BYTES:
        trips = [1.0] * len(rtt_s)
    else:
        connections = _connections(candidates, congestion, rtt_s)
        trips = [round_trips_after_idle(body_bytes, *each) for each in connections]
    handshakes = zip(rtt_s, trips, congestion, table.connect_round_trips.tolist(), strict=True)
    return [rtt * (connect + trip if cwnd == 0.0 else trip) for rtt, trip, cwnd, connect in handshakes]


def _connections(
    candidates: Candidates, congestion: list[float], rtt_s: list[float]
) -> Iterator[tuple[float, float, float, float]]:
    """Return windows, idle time and round trip of each connection."""
    table, now = candidates.table, candidates.now
    idle_s = [now - sent_s for sent_s in table.sent_s.tolist()]
    return zip(congestion, table.rwnd_bytes.tolist(), idle_s, rtt_s, strict=True)
