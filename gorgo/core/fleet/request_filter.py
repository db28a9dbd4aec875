"""Which replicas may serve a request now: the one rule of eligibility, by model, place, pin, health and six pauses.

`eligibility` has what depends on the replicas alone: model, region, subset, drain mark, ejection and the panic
threshold. This module adds what depends on time and on the request. `RequestFilter.eligible` is the whole rule.

Theory of operation. A pause never leaves a request without a replica: where it would exclude all candidates, it does
not count. The pauses apply in this order, each to what the one before it has left.

- It has never answered a probe: its distance is unknown, and would be taken for that of the others.
- Context: the request is longer than the model's context there, by what the replica lists. No pause, but with the same
  rule: the estimate of a prompt may be wrong, and where no replica fits the engine says so best.
- `RefusedKinds`: the replica refuses requests of this route and model, and others answer them.
- `ShortAnswers`: its answers are short in a row, and those of others are not.
- `OpenFailures`: it has failed several requests of which another replica's result is awaited.
- `BusyPauses`: its engine has answered 429 or 503.
- `SlowStart`: it has joined or was readmitted, and is at its concurrency limit. This one is last: a replica at its
  limit is excluded beside others that can serve, not beside those that the request has tried.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence, Set
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from gorgo.core.backoff import backoff_s
from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.replica import SUSPECT_AFTER, Replica, one_way_s
from gorgo.core.latency.prefill import MIXED_S, STUCK_AFTER_S
from gorgo.core.limits import OverloadLimits
from gorgo.core.lru import Lru
from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import FEW

#: Proven refusals after which a replica gets no request of a kind, and for how long, s.
REFUSALS_OF_A_KIND = 3
WITHOUT_KIND_S = 10.0
#: Kinds at once: more than routes times models of any fleet in practice; the oldest is forgotten.
MAX_KINDS = 256

#: From a short answer to the next trial, s; doubled by each trial.
FIRST_TRIAL_S, LONGEST_TRIAL_S = 2.0, 30.0

#: First pause of a busy engine, s: some decode iterations of a full batch.
FIRST_PAUSE_S = 0.25
#: Refusals in a row, each after a pause, that eject: 8 s without one answer, where the longest prefills take less.
MOST_IN_A_ROW = 6

#: First limit of a slow start: two, so that one long prefill does not hide whether the replica works.
INITIAL = 2.0
#: Last limit of a slow start: any engine's running batch.
FINAL = 256.0

#: Kinds that are remembered of the answers of one replica, and for how long, s.
MAX_ANSWERED, ANSWERED_S = 8, 300.0

#: Route, model and credential, which is `_ANY` for a refusal that says nothing of it.
Kind = tuple[str, str | None, int | None]
#: No hash of Python's is -1.
_ANY = -1
#: Refusals of a credential.
_OF_CREDENTIALS = frozenset({401, 403})


class RequestFilter:
    """Applies the fleet's eligibility and the six pauses to a request.

    Parameters
    ----------
    fleet:
        The Router's.
    slow_start_s:
        Duration of a slow start, s; 0 is none. May be replaced: `slow_start.ramp_s`.
    """

    __slots__ = ("_fleet", "busy", "open_failures", "refused_kinds", "short_answers", "slow_start")

    def __init__(self, fleet: Fleet, *, slow_start_s: float) -> None:
        self._fleet = fleet
        self.refused_kinds = RefusedKinds()
        self.short_answers = ShortAnswers()
        self.open_failures = OpenFailures()
        self.busy = BusyPauses()
        self.slow_start = SlowStart(fleet, ramp_s=slow_start_s)

    def eligible(self, request: RouteRequest, now: float) -> CandidateSet:
        """Return the candidates; none if the pinned replica has left or is one that may not serve the request."""
        eligibility = self._fleet.eligibility
        if request.pinned_replica is None:
            return self._without_paused(self._for_request(request), request, now)
        pinned = self._fleet.replicas.get(request.pinned_replica)
        # It may have moved to another region while the request was queued.
        if pinned is None or (request.regions is not None and pinned.spec.region not in request.regions):
            return eligibility.none
        if request.replicas is not None and pinned.spec.name not in request.replicas:
            return eligibility.none
        return eligibility.pinned(pinned)

    def untried(self, request: RouteRequest, tried: Set[str], now: float) -> CandidateSet:
        """Return the candidates for a retry; none for a pinned request."""
        if request.pinned_replica is not None:
            return self._fleet.eligibility.none
        return self._without_paused(self._for_request(request).excluding(tried), request, now)

    def longer(self, candidates: CandidateSet, request: RouteRequest, than: Replica) -> CandidateSet:
        """Return the candidates whose context is longer than that of a replica, or may be."""
        most = than.context_tokens(request.model)
        if most is None:
            return candidates
        short = [each for each in candidates.replicas if (each.context_tokens(request.model) or inf) <= most]
        return candidates.excluding_some(short, "context") if short else candidates

    def has_replica_in(self, regions: frozenset[str], request: RouteRequest) -> bool:
        """Return whether a replica in `regions` would serve the request, healthy or not."""
        if request.pinned_replica is None:
            return self._fleet.eligibility.has_replica_in(regions, request.model)
        return self._fleet.replicas[request.pinned_replica].spec.region in regions

    def has_replica_of_subset(self, request: RouteRequest) -> bool:
        """Return whether a replica of the request's subset would serve it, healthy or not; True without one."""
        subset, pinned = request.replicas, request.pinned_replica
        if subset is None or (pinned is not None and pinned in subset):
            return True
        return pinned is None and self._fleet.eligibility.has_replica_of(subset, request.model)

    def on_fleet_change(self, joined: Sequence[Replica], *, now: float) -> None:
        """Forget replicas that left, and start the ramp of those that `joined` a fleet at work."""
        self.refused_kinds.forget_left()
        self.short_answers.forget_left()
        self.open_failures.forget_left()
        self.busy.forget_left()
        for replica in joined:
            self.slow_start.begin(replica, now=now)

    def _for_request(self, request: RouteRequest) -> CandidateSet:
        return self._fleet.eligibility.for_model(request.model, request.regions, request.replicas)

    def _without_paused(self, eligible: CandidateSet, request: RouteRequest, now: float) -> CandidateSet:
        if self._fleet.unprobed and (unprobed := [each for each in self._fleet.unprobed if each in eligible]):
            eligible = _excluding(eligible, unprobed, "not probed yet")
        if self._fleet.warming and (warming := [each for each in self._fleet.warming if each in eligible]):
            eligible = _excluding(eligible, warming, "warming")
        if request.prompt_tokens + (request.most_output_tokens or 1) > self._fleet.eligibility.shortest_context:
            eligible = _fitting(eligible, request)
        # Each is looked at before it is asked: on most requests none of them has anything to say.
        if self.refused_kinds.kinds and (refusing := self.refused_kinds.refusing(eligible, request, now=now)):
            eligible = _excluding(eligible, refusing, "refuses")
        if self.short_answers.pauses and (short := self.short_answers.paused(eligible, now=now)):
            eligible = _excluding(eligible, short, "answers shortly")
        if self.open_failures.counts and (failing := self.open_failures.paused(eligible)):
            eligible = _excluding(eligible, failing, "failing")
        if now < self.busy.until_s and (busy := self.busy.paused(eligible, now=now)):
            eligible = _excluding(eligible, busy, "busy")
        if self.slow_start.ramps and (full := self.slow_start.full(eligible, now=now)):
            eligible = _excluding(eligible, full, "slow_start")
        return eligible


