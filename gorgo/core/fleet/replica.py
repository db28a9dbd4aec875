"""One replica in the core: what is known of it beforehand, and its state while it is in the fleet.

Owns the record of identity, models and priors (`ReplicaSpec`), the detection of restarts (`RestartDetector`), and
health, prefill queue and learned speeds (`Replica`). Leaves cells and slots to `fleet.fleet`.

Attempts reference a `Replica` until they end. Its cells are in the fleet's columns at its slot. A replica that has left
has slot -1, so an attempt that ends late releases nothing, even when another replica has its slot by then. The prefill
queue writes its cells after each change.
"""

from __future__ import annotations

import re
from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from hashlib import blake2b
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

from gorgo.core.backoff import backoff_s
from gorgo.core.latency.decode import ConcurrencyLimit, DecodeTimes, TokenGap
from gorgo.core.latency.prefill import PrefillPrior, PrefillQueue, ReportedSpeed
from gorgo.core.latency.ttft import (
    INITIAL_WINDOW_BYTES,
    RECEIVE_WINDOW_BYTES,
    Pacing,
    TcpWindows,
    connect_round_trips,
    cwnd_after_idle,
    is_one_burst,
    round_trips_of_one,
)
from gorgo.core.limits import OutlierLimits
from gorgo.core.messages.request import EngineSample, OpenConnection, RouteRequest
from gorgo.core.numeric import Floats, nan_if_none

# Outlier detection for one replica: when it is ejected, for how long, and what readmits it.
#
# Owns the state machine; the fleet filters candidates by it and applies the panic threshold over all of them.
#
# Theory of operation::
#
#     HEALTHY --3 failures in a row--> EJECTED --back-off over--> HALF_OPEN --probe or attempt succeeds--> HEALTHY
#                                         ^                           |
#                                         '---- any failure, back-off doubled
#
# Streams and answers in one piece are counted apart: an engine may cut every stream and answer all else. Of each kind
# three bad answers in a row eject, or half of the last ones, and only a good answer of that kind ends it.
#
# One that was ejected for failed probes is half open as soon as a probe succeeds.
#
# Failures of attempts and of probes are counted apart: a server whose engine is broken still answers a ping, and that
# answer must not wipe out the failed attempts. For the same reason a good probe readmits a replica, but only a good
# attempt resets the count of ejections; until then one failure ejects again, for twice as long.
#
# Evidence has an age: an attempt dispatched before the last ejection or readmission says nothing about the replica as
# it is now. Without that rule, a hundred streams cut together would raise the back-off to its maximum at once.


#: Back-off in a panic, s. After a wrong ejection the replica is back before the few others are overloaded; after a
#: right one the retries of four such replicas are within their budget.
PANIC_BACK_OFF_S = 2.0


#: Open answers that break off within this time are one event, s: the resets of one loss come closer together.
TOGETHER_S = 0.1
#: Causes of an ejection that are facts about the path.
_UNREACHABLE = ("probes", "region")


class HealthState(Enum):
    HEALTHY = "healthy"
    EJECTED = "ejected"
    HALF_OPEN = "half_open"


#: As names: in Python 3.11 a member of an Enum takes eight times as long to read.
_HEALTHY, _EJECTED, _HALF_OPEN = HealthState


#: Answers of one kind that are remembered; half of them bad is no chance.
RECENT_ANSWERS = 6
_RECENT_BITS = (1 << RECENT_ANSWERS) - 1


class _Answers:
    """The last answers of one kind: how many failed or broke off, in a row and of the last ones."""

    __slots__ = ("_bits", "_count", "broken", "in_a_row")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.in_a_row = 0
        #: Those in a row that broke off after content.
        self.broken = 0
        self._bits = self._count = 0

    def add(self, *, bad: bool) -> None:
        self._bits = (self._bits << 1 | bad) & _RECENT_BITS
        self._count += 1
        if bad:
            self.in_a_row += 1
        else:
            self.in_a_row = self.broken = 0

    def are_bad(self, tolerated: int) -> bool:
        """Return whether so many failed in a row, or half of the last ones did."""
        often = self._count >= RECENT_ANSWERS and 2 * self._bits.bit_count() >= max(RECENT_ANSWERS, 2 * tolerated)
        return self.in_a_row >= tolerated or often


