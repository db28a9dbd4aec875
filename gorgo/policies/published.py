"""Policies of published systems that need no page of constants: each class has its cost, its source, and what differs.

`lmetric`, `mooncake`, `dualmap`, `skywalker`, `preble-e2` and `sticky-least-loaded`. The paper's own policy is in
`gorgo`, its four baselines are in `baselines`, `least_load` and `prefix_cache`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gorgo.core.latency.prefill import prefill_s
from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats
from gorgo.core.policy.interface import (
    USUAL_SCRAPE_S,
    Candidates,
    Choice,
    IndexKind,
    argmin_tiebreak,
    choose_min_cost,
    fill_unknown,
)
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.policies.base import evidence, least_loaded, longest_match, rendezvous_scores


class LMetric:
    """cost = (prompt tokens to prefill there) * (batch size there), in tokens.

    A product compares as a weighted sum does, and a factor on either part cancels out, so there is nothing to tune.

    From the paper are the two indicators and their product. Decided here, where the paper is silent or its engines say
    more than a router knows: the batch is the requests that this router has in flight there, waiting ones included, and
    this request, so that an idle replica without the prefix is not free; at least one token is always prefilled, so
    that a prompt that is cached whole still goes to the smaller batch. The paper detects the rare traffic on which the
    product fails and changes the rule then; that is left out.

    References
    ----------
    LMetric: Simple is Better - Multiplication May Be All You Need for LLM Request Scheduling, arXiv 2603.15202, 2026.
    """

    name: ClassVar[str] = "lmetric"
    summary: ClassVar[str] = "LMetric: least uncached tokens x batch size, no weights"
    unit: ClassVar[str] = "tokens"
    index: ClassVar[IndexKind] = "events"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        batch = candidates.in_flight_requests + 1.0
        return choose_min_cost({"product": np.maximum(candidates.uncached_tokens, 1.0) * batch}, candidates, rng)


class Mooncake:
    """cost = (uncached tokens before their first token + uncached tokens of this prompt) / throughput, in ms.

    One throughput for every replica, as in the paper: the choice does not depend on it, the terms do. Instances of one
    data centre are meant, so distance is not read. Mooncake also copies a longer prefix from another instance, which
    engines behind HTTP cannot.

    References
    ----------
    Mooncake (FAST'25), algorithm 1 without transfers.
    """

    name: ClassVar[str] = "mooncake"
    summary: ClassVar[str] = "Mooncake Alg. 1: least queue + prefill, both tokens over one constant throughput"
    unit: ClassVar[str] = "ms"
    index: ClassVar[IndexKind] = "published"
    #: It reads tokens before a first token, which are counted for policies that say so.
    reads_progress: ClassVar[bool] = True
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("tokens_per_s", 16_000.0, 100.0, 1e6, "prefill throughput of every replica", tunable="no"),
    )

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        token_ms = 1e3 / weights["tokens_per_s"]
        terms = {
            "queue": fill_unknown(candidates.uncached_prefill_tokens) * token_ms,
            "prefill": candidates.uncached_tokens * token_ms,
        }
        return choose_min_cost(terms, candidates, rng)


#: Makes the second hash of a prefix independent of the first: any constant with many bits does.
SECOND_HASH = 0xC2B2_AE3D_27D4_EB4F


class DualMap:
    """Of the two replicas that a prefix is hashed to, the one with more of it in cache, while its TTFT is in time.

    If the expected TTFT there exceeds `slo_ms`, the one of the two that is expected sooner serves (`slo`). If that
    exceeds it too, both are a hot spot, and the replica that is expected soonest among all serves (`hotspot`). The
    expected TTFT is the uncached tokens before their first token there and of this prompt, over `tokens_per_s`.

    From the paper are the two hashes of a prompt's prefix, the choice by cache while the objective is met and by load
    otherwise, and moves away from pairs that are both overloaded. Decided here: the prefix is the first 256 tokens,
    which is what the router hashes for affinity; rendezvous hashing stands for the two rings, with which it shares that
    a change of the fleet moves few prefixes; the objective is 2 s, that of the laboratory's goodput; the throughput is
    one constant, as in `mooncake`. The paper's migration takes requests back from an engine's queue. A router cannot,
    so that a move is made when a request arrives.

    References
    ----------
    DualMap: Enabling Both Cache Affinity and Load Balancing for Distributed LLM Serving, ICLR 2026, arXiv 2602.06502.
    Mitzenmacher, The power of two choices in randomized load balancing, 2001.
    """

    name: ClassVar[str] = "dualmap"
    summary: ClassVar[str] = (
        "DualMap: of two replicas by two hashes of the first 256 tokens the one with more cached; beyond an objective "
        "the sooner one, of all if both exceed it"
    )
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "events"
    #: It reads tokens before a first token, which are counted for policies that say so.
    reads_progress: ClassVar[bool] = True
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("slo_ms", 2000.0, 1.0, 1e6, "objective for the expected TTFT", tunable="no"),
        WeightSpec("tokens_per_s", 16_000.0, 100.0, 1e6, "prefill throughput of every replica", tunable="no"),
    )

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        token_ms = 1e3 / weights["tokens_per_s"]
        queue_ms = fill_unknown(candidates.uncached_prefill_tokens) * token_ms
        prefill_ms = candidates.uncached_tokens * token_ms
        terms = {"cached_tokens": candidates.cached_tokens.copy(), "queue": queue_ms, "prefill": prefill_ms}
        ttft_ms, load = queue_ms + prefill_ms, candidates.in_flight_requests
        pair = np.array(mapped_rows(candidates.salt, request.prefix_hash))
        cached = candidates.cached_tokens[pair]
        first = pair[argmin_tiebreak(-cached, ttft_ms[pair], rng)]
        if ttft_ms[first] <= weights["slo_ms"]:
            return Choice(int(first), terms)
        sooner = pair[argmin_tiebreak(ttft_ms[pair], load[pair], rng)]
        if ttft_ms[sooner] <= weights["slo_ms"]:
            return Choice(int(sooner), terms, fallback="slo")
        return Choice(argmin_tiebreak(ttft_ms, load, rng), terms, fallback="hotspot")


def mapped_rows(salt: NDArray[np.uint64], key: int) -> tuple[int, ...]:
    """Return the rows of the two replicas of a key, one if there is one: the second hash never gives the first's."""
    first = int(rendezvous_scores(salt, key).argmax())
    if len(salt) == 1:
        return (first,)
    others = rendezvous_scores(salt, key ^ SECOND_HASH)
    others[first] = 0
    return first, int(others.argmax())


class SkyWalker:
    """The longest prefix among the near replicas without pending requests, else in the best other region.

    The first layer is a region's balancer: of its replicas that are available it takes the one with the longest match,
    ties to the fewest in flight. A replica is available while it has no pending request, so that requests are pushed to
    replicas that begin them at once. If no near replica is available, the second layer pushes the request to the region
    whose available replicas have the longest match, ties to the nearest (`remote`), and its balancer chooses there. If
    no replica anywhere is available, the near one with the fewest pending requests serves (`pending`).

    From the paper are the two layers, the longest match in each, and pushing by pending requests. Decided here: this
    router is the balancer of the region it is in, and one set of replicas within `near_ms` of each other by round trip
    is a region, since a policy sees distances. A request is pending while another one of this router is before its
    first token on the replica, or while the replica reported a queue. The paper's balancers queue a request when no
    replica is available; a policy never waits, the queue of the router is for that.

    References
    ----------
    SkyWalker: A Locality-Aware Cross-Region Load Balancer for LLM Inference, EuroSys 2026, arXiv 2505.24095.
    """

    name: ClassVar[str] = "skywalker"
    summary: ClassVar[str] = (
        "SkyWalker: longest prefix among near replicas without pending requests, else in another region that has such"
    )
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "published"
    signal_ages: ClassVar[Mapping[str, float]] = {"queued_requests": USUAL_SCRAPE_S}
    #: It reads requests before a first token, which are counted for policies that say so.
    reads_progress: ClassVar[bool] = True
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("near_ms", 10.0, 0.1, 1000.0, "most difference of round trips within a region", tunable="no"),
    )

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        rtt_ms = fill_unknown(candidates.rtt_s) * 1e3
        pending, cached = _pending(candidates), candidates.cached_tokens
        terms = {"cached_tokens": cached.copy(), "pending": pending, "rtt": rtt_ms}
        region = regions_of(rtt_ms, weights["near_ms"])
        free = pending == 0.0
        near = region == 0
        if (near & free).any():
            return Choice(longest_match(np.flatnonzero(near & free), candidates, rng), terms)
        if free.any():
            # The nearest of the regions with the longest match: regions are numbered by distance.
            best = region[free & (cached == cached[free].max())].min()
            rows = np.flatnonzero(free & (region == best))
            return Choice(longest_match(rows, candidates, rng), terms, fallback="remote")
        rows = np.flatnonzero(near)
        row = argmin_tiebreak(pending[rows], candidates.in_flight_requests[rows], rng)
        return Choice(int(rows[row]), terms, fallback="pending")


