"""Open attempts and their requests: which load is reserved on which replica.

Owns the guarantee that load is counted at dispatch and released exactly once, however often an end is reported
(`InFlightTable`), and the counts of prefills and decodes for policies that learn (`ProgressCounts`). Leaves what
follows from an end to `dispatch.lifecycle`. An attempt holds its `Replica`, not a slot: the slot may belong to another
replica when the attempt ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from math import fsum, nan
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from gorgo.core.fleet.columns import Columns, one_way_s
from gorgo.core.fleet.fleet import Fleet, FleetChange
from gorgo.core.fleet.replica import Replica
from gorgo.core.latency.decode import EMPTY_CHECKPOINT, Checkpoint, TokenGap
from gorgo.core.messages.decision import Decision
from gorgo.core.messages.request import RouteRequest
from gorgo.core.prefix.answers import Behind
from gorgo.core.prefix.kv_speculation import Speculation
from gorgo.core.prefix.residency import NO_PREFIX, ConfirmedPrefix
from gorgo.core.record import mutable_record
from gorgo.core.training.outcomes import OutcomeRing

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

    request: RouteRequest
    #: Counted against the client's quota (`core.quotas`).
    has_quota: bool = False
    attempts: int = 0
    tried_replicas: set[str] = field(default_factory=set)
    #: Attempts that ended with a 4xx which may be the replica's fault, with its status.
    refused: list[tuple[Attempt, int | None]] = field(default_factory=list)
    #: Attempts that failed as the request might make every replica fail, with the status or the word of the failure.
    failed: list[tuple[Attempt, int | str]] = field(default_factory=list)
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


@mutable_record
class Attempt:
    """One dispatch, with the decision that made it."""

    attempt_id: str
    state: RequestState
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
    recorded: NDArray[np.float32] | None = None
    #: A gateway had sent it there before the Router knew: its times say nothing of the replica.
    moved: bool = False
    #: A short answer should be withheld: the last ones of its replica were short too.
    withhold: bool = False
    #: Whether peers were told that its prompt is on its way.
    prefix_reported: bool = False
    #: Called with the time of its completion, where its policy learns from answers.
    learn: Callable[[float], None] | None = None

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that the index did not find there at the decision."""
        return self.state.request.prompt_tokens - self.decision.estimated_cached_tokens

    @property
    def longest_confirmed(self) -> ConfirmedPrefix:
        """The longest prefix of the prompt that a router of the group had confirmed there."""
        own, group = self.confirmed_prefix, self.group_prefix
        return group if group.blocks > own.blocks else own

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
        replica, request = attempt.replica, attempt.state.request
        self._fleet.reserve(replica, request.prompt_tokens)
        if self._progress is not None:
            self._progress.on_dispatched(replica, attempt.uncached_tokens)
        if request.slo_tpot_s is not None:
            replica.add_tpot_objective(request.slo_tpot_s)
        prefill_s = attempt.prior_s * replica.prefill_queue.speed.factor
        self._fleet.add_prefill(replica, prefill_s, now=attempt.dispatched_s)
        if self.started_prefills is not None:
            name = replica.spec.name
            self.started_prefills[name] = self.started_prefills.get(name, 0.0) + prefill_s
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
        replica, request = attempt.replica, attempt.state.request
        uncached_tokens = attempt.uncached_tokens
        self._fleet.release_prefill(replica, request.prompt_tokens)
        if self._progress is not None:
            attempt.decode_mark = self._progress.on_first_token(replica, uncached_tokens, now=now)
        replica.reported_speed.on_request(uncached_tokens, attempt.prior_s)
        is_visible = request.streamed and not attempt.moved
        half_rtt_s = one_way_s(self._fleet.columns, replica.slot)
        if is_visible:
            shared_s = self._fleet.others_waited_until_s(replica.slot, now=now) - half_rtt_s
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
            tokens = [each.state.request.prompt_tokens for each in mine]
            prefilling = [each for each in mine if each.first_token_s is None]
            charged = columns.in_flight_requests[replica.slot], columns.in_flight_tokens[replica.slot]
            assert charged == (len(tokens), sum(tokens)), f"{name}: {charged} reserved for {len(tokens)} open attempts"
            waiting = sum(each.state.request.prompt_tokens for each in prefilling)
            assert columns.queued_prefill_tokens[replica.slot] == waiting, f"{name}: tokens before a first token"
            if self._progress is not None:
                first_s = [each.first_token_s for each in mine if each.first_token_s is not None]
                self._progress.check(replica, [each.uncached_tokens for each in prefilling], first_s)
            replica.prefill_queue.check()

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
        replica, tokens = attempt.replica, attempt.state.request.prompt_tokens
        if attempt.first_token_s is None:
            self._fleet.release_prefill(replica, tokens)
            replica.prefill_queue.remove(attempt_id, engine_s=now + one_way_s(self._fleet.columns, replica.slot))
        if self._progress is not None:
            self._progress.on_end(replica, attempt.uncached_tokens, attempt.first_token_s, now=now)
        self._fleet.release(replica, tokens)
        if attempt.state.request.slo_tpot_s is not None:
            replica.remove_tpot_objective(attempt.state.request.slo_tpot_s)
        replica.concurrency.on_left(now=now)
        return attempt
