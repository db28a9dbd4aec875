"""The exchange of one Router with its peers: what it reports, and what of their reports it takes in.

Owns the steps between records and the Router's parts. Leaves the loads of peers to `fleet.peer_loads`, the marks to
`marks`, the wire form to `codec`, and the transport to a shell.

- `own_loads` is the load of the open attempts.
- `PeerSpeeds` turns learned prefill speeds of all peers into priors.
- `Outbox` has what happened since the last report.
- `PolicyRoutes` has the routes of a policy that keeps its own.
- `SharedPrefixes` applies confirmed prefixes of this Router and of its peers.
- `PeerExchange` makes reports and applies those of others.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, runtime_checkable

import numpy as np

from gorgo.core.dispatch.in_flight import Attempt, InFlightTable
from gorgo.core.fleet.fleet import Fleet, FleetChange
from gorgo.core.fleet.peer_loads import FADE_S, MAX_PEERS, PeerLoads
from gorgo.core.fleet.replica import HealthState, Replica
from gorgo.core.latency.prefill import STEADY_TRUST_S, faded
from gorgo.core.lru import Lru
from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import Outcome, RouteRequest
from gorgo.core.peers.marks import LEAST_TOKENS, GroupPrefixes, MarkedPrompt, used_before
from gorgo.core.peers.records import (
    MAX_ANSWERS,
    MAX_CACHE_REPORTS,
    MAX_MARKS,
    MAX_PREFILL_S,
    MAX_PREFIXES,
    LearnedSpeed,
    MarkKind,
    PeerReport,
    PeerStatus,
    PrefixMarks,
    ReplicaLoad,
    SharedAnswer,
    SharedCacheReport,
    StartedPrefill,
)
from gorgo.core.policy.interface import Policy
from gorgo.core.prefix.index import Answers, GivenAnswer, Origin, PrefixIndex
from gorgo.core.prefix.residency import BLOCK_HASH_BYTES, SLACK_TOKENS, CacheReport, FoundShares


def own_loads(table: InFlightTable, *, now: float) -> Iterable[ReplicaLoad]:
    """Yield the load of each replica with an open attempt."""
    by_replica: dict[Replica, list[Attempt]] = {}
    for attempt in table.attempts():
        by_replica.setdefault(attempt.replica, []).append(attempt)
    for replica, attempts in by_replica.items():
        if replica.slot < 0:
            continue
        waiting = [each for each in attempts if each.first_token_s is None]
        first_s = [each.first_token_s for each in attempts if each.first_token_s is not None]
        yield ReplicaLoad(
            replica.spec.name,
            len(attempts),
            sum(each.request.prompt_tokens for each in attempts),
            len(waiting),
            sum(each.request.prompt_tokens for each in waiting),
            sum(each.uncached_tokens for each in waiting),
            replica.prefill_queue.left_s(engine_s=now),
            max(0.0, len(first_s) * now - sum(first_s)),
        )


# Learned prefill speeds of a group: which of the own to report, and priors from those of all peers.
#
# Owns the samples of each peer and their sums. A replica's own factor learns from its own samples (`core.latency`).


#: Every so many reports have all learned speeds, the others those that changed.
_ALL_SPEEDS = 50
_US = 1e6


@dataclass(slots=True)
class PeerSpeeds:
    """Samples of peers, in whole microseconds: sums stay exact."""

    _reported: dict[str, tuple[float, float]] = field(default_factory=dict)
    _samples: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    _sums: dict[str, tuple[int, int]] = field(default_factory=dict)

    def own(self, replicas: Mapping[str, Replica], *, seq: int) -> Iterable[LearnedSpeed]:
        """Yield the own samples that changed since a report had them, or all in some reports."""
        reported, all_of_them = self._reported, seq % _ALL_SPEEDS == 0
        for name, replica in replicas.items():
            samples = replica.prefill_queue.speed.samples
            if samples[1] > 0.0 and (all_of_them or reported.get(name) != samples):
                reported[name] = samples
                # A first token may be sooner than a round trip; a report has no negative time.
                yield LearnedSpeed(name, max(0.0, samples[0]), samples[1])

    def take_samples(self, router: str, speeds: Iterable[LearnedSpeed], replicas: Mapping[str, Replica]) -> None:
        """Start the learned factors from the samples of all peers, with their weight beside the prior's."""
        samples = self._samples.setdefault(router, {})
        for speed in speeds:
            replica = replicas.get(speed.replica)
            sample = round(speed.spent_s * _US), round(speed.prior_s * _US)
            if replica is None or samples.get(speed.replica) == sample:
                continue
            self._add(speed.replica, sample, instead_of=samples.get(speed.replica, (0, 0)))
            samples[speed.replica] = sample
            spent_us, prior_us = self._sums[speed.replica]
            reported = None if replica.prior.known else replica.reported_speed.factor
            start = 1.0 if reported is None else reported
            trusted = (spent_us / _US + STEADY_TRUST_S * start) / (prior_us / _US + STEADY_TRUST_S)
            replica.prefill_queue.set_speed_prior(trusted)

    def forget(self, router: str) -> None:
        """Drop the samples of a router."""
        for name, sample in self._samples.pop(router, {}).items():
            self._add(name, (0, 0), instead_of=sample)

    def _add(self, name: str, sample: tuple[int, int], *, instead_of: tuple[int, int]) -> None:
        spent_us, prior_us = self._sums.get(name, (0, 0))
        self._sums[name] = spent_us + sample[0] - instead_of[0], prior_us + sample[1] - instead_of[1]