def regions_of(rtt_ms: Floats, near_ms: float) -> NDArray[np.intp]:
    """Return the number of each row's region, 0 for the nearest: rows within `near_ms` of a region's nearest are in it.

    Example
    -------
    >>> regions_of(np.array([95.0, 2.0, 180.0, 97.0, 3.0]), 10.0).tolist()
    [1, 0, 2, 1, 0]
    """
    numbers = np.zeros(len(rtt_ms), dtype=np.intp)
    number, begins_ms = -1, -np.inf
    for row in rtt_ms.argsort(kind="stable"):
        if rtt_ms[row] - begins_ms > near_ms:
            number, begins_ms = number + 1, rtt_ms[row]
        numbers[row] = number
    return numbers


def _pending(candidates: Candidates) -> Floats:
    """Return the requests that wait for another one to begin: by this router's counts, or as reported if more."""
    before_first = candidates.in_flight_requests - np.nan_to_num(candidates.decoding_requests)
    pending: Floats = np.maximum(np.maximum(before_first, 0.0), fill_unknown(candidates.queued_requests))
    return pending


#: Most requests whose cost is remembered; beyond it the oldest is forgotten early. 180 s at 360 requests a second.
MAX_REMEMBERED = 65_536
#: Length of an answer, which the paper takes from its profile; no policy is told the lengths of answers.
ANSWER_TOKENS = 128.0


