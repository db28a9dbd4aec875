"""`gorgo-ms`: GORGO's cost with every term a time, so that it predicts what it minimises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, isnan
from typing import ClassVar, NamedTuple

import numpy as np

from gorgo.core.latency.prefill import STUCK_AFTER_S, faded, mean_of_columns, mean_of_rows, prefill_s, shares_of_columns
from gorgo.core.latency.ttft import (
    INITIAL_WINDOW_BYTES,
    SEGMENT_BYTES,
    exchange_round_trips,
    is_one_burst,
    is_one_round_trip,
    is_paced,
    paced_round_trips_after_idle,
    round_trips_after_idle,
)
from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import FEW, Floats, clamp
from gorgo.core.policy.interface import (
    Candidates,
    Choice,
    IndexKind,
    Prediction,
    TermRows,
    choose_min_cost,
    fill_unknown,
    least_of_rows,
)
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.core.record import record

# Stalls as a cost counts them: requests in flight that a prefill stalls, and what later prefills will stall.
#
# Theory of operation. A prefill of P stalls every running request, so its price is P times their number. The mean over
# the candidates prices what a cache saves. The differences from the mean choose between replicas with equal caches.
# With many requests in flight such a difference is a small part of the number and soon evened out by other arrivals,
# while its price exceeds any round trip: all long prompts would go to the replica that happens to run fewest. So
# beyond a mean of `WHOLE` the differences are damped, by the mean.
#
# A replica that prefills much of its time will stall this request too. That price is in full up to a mean of `FEW_RUN`
# in flight. With more, the batches decide how long an answer takes, and what evens them out counts: it falls as the
# mean grows.
#
# Of n requests in flight, n * s are stalled at any time where prefills take the share s. Beyond `STALLED` of these by
# the means of the fleet, the engines' time is what is short: a prefill delays all that come until the queues are gone,
# and a batch is even soon. So the price of a prefill rises by this excess and the price of a request in flight falls
# by it, within a bound: in lasting overload all numbers are large, and one cached prefix would outweigh any queue.


#: Mean number in flight up to which differences count in full. Of 4, 6, 8 and 10 in simulation, 4 raises p95 E2E.
WHOLE = 8.0
#: Mean number in flight up to which the share of time spent on prefills counts in full. Without such an end p95 E2E
#: rose by up to a half in simulation (ART-Chat-like, load 0.8).
FEW_RUN = 4.0
#: Mean number stalled at any time up to which both prices are as given. In simulation 1.5 raises p95 TTFT.
STALLED = 2.0
#: Bound of the rise. Without one and with 4 the p95 TTFT of a lasting overload rises by a quarter, with 2 it falls.
RISE_MAX = 2.0


def counted(numbers: Floats, mean: float) -> Floats:
    """Return the numbers with their differences from their mean damped.

    Example
    -------
    >>> import numpy as np
    >>> counted(np.array([2.0, 8.0]), 5.0).tolist(), counted(np.array([30.0, 34.0]), 32.0).tolist()
    ([2.0, 8.0], [31.5, 32.5])
    """
    return numbers if mean <= WHOLE else mean + (numbers - mean) * (WHOLE / mean)


def counted_of_rows(numbers: list[float], mean: float) -> list[float]:
    """Return the same of a few candidates, to the last bit."""
    if mean <= WHOLE:
        return numbers
    damping = WHOLE / mean
    return [mean + (number - mean) * damping for number in numbers]


def stall_ms(full_ms: float, mean: float) -> float:
    """Return the price of a replica that always prefills, at a mean number in flight; `full_ms` where few are.

    Example
    -------
    >>> stall_ms(1000.0, 3.0), stall_ms(1000.0, 8.0)
    (1000.0, 500.0)
    """
    return full_ms if mean <= FEW_RUN else full_ms * (FEW_RUN / mean)


def excess(mean: float, share: float) -> float:
    """Return how many times `STALLED` the requests stalled at any time are, from 1 to `RISE_MAX`.

    Parameters are means over the candidates: number in flight, and share of the time in prefills.

    Example
    -------
    >>> excess(4.0, 0.5), excess(6.0, 0.5), excess(60.0, 0.9)
    (1.0, 1.5, 2.0)
    """
    return clamp(mean * share / STALLED, 1.0, RISE_MAX)


#: Constants as arrays: numpy makes one of a Python number at each use, which takes as long as the arithmetic.
_MS, _HALF, _NONE = np.array(1e3), np.array(0.5), np.array(0.0)
_TERMS = ("rtt", "queue", "prefill", "externality", "room", "shared")


class _Factors(NamedTuple):
    """The weights, those of times in seconds as factors to milliseconds."""

    rtt: float
    queue: float
    share: float
    delta_ms: float
    eta_ms: float

    @classmethod
    def of(cls, weights: Weights) -> _Factors:
        rtt, queue = weights["m_rtt"] * 1e3, weights["m_queue"] * 1e3
        return cls(rtt, queue, weights["lambda"], weights["delta"], weights["eta"])


class _Scales(NamedTuple):
    """The factors of times in seconds as arrays without a dimension."""

    rtt: Floats
    queue: Floats

    @classmethod
    def of(cls, factors: _Factors) -> _Scales:
        return cls(np.array(factors.rtt), np.array(factors.queue))


class GorgoMs:
    """cost = m_rtt * N + m_queue * W + P + lambda * P * m + delta * n + eta * s + room + shared, in ms.

    N is the network's time: the round trip, as often as this body takes over the connection that it would get there. W
    is the work before this request by the replica's prefill queue when it arrives, P its own prefill by the replica's
    priors and learned speed, n the requests in flight there, which a prefill stalls, and m the same with differences
    damped where many are in flight (`counted`): lambda prices what this request costs the others, as a preference for
    end-to-end times over first tokens. delta is the same price for decoding: of every request in flight there, how much
    its tokens and this request's come later for there being one more. eta prices the prefills that will stall this
    request: s is the share of its time that the replica prefills (`core.latency.prefill`), and it counts for less where
    many are in flight (`stall_ms`). Where prefills stall many at any time, lambda rises and delta falls (`excess`). Of
    more requests than its running batch an engine stalls that batch alone: the others wait in any case.
    An unknown round trip counts as the worst known one. The first three terms without their factors are the predicted
    time to first token.

    room and shared price what a placement does to the next requests. g is the fill of the replica's KV pool times the
    share of prompt tokens that some replica has: what the new tokens push out is prefilled again as far as it is
    requested again, so room = P * g. shared = -P * (1 - g) * d, at most 0: of a run that the replica lacks and other
    prompts went on from, this one owes its part alone (`core.prefix.residency.SharedRuns`); d is the part of the
    prefill that the others owe, unless the copy will be pushed out.

    References
    ----------
    GORGO paper, equation 3, with its token terms turned into times.
    """

    name: ClassVar[str] = "gorgo-ms"
    summary: ClassVar[str] = (
        "every term a time: least m_rtt * RTT + m_queue * W + P + lambda * P * m + delta * in flight + eta * s + room "
        "+ shared, W the work there, P the prefill, m those in flight, damped where many are, s the share of its time "
        "in prefills, room what the prompt pushes out of a full cache, shared (below 0) what its copy saves others"
    )
    unit: ClassVar[str] = "ms"
    index: ClassVar[IndexKind] = "events"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("m_rtt", 1.0, 0.25, 4.0, "factor on the network's time"),
        WeightSpec("m_queue", 1.0, 0.25, 4.0, "factor on the work before this request"),
        WeightSpec("lambda", 0.15, 0.1, 1.0, "of the prefill, per request in flight that it stalls", tunable="opt_in"),
        WeightSpec("delta", 25.0, 0.0, 100.0, "ms per request in flight, for slower decoding", tunable="no"),
        WeightSpec("eta", 800.0, 0.0, 4000.0, "ms where a replica always prefills, for stalls to come", tunable="no"),
    )

    def __init__(self) -> None:
        #: Made once per set of weights.
        self._scaled: tuple[Weights, _Factors, _Scales] | None = None

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        factors, scales = self._scales(weights)
        if len(candidates.names) <= FEW:
            return _choose_by_rows(request, candidates, factors, rng)
        table = candidates.table
        network_s, work_s, prefill_ms = _times_of_columns(request, candidates)
        in_flight = np.fmin(table.in_flight_requests, table.max_running_requests)
        shares = shares_of_columns(table.prefill_share, table.prefill_share_s, candidates.now)
        # Sums of whole numbers are exact in any order, so that rows have the same mean.
        mean = np.add.reduce(in_flight).item() / len(in_flight)
        rise = excess(mean, mean_of_columns(shares))
        stalled_ms = prefill_ms * (factors.share * rise) * counted(in_flight, mean)
        stalled_ms += in_flight * (factors.delta_ms / rise)
        stalled_ms += shares * stall_ms(factors.eta_ms, mean)
        again_ms = prefill_ms * (table.cache_fill * candidates.found_share)
        terms = {
            "rtt": network_s * scales.rtt,
            "queue": work_s * scales.queue,
            "prefill": prefill_ms,
            "externality": stalled_ms,
            "room": again_ms,
            "shared": (prefill_ms - again_ms) * candidates.discounts,
        }
        times = PredictedTimes(request, candidates, network_s, work_s, prefill_ms)
        return choose_min_cost(terms, candidates, rng, predicted_ttft_s=times.ttft_s, forecast=times.prediction)

    def _scales(self, weights: Weights) -> tuple[_Factors, _Scales]:
        if self._scaled is None or self._scaled[0] is not weights:
            factors = _Factors.of(weights)
            self._scaled = weights, factors, _Scales.of(factors)
        return self._scaled[1:]


@record
class PredictedTimes:
    """N and W in seconds and P in milliseconds of each candidate, as lists or arrays, without the factors."""

    request: RouteRequest
    candidates: Candidates
    network_s: Sequence[float] | Floats
    work_s: Sequence[float] | Floats
    prefill_ms: Sequence[float] | Floats

    def ttft_s(self, row: int) -> float | None:
        """Return the predicted TTFT; none where the round trip is unknown: the worst known is for comparing only."""
        if isnan(self.candidates.rtt_s.item(row)):
            return None
        before_s = self.candidates.now - self.request.received_s
        return float(before_s + self.network_s[row] + self.work_s[row] + self.prefill_ms[row] / 1e3)

    def prediction(self) -> Prediction:
        prefill_s = np.asarray(self.prefill_ms) / 1e3
        return Prediction(np.asarray(self.network_s) + prefill_s, np.asarray(self.work_s), prefill_s)


def predict_times(request: RouteRequest, candidates: Candidates) -> PredictedTimes:
    """Return the predicted times of each candidate."""
    if len(candidates.names) <= FEW:
        return PredictedTimes(request, candidates, *_times_of_rows(candidates, request.body_bytes))
    return PredictedTimes(request, candidates, *_times_of_columns(request, candidates))


def _choose_by_rows(
    request: RouteRequest, candidates: Candidates, factors: _Factors, rng: np.random.Generator
) -> Choice:
    """Return the choice among a few candidates: the same as by columns, in half the time."""
    network_s, work_s, prefill_ms = _times_of_rows(candidates, request.body_bytes)
    rows, costs = _terms_of_rows(candidates, network_s, work_s, prefill_ms, factors)
    row = least_of_rows(costs, min(costs), candidates.table.in_flight_requests, rng)
    times = PredictedTimes(request, candidates, network_s, work_s, prefill_ms)
    return Choice(row, TermRows(_TERMS, rows), np.array(costs), times.ttft_s(row), None, times.ttft_s, times.prediction)


def _terms_of_rows(
    candidates: Candidates, network: list[float], work: list[float], prefill: list[float], factors: _Factors
) -> tuple[list[tuple[float, ...]], list[float]]:
    """Return the terms and the cost of each candidate, ms."""
    rtt_factor, queue_factor, share, delta_ms, eta_ms = factors
    table, now = candidates.table, candidates.now
    in_flight, shares = [], []
    loads = zip(
        table.in_flight_requests.tolist(),
        table.max_running_requests.tolist(),
        table.prefill_share.tolist(),
        table.prefill_share_s.tolist(),
        strict=True,
    )
    for n, most, s, at_s in loads:
        # Where the limit is unknown it is NaN, and less than nothing.
        in_flight.append(most if most < n else n)
        shares.append(faded(s, now - at_s))
    mean = sum(in_flight) / len(in_flight)
    rise = excess(mean, mean_of_rows(shares))
    share, delta_ms, eta_ms = share * rise, delta_ms / rise, stall_ms(eta_ms, mean)
    if candidates.shared is None:
        discounts = [0.0] * len(shares)
    else:
        discounts = candidates.shared.discounts_of_rows(candidates.cached_tokens.tolist(), candidates.prompt_tokens)
    share_found, fills = candidates.found_share, table.cache_fill.tolist()
    rows: list[tuple[float, ...]] = []
    cost: list[float] = []
    damped = counted_of_rows(in_flight, mean)
    columns = zip(network, work, prefill, damped, in_flight, shares, fills, discounts, strict=True)
    for network_s, work_s, c, m, n, s, fill, discount in columns:
        a, b = network_s * rtt_factor, work_s * queue_factor
        d = c * share * m + n * delta_ms + s * eta_ms
        e = c * (fill * share_found)
        f = (c - e) * discount
        rows.append((a, b, c, d, e, f))
        cost.append(a + b + c + d + e + f)
    return rows, cost


def _times_of_rows(candidates: Candidates, body_bytes: int) -> tuple[list[float], list[float], list[float]]:
    """Return what `_times_of_columns` does, to the last bit, in half the time for a few candidates."""
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
        table.slowdown.tolist(),
        table.prefill_base_s.tolist(),
        table.prefill_token_s.tolist(),
        table.prefill_kappa_s.tolist(),
        candidates.cached_tokens.tolist(),
        strict=True,
    )
    for rtt, network_s, drained_at_s, due_s, slowdown, base_s, token_s, kappa_s, cached in rows:
        one_way_s = rtt * 0.5
        work_s = drained_at_s - now - (network_s - one_way_s)
        if due_s < late_since_s and (late_s := late_since_s - due_s - one_way_s) > 0.0:
            work_s = table.waiting_prefill_s.item(len(work)) + late_s
        elif not work_s > 0.0:
            work_s = 0.0
        work.append(work_s)
        prefill.append(slowdown * prefill_s(base_s, token_s, kappa_s, prompt_tokens - cached, cached) * 1e3)
    kv_waits_s = candidates.kv_wait_s
    if kv_waits_s is not None:
        for row, kv_wait_s in enumerate(kv_waits_s.tolist()):
            if kv_wait_s > 0.0:
                drained_at_s = table.drained_at_s.item(row)
                begins_s = drained_at_s if drained_at_s > now else now
                work_s = begins_s + kv_wait_s - now - (network[row] - rtt_s[row] * 0.5)
                work[row] = work_s if work_s > 0.0 else 0.0
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


def _times_of_columns(request: RouteRequest, candidates: Candidates) -> tuple[Floats, Floats, Floats]:
    """Return N and W in seconds and P in milliseconds of each candidate."""
    rtt_s = fill_unknown(candidates.table.rtt_s)
    trips = _trips(request, candidates, rtt_s)
    network_s = rtt_s if trips is None else rtt_s * trips
    one_way_s = rtt_s * _HALF
    return network_s, _work_s(candidates, network_s - one_way_s, one_way_s), _prefill_s(candidates) * _MS


def _trips(request: RouteRequest, candidates: Candidates, rtt_s: Floats) -> Floats | None:
    """Round trips until the first byte of an answer that takes no time; `None` if it is one everywhere."""
    table, body_bytes = candidates.table, request.body_bytes
    pace: Floats | None = table.pace_bytes
    if body_bytes > SEGMENT_BYTES and not is_paced(table.pace_bytes):
        pace = None
    if is_one_round_trip(body_bytes, table.cwnd_bytes, pace):
        return None
    return exchange_round_trips(
        body_bytes,
        congestion=table.cwnd_bytes,
        receive=table.rwnd_bytes,
        idle_s=candidates.now - table.sent_s,
        rtt_s=rtt_s,
        connect=table.connect_round_trips,
        pace=pace,
        burst=None if pace is None else table.burst_bytes,
    )


def _work_s(candidates: Candidates, outbound_s: Floats, one_way_s: Floats) -> Floats:
    """W: work left when this request gets there; on a stuck engine all that waits and how late it is.

    Where it waits for KV memory, that time and the work, which begins then.
    """
    table, now = candidates.table, candidates.now
    work_s: Floats = np.maximum(table.drained_at_s - now - outbound_s, _NONE)
    due_s, late_since_s = table.head_due_s, now - STUCK_AFTER_S
    if due_s.item(due_s.argmin()) < late_since_s:  # a first token is due
        late_s = late_since_s - due_s - one_way_s
        work_s = np.where(late_s > 0.0, table.waiting_prefill_s + late_s, work_s)
    kv_wait_s = candidates.kv_wait_s
    if kv_wait_s is None:
        return work_s
    waits_s = np.maximum(table.drained_at_s, now) + kv_wait_s - now - outbound_s
    return np.where(kv_wait_s > 0.0, np.maximum(waits_s, _NONE), work_s)


def _prefill_s(candidates: Candidates) -> Floats:
    """Return P: the prefill of the uncached tokens behind the cached ones."""
    table, cached = candidates.table, candidates.cached_tokens
    uncached = candidates.prompt_tokens - cached
    prior_s = prefill_s(table.prefill_base_s, table.prefill_token_s, table.prefill_kappa_s, uncached, cached)
    return table.slowdown * prior_s