# What happened since the last report: prefixes confirmed and found evicted, reports of cached tokens, and answers.
#
# Bounded: of a burst the oldest entries are dropped, and their number
# counted.


#: A dispatched prefill of so many seconds is reported at once: within 100 ms others would add theirs to it.
URGENT_PREFILL_S = 0.2


@dataclass(slots=True)
class Outbox:
    """Entries for the next report."""

    dropped: int = 0
    _prefixes: deque[PrefixMarks] = field(default_factory=lambda: deque(maxlen=MAX_PREFIXES))
    #: Of prompts sent since the last report that still wait, by attempt.
    _sent: Lru[str, PrefixMarks] = field(default_factory=lambda: Lru(MAX_PREFIXES))
    _cache_reports: deque[SharedCacheReport] = field(default_factory=lambda: deque(maxlen=MAX_CACHE_REPORTS))
    _answers: deque[SharedAnswer] = field(default_factory=lambda: deque(maxlen=MAX_ANSWERS))

    def on_confirmed(self, attempt: Attempt, marks: PrefixMarks) -> None:
        """Add the prefixes of a prompt that a first token confirmed."""
        self._sent.pop(attempt.attempt_id, None)
        self._add(marks)

    def on_sent(self, attempt: Attempt, marks: PrefixMarks) -> None:
        """Add the prefixes of a prompt that waits for its first token."""
        attempt.prefix_reported = True
        self.dropped += len(self._sent.put(attempt.attempt_id, marks))

    def on_withdrawn(self, attempt: Attempt, marks: Callable[[], PrefixMarks]) -> None:
        """Add that a prompt that was reported as sent will have no first token."""
        if attempt.prefix_reported and self._sent.pop(attempt.attempt_id, None) is None:
            self._add(marks())

    def on_evicted(self, replica: str, marks: Sequence[int]) -> None:
        """Add marks that are no longer on a replica, oldest first: the newest of them say how old."""
        if marks:
            words = b"".join([mark.to_bytes(BLOCK_HASH_BYTES, "little") for mark in marks[-MAX_MARKS:]])
            self._add(PrefixMarks(replica, None, (), words, "evicted"))

    def on_cache_report(self, attempt: Attempt, report: CacheReport) -> None:
        """Add an engine's report."""
        shared = SharedCacheReport(
            attempt.replica.spec.name,
            attempt.request.recorded_model,
            report.confirmed_tokens,
            report.found_tokens,
        )
        self.dropped += len(self._cache_reports) == MAX_CACHE_REPORTS
        self._cache_reports.append(shared)

    def on_answered(self, attempt: Attempt, output_tokens: int) -> None:
        """Add a whole answer of which a next turn may find the tokens cached."""
        request = attempt.request
        prompt = request.blocks[-BLOCK_HASH_BYTES:]
        if prompt and request.boundaries and output_tokens > 0:
            self.dropped += len(self._answers) == MAX_ANSWERS
            answer = SharedAnswer(attempt.replica.spec.name, prompt, request.prompt_tokens, output_tokens)
            self._answers.append(answer)

    def __bool__(self) -> bool:
        return bool(self._prefixes or self._sent or self._cache_reports or self._answers)

    def take_entries(
        self,
    ) -> tuple[tuple[PrefixMarks, ...], tuple[SharedCacheReport, ...], tuple[SharedAnswer, ...]]:
        """Return the entries since the last call."""
        for sent in self._sent.values():
            self._add(sent)
        self._sent.clear()
        taken = tuple(self._prefixes), tuple(self._cache_reports), tuple(self._answers)
        for entries in (self._prefixes, self._cache_reports, self._answers):
            entries.clear()
        return taken

    def _add(self, marks: PrefixMarks) -> None:
        self.dropped += len(self._prefixes) == MAX_PREFIXES
        self._prefixes.append(marks)