class PrebleE2:
    """Exploit or explore: by the length that is shared and the length that is left to compute.

    If the longest match is longer than the rest of the prompt, the replicas that have it compete by cost (exploit),
    else all of them do (explore, `explore`). The cost of a replica is its load, that is what the requests of the last
    `window_s` were expected to take there, and the prefill of this prompt. If exploitation would leave the chosen
    replica `balance` times as costly as the cheapest one, that one serves, and has a copy then (`rebalanced`).

    From the paper are exploitation and exploration by shared against computed length, the load as a sum over a window
    of prefills and decoding, the prefill of the request itself, and the shift of load beyond a threshold. Decided here:
    the prefill is predicted by the replica's priors and learned speed, in the place of the paper's regression; decoding
    takes `ANSWER_TOKENS` at the learned time per token, and nothing where that is unknown everywhere. The
    threshold includes the request's own prefill, since an idle replica's load is 0 and every ratio to it infinite. The
    cost of what a prompt would evict is left out: no list of a replica's blocks in the order of use reaches a policy.
    A request that is evaluated again counts once.

    References
    ----------
    Preble: Efficient Distributed Prompt Scheduling for LLM Serving, ICLR 2025, arXiv 2407.00023, algorithm 1.
    """

    name: ClassVar[str] = "preble-e2"
    summary: ClassVar[str] = (
        "Preble's E2: of the replicas with the longest match if that exceeds the rest of the prompt, else of all, the "
        "least load of 3 min + prefill"
    )
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "events"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("window_s", 180.0, 1.0, 3600.0, "how long a request is load", tunable="no"),
        WeightSpec("balance", 2.0, 1.0, 1000.0, "ratio of costs above which load is shifted", tunable="no"),
    )

    def __init__(self) -> None:
        self._window = LoadWindow()

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        c, cached = candidates, candidates.cached_tokens
        prior_s = prefill_s(c.prefill_base_s, c.prefill_token_s, c.prefill_kappa_s, c.uncached_tokens, cached)
        prefill_ms = c.slowdown * prior_s * 1e3
        decoding_ms = ANSWER_TOKENS * fill_unknown(c.token_gap_s) * 1e3
        self._window.drop_before(c.now - weights["window_s"])
        load_ms = self._window.loads_ms(c.names, without=request.request_id)
        terms = {"cached_tokens": cached.copy(), "load": load_ms, "prefill": prefill_ms}
        cost, in_flight = load_ms + prefill_ms, c.in_flight_requests
        row, fallback = argmin_tiebreak(cost, in_flight, rng), "explore"
        longest = cached.max()
        if longest > c.prompt_tokens - longest:
            rows = np.flatnonzero(cached == longest)
            chosen = int(rows[argmin_tiebreak(cost[rows], in_flight[rows], rng)])
            if cost[chosen] > weights["balance"] * cost[row]:
                fallback = "rebalanced"
            else:
                row, fallback = chosen, ""
        self._window.add(request.request_id, c.names[row], float(prefill_ms[row] + decoding_ms[row]), now=c.now)
        return Choice(row, terms, fallback=fallback or None)


