"""Open attempts and their requests: which load is reserved on which replica.

Owns the guarantee that load is counted at dispatch and released exactly once, however often an end is reported
(`InFlightTable`), and the counts of prefills and decodes for policies that learn (`ProgressCounts`). Leaves what
follows from an end to `dispatch.lifecycle`. An attempt holds its `Replica`, not a slot: the slot may belong to another
replica when the attempt ends.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import field
from math import fsum, inf, nan
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from gorgo.core.fleet.fleet import Fleet, FleetChange
from gorgo.core.fleet.replica import Columns, Replica, one_way_s
from gorgo.core.latency.decode import EMPTY_CHECKPOINT, Checkpoint, TokenGap
from gorgo.core.limits import QuotaExceeded
from gorgo.core.lru import Lru
from gorgo.core.messages.actions import Reject
from gorgo.core.messages.decision import Decision
from gorgo.core.messages.request import COMPLETED, AttemptResult, Outcome, RouteRequest, Sample
from gorgo.core.numeric import in_ms
from gorgo.core.policy.interface import terms_of_row
from gorgo.core.prefix.index import Behind
from gorgo.core.prefix.kv_index import Speculation
from gorgo.core.prefix.residency import NO_PREFIX, ConfirmedPrefix
from gorgo.core.record import mutable_record, record
from gorgo.core.training.candidate_table import CandidateTable
from gorgo.core.training.outcomes import OutcomeRing

#: Beyond what is expected, and beyond twice that, a first token is overdue after so long, s: longer than a burst of
#: others' prefills; and an answer in one piece, whose length is unknown.
OVERDUE_AFTER_S, WHOLE_OVERDUE_AFTER_S = 5.0, 30.0

# What replicas prefill and decode, counted for policies that learn; other policies do not pay for it.
#
# Owns four columns: uncached prompt tokens before a first token, requests after it, the sum of the times of their
# first tokens, and the learned time per output token. They are NaN while nothing is counted.


_COUNTED = ("uncached_prefill_tokens", "decoding_requests", "first_tokens_s")
#: Of a sum of times, the rounding of all changes since it was 0.
_DRIFT = 1e-9


class ProgressCounts:
    """The counts of all replicas, from 0.

    Parameters
    ----------
    columns:
        The fleet's.
    replicas:
        All members.
    """

    __slots__ = ("_columns",)

    def __init__(self, columns: Columns, replicas: Iterable[Replica]) -> None:
        self._columns = columns
        self.add_replicas(replicas)

    def add_replicas(self, replicas: Iterable[Replica]) -> None:
        """Count new replicas from 0."""
        for replica in replicas:
            replica.token_gap = TokenGap()
            self._write(replica, 0.0)

    def stop(self, replicas: Iterable[Replica]) -> None:
        """Count no longer; the columns are unknown."""
        for replica in replicas:
            replica.token_gap = None
            self._write(replica, nan)

    def on_dispatched(self, replica: Replica, uncached_tokens: int) -> None:
        if replica.slot >= 0:
            self._columns.uncached_prefill_tokens[replica.slot] += uncached_tokens

    def on_first_token(self, replica: Replica, uncached_tokens: int, *, now: float) -> float:
        """Return the mark of the answer (`core.latency.decode`)."""
        gap, slot, columns = replica.token_gap, replica.slot, self._columns
        if slot < 0 or gap is None:
            return 0.0
        mark = gap.begin(now=now)
        columns.uncached_prefill_tokens[slot] -= uncached_tokens
        columns.decoding_requests[slot] = gap.decoding
        columns.first_tokens_s[slot] += now
        return mark

    def on_end(self, replica: Replica, uncached_tokens: int, first_token_s: float | None, *, now: float) -> None:
        gap, slot, columns = replica.token_gap, replica.slot, self._columns
        if slot < 0 or gap is None:
            return
        if first_token_s is None:
            columns.uncached_prefill_tokens[slot] -= uncached_tokens
            return
        gap.end(now=now)
        columns.decoding_requests[slot] = gap.decoding
        # Exactly 0 without one, so that rounding does not add up.
        columns.first_tokens_s[slot] = columns.first_tokens_s.item(slot) - first_token_s if gap.decoding else 0.0

    def check(self, replica: Replica, uncached_tokens: Sequence[int], first_tokens_s: Sequence[float]) -> None:
        """Assert the counts of a replica by its attempts without a first token, and the times of those with one."""
        name, slot, columns = replica.spec.name, replica.slot, self._columns
        assert columns.uncached_prefill_tokens[slot] == sum(uncached_tokens), f"{name}: uncached tokens"
        assert columns.decoding_requests[slot] == len(first_tokens_s), f"{name}: requests after their first token"
        total_s = fsum(first_tokens_s)
        drift_s = abs(columns.first_tokens_s[slot] - total_s)
        assert drift_s <= _DRIFT * max(1.0, total_s), f"{name}: times of first tokens"

    def _write(self, replica: Replica, value: float) -> None:
        if replica.slot >= 0:
            for name in _COUNTED:
                getattr(self._columns, name)[replica.slot] = value
            self._columns.token_gap_s[replica.slot] = nan


@mutable_record
class RequestState:
    """A request from its first dispatch to the end of its last attempt."""

    #: As its next attempt is asked.
    request: RouteRequest
    #: Counted against the client's quota (`core.limits`).
    has_quota: bool = False
    attempts: int = 0
    tried_replicas: set[str] = field(default_factory=set)
    #: Attempts that ended with a 4xx which may be the replica's fault, with its status.
    refused: list[tuple[Attempt, int | None]] = field(default_factory=list)
    #: Attempts that failed as the request might make every replica fail, with the status or the word of the failure.
    failed: list[tuple[Attempt, int | str]] = field(default_factory=list)
    #: The replica whose context it was longer than, by the engine's own word.
    too_long_for: Replica | None = None
    #: Why its attempts failed, in words, with the name of each replica.
    causes: list[str] = field(default_factory=list)
    #: Attempts that have not ended, first one first.
    open_attempts: list[Attempt] = field(default_factory=list)
    #: A second attempt was dispatched before the first had a first token.
    hedged: bool = False
    #: An attempt has its first token. Not which one: a request and its attempt in a cycle would wait for the collector.
    answered: bool = False
    #: The request's sample is written.
    closed: bool = False
    #: Its client's quota of requests in flight is released, before the outcome is known.
    released: bool = False
    first_dispatched_s: float | None = None
    #: How often its answer was continued, the tokens before its next attempt, and when its client had the first.
    continuations: int = 0
    partial_tokens: int = 0
    first_token_s: float | None = None
    #: Continuations that were cancelled, because the answer went on where it was.
    withdrawn: int = 0
    #: The end of an answer of which nothing but its counts is asked for elsewhere.
    whole: Outcome | None = None


@mutable_record
class Attempt:
    """One dispatch, with the decision that made it."""

    attempt_id: str
    state: RequestState
    #: What its replica is asked: the request, or the rest of its answer.
    request: RouteRequest
    replica: Replica
    dispatched_s: float
    decision: Decision
    #: NaN if unknown.
    rtt_s: float
    #: Predicted arrival at the engine, and the prefill by the replica's prior.
    arrival_s: float
    prior_s: float
    first_token_s: float | None = None
    #: When its load was released before its outcome was known.
    released_s: float | None = None
    #: Of its answer, at its first token (`core.latency.decode`).
    decode_mark: float = 0.0
    #: State of the replica's batch at dispatch.
    checkpoint: Checkpoint = EMPTY_CHECKPOINT
    #: Prefix of the prompt that was confirmed there at dispatch.
    confirmed_prefix: ConfirmedPrefix = NO_PREFIX
    #: Its prompt on the replica, until reported; `None` without a feed.
    speculation: Speculation | None = None
    #: The answer that may be cached there behind the prompt's match.
    behind: Behind | None = None
    #: Prefix of it that routers of the group had confirmed there before its first token.
    group_prefix: ConfirmedPrefix = NO_PREFIX
    #: Where its outcome is written: the ring of the learner of its decision.
    outcomes: OutcomeRing | None = None
    #: The candidates at the decision, for the log of outcomes.
    recorded: CandidateTable | None = None
    #: The chance with which its replica was chosen, for that log; `None` where it is not known.
    probability: float | None = None
    #: A gateway had sent it there before the Router knew: its times say nothing of the replica.
    moved: bool = False
    #: A short answer should be withheld: the last ones of its replica were short too.
    withhold: bool = False
    #: Its replica was ejected by probes before it began to answer.
    stranded: bool = False
    #: Whether peers were told that its prompt is on its way.
    prefix_reported: bool = False
    #: When it was dispatched, the KV pool had no memory left for it: its first token says nothing of the speed.
    waits_for_memory: bool = False
    #: Called with the time of its completion, where its policy learns from answers.
    learn: Callable[[float], None] | None = None
    #: Tokens of the answer before it, at the end of its prompt.
    partial_tokens: int = 0
    #: The attempt beside which it was opened, to go on with the answer of that one; whichever brings more of it first
    #: has it from then on.
    beside: str | None = None
    #: Another attempt is the answer; its own end is still to come.
    superseded: bool = False

    def overdue_s(self, *, now: float) -> float:
        """Return how much longer it has had no answer than it should, s; 0 while that may still be."""
        if self.first_token_s is not None:
            return 0.0
        expected_s = self.decision.estimate.expected_s
        patience_s = OVERDUE_AFTER_S if self.request.streamed else WHOLE_OVERDUE_AFTER_S
        late_s = now - self.dispatched_s - expected_s
        return late_s if late_s > max(patience_s, expected_s) else 0.0

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that the index did not find there at the decision."""
        return self.request.prompt_tokens - self.decision.estimated_cached_tokens

    @property
    def longest_confirmed(self) -> ConfirmedPrefix:
        """The longest prefix of the prompt that a router of the group had confirmed there."""
        confirmed, group = self.confirmed_prefix, self.group_prefix
        return group if group.blocks > confirmed.blocks else confirmed

    @property
    def features(self) -> NDArray[np.float32] | None:
        """Features of the replica at the decision; `None` without a learner."""
        table = self.decision.features
        return None if table is None else table[self.decision.row]