@runtime_checkable
class RoutePolicy(Protocol):
    """A policy with routes of its own, which takes in those of peers."""

    @property
    def evicted_routes(self) -> Mapping[Origin, int]: ...

    def add_remote_route(self, model: str | None, prefix: bytes, replica: str, *, now: float) -> None: ...


class PolicyRoutes:
    """The routes of the present policy, if it has any."""

    def __init__(self, policy: Callable[[], Policy]) -> None:
        self._policy = policy
        self._checked: tuple[Policy, RoutePolicy | None] | None = None

    def add(self, marks: PrefixMarks, *, now: float) -> None:
        """Add a route per mark of a peer's prompt."""
        policy = self._route_policy()
        if policy is not None:
            for at in range(0, len(marks.hashes), BLOCK_HASH_BYTES):
                policy.add_remote_route(marks.model, marks.hashes[at : at + BLOCK_HASH_BYTES], marks.replica, now=now)

    def evicted(self) -> Mapping[Origin, int]:
        """Return the routes evicted so far, by origin."""
        policy = self._route_policy()
        return {} if policy is None else policy.evicted_routes

    def _route_policy(self) -> RoutePolicy | None:
        """Return the policy if it has routes; the check is slow, and policies change seldom."""
        policy = self._policy()
        if self._checked is None or self._checked[0] is not policy:
            self._checked = policy, policy if isinstance(policy, RoutePolicy) else None
        return self._checked[1]


# Prefixes that the routers of a group confirmed: those of this Router's attempts, and those of its peers' reports.
#
# Owns what a result of an attempt or a record of a peer means for marks, for the next report, for the index and for a
# policy with routes of its own.