def _excluding(eligible: CandidateSet, paused: Sequence[Replica], why: str) -> CandidateSet:
    """Return the set without some of its replicas, or all of it if these are all."""
    return eligible if len(paused) == len(eligible.replicas) else eligible.excluding_some(paused, why)


def _fitting(eligible: CandidateSet, request: RouteRequest) -> CandidateSet:
    """Return the candidates whose context the request fits with its answer, else those that its prompt fits, or all."""
    for tokens in (request.prompt_tokens + (request.most_output_tokens or 1), request.prompt_tokens + 1):
        short = [each for each in eligible.replicas if (each.context_tokens(request.model) or inf) < tokens]
        if len(short) < len(eligible.replicas):
            return eligible.excluding_some(short, "context") if short else eligible
    return eligible


class RefusedKinds:
    """Kinds of requests that a replica refuses and others answer: it gets none of them for a while.

    A replica may lack a route or a model name and be well for all others. Its failures are then never three in a row,
    so outlier detection does not eject it, and each such request would be tried there first. A kind is a route and a
    model, and for a 401 or 403 of a client's key that key too; only kinds that another replica has answered are
    recorded, so that clients cannot fill the table with names. Such refusals are failures of a replica only if it
    answers nothing else.

    A key that a client brings and the replica refuses says nothing of the replica, unless it refuses those of
    `REFUSALS_OF_A_KIND` clients, or all that it has answered, and answers none. Where clients bring keys, a request
    without one is alike. A refused key from the replica's own configuration is its failure, and so is the lack of one
    where clients' keys are not passed on.
    """

    __slots__ = ("_answered", "_keyed", "kinds")

    def __init__(self) -> None:
        #: Count and time of the last refusal of each kind, by replica.
        self.kinds = Lru[Kind, dict[Replica, tuple[int, float]]](MAX_KINDS)
        #: The last answer of each kind, by replica.
        self._answered: dict[Replica, Lru[Kind, float]] = {}
        #: Whether a client's key was answered.
        self._keyed = False

    def on_proven(self, replica: Replica, request: RouteRequest, status: int, *, now: float) -> bool:
        """Record that another replica has answered a request that `replica` refused.

        Return whether that is a failure of the replica: it has answered no other kind of late, and the key that it
        refused, if it was one, is not the client's.
        """
        of_client = status in _OF_CREDENTIALS and request.client is None and not replica.spec.own_key
        kind = (request.route, request.model, request.credential if of_client else _ANY)
        refusals = self.kinds.get(kind)
        if refusals is None:
            refusals = {}
            self.kinds.put(kind, refusals)
        refusals[replica] = refusals.get(replica, (0, now))[0] + 1, now
        answered = self._answered.get(replica)
        if answered is not None:
            for other in [other for other in answered if other[:2] == kind[:2] and kind[2] in (_ANY, other[2])]:
                del answered[other]
            if not answered:
                return True  # it refuses all that it has answered
            if any(now - at_s < ANSWERED_S for at_s in answered.values()):
                return False
        is_key_of_client = of_client and (self._keyed or request.credential is not None)
        return not is_key_of_client or self._refused_keys(replica) >= REFUSALS_OF_A_KIND

    def _refused_keys(self, replica: Replica) -> int:
        """Return how many clients' keys a replica refuses."""
        return len({key for (_, _, key), refusing in self.kinds.items() if key != _ANY and replica in refusing})

    def on_answer(self, replica: Replica, request: RouteRequest, *, now: float) -> None:
        """Forget the refusals of a kind that `replica` answers."""
        answered = self._answered.get(replica)
        if answered is None:
            if replica.slot < 0:
                return
            answered = self._answered[replica] = Lru(MAX_ANSWERED)
        answered.put((request.route, request.model, request.credential), now)
        if request.credential is not None:
            self._keyed = True
        if not self.kinds:
            return
        for kind in _kinds(request):
            if (refusals := self.kinds.get(kind)) is not None:
                refusals.pop(replica, None)
                if not refusals:
                    del self.kinds[kind]

    def refusing(self, eligible: CandidateSet, request: RouteRequest, *, now: float) -> Sequence[Replica]:
        """Return the candidates that refuse the request's kind."""
        refusing: dict[Replica, None] = {}
        for kind in _kinds(request):
            for replica, (count, last_s) in self.kinds.get(kind, {}).items():
                if count >= REFUSALS_OF_A_KIND and now < last_s + WITHOUT_KIND_S and replica in eligible:
                    refusing[replica] = None
        return list(refusing)

    def forget_left(self) -> None:
        """Forget replicas that left."""
        self._answered = {replica: kinds for replica, kinds in self._answered.items() if replica.slot >= 0}
        for kind, refusals in list(self.kinds.items()):
            left = {replica: counted for replica, counted in refusals.items() if replica.slot >= 0}
            if left:
                self.kinds[kind] = left
            else:
                del self.kinds[kind]