class _Remembered(NamedTuple):
    at_s: float
    replica: str
    cost_ms: float


class LoadWindow:
    """What the requests of a window are expected to take on each replica, ms.

    Example
    -------
    >>> window = LoadWindow()
    >>> window.add("r1", "a", 30.0, now=0.0)
    >>> window.add("r2", "a", 12.0, now=1.0)
    >>> window.loads_ms(["a", "b"]).tolist()
    [42.0, 0.0]
    >>> window.drop_before(0.5)
    >>> window.loads_ms(["a", "b"]).tolist()
    [12.0, 0.0]
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[str, _Remembered] = OrderedDict()
        #: Requests and their cost, by replica; a replica without a request has no entry.
        self._loads: dict[str, tuple[int, float]] = {}

    def loads_ms(self, names: Sequence[str], *, without: str = "") -> Floats:
        """Return the load of each replica, without that of one request."""
        loads: Floats = np.array([self._loads.get(name, (0, 0.0))[1] for name in names])
        left_out = self._requests.get(without)
        if left_out is not None and left_out.replica in names:
            row = list(names).index(left_out.replica)
            loads[row] = max(loads[row] - left_out.cost_ms, 0.0)
        return loads

    def add(self, request_id: str, replica: str, cost_ms: float, *, now: float) -> None:
        """Remember a request, in the place of what was remembered of it."""
        self._forget(request_id)
        while len(self._requests) >= MAX_REMEMBERED:
            self._forget(next(iter(self._requests)))
        self._requests[request_id] = _Remembered(now, replica, cost_ms)
        count, load_ms = self._loads.get(replica, (0, 0.0))
        self._loads[replica] = count + 1, load_ms + cost_ms

    def drop_before(self, before_s: float) -> None:
        """Forget the requests from before that time."""
        while self._requests and (oldest := next(iter(self._requests.items())))[1].at_s < before_s:
            self._forget(oldest[0])

    def _forget(self, request_id: str) -> None:
        entry = self._requests.pop(request_id, None)
        if entry is None:
            return
        count, load_ms = self._loads.pop(entry.replica)
        if count > 1:
            self._loads[entry.replica] = count - 1, max(load_ms - entry.cost_ms, 0.0)


class StickyLeastLoaded:
    """Of the replicas with the first `prefix_len` tokens in cache, the one with the fewest requests in flight.

    A holder serves however loaded it is. Without a holder the least loaded of all serves, and becomes one.

    Theory of operation. The published system maps the hash of the first tokens to the workers that reported it. Here
    the prefix index is that map: its block hashes stand for whole prefixes, it is bounded by each replica's KV pool,
    and it is corrected by what engines report. A dispatch enters the prompt at once, before the engine confirms it, so
    a burst of one prefix goes to one replica. A request may have a `prefix_len` of its own. It is rounded down to
    blocks of the source, and a prompt shorter than that is compared by its full blocks.

    References
    ----------
    Push-based cache map for prefix-aware routing, algorithm 1.
    """

    name: ClassVar[str] = "sticky-least-loaded"
    summary: ClassVar[str] = (
        "push-based cache map, Alg. 1: the least loaded replica with the first 64 tokens in cache, else the least "
        "loaded of all"
    )
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "events"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("prefix_len", 64.0, 1.0, 1e6, "first tokens of a prompt that a holder has in cache", tunable="no"),
    )

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        needed = _needed_tokens(request.prefix_len or weights["prefix_len"], request)
        holders = np.flatnonzero(candidates.cached_tokens >= needed) if needed > 0.0 else ()
        if not len(holders):
            return Choice(least_loaded(candidates, rng), evidence(candidates), fallback="no_match")
        load = candidates.in_flight_requests[holders]
        return Choice(int(holders[argmin_tiebreak(load, load, rng)]), evidence(candidates))


def _needed_tokens(prefix_len: float, request: RouteRequest) -> float:
    """Return the cached tokens that make a holder; 0 for a prompt without a full block, which none can hold.

    Whole blocks of the source are compared, rounded down and at least one: those of the engine where the tokens of the
    prompt are known, else those of the text. Half a token less than they have allows for rounding.
    """
    tokens = min(request.kv_hashes, default=request.block_tokens)
    blocks = min(max(1, int(prefix_len / tokens)), int(request.prompt_tokens / tokens))
    return blocks * tokens - 0.5 if blocks else 0.0
