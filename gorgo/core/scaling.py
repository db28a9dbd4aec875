"""How many replicas a region wants of a model, by the share of requests that would meet their objective.

Owns the decision, one `ScalingSignal` for all groups of replicas. A group is the replicas of one region whose first
model is the same. Leaves what is read of the Router to `router_parts`, and starting replicas to others.

Theory of operation. Utilisation does not say when requests become late: an engine that is always busy may be on time,
and one that is busy half the time late after a burst. So the last requests of a group are served again, in virtual
time, by n replicas: each has its learned prefill time and its stay, and waits for a prefill to end and for a place in a
batch. The wanted number is the least n for which the objective's share of them has a first token in time.

- Forecast. A replica that is asked for now serves after `startup_s`. So the requests are served again at the rate of
  work that is expected then: a level and a trend (Holt) of the prefill time that arrives per second, and on top the
  error that such forecasts had. Work counts whether it was dispatched or shed, because what is shed is in no queue.
  Of several routers that share their load each dispatches a part: its work counts as many times as there are requests
  in flight for one of its own.
- Backlog. What will still wait when the replicas are there has to be worked off too, within another `startup_s`.
  Replicas that were asked for count from when they serve.
- Correction. The replay has one queue for all replicas, which no router reaches: prefixes bind requests to replicas.
  So what it says of the present fleet, less what was measured there, is learned and added to the objective.
- What cannot be in time on an idle replica is served again as load, and counts neither as in time nor as late: no
  number of replicas helps it.
- Hysteresis. More are wanted at once, fewer only if no decision of the last two start-ups wanted as many: a replica
  that goes takes its cache along, and costs a start-up to have back.

A router that has just started knows nothing, and wants what serves. So does one whose group is empty or cut off.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from heapq import heapify, heapreplace
from math import ceil, exp, inf, sqrt
from typing import Any, NamedTuple

#: Most time between two decisions, s, and their least number in a start-up: little of it passes unseen.
DECISION_INTERVAL_S, DECISIONS_PER_STARTUP = 10.0, 8
#: Requests that are served again: the 5 % that may be late are a dozen. One replay takes about 0.3 ms.
REPLAYED = 256
#: Requests that are read at one decision: those of some groups, in about a millisecond.
READ_AT_ONCE = 4 * REPLAYED
#: Requests before which the replay says nothing; a replica is then taken to prefill for so large a share of its time.
FIRST_REQUESTS, FIRST_SHARE = 32, 0.6
#: Age beyond which a request says nothing of the present traffic, s.
REMEMBERED_S = 1800.0
#: Decisions after which a learned error weighs 1 / e: five minutes and half an hour.
CORRECTION_MEMORY, ERROR_MEMORY = 30.0, 180.0
#: A correction beyond this would be of another cause than imbalance, as an engine that fails.
MOST_CORRECTION = 0.04
#: Standard errors of forecasts by which the expected rate is raised.
FORECAST_ERRORS = 1.0
#: Start-ups for which a higher number is remembered.
HOLD_STARTUPS = 2.0


class Group(NamedTuple):
    """Replicas that are scaled as one: those of a region whose first model is the same; `None` lists no model."""

    region: str
    model: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLimits:
    """What a group of replicas has to reach.

    Parameters
    ----------
    ttft_s:
        Time within which a first token has to be there.
    share:
        Share of the requests that have it by then.
    startup_s:
        From the wish for one more replica to its first answer.
    min_replicas, max_replicas:
        Bounds of the wanted number.
    """

    ttft_s: float
    share: float = 0.95
    startup_s: float = 240.0
    min_replicas: int = 1
    max_replicas: int = 64

    @property
    def interval_s(self) -> float:
        """Return the time between two decisions, s."""
        return min(DECISION_INTERVAL_S, self.startup_s / DECISIONS_PER_STARTUP)


class ServedRequest(NamedTuple):
    """A request that had its first token: when it arrived, and how long its parts took, s.

    `prefill_s` is the engine's time for its prompt, `ttft_s` with every wait, `stay_s` from the begin of its prefill to
    its end, and `network_s` what is neither.
    """

    arrived_s: float
    prefill_s: float
    network_s: float
    stay_s: float
    ttft_s: float

    @property
    def ended_s(self) -> float:
        """Return when it ended."""
        return self.arrived_s + self.ttft_s - self.prefill_s + self.stay_s

    @property
    def idle_s(self) -> float:
        """Return the time of its first token on an idle replica, s."""
        return self.prefill_s + self.network_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvidence:
    """What a Router knows of one group now.

    Parameters
    ----------
    replicas:
        That a request may be dispatched to.
    work:
        Prefill time that was dispatched per second of late, s/s: so many replicas would do nothing but prefill.
    shed_s:
        Prefill time of the requests that were shed since the Router's start.
    own_requests, requests:
        In flight: dispatched by this Router, and by all routers that share their load.
    backlog_s:
        Prefill time that waits, at the engines and at the router.
    prefills:
        Prefills that a replica does at once.
    slots:
        Requests that a replica runs at once; infinite if unknown.
    """

    replicas: int
    work: float = 0.0
    shed_s: float = 0.0
    own_requests: float = 0.0
    requests: float = 0.0
    backlog_s: float = 0.0
    prefills: int = 1
    slots: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedReplicas:
    """One decision, with its reasons; `None` is unknown.

    Parameters
    ----------
    region, model:
        Of the group.
    wanted:
        Replicas, with the hysteresis.
    needed:
        Without it.
    replicas:
        That serve now.
    work, expected_work:
        Prefill time that arrives per second: now, and after a start-up with the error of such forecasts.
    attainment, expected_attainment:
        Share of the last requests within the objective, of those that an idle replica serves in time: measured, and as
        predicted for the wanted number.
    correction:
        Added to the objective.
    backlog_s:
        Prefill time that will wait after a start-up.
    """

    region: str
    model: str | None
    wanted: int
    needed: int
    replicas: int
    work: float
    expected_work: float
    attainment: float | None
    expected_attainment: float | None
    correction: float
    backlog_s: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class ScalingSignal:
    """The wanted replicas of every group.

    Parameters
    ----------
    limits:
        May be replaced.

    Example
    -------
    >>> signal = ScalingSignal(ScalingLimits(ttft_s=2.0, startup_s=60.0))
    >>> group = Group("eu", "m")
    >>> wanted = signal.decide({group: GroupEvidence(replicas=2, work=0.0)}, {}, now=0.0)
    >>> wanted[group].wanted, wanted[group].needed  # fewer only after two start-ups
    (2, 1)
    >>> for second in range(10, 200, 10):
    ...     wanted = signal.decide({group: GroupEvidence(replicas=2, work=2.4)}, {}, now=float(second))
    >>> wanted[group].wanted  # 2.4 s of prefill arrive per second, two of which are served: the rest waits
    6
    """

    def __init__(self, limits: ScalingLimits) -> None:
        self.limits = limits
        self._groups: dict[Group, _GroupState] = {}
        #: The last decisions.
        self.wanted: dict[Group, WantedReplicas] = {}

    def decide(
        self,
        evidence: Mapping[Group, GroupEvidence],
        served: Mapping[Group, Sequence[ServedRequest]],
        *,
        now: float,
    ) -> Mapping[Group, WantedReplicas]:
        """Decide for each group of `evidence`; `served` has the requests since the last decision. Others are forgotten.

        A group with no replica left is retained for as long as a number is remembered: its replicas may be restarting.
        """
        limits = self.limits
        for group in evidence:
            if group not in self._groups:
                self._groups[group] = _GroupState()
        for group, state in list(self._groups.items()):
            group_evidence = evidence.get(group)
            if group_evidence is None:
                if now - state.updated_s > HOLD_STARTUPS * limits.startup_s:
                    del self._groups[group]
                    self.wanted.pop(group, None)
                continue
            self.wanted[group] = state.decide(group, group_evidence, served.get(group, ()), limits, now=now)
        return self.wanted


class _GroupState:
    """What is remembered of one group."""

    __slots__ = (
        *("_correction", "_needed", "_own_requests", "_rate", "_replicas_since", "_requests", "_served", "_shed_s"),
        "updated_s",
    )

    def __init__(self) -> None:
        self._rate = RateForecast()
        #: The last requests.
        self._served: deque[ServedRequest] = deque(maxlen=REPLAYED)
        #: Needed numbers of the last decisions with their times, ascending in time.
        self._needed: deque[tuple[float, int]] = deque()
        self._correction = 0.0
        self._shed_s: float | None = None
        #: In flight at the last decisions, of this Router and of all; newer ones weigh more.
        self._own_requests = self._requests = 0.0
        self._replicas_since = (0, -inf)
        self.updated_s = -inf

    def decide(
        self,
        group: Group,
        evidence: GroupEvidence,
        served: Sequence[ServedRequest],
        limits: ScalingLimits,
        *,
        now: float,
    ) -> WantedReplicas:
        first = not self._needed
        offered = (evidence.work + self._shed_rate(evidence.shed_s, now)) * self._routers(evidence)
        self._remember(evidence, served, now)
        if first:
            # As many as there are until something is known: the router may be new, and the fleet as it should be.
            self._needed.append((now, min(max(evidence.replicas, limits.min_replicas), limits.max_replicas)))
        if evidence.replicas or not self._rate.known:
            self._rate.observe(offered, lead_s=limits.startup_s, now=now)
        present, expected = self._rate.level, self._rate.expected(limits.startup_s)
        attainment = self._attainment(limits)
        backlog_s = self._backlog_s(evidence, limits, present, expected, now)
        replay = self._replay(evidence, limits, max(present, expected))
        self._correct(evidence, limits, attainment)
        needed = self._least(evidence, limits, replay, max(present, expected), backlog_s)
        if not evidence.replicas:
            needed = max(needed, self._needed[-1][1])
        wanted = self._with_hysteresis(needed, limits, now)
        self.updated_s = now
        return WantedReplicas(
            region=group.region,
            model=group.model,
            wanted=wanted,
            needed=needed,
            replicas=evidence.replicas,
            work=present,
            expected_work=max(present, expected),
            attainment=attainment,
            expected_attainment=None if replay is None else replay.share(wanted),
            correction=self._correction,
            backlog_s=backlog_s,
        )

    def _shed_rate(self, shed_s: float, now: float) -> float:
        """Return the prefill time that was shed per second since the last decision; replicas that leave take theirs."""
        before, self._shed_s = self._shed_s, shed_s
        if before is None or now <= self.updated_s:
            return 0.0
        return max(0.0, shed_s - before) / (now - self.updated_s)

    def _routers(self, evidence: GroupEvidence) -> float:
        """Return how many times the load of this Router all routers have."""
        faded_by = exp(-1.0 / CORRECTION_MEMORY)
        self._own_requests = self._own_requests * faded_by + evidence.own_requests
        self._requests = self._requests * faded_by + evidence.requests
        return self._requests / self._own_requests if self._own_requests > 0.0 else 1.0

    def _remember(self, evidence: GroupEvidence, served: Sequence[ServedRequest], now: float) -> None:
        self._served.extend(served)
        while self._served and self._served[0].arrived_s < now - REMEMBERED_S:
            self._served.popleft()
        if evidence.replicas != self._replicas_since[0]:
            self._replicas_since = evidence.replicas, now

    def _attainment(self, limits: ScalingLimits) -> float | None:
        """Return the share of the last requests in time, of those that an idle replica serves in time."""
        in_time = [one.ttft_s <= limits.ttft_s for one in self._served if one.idle_s <= limits.ttft_s]
        return sum(in_time) / len(in_time) if len(in_time) >= FIRST_REQUESTS else None

    def _replay(self, evidence: GroupEvidence, limits: ScalingLimits, work: float) -> ServedAgain | None:
        """Return the last requests as they would arrive at another rate of work; `None` while there are too few."""
        if sum(one.idle_s <= limits.ttft_s for one in self._served) < FIRST_REQUESTS:
            return None
        # Of this router alone: other routers of the group see what is theirs.
        ends = [one.ended_s for one in self._served]
        span_s = max(ends) - min(ends)
        usual = sum(one.prefill_s for one in self._served) / evidence.prefills
        if usual <= 0.0 or span_s <= 0.0:
            return None
        return ServedAgain.of(self._served, evidence, ttft_s=limits.ttft_s, speed=work * span_s / usual)

    def _correct(self, evidence: GroupEvidence, limits: ScalingLimits, attainment: float | None) -> None:
        """Learn how much better the replay of the last requests is than they were, while the fleet was as it is."""
        replicas, since_s = self._replicas_since
        if attainment is None or not replicas or since_s > self._served[0].arrived_s:
            return
        replay = ServedAgain.of(self._served, evidence, ttft_s=limits.ttft_s, speed=1.0)
        error = min(max(replay.share(replicas) - attainment, 0.0), MOST_CORRECTION)
        self._correction += (error - self._correction) / CORRECTION_MEMORY

    def _backlog_s(
        self, evidence: GroupEvidence, limits: ScalingLimits, present: float, expected: float, now: float
    ) -> float:
        """Return the prefill time that will wait after a start-up, with the replicas that are there or on their way."""
        left_s, at_s = evidence.backlog_s, now
        rate = (present + expected) / 2
        # A wish of the past is a replica from a start-up later on.
        requested = [(requested_s + limits.startup_s, number) for requested_s, number in self._needed]
        steps = [(served_s, number) for served_s, number in requested if now < served_s < now + limits.startup_s]
        serving = evidence.replicas
        for until_s, number in [*steps, (now + limits.startup_s, 0)]:
            left_s = max(0.0, left_s + (rate - serving * evidence.prefills) * (until_s - at_s))
            serving, at_s = max(serving, number), until_s
        return left_s

    def _least(
        self, evidence: GroupEvidence, limits: ScalingLimits, replay: ServedAgain | None, work: float, backlog_s: float
    ) -> int:
        """Return the least number that meets the objective and works off the backlog."""
        if replay is None:
            least = ceil(work / (FIRST_SHARE * evidence.prefills))
        else:
            share = min(limits.share + self._correction, 1.0)
            numbers = range(1, limits.max_replicas + 1)
            least = 1 + bisect_left(numbers, share, key=replay.share)
        busy = (work + backlog_s / limits.startup_s) / evidence.prefills
        return min(max(least, ceil(busy), limits.min_replicas), limits.max_replicas)

    def _with_hysteresis(self, needed: int, limits: ScalingLimits, now: float) -> int:
        """Return the highest number that was needed within the last start-ups."""
        self._needed.append((now, needed))
        while self._needed[0][0] < now - HOLD_STARTUPS * limits.startup_s:
            self._needed.popleft()
        return min(max(number for _, number in self._needed), limits.max_replicas)


class ServedAgain:
    """The last requests of a group, to be served again by any number of replicas.

    Parameters
    ----------
    arrivals:
        When each comes, ascending, s.
    requests:
        Their prefill, what the network takes, and their stay, s.
    ttft_s:
        The objective.
    prefills, slots:
        Prefills and requests of a replica at once.

    Example
    -------
    >>> twice = ServedAgain([0.0, 0.0], [(1.0, 0.1, 2.0)] * 2, ttft_s=1.5, prefills=1, slots=8.0)
    >>> twice.share(1), twice.share(2)  # the second waits for the first, or not
    (0.5, 1.0)
    """

    def __init__(
        self,
        arrivals: Sequence[float],
        requests: Sequence[tuple[float, float, float]],
        *,
        ttft_s: float,
        prefills: int,
        slots: float,
    ) -> None:
        self._arrivals = arrivals
        self._requests = requests
        self._ttft_s = ttft_s
        self._prefills = prefills
        self._slots = slots
        self._shares: dict[int, float] = {}

    @classmethod
    def of(
        cls, served: Sequence[ServedRequest], evidence: GroupEvidence, *, ttft_s: float, speed: float
    ) -> ServedAgain:
        """Return the requests as they arrive at `speed` times their rate."""
        ordered = sorted(served)
        first_s = ordered[0].arrived_s
        factor = 1.0 / max(speed, 1e-6)
        return cls(
            [(one.arrived_s - first_s) * factor for one in ordered],
            [(one.prefill_s, one.network_s, one.stay_s) for one in ordered],
            ttft_s=ttft_s,
            prefills=evidence.prefills,
            slots=evidence.slots,
        )

    def share(self, replicas: int) -> float:
        """Return the share with a first token in time, of those that can be, if so many replicas serve all in order."""
        share = self._shares.get(replicas)
        if share is None:
            share = self._shares[replicas] = self._served_again(replicas)
        return share

    def _served_again(self, replicas: int) -> float:
        if replicas < 1:
            return 0.0
        count = len(self._arrivals)
        engines = [-inf] * min(replicas * self._prefills, count)
        places = [-inf] * min(int(min(replicas * self._slots, float(count))), count)
        if not places:
            return 0.0
        heapify(engines)
        in_time = feasible = 0
        for arrival_s, (prefill_s, network_s, stay_s) in zip(self._arrivals, self._requests, strict=True):
            begin_s = max(arrival_s, engines[0], places[0])
            heapreplace(engines, begin_s + prefill_s)
            heapreplace(places, begin_s + stay_s)
            if prefill_s + network_s <= self._ttft_s:
                feasible += 1
                in_time += begin_s + prefill_s + network_s - arrival_s <= self._ttft_s
        return in_time / feasible if feasible else 1.0


class RateForecast:
    """A rate with its trend, and how wrong earlier forecasts of it were.

    Theory of operation. Holt's level and trend, with memories in proportion to the time ahead: the level's is half of
    it, the trend's four times, so that a trend is of the day and not of the last minute. Each forecast is compared with
    the level at its time; only what it was too low by counts, as a share of that level: a surprise of the day adds
    little at night.

    Example
    -------
    >>> rate = RateForecast()
    >>> for second in range(0, 6000, 10):
    ...     rate.observe(second / 1000, lead_s=240.0, now=float(second))
    >>> round(rate.level, 2), round(rate.expected(240.0), 2)
    (5.99, 6.65)
    """

    __slots__ = ("_due", "_error_squared", "_now", "_trend", "known", "level")

    def __init__(self) -> None:
        self.level = 0.0
        self.known = False
        self._trend = 0.0
        self._now = -inf
        self._error_squared = 0.0
        #: Forecasts whose time is still to come: that time, and the rate.
        self._due: deque[tuple[float, float]] = deque()

    def observe(self, rate: float, *, lead_s: float, now: float) -> None:
        """Record the rate of now; forecasts are for `lead_s` ahead."""
        if not self.known:
            self.level, self._now, self.known = rate, now, True
            return
        passed_s = now - self._now
        if passed_s <= 0.0:
            return
        self._now = now
        ahead = self.level + self._trend * passed_s
        level = ahead + (1.0 - exp(-passed_s / max(lead_s / 2, 1e-9))) * (rate - ahead)
        trend_weight = 1.0 - exp(-passed_s / max(4 * lead_s, 1e-9))
        self._trend += trend_weight * ((level - self.level) / passed_s - self._trend)
        self.level = max(0.0, level)
        while self._due and self._due[0][0] <= now:
            _, forecast = self._due.popleft()
            short = max(0.0, 1.0 - forecast / self.level) if self.level else 0.0
            self._error_squared += (short * short - self._error_squared) / ERROR_MEMORY
        self._due.append((now + lead_s, self._ahead(lead_s)))

    def expected(self, lead_s: float) -> float:
        """Return the rate of then, with the error that such forecasts have."""
        return self._ahead(lead_s) + FORECAST_ERRORS * sqrt(self._error_squared) * self.level

    def _ahead(self, lead_s: float) -> float:
        return max(0.0, self.level + self._trend * lead_s)
