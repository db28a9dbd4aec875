"""The pinned baseline: every session stays on one replica, assigned before the run with knowledge of the whole trace.

Owns the sessions of a trace, the estimated cost of an assignment, the search for a good one, and the policy that
follows it. It cannot herd: a session's place does not depend on which replica was first to have a system prompt. It
is no bound: within the run it reacts to nothing, and a policy that moves a session at the right time can beat it.

Theory of operation. A session is a chain of prompts, each of which goes on with the whole one before (in full blocks).
A prompt with which two others go on in different ways ends no chain: it is a shared beginning, such as a system prompt,
and each of the two begins a session. An assignment is estimated in seconds, summed up over the replicas:

    distance + prefill + recompute + wait + decoding

*Distance* is round trips for the bodies, *prefill* that of new tokens, of each shared beginning once per replica that
has a session with it. Time is divided into slots. In each a replica needs the tokens of the sessions that are between
their first and last request. Where they exceed its KV pool, a part of what is reused in that slot is computed again
(*recompute*): with a share z of the need in the pool a request finds its prefix with probability z + (1 - z) ln(1 - z),
as under LRU where sessions take turns in a new random order each round. So it is better to give up the sessions of one
replica than a part of all, and the search finds that. *Wait* is the mean wait of an M/G/1 queue (Pollaczek and
Khinchine) by all of those prefills. *Decoding* is the time of the output tokens in a batch of the mean size, of which
prefills take their share. Each term grows with each session that is added, so that the cost of a part of the sessions
bounds the whole.

Few sessions are assigned by branch and bound, which finds the least estimate. More are assigned one by one, the largest
first, each where it costs the least; then moves of one session and exchanges of two are made while they gain.

References
----------
Graham, Bounds on multiprocessing timing anomalies, 1969, for the order of the largest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from gorgo.core.latency.ttft import TcpWindows, round_trips
from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats
from gorgo.core.policy.interface import Candidates, Choice, IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.core.prefix.residency import BLOCK_HASH_BYTES
from gorgo.lab.sim.engine.profiles import EngineProfile
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.lower_bound import prefill_s
from gorgo.lab.sim.workload import BLOCK_TOKENS, SimRequest
from gorgo.policies.base import least_loaded

#: Parts of a run's time in which the need for KV memory is counted apart.
SLOTS = 32
#: Assignments that branch and bound may have to visit: less than a second.
EXACT_ASSIGNMENTS = 20_000
#: Estimates of one replica's cost in the search for gains: some five seconds.
MAX_ESTIMATES = 300_000
#: The mean wait is finite up to this utilisation; beyond it the estimate goes on with this one.
UTILISATION_MAX = 0.95
#: Rounds in which the mean size of a batch is found: a few are enough below saturation.
BATCH_ROUNDS = 4
#: Gains below this share of the whole cost are noise of rounding.
LEAST_GAIN = 1e-9


@runtime_checkable
class TraceObserver(Protocol):
    """A policy that knows the whole trace before the run; no router can."""

    def prepare(self, feed: Sequence[SimRequest], fleet: SimFleet, *, block_tokens: int) -> None: ...


class Pinned:
    """Each session on its replica of an assignment that was made with knowledge of the whole trace.

    Where that replica is not among the candidates the least loaded one serves (`absent`).
    """

    name: ClassVar[str] = "pinned"
    summary: ClassVar[str] = "every session on one replica, assigned with knowledge of the whole trace"
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "any"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def __init__(self) -> None:
        self._replica_of: Mapping[str, str] = {}

    def prepare(self, feed: Sequence[SimRequest], fleet: SimFleet, *, block_tokens: int) -> None:
        """Assign the sessions of `feed`; called once, before the first choice."""
        sessions = sessions_of(feed)
        assigned = assign(feed, sessions, fleet, block_tokens=block_tokens)
        self._replica_of = {
            str(feed[row].index): fleet.replicas[replica_index].name
            for rows, replica_index in zip(sessions, assigned, strict=True)
            for row in rows
        }

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        names = list(candidates.names)
        replica = self._replica_of.get(request.request_id)
        if replica in names:
            return Choice(names.index(replica))
        return Choice(least_loaded(candidates, rng), fallback="absent")


# -- sessions


def sessions_of(feed: Sequence[SimRequest]) -> list[list[int]]:
    """Return the sessions as rows of `feed` in the order of time, the sessions in the order of their first request.

    Example
    -------
    >>> prompts = [b"system..one.....", b"system..two.....", b"system..one.....more....", b"system.."]
    >>> feed = [
    ...     SimRequest(index=n, arrival_s=n, prompt_tokens=9, output_tokens=1, blocks=blocks, prefix_hash=0)
    ...     for n, blocks in enumerate(prompts)
    ... ]
    >>> sessions_of(feed)
    [[0, 2], [1], [3]]
    """
    chains = [_hashes(request) for request in feed]
    parting = _parting(chains)
    sessions: list[list[int]] = []
    #: The session whose newest prompt ends with this block.
    ends: dict[bytes, int] = {}
    for row in np.argsort([request.arrival_s for request in feed], kind="stable").tolist():
        chain = chains[row]
        last = next((block for block in reversed(chain) if block in ends), None)
        if last is None:
            session = len(sessions)
            sessions.append([])
        else:
            session = ends.pop(last)
        sessions[session].append(row)
        if chain and chain[-1] not in parting:
            ends[chain[-1]] = session
    return sessions


def _hashes(request: SimRequest) -> list[bytes]:
    blocks = request.blocks
    return [blocks[at : at + BLOCK_HASH_BYTES] for at in range(0, len(blocks), BLOCK_HASH_BYTES)]


def _parting(chains: Sequence[Sequence[bytes]]) -> set[bytes]:
    """Return the blocks with which prompts go on in different ways."""
    following: dict[bytes, bytes] = {}
    parting: set[bytes] = set()
    for chain in chains:
        for block, after in pairwise(chain):
            if following.setdefault(block, after) != after:
                parting.add(block)
    return parting


# -- the estimate


@dataclass(frozen=True, slots=True)
class _Session:
    """What a session adds to a replica.

    `output_tokens` and `context_tokens` are sums, the latter of the context of each output token. `tokens` are its own
    at the end, behind its shared beginning, whose blocks are `shared`; `need` are those in each slot. By kind of
    engine: the sums of its prefills and of their squares, s and s^2, and the prefills that its reuse saves, as sums per
    slot and as the sum of their squares.
    """

    requests: int
    trips: float
    output_tokens: float
    context_tokens: float
    tokens: float
    shared: tuple[bytes, ...]
    need: Floats
    work_s: tuple[float, ...]
    squares_s2: tuple[float, ...]
    saved_s: tuple[Floats, ...]
    saved_s2: tuple[float, ...]


@dataclass(slots=True)
class _Load:
    """One replica with the sessions that are assigned to it."""

    profile: EngineProfile
    kind: int
    rtt_s: float
    block_tokens: int
    horizon_s: float
    requests: int = 0
    trips: float = 0.0
    output_tokens: float = 0.0
    context_tokens: float = 0.0
    work_s: float = 0.0
    squares_s2: float = 0.0
    need: Floats = field(default_factory=lambda: np.zeros(SLOTS))
    saved_s: Floats = field(default_factory=lambda: np.zeros(SLOTS))
    saved_s2: float = 0.0
    #: Shared blocks here, each with the number of sessions that have it.
    blocks: Counter[bytes] = field(default_factory=Counter)

    def add(self, session: _Session, sign: int = 1) -> None:
        """Add a session, or with -1 remove it."""
        self.requests += sign * session.requests
        self.trips += sign * session.trips
        self.output_tokens += sign * session.output_tokens
        self.context_tokens += sign * session.context_tokens
        self.work_s += sign * session.work_s[self.kind]
        self.squares_s2 += sign * session.squares_s2[self.kind]
        self.need = self.need + sign * session.need
        self.saved_s = self.saved_s + sign * session.saved_s[self.kind]
        self.saved_s2 += sign * session.saved_s2[self.kind]
        for block in session.shared:
            self.blocks[block] += sign
            if not self.blocks[block]:
                del self.blocks[block]

    def cost_s(self, session: _Session | None = None) -> float:
        """Return the estimate with the sessions here, and with one more."""
        requests, trips, work_s, squares_s2 = self.requests, self.trips, self.work_s, self.squares_s2
        need, saved_s, saved_s2, blocks = self.need, self.saved_s, self.saved_s2, len(self.blocks)
        output_tokens, context_tokens = self.output_tokens, self.context_tokens
        if session is not None:
            requests, trips = requests + session.requests, trips + session.trips
            work_s, squares_s2 = work_s + session.work_s[self.kind], squares_s2 + session.squares_s2[self.kind]
            need, saved_s = need + session.need, saved_s + session.saved_s[self.kind]
            saved_s2 += session.saved_s2[self.kind]
            blocks += self._missing(session)
            output_tokens += session.output_tokens
            context_tokens += session.context_tokens
        if not requests:
            return 0.0
        needed = need + blocks * self.block_tokens
        work_s += blocks * self.block_tokens / self.profile.prefill_tokens_per_s
        if needed.max() > self.profile.kv_tokens:
            recompute_s = float(saved_s @ _missed_shares(self.profile.kv_tokens / np.maximum(needed, 1.0)))
            work_s += recompute_s
            squares_s2 += saved_s2 * recompute_s / max(float(saved_s.sum()), 1e-9)
        idle = 1.0 - min(work_s / self.horizon_s, UTILISATION_MAX)
        wait_s = requests * squares_s2 / self.horizon_s / (2.0 * idle)
        return trips * self.rtt_s + work_s + wait_s + self._decoding_s(output_tokens, context_tokens, idle)

    def _decoding_s(self, output_tokens: float, context_tokens: float, idle: float) -> float:
        """Return the time of all output tokens; the batch is as large as its steps are long, found in a few rounds."""
        context, batch, step_s = context_tokens / max(output_tokens, 1.0), 1, 0.0
        for _ in range(BATCH_ROUNDS):
            step_s = (self.profile.decode_s(batch, 0) + self.profile.decode_kv_s * batch * context) / idle
            batch = min(max(round(output_tokens / self.horizon_s * step_s), 1), self.profile.max_running_requests)
        return output_tokens * step_s

    def _missing(self, session: _Session) -> int:
        """Return the shared blocks of a session that are not here; with a block its whole prefix is."""
        path = session.shared
        there = next((number for number in range(len(path), 0, -1) if path[number - 1] in self.blocks), 0)
        return len(path) - there


def _missed_shares(fit: Floats) -> Floats:
    """Return the share of reuse that is lost where so large a share of the need fits into the pool."""
    excess = np.clip(1.0 - fit, 0.0, None)
    shares: Floats = excess - excess * np.log(np.maximum(excess, np.finfo(np.float64).tiny))
    return shares


def _sessions(
    feed: Sequence[SimRequest], rows_of: Sequence[Sequence[int]], profiles: Sequence[EngineProfile], block_tokens: int
) -> list[_Session]:
    owner: dict[bytes, int] = {}
    shared: set[bytes] = set()
    for number, rows in enumerate(rows_of):
        for block in {block for row in rows for block in _hashes(feed[row])}:
            if owner.setdefault(block, number) != number:
                shared.add(block)
    begin_s, horizon_s = _times(feed)
    sessions = []
    for rows in rows_of:
        requests = [feed[row] for row in rows]
        path = tuple(block for block in _hashes(requests[-1]) if block in shared)
        prompt = np.array([request.prompt_tokens for request in requests], dtype=np.float64)
        before = [path_tokens := len(path) * block_tokens, *(one.prompt_tokens for one in requests[:-1])]
        full = [len(one.blocks) // BLOCK_HASH_BYTES * block_tokens for one in requests]
        cached = np.minimum(np.minimum(np.maximum(before, path_tokens), full), prompt - 1)
        slots = [min(int((one.arrival_s - begin_s) / horizon_s * SLOTS), SLOTS - 1) for one in requests]
        output = np.array([request.output_tokens for request in requests], dtype=np.float64)
        tokens = max(float(prompt[-1] + requests[-1].output_tokens - path_tokens), 0.0)
        need = np.zeros(SLOTS)
        for slot, one in zip(slots, requests, strict=True):  # from each prompt on; the last one's is the session's end
            need[slot : slots[-1] + 1] = max(one.prompt_tokens + one.output_tokens - path_tokens, 0)
        prefills = [prefill_s(profile, prompt - cached, cached) for profile in profiles]
        nothing = np.zeros_like(cached)
        saved = [prefill_s(profile, cached, nothing) for profile in profiles]
        sessions.append(
            _Session(
                requests=len(requests),
                trips=float(sum(round_trips(one.body_bytes, TcpWindows())[0] for one in requests)),
                output_tokens=float(output.sum()),
                context_tokens=float(output @ (prompt + output / 2)),
                tokens=tokens,
                shared=path,
                need=need,
                work_s=tuple(float(each.sum()) for each in prefills),
                squares_s2=tuple(float(each @ each) for each in prefills),
                saved_s=tuple(np.bincount(slots, weights=each, minlength=SLOTS).astype(np.float64) for each in saved),
                saved_s2=tuple(float(each @ each) for each in saved),
            )
        )
    return sessions


def _times(feed: Sequence[SimRequest]) -> tuple[float, float]:
    """Return when the trace begins, and how long it takes: at least a second, since rates are per this time."""
    arrivals = [request.arrival_s for request in feed]
    return min(arrivals), max(max(arrivals) - min(arrivals), 1.0)


# -- the search


def assign(
    feed: Sequence[SimRequest], sessions: Sequence[Sequence[int]], fleet: SimFleet, *, block_tokens: int = BLOCK_TOKENS
) -> list[int]:
    """Return the place in the fleet of each session, at the least estimate that the search finds."""
    if not feed:
        return []
    search = _Search(feed, sessions, fleet, block_tokens)
    search.assign_greedily()
    if len(fleet.replicas) ** len(sessions) <= EXACT_ASSIGNMENTS:
        search.branch_and_bound()
    else:
        search.improve()
    return search.places


class _Search:
    """An assignment that is made better."""

    def __init__(
        self, feed: Sequence[SimRequest], rows_of: Sequence[Sequence[int]], fleet: SimFleet, block_tokens: int
    ) -> None:
        profiles = list(dict.fromkeys(replica.profile for replica in fleet.replicas))
        _, horizon_s = _times(feed)
        self._sessions = _sessions(feed, rows_of, profiles, block_tokens)
        self._loads = [
            _Load(one.profile, profiles.index(one.profile), one.link.rtt_s, block_tokens, horizon_s)
            for one in fleet.replicas
        ]
        self._order = sorted(range(len(self._sessions)), key=lambda number: -self._sessions[number].tokens)
        self._estimates = 0
        self.places = [-1] * len(self._sessions)

    def cost_s(self) -> float:
        return sum(load.cost_s() for load in self._loads)

    def put(self, number: int, replica_index: int) -> None:
        """Assign a session to a replica, from where it was."""
        if self.places[number] >= 0:
            self._loads[self.places[number]].add(self._sessions[number], -1)
        self._loads[replica_index].add(self._sessions[number])
        self.places[number] = replica_index

    def assign_greedily(self) -> None:
        """Assign every session, the largest first, each where it costs the least."""
        for number in self._order:
            session = self._sessions[number]
            added = [load.cost_s(session) - load.cost_s() for load in self._loads]
            self.put(number, added.index(min(added)))

    def improve(self) -> None:
        """Move and exchange sessions while that gains, or until the search has taken its time."""
        least_s = LEAST_GAIN * self.cost_s()
        gained = True
        while gained:
            gained = False
            for number in self._order:
                if self._estimates > MAX_ESTIMATES:
                    return
                gained = self._move(number, least_s) or gained
                gained = self._exchange(number, least_s) or gained

    def branch_and_bound(self) -> None:
        """Find the least estimate; the present assignment is the first bound."""
        best_s, best = self.cost_s(), list(self.places)
        for session, replica_index in zip(self._sessions, best, strict=True):
            self._loads[replica_index].add(session, -1)
        self.places = [-1] * len(best)
        assignment = self._branch(0, best_s, best)
        for number, replica_index in enumerate(assignment):
            self.put(number, replica_index)

    # -- helpers

    def _move(self, number: int, least_s: float) -> bool:
        session, here = self._sessions[number], self.places[number]
        before_s = self._loads[here].cost_s()
        self._loads[here].add(session, -1)
        saved_s = before_s - self._loads[here].cost_s()
        added = [load.cost_s(session) - load.cost_s() for load in self._loads]
        self._estimates += 2 * len(added) + 2
        replica_index = added.index(min(added))
        if saved_s - added[replica_index] <= least_s:
            replica_index = here
        self._loads[replica_index].add(session)
        self.places[number] = replica_index
        return replica_index != here

    def _exchange(self, number: int, least_s: float) -> bool:
        """Exchange the session with one of another replica, there the nearest in tokens, if one gains."""
        here = self.places[number]
        for replica_index in range(len(self._loads)):
            other = None if replica_index == here else self._nearest(number, replica_index)
            if other is None:
                continue
            before_s = self._loads[here].cost_s() + self._loads[replica_index].cost_s()
            self.put(number, replica_index)
            self.put(other, here)
            self._estimates += 4 + len(self.places) // 100
            if before_s - self._loads[here].cost_s() - self._loads[replica_index].cost_s() > least_s:
                return True
            self.put(number, here)
            self.put(other, replica_index)
        return False

    def _nearest(self, number: int, replica_index: int) -> int | None:
        tokens = self._sessions[number].tokens
        there = [other for other, at in enumerate(self.places) if at == replica_index]
        return min(there, key=lambda other: abs(self._sessions[other].tokens - tokens), default=None)

    def _branch(self, depth: int, best_s: float, best: list[int]) -> list[int]:
        """Return the best assignment of the sessions from `depth` on behind those that are assigned."""
        tried: set[tuple[int, float]] = set()
        if depth == len(self._order):
            return list(self.places)
        number = self._order[depth]
        for replica_index, load in enumerate(self._loads):
            alike = (load.kind, load.rtt_s)
            if not load.requests:  # of equal empty replicas one stands for all
                if alike in tried:
                    continue
                tried.add(alike)
            self.put(number, replica_index)
            if self.cost_s() < best_s:
                assignment = self._branch(depth + 1, best_s, best)
                if assignment is not best:
                    best, best_s = assignment, self._cost_of(assignment)
            load.add(self._sessions[number], -1)
            self.places[number] = -1
        return best

    def _cost_of(self, places: Sequence[int]) -> float:
        """Return the cost of a whole assignment, leaving the present one as it is."""
        loads = [_Load(one.profile, one.kind, one.rtt_s, one.block_tokens, one.horizon_s) for one in self._loads]
        for session, replica_index in zip(self._sessions, places, strict=True):
            loads[replica_index].add(session)
        return sum(load.cost_s() for load in loads)