class OutlierDetector:
    """The state of one replica.

    Each method returns whether the replica's eligibility may have changed; `on_change` is called just before.

    Example
    -------
    >>> health = OutlierDetector(OutlierLimits(failures=1))
    >>> health.attempt_failed(dispatched_s=0.0, now=1.0), health.state.value, health.backoff_until_s
    (True, 'ejected', 6.0)
    """

    __slots__ = (
        "_answers",
        "attempt_failures",
        "backoff_until_s",
        "broken_s",
        "changed_s",
        "ejected_by",
        "ejected_for_streams",
        "ejected_since_s",
        "ejections",
        "limits",
        "on_change",
        "probation",
        "probe_failures",
        "state",
    )

    def __init__(self, limits: OutlierLimits) -> None:
        #: May be replaced; the next ejection goes by the new ones.
        self.limits = limits
        self.on_change: Callable[[], None] | None = None
        self.state = _HEALTHY
        self.attempt_failures = 0
        self.probe_failures = 0
        #: Answers in one piece, and streams.
        self._answers = (_Answers(), _Answers())
        #: When the last answer that broke off was counted.
        self.broken_s = float("-inf")
        #: Ejections since the last good attempt: the exponent of the back-off.
        self.ejections = 0
        #: Cause of the last ejection: failed `attempts`, `refusals` of what others answer, broken or short
        #: `answers`, a `busy` engine, failed `probes`, or its unreachable `region`.
        self.ejected_by: str | None = None
        #: Whether it was ejected for streams, or for answers in one piece; `None` for what concerns both.
        self.ejected_for_streams: bool | None = None
        #: First ejection since it was healthy, `None` while healthy.
        self.ejected_since_s: float | None = None
        #: Last ejection or readmission.
        self.changed_s = float("-inf")
        #: End of the back-off, `None` unless ejected.
        self.backoff_until_s: float | None = None
        #: The trial attempt of a half-open replica; one at a time.
        self.probation: str | None = None

    @property
    def can_accept(self) -> bool:
        """Return whether a new attempt may be dispatched there, panic aside."""
        return self.state is _HEALTHY or (self.state is _HALF_OPEN and self.probation is None)

    @property
    def probe_down(self) -> bool:
        """Return whether probes ejected it, its own or its region's: a fact, where failed attempts are a guess."""
        return self.state is not _HEALTHY and self.ejected_by in _UNREACHABLE

    def attempt_started(self, attempt_id: str) -> bool:
        if self.state is not _HALF_OPEN or self.probation is not None:
            return False
        self.probation = attempt_id
        return self._changed()

    def attempt_ended(self, attempt_id: str) -> bool:
        """End the trial, whatever its result."""
        if self.probation != attempt_id:
            return False
        self.probation = None
        return self._changed()

    @property
    def broken_answers(self) -> int:
        """Return how many answers of one kind broke off in a row."""
        return max(answers.broken for answers in self._answers)

    @property
    def breaks_answers(self) -> bool:
        """Return whether answers broke off twice, or ejected it, without a whole one of their kind since."""
        return self.broken_answers > 1 or (self.ejections > 0 and self.ejected_by == "answers")

    def breaks(self, streamed: bool) -> bool:
        """Return whether answers of this kind do."""
        if self._answers[streamed].broken > 1:
            return True
        return self.ejections > 0 and self.ejected_by == "answers" and self.ejected_for_streams in (None, streamed)

    def attempt_succeeded(self, *, dispatched_s: float, now: float, whole: bool = True, streamed: bool = True) -> bool:
        """Record an answer: `whole`, or its first token, which says nothing of a replica that breaks answers off.

        Nor does an answer in one piece of a replica whose streams fail, and the other way round.
        """
        if dispatched_s < self.changed_s:
            return False
        if whole:
            self._answers[streamed].add(bad=False)
        elif self.breaks(streamed):
            return False
        self.attempt_failures = self.probe_failures = 0
        if self.ejections and self.ejected_for_streams not in (None, streamed):
            return False
        self.ejections = 0
        return self.state is not _HEALTHY and self._readmit(now)

    def attempt_failed(self, *, dispatched_s: float, now: float, by: str = "attempts", streamed: bool = True) -> bool:
        """Record an attempt without an answer. It ejects after others in a row, of its kind or of both."""
        if dispatched_s < self.changed_s or self.state is _EJECTED:
            return False
        self.attempt_failures += 1
        if self.attempt_failures >= self._tolerated:
            return self._eject(by, now)
        if by == "refusals":  # says something of some requests, and nothing of the other answers
            return False
        self._answers[streamed].add(bad=True)
        return self._answers[streamed].are_bad(self._tolerated) and self._eject(by, now, streamed)

    def answer_broken(self, *, dispatched_s: float, now: float, streamed: bool = True) -> bool:
        """Record an answer that broke off after content. Several that were open at once are one event."""
        together = dispatched_s < self.broken_s and now - self.broken_s < TOGETHER_S
        if dispatched_s < self.changed_s or self.state is _EJECTED or together:
            return False
        answers = self._answers[streamed]
        answers.add(bad=True)
        answers.broken += 1
        self.broken_s = now
        return answers.are_bad(self._tolerated) and self._eject("answers", now, streamed)

    def attempt_busy(self, last: bool, *, dispatched_s: float, now: float) -> bool:
        """Eject an engine that was busy once too often: `last`, or again after it was ejected for that."""
        if dispatched_s < self.changed_s or self.state is _EJECTED:
            return False
        again = self.ejections > 0 and self.ejected_by == "busy"
        return (last or again) and self._eject("busy", now)

    def probe_succeeded(self, *, now: float) -> bool:
        self.probe_failures = 0
        if self.state is _EJECTED and self.probe_down:
            # The cause of the ejection is over, however long the back-off has grown.
            return self.region_reachable(now=now)
        return self.state is _HALF_OPEN and self._readmit(now)

    def probe_failed(self, *, now: float) -> bool:
        if self.state is _EJECTED:
            return False
        self.probe_failures += 1
        return self.probe_failures >= self._tolerated and self._eject("probes", now)

    def region_unreachable(self, *, now: float) -> bool:
        """Eject the replica with its region, without further failures of its own."""
        return self.state is not _EJECTED and self._eject("region", now)

    def region_reachable(self, *, now: float) -> bool:
        """End the back-off: a replica of the region answers again."""
        return self.state is _EJECTED and self.end_backoff(now=max(now, self.backoff_until_s or now))

    def end_backoff(self, *, now: float) -> bool:
        """Become half open if the back-off is over."""
        if self.backoff_until_s is None or now < self.backoff_until_s:
            return False
        self.state, self.backoff_until_s = _HALF_OPEN, None
        return self._changed()

    def shorten_backoff(self) -> None:
        """Shorten the back-off in a panic: failed attempts may be the fault of load."""
        if self.backoff_until_s is not None and not self.probe_down:
            self.backoff_until_s = min(self.backoff_until_s, self.changed_s + PANIC_BACK_OFF_S)

    @property
    def _tolerated(self) -> int:
        return 1 if self.ejections else self.limits.failures

    def _eject(self, by: str, now: float, streamed: bool | None = None) -> bool:
        self.ejections += 1
        self.ejected_for_streams = streamed
        self._forget()
        self.state, self.changed_s, self.ejected_by = _EJECTED, now, by
        self.ejected_since_s = now if self.ejected_since_s is None else self.ejected_since_s
        self.backoff_until_s = now + backoff_s(self.ejections, first_s=self.limits.base_s, longest_s=self.limits.max_s)
        return self._changed()

    def _readmit(self, now: float) -> bool:
        self.state, self.changed_s, self.backoff_until_s = _HEALTHY, now, None
        self.ejected_since_s = None
        self._forget()
        return self._changed()

    def _forget(self) -> None:
        """Forget what says nothing of the replica as it is now."""
        self.attempt_failures = self.probe_failures = 0
        for answers in self._answers:
            answers.reset()

    def _changed(self) -> bool:
        if self.on_change is not None:
            self.on_change()
        return True