class InFlightTable:
    """Attempts that have not ended, by id."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._open: dict[str, Attempt] = {}
        #: Without load, and without an outcome yet.
        self._released: dict[str, Attempt] = {}
        #: Events so far: an attempt was dispatched, has its first token, or has ended.
        self.changes = 0
        #: What replicas prefill and decode; `None` unless a policy learns.
        self._progress: ProgressCounts | None = None
        #: Prefills dispatched since the last report to peers, by replica, s; `None` without peers.
        self.started_prefills: dict[str, float] | None = None

    def __len__(self) -> int:
        return len(self._open)

    def find(self, attempt_id: str) -> Attempt | None:
        """Return an open attempt."""
        return self._open.get(attempt_id)

    def attempts(self) -> Iterable[Attempt]:
        """Return the open attempts, first one first."""
        return self._open.values()

    def unanswered(self, replicas: Container[Replica]) -> list[Attempt]:
        """Return the open attempts on some replicas that have no first token, first one first."""
        return [each for each in self._open.values() if each.first_token_s is None and each.replica in replicas]

    def overdue(self, *, now: float) -> dict[Replica, list[tuple[float, Attempt]]]:
        """Return by replica the attempts that are overdue, and by how much, s; the longest first."""
        by_replica: dict[Replica, list[tuple[float, Attempt]]] = {}
        for attempt in self._open.values():
            if overdue_s := attempt.overdue_s(now=now):
                by_replica.setdefault(attempt.replica, []).append((overdue_s, attempt))
        for overdue in by_replica.values():
            overdue.sort(key=itemgetter(0), reverse=True)
        return by_replica

    def count_progress(self, on: bool) -> None:
        """Count what replicas prefill and decode, open attempts included, or no longer."""
        replicas = self._fleet.replicas.values()
        if not on and self._progress is not None:
            self._progress.stop(replicas)
            self._progress = None
        elif on and self._progress is None:
            self._progress = progress = ProgressCounts(self._fleet.columns, replicas)
            for attempt in self._open.values():
                progress.on_dispatched(attempt.replica, attempt.uncached_tokens)
            decoding = [(each.first_token_s, each) for each in self._open.values() if each.first_token_s is not None]
            for first_s, attempt in sorted(decoding, key=itemgetter(0)):
                attempt.decode_mark = progress.on_first_token(attempt.replica, attempt.uncached_tokens, now=first_s)

    def on_fleet_change(self, change: FleetChange) -> None:
        """Count new replicas too."""
        if self._progress is not None:
            self._progress.add_replicas(change.joined)

    def open(self, attempt: Attempt) -> None:
        """Reserve the attempt's load on its replica."""
        assert attempt.attempt_id not in self._open, "ids of requests in flight are unique"
        self._open[attempt.attempt_id] = attempt
        self.changes += 1
        attempt.state.open_attempts.append(attempt)
        replica, request = attempt.replica, attempt.request
        self._fleet.reserve(replica, request.prompt_tokens)
        attempt.waits_for_memory = replica.short_kv_tokens(request) > 0.0
        replica.kv_demand.add(attempt.attempt_id, request, attempt.uncached_tokens)
        replica.on_kv_demand()
        if self._progress is not None:
            self._progress.on_dispatched(replica, attempt.uncached_tokens)
        if request.slo_tpot_s is not None:
            replica.add_tpot_objective(request.slo_tpot_s)
        prefill_s = replica.prefill_queue.engine_time_s(attempt.prior_s)
        self._fleet.add_prefill(replica, prefill_s, now=attempt.dispatched_s)
        if self.started_prefills is not None:
            name = replica.spec.name
            self.started_prefills[name] = self.started_prefills.get(name, 0.0) + prefill_s
        if not request.streamed:
            self._fleet.unseen_s = max(self._fleet.unseen_s, attempt.arrival_s)
        attempt.checkpoint = replica.concurrency.on_dispatched(prefill_s=prefill_s, now=attempt.dispatched_s)
        replica.prefill_queue.add(
            attempt.attempt_id,
            arrives_s=attempt.arrival_s,
            prior_s=attempt.prior_s,
            streamed=request.streamed,
            shared_s=self._fleet.others_prefill_before_s(
                replica, arrives_s=attempt.arrival_s, now=attempt.dispatched_s
            ),
        )

    def first_token(self, attempt_id: str, *, now: float) -> Attempt | None:
        """Record the first token; return `None` if the attempt has ended or has one already."""
        attempt = self._open.get(attempt_id)
        if attempt is None:
            return self._late_first_token(attempt_id, now)
        if attempt.first_token_s is not None:
            return None
        attempt.first_token_s = now
        self.changes += 1
        replica, request = attempt.replica, attempt.request
        uncached_tokens = attempt.uncached_tokens
        self._fleet.release_prefill(replica, request.prompt_tokens)
        replica.kv_demand.on_first_token(attempt_id)
        if self._progress is not None:
            attempt.decode_mark = self._progress.on_first_token(replica, uncached_tokens, now=now)
        replica.reported_speed.on_request(uncached_tokens, attempt.prior_s)
        is_visible = request.streamed and not attempt.moved
        half_rtt_s = one_way_s(self._fleet.columns, replica.slot)
        if is_visible:
            shared_s = self._fleet.others_waited_until_s(replica.slot, now=now) - half_rtt_s
            if attempt.waits_for_memory:
                shared_s = now - half_rtt_s
            replica.prefill_queue.on_first_token(attempt_id, engine_s=now - half_rtt_s, shared_until_s=shared_s)
        else:
            replica.prefill_queue.remove(attempt_id, engine_s=now - half_rtt_s)
        return attempt

    def _late_first_token(self, attempt_id: str, now: float) -> Attempt | None:
        """Record the first token of an attempt whose load is released; `None` if it has ended or has one already."""
        attempt = self._released.get(attempt_id)
        if attempt is None or attempt.first_token_s is not None or attempt.released_s is None:
            return None
        attempt.first_token_s = min(now, attempt.released_s)
        return attempt

    def check(self) -> None:
        """Assert that the reserved load of each replica is that of its open attempts; visits all of them."""
        columns = self._fleet.columns
        assert not self._open.keys() & self._released.keys(), "a released attempt is not open"
        for name, replica in self._fleet.replicas.items():
            mine = [each for each in self._open.values() if each.replica is replica]
            tokens = [each.request.prompt_tokens for each in mine]
            prefilling = [each for each in mine if each.first_token_s is None]
            charged = columns.in_flight_requests[replica.slot], columns.in_flight_tokens[replica.slot]
            assert charged == (len(tokens), sum(tokens)), f"{name}: {charged} reserved for {len(tokens)} open attempts"
            waiting = sum(each.request.prompt_tokens for each in prefilling)
            assert columns.queued_prefill_tokens[replica.slot] == waiting, f"{name}: tokens before a first token"
            if self._progress is not None:
                first_s = [each.first_token_s for each in mine if each.first_token_s is not None]
                self._progress.check(replica, [each.uncached_tokens for each in prefilling], first_s)
            replica.prefill_queue.check()
            replica.kv_demand.check()

    def release(self, attempt_id: str, *, now: float) -> Attempt | None:
        """Release the attempt's load before its outcome is known; `None` unless it is open. `close` removes it."""
        attempt = self._close(attempt_id, now)
        if attempt is not None:
            attempt.released_s = now
            self._released[attempt_id] = attempt
        return attempt

    def close(self, attempt_id: str, *, now: float) -> Attempt | None:
        """Release the attempt's load and remove it; return `None` if it has ended already."""
        return self._close(attempt_id, now) or self._released.pop(attempt_id, None)

    def _close(self, attempt_id: str, now: float) -> Attempt | None:
        attempt = self._open.pop(attempt_id, None)
        if attempt is None:
            return None
        self.changes += 1
        attempt.state.open_attempts.remove(attempt)
        replica, tokens = attempt.replica, attempt.request.prompt_tokens
        if attempt.first_token_s is None:
            self._fleet.release_prefill(replica, tokens)
            replica.prefill_queue.remove(attempt_id, engine_s=now + one_way_s(self._fleet.columns, replica.slot))
        if self._progress is not None:
            self._progress.on_end(replica, attempt.uncached_tokens, attempt.first_token_s, now=now)
        self._fleet.release(replica, tokens)
        replica.kv_demand.remove(attempt_id)
        replica.on_kv_demand()
        if attempt.request.slo_tpot_s is not None:
            replica.remove_tpot_objective(attempt.request.slo_tpot_s)
        replica.concurrency.on_left(now=now)
        return attempt