class SharedPrefixes:
    """Observer of the Router's results.

    Parameters
    ----------
    prefixes, outbox, routes:
        The exchange's: marks, what the next report has, and routes of the policy.
    fleet, found_shares, index, capacity_of:
        As in `PeerExchange`.
    """

    def __init__(
        self,
        prefixes: GroupPrefixes,
        outbox: Outbox,
        routes: PolicyRoutes,
        *,
        fleet: Fleet,
        found_shares: FoundShares,
        index: PrefixIndex,
        capacity_of: Callable[[Replica], int | None],
    ) -> None:
        self._prefixes, self._outbox, self._routes = prefixes, outbox, routes
        self._fleet, self._found_shares, self._index, self._capacity_of = fleet, found_shares, index, capacity_of

    def on_sent(self, attempt: Attempt) -> None:
        """Report the prefixes of a prompt that waits so long that others may send its like before its first token."""
        estimate = attempt.decision.estimate
        if (
            estimate is not None
            and estimate.queue_s + estimate.prefill_s >= URGENT_PREFILL_S
            and _is_reported(attempt.request)
        ):
            prompt = MarkedPrompt.of(attempt.request)
            known_depth, _ = self._prefixes.deepest(attempt.replica.slot, prompt)
            self._outbox.on_sent(attempt, _marks(attempt, "sent", *prompt.marks_from(known_depth)))

    def on_withdrawn(self, attempt: Attempt) -> None:
        """Report that a prompt that was reported as sent has ended before its first token."""
        self._outbox.on_withdrawn(attempt, lambda: self._withdrawn(attempt))

    def on_confirmed(self, attempt: Attempt) -> None:
        """Mark the prefixes of a prompt, here and in the next report."""
        if _is_reported(attempt.request):
            self._confirm(attempt)

    def _confirm(self, attempt: Attempt) -> None:
        prompt = MarkedPrompt.of(attempt.request)
        known_depth, run = self._prefixes.deepest(attempt.replica.slot, prompt)
        attempt.group_prefix = used_before(known_depth, run, attempt.dispatched_s)
        depths, words = prompt.marks_from(known_depth)
        self._outbox.on_confirmed(attempt, _marks(attempt, "confirmed", depths, words))
        first_token_s = attempt.first_token_s or inf
        self._use_prefixes(attempt.replica, depths, words, Origin.LOCAL, now=first_token_s)

    def _withdrawn(self, attempt: Attempt) -> PrefixMarks:
        prompt = MarkedPrompt.of(attempt.request)
        known_depth, _ = self._prefixes.deepest(attempt.replica.slot, prompt)
        depths = prompt.depths_behind(known_depth)
        return _marks(attempt, "withdrawn", (), prompt.words_at(depths))

    def on_cache_report(self, attempt: Attempt, report: CacheReport, *, evicted: bool) -> None:
        """Add an engine's report to the next one; the index evicts by it, and so do the marks."""
        if _is_reported(attempt.request):
            self._outbox.on_cache_report(attempt, report)
        if evicted:
            self._evict_marks(attempt.replica, attempt.longest_confirmed.tick)

    def on_completed(self, attempt: Attempt, outcome: Outcome) -> None:
        """Remove the marks that are older than one which the engine did not have."""
        prefix, request, slot = attempt.group_prefix, attempt.request, attempt.replica.slot
        if prefix.blocks * request.block_tokens <= SLACK_TOKENS:  # no report contradicts so few
            return
        report = CacheReport.of(request, prefix, outcome)
        if report is not None and report.confirmed_tokens:
            usual = self._found_shares.of(slot, request.recorded_model, report.confirmed_tokens)
            if report.is_contradiction(usual):
                self._evict_marks(attempt.replica, prefix.tick)

    def on_answered(self, attempt: Attempt, output_tokens: int) -> None:
        """Add a whole answer to the next report, if it and its prompt are worth one."""
        if not _is_reported(attempt.request):
            if not _is_reported(attempt.request, output_tokens):
                return
            self._confirm(attempt)
        self._outbox.on_answered(attempt, output_tokens)

    def evicted(self) -> Counter[Origin]:
        """Return the marks, and the routes of the policy, that were evicted so far, by origin."""
        counts: Counter[Origin] = Counter()
        for (origin, _), count in self._prefixes.evicted.items():
            counts[origin] += count
        counts.update(self._routes.evicted())
        return counts

    def take_prefixes(self, marks: PrefixMarks, *, now: float) -> None:
        """Take in prefixes of a peer's report."""
        replica = self._fleet.replicas.get(marks.replica)
        if replica is None:
            return
        if marks.kind == "withdrawn":
            self._prefixes.withdraw(replica.slot, marks.words)
            return
        if marks.kind == "evicted":
            tick = self._prefixes.median_tick(replica.slot, marks.words) + 1
            self._prefixes.evict_older(replica.slot, before=tick)
            self._evict_older(replica.slot, tick)
            return
        self._index.tick += 2  # a use by another router
        confirmed = marks.kind == "confirmed"
        self._use_prefixes(replica, marks.blocks, marks.words, Origin.REMOTE, now=now if confirmed else inf)
        if confirmed:
            self._routes.add(marks, now=now)

    def _evict_marks(self, replica: Replica, tick: int) -> None:
        """Evict the marks last used before `tick`, here and by the next report."""
        marks = self._prefixes.evict_older(replica.slot, before=tick)
        self._outbox.on_evicted(replica.spec.name, marks)

    def _use_prefixes(
        self, replica: Replica, depths: Sequence[int], words: Sequence[int], origin: Origin, *, now: float
    ) -> None:
        """Mark prefixes as used now, and evict from the index what no longer fits beside those of all routers."""
        bounded = self._index.bounded
        capacity_blocks = self._capacity_of(replica) if bounded else None
        tick, slot = self._index.tick, replica.slot
        oldest = self._prefixes.use(slot, depths, words, origin, tick=tick, now=now, capacity_blocks=capacity_blocks)
        self._index.changed |= 1 << slot
        self._evict_older(slot, oldest)

    def _evict_older(self, slot: int, tick: int) -> None:
        if tick and self._index.bounded:
            self._index.evict_older(slot, before=tick)