# What is known of every replica as numpy columns, one cell per slot.
#
# Owns the cells and their empty values, and what the cells of connections say of the arrival of a request
# (`arrival_s`). The fleet writes cells event by event; policies read them through `candidates`.


#: Cells of an empty slot. Columns that are not here are NaN: unknown.
_EMPTY: Mapping[str, float] = {
    "in_flight_requests": 0.0,
    "in_flight_tokens": 0.0,
    "queued_prefill_tokens": 0.0,
    "prefill_base_s": 0.0,
    "prefill_token_s": 0.0,
    "prefill_kappa_s": 0.0,
    "slowdown": 1.0,
    "drained_at_s": -inf,
    "head_due_s": inf,
    "waiting_prefill_s": 0.0,
    "shared_s": 0.0,
    "head_shared_s": 0.0,
    "head_began_s": -inf,
    "prefill_share": 0.0,
    "prefill_share_s": 0.0,
    "cache_fill": 0.0,
    "connect_round_trips": 1.0,
    "pace_bytes": inf,
    "burst_bytes": inf,
    "salt": 0,
}


#: What may stand before the name of an accelerator: how many there are, and the words of makers and lines.
_COUNT = re.compile(r"\d+ *x *(?=\D)")
_MAKERS = frozenset({"nvidia", "amd", "intel", "instinct", "tesla", "geforce", "rtx", "gpu"})


def accelerator_name(name: str) -> str:
    """Return the name by which accelerators are compared: without number, maker and memory, in small letters.

    >>> [accelerator_name(name) for name in ("2xL40S", "L40S", "NVIDIA-L40S", "nvidia A100-SXM4-80GB", "8 x H200")]
    ['l40s', 'l40s', 'l40s', 'a100', 'h200']
    """
    words = re.split(r"[\s_/-]+", _COUNT.sub("", name.strip().casefold(), count=1))
    return next((word for word in words if word and word not in _MAKERS), name)


def accelerator_code(name: str) -> float:
    """Return the code of an accelerator in its column: 48 bits of a hash, which a float holds exactly."""
    return float(int.from_bytes(blake2b(accelerator_name(name).encode(), digest_size=6).digest(), "little"))


