"""The oracle: the rule of `gorgo-ms` with full knowledge, the true state of every engine. It is no optimum.

Owns its cost. `engine.prediction` predicts an engine; the form of the cost is that of `gorgo-ms`, so that the
difference is due to knowledge alone.

It sees: each engine's line, batch, cache and step under way, requests in transit, its present speed, the present
mean round trip, and dead replicas. It does not see: what will arrive later, how long its own request's output is, the
jitter of a trip, and when a fault begins or ends. It is greedy like every policy, so it is a baseline and no bound: a
router that knew the next arrivals could do a few per cent better. A far replica is priced by the requests under way to
it, which a proxy with full information could know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gorgo.core.latency.prefill import mean_of_columns, shares_of_columns
from gorgo.core.latency.ttft import exchange_round_trips
from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats
from gorgo.core.policy.interface import Candidates, Choice, IndexKind, choose_min_cost
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.lab.sim.engine.engines import Engine, predict_first_token
from gorgo.lab.sim.engine.prediction import ArrivingRequest, idle_ttft_s
from gorgo.lab.sim.engine.request import EngineRequest
from gorgo.lab.sim.faults import EngineView
from gorgo.policies.gorgo_ms import GorgoMs, counted, excess, stall_ms

#: Cost of a dead replica, ms: more than any queue, and finite, so that sums of terms stay numbers.
DEAD_MS = 3.6e6
#: Requests sent to an engine and not there yet, with the times at which they will arrive, s.
InTransit = Sequence[tuple[float, EngineRequest]]


class Oracle:
    """cost = N + W + P + lambda * P * m + delta * n + eta * s + room + shared, in ms, every term true.

    N is the network's time (mean round trip, as often as this body takes), W + P the time in the engine until the first
    token without later arrivals, P this request's own prefill alone on that engine, n the requests there and on the way
    there, at most its running batch, m the same with damped differences, s the share of its time that it prefills, by
    what was sent there: its future is as unknown as to the router. The first three are the predicted time to first
    token. room and shared are by the true fill of each pool and the tokens that will be cached there; what is requested
    again, and who went on from a run, is known from the past alone, as to the router.

    `observe` gives it the engines, once, before the first choice.

    References
    ----------
    DESIGN.md, "The oracle knows engine state, not the future"; the weights are those of `gorgo-ms`.
    """

    name: ClassVar[str] = "oracle"
    summary: ClassVar[str] = "the cost of `gorgo-ms` with every term true, read from the simulated engines"
    unit: ClassVar[str] = "ms"
    index: ClassVar[IndexKind] = "events"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = tuple(
        spec for spec in GorgoMs.weight_specs if spec.name in ("lambda", "delta", "eta")
    )

    def __init__(self) -> None:
        self._engines: Mapping[str, EngineView] = {}

    def observe(self, engines: Mapping[str, EngineView]) -> None:
        """See these engines, by replica, from now on: views of the living thing, not copies."""
        self._engines = engines

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        views = [self._engines[name] for name in candidates.names]
        # Both are worked out anew whenever they are read.
        models, in_transit = [view.model for view in views], [view.in_transit for view in views]
        rtt_s = np.array([view.rtt_s for view in views])
        trips = _trips(request, candidates, rtt_s)
        arrives_s = candidates.now + rtt_s * (trips - 0.5)
        engines = [
            _engine_ms(model, coming, request, at_s, candidates.now) if view.alive else (DEAD_MS, 0.0, 0.0)
            for view, model, coming, at_s in zip(views, models, in_transit, arrives_s.tolist(), strict=True)
        ]
        engine_ms, prefill_ms, cached_tokens = np.array(engines).T
        in_flight = _stalled(models, in_transit)
        shares = shares_of_columns(candidates.prefill_share, candidates.prefill_share_s, candidates.now)
        mean = float(in_flight.mean())
        rise = excess(mean, mean_of_columns(shares))
        delta_ms = weights["delta"] / rise
        decoding_ms = delta_ms * in_flight + stall_ms(weights["eta"], mean) * shares
        again_ms = prefill_ms * np.array([_fill(model) for model in models]) * candidates.found_share
        shared = candidates.shared
        discounts = 0.0 if shared is None else shared.discounts(cached_tokens, request.prompt_tokens)
        terms = {
            "rtt": rtt_s * trips * 1e3,
            "queue": engine_ms - prefill_ms,
            "prefill": prefill_ms,
            "externality": weights["lambda"] * rise * prefill_ms * counted(in_flight, mean) + decoding_ms,
            "room": again_ms,
            "shared": (prefill_ms - again_ms) * discounts,
        }
        predicted_s = (candidates.now - request.received_s) + (terms["rtt"] + engine_ms) / 1e3
        return choose_min_cost(terms, candidates, rng, predicted_ttft_s=predicted_s)


def make_oracle() -> Oracle:
    """Return a new oracle for one simulation, which gives it its engines."""
    return Oracle()


def _trips(request: RouteRequest, candidates: Candidates, rtt_s: Floats) -> Floats:
    return exchange_round_trips(
        request.body_bytes,
        congestion=candidates.cwnd_bytes,
        receive=candidates.rwnd_bytes,
        idle_s=candidates.now - candidates.sent_s,
        rtt_s=rtt_s,
        connect=candidates.connect_round_trips,
    )


def _engine_ms(
    model: Engine[Any], in_transit: InTransit, request: RouteRequest, arrives_s: float, now: float
) -> tuple[float, float, float]:
    """Return the time from arrival to first token, the part of the request's own prefill, and its cached tokens."""
    arrival = ArrivingRequest(request.blocks, request.prompt_tokens, arrives_s)
    predicted = predict_first_token(model, in_transit, arrival, now=now)
    new_tokens = request.prompt_tokens - predicted.cached_tokens
    prefill_s = idle_ttft_s(model.profile, new_tokens, predicted.cached_tokens) * model.slowdown
    return (predicted.first_token_s - arrives_s) * 1e3, prefill_s * 1e3, predicted.cached_tokens


def _fill(model: Engine[Any]) -> float:
    """Return the share of the KV pool that is in use, cached blocks included."""
    return 1.0 - model.cache.free_tokens / model.cache.capacity_tokens


def _stalled(models: Sequence[Engine[Any]], in_transit: Sequence[InTransit]) -> Floats:
    """Return the requests that a prefill there stalls: those there and on the way, at most the running batch."""
    there = (
        min(model.running + model.queued + len(coming), model.profile.max_running_requests)
        for model, coming in zip(models, in_transit, strict=True)
    )
    return np.fromiter(there, dtype=np.float64, count=len(models))