def _marks(attempt: Attempt, kind: MarkKind, depths: Sequence[int], words: Sequence[int]) -> PrefixMarks:
    """Return marks of an attempt's prompt for the next report."""
    hashes = struct.pack(f"<{len(words)}Q", *words)
    return PrefixMarks(attempt.replica.spec.name, attempt.request.recorded_model, tuple(depths), hashes, kind)


def _is_reported(request: RouteRequest, output_tokens: int = 0) -> bool:
    """Return whether a prompt, or one with its answer, is long enough to be reported to peers."""
    return bool(request.blocks) and request.prompt_tokens + output_tokens >= LEAST_TOKENS


#: Longest time between two reports, s: three of them fit into `FADE_S`.
HEARTBEAT_S = 0.5
#: Replicas to probe that a shell has not taken yet.
_MAX_HINTS = 1000


def is_urgent(dispatch: Dispatch) -> bool:
    """Return whether to report now: until the next report in turn, others would choose without this prefill."""
    estimate = dispatch.decision.estimate
    return estimate is not None and estimate.prefill_s >= URGENT_PREFILL_S


@dataclass(frozen=True, slots=True)
class PeerView:
    """One peer as an operator reads it."""

    router: str
    status: PeerStatus
    received_s: float
    #: Whether its load counts; not when it is silent.
    counts: bool
    same_key: bool