# Poison requests: a prompt on which engines die is not sent to a third one.
#
# Owns the suspects: prompts whose attempts broke off, and which of their replicas went down afterwards. Leaves the
# error to `outcomes`, and the health of replicas to `core.fleet`.
#
# Theory of operation. A retry after a broken connection is right where the replica died by itself, and wrong where the
# prompt killed it: one retry of the router and one of an SDK would stop a fleet. A broken connection alone proves
# nothing. It counts where the replica, after it was sent the prompt, refused a connection, failed a probe or
# restarted. `MOST_KILLED` such replicas within `WINDOW_S` make a prompt poison, whichever request brings it, until the
# first of them is older than that. For a request whose last attempt has broken just now, the others have to be proven:
# there was no time to prove the last. A prompt that was answered to its end in that time is no suspect, so that many
# clients with one prompt are served while replicas die for another reason.


#: Replicas that one prompt may take down.
MOST_KILLED = 2
#: How long a broken attempt counts, and how long after it the replica may be found down, s: an engine that dies takes
#: tens of seconds until it listens again, and its counters are read at the next scrape.
WINDOW_S = 60.0
#: Suspects at once: more than attempts in flight on several replicas that die within the window. Prompts that were
#: answered are as many: of those that many clients send, the last answer is never far away.
MAX_SUSPECTS = 4096
#: Model, hash of the beginning, hash of the whole full blocks, and the length.
_Key = tuple[str | None, int, bytes, int]