class ShortAnswers:
    """Replicas whose answers are short in a row while those of others are not: they get a trial at times.

    Where a gateway carries the bytes, a short answer cannot be withheld and tried elsewhere: nothing is proven, and
    nobody is ejected. The next requests go to others. A longer answer to a request after the first short one ends it.
    Off while more than half of the replicas are doubtful: then the requests are like that.
    """

    __slots__ = ("_short", "pauses")

    def __init__(self) -> None:
        #: Doubtful ones, after short answers in a row: single ones come from every replica.
        self._short: set[Replica] = set()
        #: End of the pause, and the trials so far.
        self.pauses: dict[Replica, tuple[float, int]] = {}

    def on_short(self, replica: Replica, *, doubtful: bool, now: float) -> None:
        """Record a short answer, of a replica that was `doubtful` at its dispatch."""
        if replica.slot < 0:
            return
        if max(replica.short_answers) >= SUSPECT_AFTER:
            self._short.add(replica)
        until_s, trials = self.pauses.get(replica, (now, 0))
        if doubtful and until_s <= now:
            pause_s = backoff_s(trials + 1, first_s=FIRST_TRIAL_S, longest_s=LONGEST_TRIAL_S)
            self.pauses[replica] = now + pause_s, trials + 1

    def on_longer(self, replica: Replica) -> None:
        """Record an answer of more than a token."""
        if self._short:
            self._short.discard(replica)
            self.pauses.pop(replica, None)

    def paused(self, eligible: CandidateSet, *, now: float) -> Sequence[Replica]:
        """Return the candidates that pause; none if most answer like them."""
        if 2 * len(self._short) > len(eligible.replicas):
            return ()
        return [replica for replica, (until_s, _) in self.pauses.items() if now < until_s and replica in eligible]

    def forget_left(self) -> None:
        """Forget replicas that left."""
        self._short = {replica for replica in self._short if replica.slot >= 0}
        self.pauses = {replica: pause for replica, pause in self.pauses.items() if replica.slot >= 0}