class PeerExchange:
    """Reports out and in.

    Parameters
    ----------
    name:
        The Router's own, unique in its group and run.
    key_id:
        Names the fingerprint key. Prefixes of peers with another one are ignored.
    fleet, table, found_shares, answers:
        The Router's.
    index, capacity_of:
        The Router's, and the blocks that fit into a replica's cache, `None` if unknown.
    policy, status:
        The policy and the status of now.
    """

    def __init__(
        self,
        name: str,
        *,
        key_id: str,
        fleet: Fleet,
        table: InFlightTable,
        found_shares: FoundShares,
        answers: Answers,
        index: PrefixIndex,
        capacity_of: Callable[[Replica], int | None],
        policy: Callable[[], Policy],
        status: Callable[[], PeerStatus],
    ) -> None:
        self.name, self.key_id = name, key_id
        self._fleet, self._table, self._found_shares, self._answers = fleet, table, found_shares, answers
        self.status = status
        self.loads = PeerLoads(name, fleet.columns)
        self.prefixes = GroupPrefixes()
        self.outbox = Outbox()
        #: Of what results of attempts say of prefixes.
        self.observer = SharedPrefixes(
            self.prefixes,
            self.outbox,
            PolicyRoutes(policy),
            fleet=fleet,
            found_shares=found_shares,
            index=index,
            capacity_of=capacity_of,
        )
        #: Replicas that a peer has ejected and this Router has not: a shell probes them now.
        self.probe_hints: deque[str] = deque(maxlen=_MAX_HINTS)
        self._seq = 0
        self._reported_s, self._reported_changes = -inf, 0
        self._last = Lru[str, tuple[int, PeerStatus, float, bool]](MAX_PEERS)
        self._speeds = PeerSpeeds()
        table.started_prefills = {}

    # -- out

    def has_news(self, *, now: float) -> bool:
        """Return whether to report in turn: something has changed, or others would take silence for death."""
        changed = self._table.changes != self._reported_changes or self.outbox
        return bool(changed) or now - self._reported_s >= HEARTBEAT_S

    def report(self, *, now: float) -> PeerReport:
        """Return the present load, and what happened since the last report."""
        self._seq += 1
        self._reported_s, self._reported_changes = now, self._table.changes
        prefixes, cache_reports, answers = self.outbox.take_entries()
        return PeerReport(
            router=self.name,
            seq=self._seq,
            key_id=self.key_id,
            loads=tuple(own_loads(self._table, now=now)),
            prefixes=prefixes,
            cache_reports=cache_reports,
            answers=answers,
            prefills=tuple(self._take_prefills()),
            speeds=tuple(self._speeds.own(self._fleet.replicas, seq=self._seq)),
            status=self.status(),
        )

    def _take_prefills(self) -> Iterator[StartedPrefill]:
        started, self._table.started_prefills = self._table.started_prefills, {}
        for name, prefill_s in (started or {}).items():
            if name in self._fleet.replicas:
                yield StartedPrefill(name, min(prefill_s, MAX_PREFILL_S))

    # -- in

    def on_report(self, report: PeerReport, *, now: float, age_s: float = 0.0) -> bool:
        """Take in a report that was written `age_s` ago by the store's clock; return whether it was news.

        One from before `FADE_S`, as of a router that has ended, is a source of prefixes and learned values alone.
        """
        last = self._last.get(report.router)
        if report.router == self.name or (last is not None and report.seq <= last[0]):
            return False
        same_key = report.key_id == self.key_id
        for router in self._last.put(report.router, (report.seq, report.status, now - age_s, same_key)):
            self._speeds.forget(router)
        if age_s < FADE_S:
            self._take_loads(report, now=now)
            self._take_hints(report.status, None if last is None else last[1])
        if same_key:
            for marks in report.prefixes:
                self.observer.take_prefixes(marks, now=now)
            for answer in report.answers:
                replica = self._fleet.replicas.get(answer.replica)
                if replica is not None:
                    given = GivenAnswer(answer.prompt_tokens, answer.output_tokens)
                    self._answers.add_by_hash(replica.slot, answer.prompt, given)
        for prefill in report.prefills:
            replica = self._fleet.replicas.get(prefill.replica)
            if replica is not None:
                self._fleet.add_prefill(replica, faded(prefill.prefill_s, age_s), now=now)
        for sample in report.cache_reports:
            replica = self._fleet.replicas.get(sample.replica)
            if replica is not None:
                self._found_shares.learn(
                    replica.slot,
                    sample.model,
                    confirmed_tokens=sample.confirmed_tokens,
                    found_tokens=sample.found_tokens,
                )
        self._speeds.take_samples(report.router, report.speeds, self._fleet.replicas)
        return True

    def drop_router(self, router: str) -> None:
        """Forget a router that has ended for certain: it has nothing in flight any longer, and differs from none."""
        self.loads.forget(router)
        self._speeds.forget(router)
        self._last.pop(router, None)

    def views(self, *, now: float) -> list[PeerView]:
        """Return the peers heard of, the last one last."""
        self.loads.expire(now=now)
        counting = self.loads.routers
        return [
            PeerView(router, status, received_s, router in counting, same_key)
            for router, (_, status, received_s, same_key) in self._last.items()
        ]

    def evicted(self) -> Counter[Origin]:
        """Return the marks, and the routes of the policy, that were evicted so far, by origin."""
        return self.observer.evicted()

    def on_fleet_change(self, change: FleetChange) -> None:
        """Forget replicas that have left."""
        left = list(change.left_slots)
        if left:
            self.loads.clear_slots(left)
            for slot in left:
                self.prefixes.flush(slot)

    def check(self) -> None:
        """Assert every invariant; visits all marks."""
        self.loads.check()
        self.prefixes.check()

    def _take_loads(self, report: PeerReport, *, now: float) -> None:
        # The last load of a replica counts.
        rows = {
            replica.slot: row
            for row, load in enumerate(report.loads)
            if (replica := self._fleet.replicas.get(load.replica)) is not None
        }
        slots = np.fromiter(rows, np.intp, len(rows))
        cells = report.load_cells
        if len(rows) < len(cells):
            cells = cells[list(rows.values())]
        self.loads.replace(report.router, slots, cells, now=now)

    def _take_hints(self, status: PeerStatus, before: PeerStatus | None) -> None:
        ejected = () if before is None else before.ejected
        for name in status.ejected:
            replica = self._fleet.replicas.get(name)
            if name not in ejected and replica is not None and replica.health.state is HealthState.HEALTHY:
                self.probe_hints.append(name)