@record
class PoisonPrompt:
    """A prompt that is sent to no replica until `until_s`; `request_id` is its last request that broke off."""

    request_id: str
    client: str | None
    model: str | None
    replicas: tuple[str, ...]
    until_s: float


class _Suspect:
    """One prompt: when its broken attempts were dispatched and broke off, by replica, and its last request."""

    __slots__ = ("broken", "request")

    def __init__(self, request: RouteRequest) -> None:
        self.request = request
        self.broken: dict[Replica, tuple[float, float]] = {}

    def killed(self, down_s: Mapping[Replica, float], *, now: float) -> list[tuple[float, Replica]]:
        """Return the replicas under which it broke off within the window and that were found down, first one first."""
        downs = [
            (at_s, replica)
            for replica, (sent_s, at_s) in self.broken.items()
            if now - at_s < WINDOW_S and sent_s <= down_s.get(replica, -inf) < at_s + WINDOW_S
        ]
        return sorted(downs, key=lambda each: each[0])


class PoisonPrompts:
    """The prompts that replicas went down under.

    Example
    -------
    >>> PoisonPrompts().known(RouteRequest("r", 0.0, 100, b"", 64.0, 1), now=0.0) is None
    True
    """

    __slots__ = ("_answered_s", "_down_s", "_suspects")

    def __init__(self) -> None:
        self._suspects = Lru[_Key, _Suspect](MAX_SUSPECTS)
        #: When a prompt was last answered to its end.
        self._answered_s = Lru[_Key, float](MAX_SUSPECTS)
        #: When a replica was last found down; as many as the fleet has.
        self._down_s: dict[Replica, float] = {}

    def on_broken(self, request: RouteRequest, replica: Replica, *, dispatched_s: float, now: float) -> None:
        """Record that the connection of an attempt broke before the end of its answer."""
        key = _key(request)
        if now - self._answered_s.get(key, -inf) < WINDOW_S:
            return
        suspect = self._suspects.get(key)
        if suspect is None:
            suspect = _Suspect(request)
        suspect.request = request
        suspect.broken = {each: times for each, times in suspect.broken.items() if now - times[1] < WINDOW_S}
        suspect.broken[replica] = dispatched_s, now
        self._suspects.put(key, suspect)

    def on_down(self, replica: Replica, *, now: float) -> None:
        """Record that a replica refused a connection, failed a probe or has restarted."""
        if replica.slot >= 0:
            self._down_s[replica] = now

    def on_answered(self, request: RouteRequest, *, now: float) -> None:
        """Record that a replica has answered a prompt to its end: it is no suspect."""
        key = _key(request)
        self._answered_s.put(key, now)
        if self._suspects:
            self._suspects.pop(key, None)

    def stops(self, request: RouteRequest, replica: Replica, *, now: float) -> bool:
        """Return whether a request whose attempt on `replica` has just broken off may have no other."""
        suspect = self._suspects.get(_key(request))
        if suspect is None:
            return False
        killed = {other for _, other in suspect.killed(self._down_s, now=now)}
        return len(killed | {replica}) >= MOST_KILLED

    def known(self, request: RouteRequest, *, now: float) -> PoisonPrompt | None:
        """Return what is known of a prompt that no replica may have now; `None` for any other."""
        suspect = self._suspects.get(_key(request)) if self._suspects else None
        return None if suspect is None else self._poison(suspect, now)

    def all(self, *, now: float) -> list[PoisonPrompt]:
        """Return the prompts that no replica may have now."""
        return [poison for suspect in self._suspects.values() if (poison := self._poison(suspect, now)) is not None]

    def forget_left(self) -> None:
        """Forget replicas that left."""
        self._down_s = {replica: at_s for replica, at_s in self._down_s.items() if replica.slot >= 0}

    def _poison(self, suspect: _Suspect, now: float) -> PoisonPrompt | None:
        killed = suspect.killed(self._down_s, now=now)
        if len(killed) < MOST_KILLED:
            return None
        request = suspect.request
        return PoisonPrompt(
            request.request_id,
            request.client,
            request.recorded_model,
            tuple(replica.spec.name for _, replica in killed),
            killed[-MOST_KILLED][0] + WINDOW_S,
        )