class OpenFailures:
    """Replicas with several failures of requests that have not ended: they pause until that is known.

    Whether a 5xx, a timeout or a refusal is the replica's failure is decided by the end of its request
    (`dispatch.lifecycle`).
    A replica that fails at once looks free, and would have every request until then.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        #: Of replicas that have some.
        self.counts: dict[Replica, int] = {}

    def add(self, replica: Replica) -> None:
        """Count a failure of a request that has not ended."""
        if replica.slot >= 0:
            self.counts[replica] = self.counts.get(replica, 0) + 1

    def remove(self, replica: Replica) -> None:
        """Count the end of that request."""
        left = self.counts.pop(replica, 0) - 1
        if left > 0:
            self.counts[replica] = left

    def paused(self, eligible: CandidateSet) -> Sequence[Replica]:
        """Return the candidates that pause."""
        return [
            replica for replica, failures in self.counts.items() if failures >= SUSPECT_AFTER and replica in eligible
        ]

    def forget_left(self) -> None:
        """Forget replicas that left."""
        self.counts = {replica: failures for replica, failures in self.counts.items() if replica.slot >= 0}


@dataclass(slots=True)
class BusyStreak:
    """Refusals of one replica since its last answer."""

    count: int = 0
    #: End of the pause by the count, and of the longest one, which may be by `Retry-After`.
    counted_until_s: float = float("-inf")
    until_s: float = float("-inf")


class BusyPauses:
    """A pause after each 429 or 503 of an engine, and ejection after so many without an answer.

    An engine that is full refuses at once, so its load falls and it looks free: without a pause it would draw every
    request. The first pause is short, because a slot may be free after the next token; each further refusal doubles
    it, and `Retry-After` may extend it. A burst is one fact: of requests dispatched before the end of a pause, none
    counts. An answer ends the count.
    """

    __slots__ = ("_streaks", "until_s")

    def __init__(self) -> None:
        self._streaks: dict[Replica, BusyStreak] = {}
        #: End of the last pause, after which nothing is excluded.
        self.until_s = float("-inf")

    def on_busy(self, replica: Replica, *, dispatched_s: float, retry_after_s: float | None, now: float) -> None:
        """Record a 429 or 503 of the engine, and eject the replica after `MOST_IN_A_ROW`."""
        streak = self._streaks.setdefault(replica, BusyStreak())
        if dispatched_s >= streak.counted_until_s:
            streak.count += 1
            if replica.health.attempt_busy(streak.count >= MOST_IN_A_ROW, dispatched_s=dispatched_s, now=now):
                del self._streaks[replica]
                return
            streak.counted_until_s = now + backoff_s(streak.count, first_s=FIRST_PAUSE_S, longest_s=inf)
        # Bounded like a back-off: an engine may not remove itself for a day.
        wanted_s = now + min(retry_after_s or 0.0, replica.health.limits.max_s)
        streak.until_s = max(streak.until_s, streak.counted_until_s, wanted_s)
        self.until_s = max(self.until_s, streak.until_s)

    def on_answer(self, replica: Replica) -> None:
        """End the count. A pause in progress ends on time: `Retry-After` still holds."""
        if self._streaks and (streak := self._streaks.get(replica)) is not None:
            streak.count = 0

    def is_open(self, replica: Replica, *, now: float) -> bool:
        """Return whether the replica is in no pause."""
        streak = self._streaks.get(replica)
        return streak is None or now >= streak.until_s

    def remaining_s(self, replica: Replica, *, now: float) -> float | None:
        """Return the time to the end of the pause; `None` outside."""
        streak = self._streaks.get(replica)
        return None if streak is None or now >= streak.until_s else streak.until_s - now

    def paused(self, eligible: CandidateSet, *, now: float) -> Sequence[Replica]:
        """Return the candidates in a pause."""
        return [replica for replica, streak in self._streaks.items() if now < streak.until_s and replica in eligible]

    def forget_left(self) -> None:
        """Forget replicas that left."""
        self._streaks = {replica: streak for replica, streak in self._streaks.items() if replica.slot >= 0}


class SlowStart:
    """A concurrency limit for a replica that has joined or was readmitted.

    The limit doubles at a fixed pace, from a few requests to more than any engine runs at once, so it always ends.

    Parameters
    ----------
    fleet:
        The Router's.
    ramp_s:
        From `INITIAL` to `FINAL`, s; 0 is no ramp. May be replaced.
    """

    __slots__ = ("_fleet", "ramp_s", "ramps")

    def __init__(self, fleet: Fleet, *, ramp_s: float) -> None:
        self._fleet = fleet
        self.ramp_s = ramp_s
        #: Begin of each.
        self.ramps: dict[Replica, float] = {}
        fleet.on_readmitted = self.begin

    def begin(self, replica: Replica, *, now: float) -> None:
        """Start the ramp of a replica."""
        if self.ramp_s > 0.0:
            self.ramps[replica] = now

    def allowed(self, replica: Replica, *, now: float) -> float:
        """Return the concurrency limit; infinite off the ramp."""
        since_s = self.ramps.get(replica)
        if since_s is None or now - since_s >= self.ramp_s:
            return float("inf")
        return float(INITIAL * (FINAL / INITIAL) ** (max(0.0, now - since_s) / self.ramp_s))

    def remaining_s(self, replica: Replica, *, now: float) -> float | None:
        """Return the time to the end of the ramp; `None` off it."""
        since_s = self.ramps.get(replica)
        return None if since_s is None or now - since_s >= self.ramp_s else self.ramp_s - (now - since_s)

    def full(self, eligible: CandidateSet, *, now: float) -> Sequence[Replica]:
        """Return the candidates at their limit."""
        in_flight = self._fleet.columns.in_flight_requests
        for replica in [replica for replica, since_s in self.ramps.items() if now - since_s >= self.ramp_s]:
            del self.ramps[replica]
        return [
            replica
            for replica in self.ramps
            if replica in eligible and in_flight[replica.slot] + 1 > self.allowed(replica, now=now)
        ]


def _kinds(request: RouteRequest) -> tuple[Kind, Kind]:
    """Return the kinds of a request: with any credential, and with its own."""
    route, model = request.route, request.model
    return (route, model, _ANY), (route, model, request.credential)


# Saturation: whether a replica has capacity for one more request.
#
# Theory of operation. Work that is queued at the proxy can still go elsewhere, be reordered or be given up; work that
# was dispatched cannot. So a replica has capacity only while it has a free slot and little prefill to do. The best
# replica is chosen among all, saturated or not: choosing among the others only would spread requests with a common
# prefix.
#
# A bound on the backlog may not prevent its own correction. How much prefill a replica has to do depends on how many go
# on there at once, which only requests that overlap can show (`core.latency.prefill.ParallelPrefills`). So the backlog
# holds requests back only from an engine with one queue:
#
# - Where several prefills go on at once, nothing is gained by an order before them: the concurrency limit alone holds.
#   So it does on other replicas of which nothing is known: the engines of a fleet are usually alike, and a request
#   waits for the one that it prefers, however free the others are.
# - Answers in one piece have no first token that could correct the backlog. While such arrive, it holds nothing back
#   unless first tokens of others have shown of late that there is one queue.
# - While a request has been queued for `LEARN_AFTER_S` and the verdict is old, streams are sent in rounds of two.
# - Before the first verdict a second prefill may begin wherever what was seen speaks against one queue.


#: Times count from the epoch, where a float has a quarter of a microsecond.
_NOISE_S = 1e-6
#: Queue time after which it may be this bound that holds a replica back, s: longer than most prefills.
LEARN_AFTER_S = 0.5


class SaturationDetector:
    """Says which replicas have capacity.

    Parameters
    ----------
    fleet:
        The Router's.
    limits:
        May be replaced.
    """

    __slots__ = ("_fleet", "limits", "queued_since_s")

    def __init__(self, fleet: Fleet, limits: OverloadLimits) -> None:
        self._fleet = fleet
        self.limits = limits
        #: Since when the first of the requests queued at the router has been; infinite if none is.
        self.queued_since_s = inf

    def any_has_capacity(self, *, now: float, besides: Container[str] = ()) -> bool:
        """Return whether a request may be dispatched somewhere now; of `besides` it is known that none may."""
        replicas = self._fleet.replicas
        if self._has_columns and np.count_nonzero(self._busy(now)) < len(replicas):
            return True
        return any(name not in besides and self.has_capacity(replica, now=now) for name, replica in replicas.items())

    def next_free_s(self, *, now: float) -> float:
        """Return when the first saturated replica has capacity without a further event; infinite if each needs one.

        The same as the least `free_at_s`. Of many replicas with one queue each, the columns tell it.
        """
        fleet = self._fleet
        if not self._has_columns or fleet.parallel or now - fleet.unseen_s <= MIXED_S:
            times_s = [self.free_at_s(replica, now=now) for replica in self.busy(now=now)]
            return min([at_s for at_s in times_s if at_s is not None], default=inf)
        columns = fleet.columns
        half_rtt_s = np.where(np.isnan(columns.rtt_s), 0.0, columns.rtt_s / 2)
        at_s = columns.drained_at_s - half_rtt_s - self.limits.max_backlog_s
        is_due = at_s > now + _NOISE_S
        is_due &= now - STUCK_AFTER_S - (columns.head_due_s + half_rtt_s) <= 0.0
        is_due &= ~self._without_slot
        waiting = [self.free_at_s(replica, now=now) for replica in fleet.contended]
        for replica in fleet.contended:
            is_due[replica.slot] = False
        due_s: list[float] = at_s[is_due].tolist()
        return min([*due_s, *[at for at in waiting if at is not None]], default=inf)

    def busy(self, *, now: float) -> Collection[Replica]:
        """Return the replicas that may be saturated: of many those that the columns do not show to be idle.

        An idle one has capacity, and nothing of it becomes due.
        """
        replicas = self._fleet.replicas.values()
        if not self._has_columns:
            return replicas
        is_busy = self._busy(now).tolist()
        return [replica for replica in replicas if is_busy[replica.slot]]

    @property
    def _has_columns(self) -> bool:
        """Whether to read the columns, which are those of this Router alone: of many replicas that takes less time."""
        fleet = self._fleet
        return len(fleet.replicas) > FEW and fleet.peers is None and self.limits.slo_e2e_s is None

    @property
    def _without_slot(self) -> NDArray[np.bool_]:
        columns, most = self._fleet.columns, self.limits.max_concurrency_per_replica
        # Unknown is NaN, and no comparison with it is true.
        return columns.in_flight_requests >= (columns.max_running_requests if most is None else most)

    def _busy(self, now: float) -> NDArray[np.bool_]:
        columns = self._fleet.columns
        busy = columns.queued_prefill_tokens > 0.0
        busy |= columns.drained_at_s > now + self.limits.max_backlog_s
        busy |= self._without_slot
        return busy

    def has_capacity(self, replica: Replica, *, now: float) -> bool:
        """Return whether a request may be dispatched there now."""
        if not self.has_slot(replica):
            return False
        queue = replica.prefill_queue
        if queue.takes_a_second or not queue.is_one_queue(engine_s=now, is_usual=not self._fleet.parallel):
            return True
        if now >= self.queued_since_s + LEARN_AFTER_S and queue.needs_evidence(engine_s=now):
            return queue.joins_round(engine_s=now) and not self._is_late(replica, now)
        return self.backlog_s(replica, now=now) <= self.limits.max_backlog_s + _NOISE_S

    def has_slot(self, replica: Replica) -> bool:
        """Return whether the concurrency limit allows one more in flight, whatever there is to prefill."""
        columns, slot, most = self._fleet.columns, replica.slot, self.limits.max_concurrency_per_replica
        in_flight = columns.in_flight_requests.item(slot)
        if self._fleet.peers is not None:
            in_flight += self._fleet.peers.requests(slot)
        goal_s = self.limits.slo_e2e_s
        if goal_s is not None and in_flight >= replica.concurrency.limit(goal_s):
            return False
        # Unknown is NaN, and no comparison with it is true.
        return not in_flight >= (columns.max_running_requests.item(slot) if most is None else most)

    def free_at_s(self, replica: Replica, *, now: float) -> float | None:
        """Return when a saturated replica has capacity without a further event; `None` if it needs one."""
        if not self.has_slot(replica):
            return None
        queue, half_rtt_s = replica.prefill_queue, one_way_s(self._fleet.columns, replica.slot)
        others_s = self._fleet.others_prefill_s(replica.slot)
        at_s = queue.one_queue_until_s(engine_s=now, is_usual=not self._fleet.parallel)
        if not self._is_late(replica, now):
            may_s = self.limits.max_backlog_s - replica.kv_wait_s(None)
            drained_s = queue.own_drained_at_s(engine_s=now) - half_rtt_s - may_s if may_s >= 0.0 else inf
            if others_s:
                drained_s = max(drained_s, now - may_s) + others_s
            if drained_s < at_s:
                at_s = drained_s
        return at_s if now + _NOISE_S < at_s < inf else None

    def _is_late(self, replica: Replica, now: float) -> bool:
        """Return whether a first token is later than it may be; those that wait for memory have no time."""
        if replica.prefill_queue.head_due_s >= now or replica.kv_wait_s(None) > 0.0:
            return False
        due_s = replica.prefill_queue.head_due_s + one_way_s(self._fleet.columns, replica.slot)
        return now - STUCK_AFTER_S - due_s - self._fleet.others_prefill_s(replica.slot) > 0.0

    def backlog_s(self, replica: Replica, *, now: float) -> float:
        """Return the prefill before a request dispatched there now, by the rule of `gorgo-ms`, s."""
        queue, half_rtt_s = replica.prefill_queue, one_way_s(self._fleet.columns, replica.slot)
        others_s, kv_wait_s = self._fleet.others_prefill_s(replica.slot), replica.kv_wait_s(None)
        late_s = now - STUCK_AFTER_S - queue.head_due_s - half_rtt_s - others_s
        if late_s > 0.0 and not kv_wait_s > 0.0:
            return queue.backlog_s + others_s + late_s
        left_s = queue.own_drained_at_s(engine_s=now) - now - half_rtt_s
        return (left_s if left_s > 0.0 else 0.0) + others_s + kv_wait_s