@dataclass(slots=True)
class Columns:
    """Columns with one cell per slot. Unknown or stale is NaN; counts by this proxy are never unknown."""

    #: EWMA of the probe round trip, s. NaN before the first probe.
    rtt_s: Floats
    #: Requests dispatched by this proxy and not ended.
    in_flight_requests: Floats
    #: Prompt tokens of those requests (Q_i, docs/policies/gorgo.md).
    in_flight_tokens: Floats
    #: Prompt tokens of those that still wait for their first token.
    queued_prefill_tokens: Floats
    #: Of those tokens the ones that the index has not found there. NaN unless a policy learns, as the next three
    #: (`core.dispatch.in_flight`).
    uncached_prefill_tokens: Floats
    #: Requests between their first token and their end, and the sum of the times of their first tokens.
    decoding_requests: Floats
    first_tokens_s: Floats
    #: Learned time per output token of a request alone, s. NaN before an answer reports its tokens.
    token_gap_s: Floats
    #: Scraped from the engine: requests running, requests waiting, KV tokens in use. NaN when unknown or stale.
    running_requests: Floats
    queued_requests: Floats
    used_tokens: Floats
    #: When the engine was last scraped. NaN when it was not, or when stale.
    sampled_s: Floats
    #: Size of the KV pool and of the running batch, from the engine or regions.yaml. NaN when unknown.
    kv_capacity_tokens: Floats
    max_running_requests: Floats
    #: Priors of a prefill: constant part, s per token, s per pair of a new token and one that it attends to.
    prefill_base_s: Floats
    prefill_token_s: Floats
    prefill_kappa_s: Floats
    #: Learned factor on the priors.
    slowdown: Floats
    #: The prefill queue, in the engine's time: when it has done what was sent to it, and when the first token of the
    #: first in line is due (infinite when none is expected).
    drained_at_s: Floats
    head_due_s: Floats
    #: Prefill of all requests before their first token, s.
    waiting_prefill_s: Floats
    #: Work of other routers before them as of their dispatches, which `drained_at_s` contains; of it what is before the
    #: first in line, and when the engine began with that (`core.latency.prefill`), s.
    shared_s: Floats
    head_shared_s: Floats
    head_began_s: Floats
    #: Share of its time in prefills, by what routers have sent there, as of the last dispatch, and when that was
    #: (`core.latency.prefill`).
    prefill_share: Floats
    prefill_share_s: Floats
    #: Share of the KV capacity that cached blocks take (`core.dispatch.prefix_updates`). 0 where it is unknown.
    cache_fill: Floats
    #: Connection of the next request: TCP windows (`core.latency.ttft`; 0 where none is open, NaN where not reported),
    #: time of the last send, and round trips to open a new connection.
    cwnd_bytes: Floats
    rwnd_bytes: Floats
    sent_s: Floats
    connect_round_trips: Floats
    #: How its sender spreads a flight: so much per round trip (infinite where it does not pace) after a first burst.
    pace_bytes: Floats
    burst_bytes: Floats
    #: Strictest objective per output token among the requests in flight, s. NaN without one.
    slo_tpot_s: Floats
    #: Code of the configured accelerator (`accelerator_code`). NaN when unknown.
    accelerator: Floats
    #: A fixed 64-bit hash of the replica's name, for rendezvous hashing.
    salt: NDArray[np.uint64]

    @classmethod
    def empty(cls) -> Columns:
        """Return columns without a slot."""
        columns = {item.name: np.zeros(0) for item in fields(cls) if item.name != "salt"}
        return cls(**columns, salt=np.zeros(0, dtype=np.uint64))

    def grow(self, count: int = 1) -> None:
        """Add empty slots. Rare: only when the fleet grows beyond its largest size."""
        for item in fields(self):
            column = getattr(self, item.name)
            added = np.full(count, _EMPTY.get(item.name, nan)).astype(column.dtype)
            setattr(self, item.name, np.concatenate((column, added)))

    def clear(self, slot: int) -> None:
        """Empty the cells of a slot."""
        for item in fields(self):
            getattr(self, item.name)[slot] = _EMPTY.get(item.name, nan)


# Cells of each replica's next connection, and when a request on it would arrive.
#
# Owns the columns of connections (`cwnd_bytes` and those beside it). See `core.latency.ttft` for round trips of a body.
#
# Theory of operation: a shell reports each change, and the cells are valid until the next one. A connection that is
# yet to be opened has no congestion window (0) and the first windows. Without any report (NaN) a request counts as one
# round trip.


def record_connection(columns: Columns, slot: int, connection: OpenConnection | None) -> None:
    """Record the connection of the next request; `None` is a connection yet to be opened.

    A new connection paces if the last open one did: they have the same kernel.
    """
    pacing = _pacing(columns, slot) and Pacing() if connection is None else connection.pacing
    columns.pace_bytes[slot], columns.burst_bytes[slot] = (inf, inf) if pacing is None else pacing
    columns.cwnd_bytes[slot] = 0.0 if connection is None else connection.windows.cwnd
    columns.rwnd_bytes[slot] = RECEIVE_WINDOW_BYTES if connection is None else connection.windows.rwnd
    columns.sent_s[slot] = inf if connection is None else connection.sent_s


def one_way_s(columns: Columns, slot: int) -> float:
    """Return half a round trip, s; 0 while it is unknown or the replica has left (slot -1)."""
    if slot < 0:
        return 0.0
    rtt_s = columns.rtt_s.item(slot)  # without a numpy number between
    return 0.0 if rtt_s != rtt_s else rtt_s / 2


def arrival_s(columns: Columns, slot: int, body_bytes: int, *, now: float) -> float:
    """Return when a request dispatched now reaches the engine."""
    half_rtt_s = one_way_s(columns, slot)
    congestion = columns.cwnd_bytes.item(slot)
    if is_one_burst(body_bytes, columns.burst_bytes.item(slot)):
        n_round_trips = 1.0
    else:
        n_round_trips = _round_trips(columns, slot, body_bytes, congestion, 2.0 * half_rtt_s, now)
    if congestion == 0.0:
        n_round_trips += columns.connect_round_trips.item(slot)
    return now + half_rtt_s * (2.0 * n_round_trips - 1.0)