def _key(request: RouteRequest) -> _Key:
    size = request.prompt_tokens if request.text_bytes is None else request.text_bytes
    return request.recorded_model, request.prefix_hash, request.blocks[-8:], size


# Results of requests as clients and samples see them: rejects before dispatch, the last failure, the sample.
#
# Owns status codes and their short stable `code`s; the Router decides when each applies.


#: Retry-After while the proxy is full or the replicas are busy, s: a few prefills later.
RETRY_AFTER_S = 1.0


def model_not_found(request: RouteRequest) -> Reject:
    return Reject(request.request_id, 404, "model_not_found", f"no replica serves the model {request.model!r}")


def too_many_in_flight(request: RouteRequest, limit: int) -> Reject:
    message = f"{limit} requests are in flight, the limit of this proxy"
    return Reject(request.request_id, 429, "too_many_in_flight", message, RETRY_AFTER_S)


def replica_not_found(request: RouteRequest) -> Reject:
    message = f"the replica {request.pinned_replica!r} with the stored response of this request has left the fleet"
    return Reject(request.request_id, 404, "replica_not_found", message)


def quota_exceeded(request: RouteRequest, exceeded: QuotaExceeded) -> Reject:
    return Reject(request.request_id, 429, exceeded.code, exceeded.message, exceeded.retry_after_s)


