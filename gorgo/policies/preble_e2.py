"""`preble-e2`: exploit the cache where more of a prompt is shared than computed, else explore the least loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from gorgo.core.latency.prefill import prefill_s
from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats
from gorgo.core.policy.interface import Candidates, Choice, IndexKind, argmin_tiebreak, fill_unknown
from gorgo.core.policy.weights import Weights, WeightSpec

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