def _round_trips(columns: Columns, slot: int, body_bytes: int, congestion: float, rtt_s: float, now: float) -> float:
    """Return the round trips of a body once its connection is open."""
    pacing = _pacing(columns, slot)
    if congestion == 0.0:
        return round_trips_of_one(body_bytes, TcpWindows(), pacing)
    if (body_bytes <= INITIAL_WINDOW_BYTES and pacing is None) or congestion != congestion:
        return 1.0
    left = cwnd_after_idle(congestion, now - columns.sent_s.item(slot), rtt_s)
    return round_trips_of_one(body_bytes, TcpWindows(left, columns.rwnd_bytes.item(slot)), pacing)


def _pacing(columns: Columns, slot: int) -> Pacing | None:
    pace = columns.pace_bytes.item(slot)
    return Pacing(pace, columns.burst_bytes.item(slot)) if pace < inf else None


# Restarts of an engine, detected by its counters: its cache is then empty.
#
# Theory of operation. A restart between two probes leaves no other trace: probes succeed, broken connections are
# retried, and the prefix index would be wrong for hours. Counters only grow while a process runs, so a counter that
# went back is another process. A process that has served as much as its predecessor had at the last scrape is not
# detected; the index had little of that one. A partition moves no counter, and the index stays.


#: Counters since the engine's start; an engine reports some of them.
_COUNTERS = ("prompt_tokens_total", "prefill_tokens_total")


class RestartDetector:
    """The counters of one engine as scraped last.

    Example
    -------
    >>> restarts = RestartDetector()
    >>> [restarts.observe(EngineSample(prompt_tokens_total=total)) for total in (900.0, 900.0, None, 20.0)]
    [False, False, False, True]
    >>> restarts.count
    1
    """

    __slots__ = ("_last", "count")

    def __init__(self) -> None:
        #: Since the replica joined the fleet.
        self.count = 0
        self._last: dict[str, float] = {}

    def replaced(self) -> None:
        """Count another process in its place, whose counters are compared with none."""
        self.count += 1
        self._last.clear()

    def observe(self, sample: EngineSample) -> bool:
        """Return whether the process is another one than at the last scrape."""
        reported = {name: value for name in _COUNTERS if (value := getattr(sample, name)) is not None}
        restarted = any(value < self._last.get(name, 0.0) for name, value in reported.items())
        self._last |= reported
        self.count += restarted
        return restarted


# How long a request waits for KV memory on a replica: by what is in flight there, and by how long answers hold theirs.
#
# Owns the demand on one replica's KV pool (`KvDemand`). The policy adds the wait to the work before a request.
#
# Theory of operation. A continuous-batching engine lets a request run when its prompt fits into the pool beside those
# that run; SGLang counts a part of the answer too, and vLLM preempts when answers outgrow the pool. So while more is in
# flight than the pool has, the last ones wait until others have ended. What is in flight are the distinct blocks of all
# prompts, since a shared prefix is there once, and a usual answer for each. Cached blocks that no request uses are
# evicted first, and count for nothing. A full pool of C tokens frees C / S of them per second, S the time for which a
# token is held (Little's law). So a request for which so many tokens are short waits so many times S / C.
#
# Memory comes back when a whole answer has ended: a request that lacks one token waits for the next end, and the sizes
# of answers to come are known in the mean only. So a pool counts as full when it has no room for one more usual
# request, with its own part of the prompt and its answer.
#
# S is learned from answers that completed: from the begin of the prefill to the end, weighted by tokens.


#: Of a pool: with less of it in flight by the sum of prompts and answers, no wait is looked for.
CONTENDED = 0.5
#: Answers after which one weighs 1 / e: a part of a batch.
MEMORY_ANSWERS = 10.0
_MEMORY_LEFT = 1.0 - 1.0 / MEMORY_ANSWERS
#: Size of the hash of a block, as `core.prefix.residency.BLOCK_HASH_BYTES`, which is no layer below this one.
_BYTES = 8