def region_not_allowed(request: RouteRequest) -> Reject:
    regions = ", ".join(sorted(request.regions or ()))
    reason = "no replica there serves it" if request.pinned_replica is None else "its stored response is elsewhere"
    message = f"this request may be served in {regions or 'no region'} only, and {reason}"
    return Reject(request.request_id, 403, "region_not_allowed", message)


def poison_prompt(request: RouteRequest, poison: PoisonPrompt | None) -> Reject:
    """Return the reject of a prompt that replicas went down under; `poison` is `None` where one is not proven yet."""
    if poison is None:
        message = "the replicas that this prompt was sent to went down, so it is sent to no other one"
    else:
        message = f"{len(poison.replicas)} replicas went down under this prompt, so it is sent to no other one for now"
    return Reject(request.request_id, 502, "poison_prompt", message)


def no_replica(request: RouteRequest, retry_after_s: float, causes: Sequence[str] = ()) -> Reject:
    """Return the reject of a request that no replica can take; `causes` are those of its own attempts."""
    if request.replicas is None:
        message = "no replica can take the request now"
    else:
        message = f"none of the {len(request.replicas)} replicas in the gateway's subset can take the request now"
    return Reject(request.request_id, 503, "no_replica", message + _listed(causes), retry_after_s)


def subset_unknown(request: RouteRequest) -> Reject:
    subset = request.replicas or ()
    reason = "serves the request" if subset else "is in the fleet"
    message = f"no replica of the gateway's subset ({len(subset)} names) {reason}"
    return Reject(request.request_id, 503, "no_replica", message, RETRY_AFTER_S)