class KvDemand:
    """What requests in flight take of the KV pool of one replica.

    Example
    -------
    >>> from gorgo.core.messages.request import RouteRequest
    >>> demand = KvDemand()
    >>> one = RouteRequest("one", 0.0, 1000, b"the sameleft own", 500.0, 0)
    >>> two = RouteRequest("two", 0.0, 1000, b"the samerightown", 500.0, 0)
    >>> demand.add("one", one, 1000)  # two prompts of two blocks, of which they share the first
    >>> demand.add("two", two, 500)
    >>> demand.short_tokens(one, 1600), demand.short_tokens(None, 1400)
    (0.0, 100.0)
    """

    __slots__ = (
        "_answers",
        "_blocks",
        "_counts",
        "_occupied",
        "_occupied_s",
        "_output",
        "_prompt_tokens",
        "_requests",
        "_waiting",
        "output_tokens",
    )

    def __init__(self) -> None:
        self._requests: dict[str, RouteRequest] = {}
        #: Uncached tokens of those that have no first token.
        self._waiting: dict[str, float] = {}
        self._prompt_tokens = 0
        #: Blocks of all prompts, and how many prompts have each; none until a wait is looked for.
        self._blocks = 0
        self._counts: dict[bytes, int] | None = None
        #: Decayed sums over answers: count, output tokens, tokens held, and these times how long.
        self._answers = self._output = self._occupied = self._occupied_s = 0.0
        #: Tokens of a usual answer; 0 before the first.
        self.output_tokens = 0.0

    def add(self, key: str, request: RouteRequest, uncached_tokens: float) -> None:
        """Count a dispatched request."""
        self._requests[key] = request
        self._waiting[key] = uncached_tokens
        self._prompt_tokens += request.prompt_tokens
        if self._counts is not None:
            self._blocks += len(request.blocks) // _BYTES
            _count(self._counts, request.blocks)

    def on_first_token(self, key: str) -> None:
        """Count a request as running."""
        self._waiting.pop(key, None)

    def remove(self, key: str) -> None:
        """Count a request no longer; a key that is not there is ignored."""
        request = self._requests.pop(key, None)
        if request is None:
            return
        self._waiting.pop(key, None)
        self._prompt_tokens -= request.prompt_tokens
        if self._counts is None:
            return
        if self._requests:
            self._blocks -= len(request.blocks) // _BYTES
            _uncount(self._counts, request.blocks)
        else:
            self._counts = None

    def on_answer(self, occupied_s: float, *, prompt_tokens: float, output_tokens: int) -> None:
        """Record a whole answer: so many tokens of its own prompt, and its answer, were held for so long."""
        left, tokens = _MEMORY_LEFT, prompt_tokens + output_tokens
        self._answers = self._answers * left + 1.0
        self._output = self._output * left + output_tokens
        self._occupied = self._occupied * left + tokens
        self._occupied_s = self._occupied_s * left + tokens * occupied_s
        self.output_tokens = self._output / self._answers

    def is_contended(self, capacity_tokens: float) -> bool:
        """Return whether a request may have to wait; never in a pool of unknown size (NaN)."""
        return self._prompt_tokens + self.output_tokens * len(self._requests) > CONTENDED * capacity_tokens

    def short_tokens(self, request: RouteRequest | None, capacity_tokens: float) -> float:
        """Return the tokens that others have to free before one more may run, or all in flight; 0 where all fit."""
        if not self._requests:
            return 0.0  # it is alone
        more = (
            self._prompt_tokens + self.output_tokens * (len(self._requests) + (request is not None)) - capacity_tokens
        )
        if request is not None:
            more += request.prompt_tokens
        if not more > 0.0:
            return 0.0
        usual = next(iter(self._requests.values()))
        return max(0.0, more - self._shared_blocks(request) * usual.block_tokens)

    def wait_s(self, request: RouteRequest | None, uncached_tokens: float, capacity_tokens: float) -> float:
        """Return how long a request waits until there is room for one usual request more, s; 0 before the first answer.

        Without a request it is how long the last one in flight waits.
        """
        if not self._occupied:
            return 0.0
        usual = self._occupied / self._answers
        short = self.short_tokens(request, capacity_tokens - usual)
        if not short:
            return 0.0
        # Those that run have their memory.
        in_line = len(self._waiting) + (request is not None)
        waiting = sum(self._waiting.values()) + uncached_tokens + self.output_tokens * in_line
        return min(short, waiting + usual) / capacity_tokens * (self._occupied_s / self._occupied)

    def _shared_blocks(self, request: RouteRequest | None) -> int:
        """Return how many blocks are there for more than one prompt, each as often as it need not be there again."""
        counts = self._counts
        if counts is None:
            counts = self._counts = {}
            self._blocks = 0
            for each in self._requests.values():
                self._blocks += len(each.blocks) // _BYTES
                _count(counts, each.blocks)
        shared = self._blocks - len(counts)
        return shared if request is None else shared + _leading(counts, request.blocks)

    def check(self) -> None:
        """Assert every invariant; for tests."""
        requests = self._requests.values()
        assert self._prompt_tokens == sum(request.prompt_tokens for request in requests)
        if self._counts is not None:
            counts: dict[bytes, int] = {}
            for request in requests:
                _count(counts, request.blocks)
            assert counts == self._counts
            assert self._blocks == sum(counts.values())
        assert self._waiting.keys() <= self._requests.keys()


def _count(counts: dict[bytes, int], blocks: bytes) -> None:
    for start in range(0, len(blocks), _BYTES):
        block = blocks[start : start + _BYTES]
        counts[block] = counts.get(block, 0) + 1


def _uncount(counts: dict[bytes, int], blocks: bytes) -> None:
    for start in range(0, len(blocks), _BYTES):
        block = blocks[start : start + _BYTES]
        left = counts[block] - 1
        if left:
            counts[block] = left
        else:
            del counts[block]


def _leading(counts: dict[bytes, int], blocks: bytes) -> int:
    """Return how many leading blocks are there: each hash stands for all blocks before it too."""
    low, high = 0, len(blocks) // _BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if blocks[(middle - 1) * _BYTES : middle * _BYTES] in counts:
            low = middle
        else:
            high = middle - 1
    return low