def queue_full(request: RouteRequest, limit: int, retry_after_s: float) -> Reject:
    message = f"{limit} requests are queued, the limit of this proxy"
    return Reject(request.request_id, 429, "queue_full", message, retry_after_s)


def deadline_exceeded(request: RouteRequest, retry_after_s: float) -> Reject:
    message = "the TTFT deadline cannot be met"
    return Reject(request.request_id, 429, "deadline_unreachable", message, retry_after_s)


#: Failed attempts that an error names: the last ones; busy replicas may be as many as the fleet has.
CAUSES_SHOWN = 3


def cause_of(outcome: Outcome, spent_s: float) -> str:
    """Return a failure in words: what happened, after how long, and the engine's own text if there is one.

    >>> cause_of(Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=500, text="CUDA out of memory"), 0.25)
    'status 500 after 0.25 s: CUDA out of memory'
    """
    by_status = outcome.status is not None and outcome.status >= 400
    what = f"status {outcome.status}" if by_status else (outcome.error or outcome.result.value).replace("_", " ")
    text = "" if outcome.text is None else f": {outcome.text}"
    return f"{what} after {spent_s:.2g} s{text}" if spent_s < 100 else f"{what} after {spent_s:.0f} s{text}"


def _listed(causes: Sequence[str]) -> str:
    return f": {'; '.join(causes[-CAUSES_SHOWN:])}" if causes else ""


def upstream_error(state: RequestState, outcome: Outcome, retry_after_s: float = RETRY_AFTER_S) -> Reject:
    """Return the reject for the last failure."""
    request_id = state.request.request_id
    tried = f"tried {len(state.tried_replicas)} replica{'s' if len(state.tried_replicas) > 1 else ''}"
    why = _listed(state.causes)
    if outcome.result is AttemptResult.BUSY:
        status = 429 if outcome.status == 429 else 503
        return Reject(request_id, status, "replicas_busy", f"every replica is busy ({tried}){why}", retry_after_s)
    if outcome.result is AttemptResult.DEADLINE_EXCEEDED:
        return Reject(request_id, 504, "total_timeout", f"the request took longer than its total timeout ({tried})")
    if outcome.status == 504 or "timeout" in (outcome.error or ""):
        return Reject(request_id, 504, "upstream_timeout", f"no replica answered in time ({tried}){why}")
    return Reject(request_id, 502, "upstream_failed", f"no replica could answer ({tried}){why}")


def status_of(outcome: Outcome) -> int:
    """Return the HTTP status of a result that is not retried."""
    if outcome.result is COMPLETED:
        return outcome.status or 200
    if outcome.result in (AttemptResult.CLIENT_DISCONNECTED, AttemptResult.SUPERSEDED):
        return 499
    if outcome.result is AttemptResult.FAILED_AFTER_CONTENT:
        return 502
    if outcome.result is AttemptResult.DEADLINE_EXCEEDED:
        return 504
    return outcome.status or (502 if outcome.result.retryable else 200)


def to_sample(attempt: Attempt, outcome: Outcome, status: int, *, seq: int, now: float) -> Sample:
    """Return the sample of a request by its last attempt."""
    request, spec = attempt.request, attempt.replica.spec
    state, decision, first_s = attempt.state, attempt.decision, attempt.first_token_s
    shadow = decision.shadow
    prompt_tokens = request.prompt_tokens if outcome.prompt_tokens is None else outcome.prompt_tokens
    output_tokens = outcome.output_tokens
    if state.first_token_s is not None:
        # Of the whole answer: the last part's prompt ends with those before it.
        first_s = state.first_token_s
        counted = outcome.partial_tokens if outcome.result is AttemptResult.COMPLETED else 0
        before = counted or attempt.partial_tokens
        prompt_tokens -= attempt.partial_tokens if outcome.prompt_tokens is None else before
        output_tokens = None if output_tokens is None else output_tokens + before
    ttft_s = None if first_s is None else first_s - request.received_s
    # By position: more than fifteen keywords go through a dict, which takes 2 us: 2 % of a request in the Router.
    # A test compares the order with the fields.
    return Sample(
        seq,
        request.request_id,
        now,  # finished_s
        spec.name,  # replica
        spec.region,
        decision.policy,
        decision.weights_version,
        prompt_tokens,  # input_tokens
        outcome.cached_tokens,
        decision.estimated_cached_tokens,
        output_tokens,
        in_ms(None if attempt.rtt_s != attempt.rtt_s else attempt.rtt_s),  # rtt_ms
        in_ms(decision.predicted_ttft_s),  # predicted_ttft_ms
        in_ms(ttft_s),  # ttft_ms
        now - request.received_s,  # e2e_s
        in_ms(outcome.itl_s_p95),  # itl_ms_p95
        status,
        state.attempts - 1 - state.hedged - state.continuations - state.withdrawn,  # retries
        state.hedged,
        terms_of_row(decision.terms, decision.row),  # terms
        None if shadow is None else shadow.policy,  # shadow_policy
        None if shadow is None else shadow.rank,  # shadow_rank
        None if shadow is None else shadow.cost,  # shadow_cost
        None if shadow is None else in_ms(shadow.predicted_ttft_s),  # shadow_predicted_ttft_ms
        decision.best_cached_tokens,
        None if ttft_s is None else decision.estimate.attribute(ttft_s).as_ms(),  # ttft_parts_ms
        request.client,
        decision.model,
        state.continuations,  # continued
    )