# What the core knows of a replica: identity, what it serves, priors of its size. No URL, no key.


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One engine process, by name.

    Parameters
    ----------
    name:
        Unique in the fleet; identity is the name, never the URL.
    region:
        Where it is.
    models:
        Models that it serves; empty means any.
    kv_capacity_tokens, max_running_requests:
        Priors from regions.yaml; an engine's own report replaces them.
    prefill_base_s, prefill_tokens_per_s, prefill_kappa_s:
        Priors of the time of a prefill (`core.latency.prefill`); `None` is the default.
    tls:
        Whether connections to it are: a new one then takes a round trip more.
    accelerator:
        Name of its accelerator from regions.yaml; `None` is unknown.
    own_key:
        Whether it is sent a key of its own, in place of the client's.
    """

    name: str
    region: str
    models: tuple[str, ...] = ()
    kv_capacity_tokens: int | None = None
    max_running_requests: int | None = None
    prefill_base_s: float | None = None
    prefill_tokens_per_s: float | None = None
    prefill_kappa_s: float | None = None
    tls: bool = False
    accelerator: str | None = None
    own_key: bool = False


#: Priors from regions.yaml that an engine's report replaces.
_CAPACITY_FIELDS = ("kv_capacity_tokens", "max_running_requests")


#: Doubtful answers in a row (a 4xx, or one token) after which they may be the replica's fault.
SUSPECT_AFTER = 3


@dataclass(slots=True, eq=False)
class Replica:
    """One replica while it is in the fleet."""

    spec: ReplicaSpec
    slot: int
    columns: Columns
    health: OutlierDetector
    prior: PrefillPrior
    prefill_queue: PrefillQueue
    reported_speed: ReportedSpeed
    #: Most requests in flight if answers are to end in time.
    concurrency: ConcurrencyLimit = field(default_factory=ConcurrencyLimit)
    #: What requests in flight take of its KV pool.
    kv_demand: KvDemand = field(default_factory=KvDemand)
    #: Requests that decode and their time per output token; `None` while nothing counts them.
    token_gap: TokenGap | None = None
    #: Times between the tokens of its streams, for operators.
    decode_times: DecodeTimes = field(default_factory=DecodeTimes)
    restarts: RestartDetector = field(default_factory=RestartDetector)
    #: The fleet's replicas that look slow; this one is there until it looks as its prior again.
    slow: dict[Replica, None] = field(default_factory=dict)
    #: Replicas of the fleet that do several prefills at once.
    parallel: dict[Replica, None] = field(default_factory=dict)
    #: Replicas of the fleet whose KV pools are taken by half or more.
    contended: dict[Replica, None] = field(default_factory=dict)
    #: Models that the engine itself lists; empty while unknown.
    listed_models: tuple[str, ...] = ()
    #: Longest prompt with its answer, by model that the engine lists; a model of unknown context is not there.
    contexts: Mapping[str, int] = field(default_factory=dict)
    draining: bool = False
    #: State in the last `HealthChanged`.
    reported_state: HealthState = HealthState.HEALTHY
    drained_s: float | None = None
    probed_s: float | None = None
    #: Whether the last probe was answered; `None` before the first.
    answers: bool | None = None
    #: When the first answered one was; `None` before.
    first_probed_s: float | None = None
    scraped_s: float | None = None
    #: Its last failure in words: of an attempt with its time and the engine's own text, or of a probe.
    last_failure: str | None = None
    #: Attempts dispatched there, and those that failed (before or after content), since it joined.
    attempts: int = 0
    failures: int = 0
    #: Least prefill of the requests that were shed while it was the best replica for them, s.
    shed_prefill_s: float = 0.0
    #: Status by which it refused a request that another replica answered; `None` after an answer of its own.
    refusal: int | None = None
    #: Status of 4xx by which it refused its last probe; `None` if it did not.
    probe_refusal: int | None = None
    #: 4xx in a row, and when the first of them was: only an answer to a later request ends the count.
    client_errors: int = 0
    client_errors_s: float = float("-inf")
    #: Doubtfully short answers in a row, in one piece and as streams; negative after other replicas have answered as
    #: shortly.
    short_answers: list[int] = field(default_factory=lambda: [0, 0])
    #: End of the first of them: only a longer answer of the kind to a later request ends the count.
    short_answers_s: list[float] = field(default_factory=lambda: [float("-inf"), float("-inf")])
    #: Objectives per output token of the requests in flight there that have one, ascending, s.
    tpot_objectives: list[float] = field(default_factory=list)

    @classmethod
    def create(cls, spec: ReplicaSpec, slot: int, columns: Columns, ejection: OutlierLimits) -> Replica:
        """Return a new replica and write its priors to its empty cells."""
        prior = _prefill_prior(spec)
        replica = cls(spec, slot, columns, OutlierDetector(ejection), prior, PrefillQueue(), ReportedSpeed(prior))
        columns.salt[slot] = _salt(spec.name)
        for name in _CAPACITY_FIELDS:
            getattr(columns, name)[slot] = nan_if_none(getattr(spec, name))
        replica._publish_spec()
        replica._publish_prior()
        replica.prefill_queue.on_change = replica._publish_queue
        return replica

    @property
    def models(self) -> tuple[str, ...]:
        """Models of the configuration, then others that the engine lists; empty means any."""
        return tuple(dict.fromkeys((*self.spec.models, *self.listed_models)))

    def doubtful(self, streamed: bool) -> bool:
        """Return whether its last answers of a kind broke off or were short; one short one is enough beside those of
        the other kind.
        """
        short = self.short_answers[streamed]
        is_short = short > 0 and (short >= SUSPECT_AFTER or self.short_answers[not streamed] >= SUSPECT_AFTER)
        return is_short or self.health.breaks(streamed)

    def context_tokens(self, model: str | None) -> int | None:
        """Return the longest prompt with its answer for `model`, by a name that it lists or any; `None` is unknown."""
        contexts = self.contexts
        if not contexts:
            return None
        tokens = contexts.get(model or "")
        return max(contexts.values()) if tokens is None else tokens

    def add_tpot_objective(self, slo_tpot_s: float) -> None:
        """Count a request in flight with an objective per output token."""
        insort(self.tpot_objectives, slo_tpot_s)
        self._publish_tpot_objective()

    def remove_tpot_objective(self, slo_tpot_s: float) -> None:
        """Count the end of that request."""
        self.tpot_objectives.remove(slo_tpot_s)
        self._publish_tpot_objective()

    def _publish_tpot_objective(self) -> None:
        if self.slot >= 0:
            self.columns.slo_tpot_s[self.slot] = self.tpot_objectives[0] if self.tpot_objectives else nan

    def update(self, spec: ReplicaSpec) -> None:
        """Apply changed priors; an unchanged one must not undo what the engine has reported."""
        columns = self.columns
        for name in _CAPACITY_FIELDS:
            if getattr(spec, name) != getattr(self.spec, name):
                getattr(columns, name)[self.slot] = nan_if_none(getattr(spec, name))
        self.spec = spec
        self._publish_spec()
        prior = _prefill_prior(spec)
        if prior != self.prior:
            # What was learned was the error of the old one.
            self.prior = prior
            self.reported_speed = ReportedSpeed(prior)
            self._publish_prior()
            self.prefill_queue.reset_speed()

    def short_kv_tokens(self, request: RouteRequest) -> float:
        """Return the tokens of KV memory that others have to free before a request may run; 0 where it fits."""
        return self.kv_demand.short_tokens(request, self.columns.kv_capacity_tokens.item(self.slot))

    def kv_wait_s(self, request: RouteRequest | None, uncached_tokens: float = 0.0) -> float:
        """Return how long a request dispatched now waits for KV memory, or the last one there, s."""
        if self not in self.contended:
            return 0.0
        return self.kv_demand.wait_s(request, uncached_tokens, self.columns.kv_capacity_tokens.item(self.slot))

    def on_kv_demand(self) -> None:
        """Record whether its KV pool is contended, after each change of what is in flight."""
        if self.slot >= 0 and self.kv_demand.is_contended(self.columns.kv_capacity_tokens.item(self.slot)):
            self.contended[self] = None
        elif self.contended:
            self.contended.pop(self, None)

    def learn_gap(self, spent_s: float, *, tokens: int, mark: float) -> None:
        """Record a whole answer of two or more tokens, `spent_s` from its first to its last."""
        if self.token_gap is not None and self.slot >= 0:
            self.token_gap.on_answer(spent_s, tokens=tokens, mark=mark)
            self.columns.token_gap_s[self.slot] = self.token_gap.alone_s

    def forget_speed(self, *, engine_s: float) -> None:
        """Forget what was learned of its speed with the time without a first token."""
        if self.prefill_queue.speed.age(engine_s=engine_s):
            self._publish_queue()

    def _publish_queue(self) -> None:
        slot, columns, queue = self.slot, self.columns, self.prefill_queue
        if slot < 0:
            return
        speed = queue.speed
        columns.drained_at_s[slot] = queue.drained_at_s
        columns.head_due_s[slot] = queue.head_due_s
        columns.waiting_prefill_s[slot] = queue.backlog_s
        columns.slowdown[slot] = speed.factor
        if speed.is_slow:
            self.slow[self] = None
        elif self.slow and speed.is_forgotten:
            self.slow.pop(self, None)
        if speed.parallel.count > 1:
            self.parallel[self] = None
        elif self.parallel:
            self.parallel.pop(self, None)
        shared_s = queue.shared_s
        if shared_s or columns.shared_s.item(slot):
            columns.shared_s[slot] = shared_s
            columns.head_shared_s[slot] = queue.head_shared_s
            columns.head_began_s[slot] = queue.head_began_s

    def _publish_spec(self) -> None:
        slot, columns, accelerator = self.slot, self.columns, self.spec.accelerator
        columns.connect_round_trips[slot] = connect_round_trips(tls=self.spec.tls)
        columns.accelerator[slot] = nan if accelerator is None else accelerator_code(accelerator)

    def _publish_prior(self) -> None:
        slot, columns, prior = self.slot, self.columns, self.prior
        columns.prefill_base_s[slot] = prior.base_s
        columns.prefill_token_s[slot] = 1.0 / prior.tokens_per_s
        columns.prefill_kappa_s[slot] = prior.kappa_s


def _salt(name: str) -> int:
    """64 bits of the name, the same in every process and on every machine."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def _prefill_prior(spec: ReplicaSpec) -> PrefillPrior:
    return PrefillPrior.of(spec.prefill_base_s, spec.prefill_tokens_per_s, spec.prefill_kappa_s)
