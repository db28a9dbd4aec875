"""How long prefills of a replica take: by its priors, by what was dispatched lately, and by what was learned.

Owns the formula P(u, c) of the cost in milliseconds, the same for one replica and for columns of them. Leaves decoding
to `core.latency.decode`.

- `PrefillPrior` is the prediction before any experience.
- `with_prefill` and `faded` keep the share of an engine's time that its prefills take.
- `PrefillSpeed` is the learned factor on the prior, by the times of first tokens.
- `ParallelPrefills` is the learned number of prefills that it does at once.
- `ReportedSpeed` is the same factor by the engine's counters, from which learning starts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import exp, inf, isfinite, sqrt
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gorgo.core.backoff import backoff_s
from gorgo.core.numeric import Floats, clamp
from gorgo.core.record import mutable_record, record

#: A number, or a column of them.
Value = TypeVar("Value", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class PrefillPrior:
    """Constant, linear and quadratic (attention) part of a prefill.

    Parameters
    ----------
    base_s:
        Of any prefill, s.
    tokens_per_s:
        Linear rate.
    kappa_s:
        Per pair of a new token and one that it attends to, s.
    known:
        Whether it was configured. The defaults are those of one GPU and model (2x L40S, Qwen3.5-35B-A3B FP8) and any
        other engine may differ from them by a factor, so what is learned outweighs them ten times sooner.

    Example
    -------
    >>> round(PrefillPrior().seconds(11_500.0, 0.0), 3)
    1.118
    """

    base_s: float = 0.012
    tokens_per_s: float = 11_500.0
    kappa_s: float = 1.6e-9
    known: bool = False

    @classmethod
    def of(cls, base_s: float | None, tokens_per_s: float | None, kappa_s: float | None) -> PrefillPrior:
        """Defaults where nothing is given. The rate is what makes a prior: it is nearly all of the time."""
        default = cls()
        return cls(
            default.base_s if base_s is None else base_s,
            default.tokens_per_s if tokens_per_s is None else tokens_per_s,
            default.kappa_s if kappa_s is None else kappa_s,
            known=tokens_per_s is not None,
        )

    def seconds(self, new_tokens: float, cached_tokens: float) -> float:
        """P(u, c): time to prefill `new_tokens` behind `cached_tokens`."""
        return prefill_s(self.base_s, 1.0 / self.tokens_per_s, self.kappa_s, new_tokens, cached_tokens)


def prefill_s(base_s: Value, token_s: Value, kappa_s: Value, new_tokens: Value, cached_tokens: Value) -> Value:
    """base + u / rate + kappa * u * (c + u / 2), with `token_s` = 1 / rate."""
    return base_s + new_tokens * (token_s + kappa_s * (cached_tokens + new_tokens / 2))


# Share of an engine's time that its prefills take, from what was dispatched to it lately.
#
# Theory of operation. A prefill stalls all that decodes, so an engine that spends the share s of its time on prefills
# decodes for 1 - s of it. Requests in flight say how full the batch is now; s says how often it will be stalled while
# a new request decodes. Each dispatch adds its predicted prefill over `FADE_S`, and what was added fades with that
# time: in a steady stream the sum is s. It may exceed 1 for a moment, after long prompts in a row.
#
# The fade is (1 + x / 4)^-4 for x = age / `FADE_S`, which is e^-x where dispatches are dense. Multiplication and
# division give rows and columns the same bits; an exponential would not.


#: Memory, s: many prompts, and no longer than load stays as it is.
FADE_S = 30.0
_RATE = 0.25 / FADE_S
#: As arrays: numpy makes one of a Python number at each use, which takes as long as half the arithmetic.
_ONE, _RATES = np.array(1.0), np.array(_RATE)


def faded(share: float, age_s: float) -> float:
    """Return what is left of a share after some time.

    Example
    -------
    >>> faded(0.5, 0.0), round(faded(0.5, 30.0), 3)
    (0.5, 0.205)
    """
    left = 1.0 / (1.0 + age_s * _RATE)
    left *= left
    return share * (left * left)


def with_prefill(share: float, age_s: float, prefill_s: float) -> float:
    """Return the share after one more dispatch; what was before is `age_s` old."""
    return faded(share, age_s) + prefill_s / FADE_S


def shares_of_columns(shares: Floats, since_s: Floats, now: float) -> Floats:
    """Return the present shares of all candidates, each the same to the last bit as `faded`."""
    left: Floats = _ONE / (_ONE + (now - since_s) * _RATES)
    left *= left
    return shares * (left * left)


def mean_of_rows(shares: Sequence[float]) -> float:
    """Return the mean of a few, the same to the last bit as `mean_of_columns`; `sum` rounds otherwise since 3.12."""
    total = 0.0
    for share in shares:
        total += share
    return total / len(shares)


def mean_of_columns(shares: Floats) -> float:
    """Return the mean, added in order; `numpy.sum` adds in pairs."""
    return float(shares.cumsum().item(-1)) / len(shares)


# The learned prefill factor of a replica: how much slower than its prior it is, by the times of its first tokens.
#
# A prior may be wrong by a constant factor, and a replica may be slow for a while (throttled, shared, failing). Both
# show in the time from one first token to the next, or from an arrival to its first token.
#
# Theory of operation. All times are the engine's: measured here, less half a round trip. A request that arrived well
# before the previous first token has had the engine since then, so the time between the two tokens is its prefill. A
# later one had to wait for the step in progress (5 ms in the mean) and then had the engine. While an older request is
# still queued, it is unknown how much of the time went to that one: both count together when the older one has its
# token. Engines that end several prefills in one step have their tokens at one time and in any order, so a short
# prompt passes a long one that is as good as done. Time is left out while a request of another router waits there.
# Tokens that come together count, the later ones with nothing, because their prefill was in the first one's time. Sums
# decay with the work done, not with time: an idle replica forgets nothing.
#
# There are two averages, because no single one is both steady and quick. The steady one leans on the prior and
# remembers long: where the prior is about right, each change of the factor would move requests to and fro. But its
# lean never fades, so that a replica three times slower would look 2.3 times slower for ever. The quick one leans on
# the prior for a few requests only and remembers half as long; it counts where it is further from the prior than noise
# takes it.
#
# A stall (a stopped process, a lost path) is no speed. What stalls together has its tokens together, of which the first
# alone counts; a request under which a probe failed counts for nothing. And while a replica is not used because it
# looks slow, nothing would ever correct that. So what was learned of one that looks `NOISE` times slower than its prior
# goes back to it with the time without a first token. One slow prefill may be a stall and is soon forgotten. A replica
# that is slow shows it in each prefill, so each further one in a row doubles the time.
#
# Without a configured prior, learning starts from the speed that the engine reports (`ReportedSpeed`).
# The reported speed has the weight of a prior. Samples stay in seconds of the default prior, so no sample counts twice
# and no queued prefill changes its length.


#: Prefill work after which a sample weighs 1 / e, and weight of "as fast as the prior says", both in s of work.
STEADY_MEMORY_S, STEADY_TRUST_S = 10.0, 5.0
QUICK_MEMORY_S, QUICK_TRUST_S = 5.0, 0.5
#: A quick average beyond this, or below its inverse, is no noise.
NOISE = 2.0
#: Mean rest of the step in progress when a request arrives: half a decode iteration.
STEP_IN_PROGRESS_S = 0.005
#: Requests that may pass one: a stuck one is passed until it fails.
MOST_PASSED = 64
#: Time without a first token after which a replica that looks slow has lost 1 - 1 / e of what was learned of it, s: one
#: stall of many seconds is forgotten within twenty. It doubles with each further slow prefill in a row, so often at
#: most: a throttled replica is tried again within two minutes. Without doubling the p95 E2E of `slow-replica` is 1.5
#: times that of full knowledge in simulation.
FORGET_S, MOST_DOUBLINGS = 3.0, 5
#: Factor on the start down to which it goes.
FORGOTTEN = 1.05
#: Clamp: beyond it the prior is for another engine.
SLOWEST, FASTEST = 10.0, 0.1


class PrefillSpeed:
    """The factor s of one replica: its prefills take s times what the prior says.

    Example
    -------
    >>> speed = PrefillSpeed()
    >>> for second in range(1, 10):
    ...     speed.on_first_token(engine_s=3.0 * second, arrived_s=0.0, prior_s=1.0, head=True)
    >>> 2.5 < speed.factor < 3.0
    True
    """

    __slots__ = (
        *("_passed", "_quick", "_slow", "_start", "_steady"),
        *("aged_s", "factor", "is_forgotten", "is_slow", "last_s", "parallel"),
    )

    def __init__(self) -> None:
        self.factor = 1.0
        #: Prefills take much longer than where learning started, or about as long.
        self.is_slow, self.is_forgotten = False, True
        #: How many prefills the engine does at once.
        self.parallel = ParallelPrefills()
        self._start = 1.0
        #: When the engine produced the last first token that was counted.
        self.last_s = -inf
        #: Until when the time without one has been counted.
        self.aged_s = -inf
        #: Slow prefills in a row.
        self._slow = 0
        #: Of the requests that have passed an older one since: first token, prior, end of others' work.
        self._passed: list[tuple[float, float, float]] = []
        self._steady = _Average(STEADY_MEMORY_S, STEADY_TRUST_S)
        self._quick = _Average(QUICK_MEMORY_S, QUICK_TRUST_S)

    def on_first_token(
        self,
        *,
        engine_s: float,
        arrived_s: float,
        prior_s: float,
        head: bool,
        shared_until_s: float = -inf,
        arrival: Arrival | None = None,
        unseen: tuple[float, float] | None = None,
        in_turn: bool = True,
    ) -> None:
        """The first token of a request that should take `prior_s`; `head` if no older one still waits for its own.

        Until `shared_until_s` the engine had prefills of other routers. `arrival` is the request's place among others.
        `unseen` is when the engine began with those directly before it that have no visible end, and their prior, s.
        The time is that of this prefill only if those before it had theirs `in_turn`.
        """
        if arrival is not None and shared_until_s <= arrived_s:
            self.parallel.on_first_token(arrival, arrived_s=arrived_s, engine_s=engine_s, prior_s=prior_s)
            if self.parallel.count > 1:
                self._weigh()
        else:
            self.parallel.on_end(engine_s)
        if not head:
            self._pass(engine_s, prior_s, shared_until_s)
            return
        begun_s = max(arrived_s, self.last_s)
        if unseen is not None:
            begun_s, prior_s = max(unseen[0], self.last_s), prior_s + unseen[1]
        spent_s = engine_s - begun_s
        if arrived_s + STEP_IN_PROGRESS_S > self.last_s:
            spent_s -= STEP_IN_PROGRESS_S
        for passed_s, passed_prior_s, passed_shared_s in self._passed:
            if passed_s > begun_s:
                prior_s += passed_prior_s
                shared_until_s = max(shared_until_s, passed_shared_s)
        if in_turn and shared_until_s <= begun_s:
            self._learn(spent_s, prior_s)
        self._begin(engine_s)

    def age(self, *, engine_s: float) -> bool:
        """Forget with the time without a first token; return whether the factor may be another."""
        idle_s = engine_s - (self.last_s if self.last_s > self.aged_s else self.aged_s)
        if not 0.0 < idle_s < inf:
            return False
        self.aged_s = engine_s
        forget_s = FORGET_S * (1 << min(max(self._slow - 1, 0), MOST_DOUBLINGS))
        left = exp(-idle_s / forget_s)
        self._steady.fade(left)
        self._quick.fade(left)
        if self.parallel.count > 1:
            return False  # the factor is that of prefills beside each other, which does not fade
        self._weigh()
        return True

    @property
    def samples(self) -> tuple[float, float]:
        """Time spent and time by the prior, s, both fading."""
        return self._steady.sums if self.parallel.count == 1 else self.parallel.sums

    def set_prior(self, factor: float) -> None:
        """The engine says that its prefills take `factor` times the prior."""
        self._start = min(max(factor, FASTEST), SLOWEST)
        self._weigh()

    def _pass(self, engine_s: float, prior_s: float, shared_until_s: float) -> None:
        """Retain a token that came before an older one's; of too many nothing is learned."""
        self._passed.append((engine_s, prior_s, shared_until_s))
        if len(self._passed) > MOST_PASSED:
            self._begin(engine_s)

    def _begin(self, engine_s: float) -> None:
        self.last_s = engine_s
        if self._passed:
            self._passed = []

    def _learn(self, spent_s: float, prior_s: float) -> None:
        self._steady.learn(spent_s, prior_s)
        self._quick.learn(spent_s, prior_s)
        usual_s = prior_s * self._start
        if spent_s > NOISE * usual_s:
            self._slow += 1
        elif spent_s > FASTEST * usual_s:  # else its prefill was in the time of another
            self._slow = 0
        self._weigh()

    def _weigh(self) -> None:
        start = self._start
        if self.parallel.count > 1:
            # Between two first tokens there is no one prefill.
            ratio = self.parallel.factor(start)
        else:
            ratio = self._quick.value(start)
            if 1.0 / NOISE < ratio / start < NOISE:
                ratio = self._steady.value(start)
        self.factor = ratio = clamp(ratio, FASTEST, SLOWEST)
        self.is_slow, self.is_forgotten = ratio > NOISE * start, ratio <= FORGOTTEN * start


class _Average:
    """Time spent per time of the prior, with a fading memory."""

    __slots__ = ("_done_s", "_memory_s", "_spent_s", "_trust_s")

    def __init__(self, memory_s: float, trust_s: float) -> None:
        self._memory_s, self._trust_s = memory_s, trust_s
        self._spent_s = 0.0
        self._done_s = 0.0

    def learn(self, spent_s: float, prior_s: float) -> None:
        decay = exp(-prior_s / self._memory_s)
        self._spent_s = self._spent_s * decay + spent_s
        self._done_s = self._done_s * decay + prior_s

    def fade(self, left: float) -> None:
        self._spent_s *= left
        self._done_s *= left

    @property
    def sums(self) -> tuple[float, float]:
        return self._spent_s, self._done_s

    def value(self, start: float) -> float:
        """`start` as long as nothing was learned."""
        return (self._spent_s + self._trust_s * start) / (self._done_s + self._trust_s)


# How many prefills an engine does at once, learned from the times of first tokens: 1 for an engine with one queue.
#
# Several engines behind one URL (data-parallel ranks, a gateway) prefill in parallel. Nothing reports that, and taken
# for one serial queue they look stuck as soon as two requests overlap.
#
# Theory of operation. An engine that does `count` prefills at once lets a request wait until fewer than `count` of
# those before it are left. The times of first tokens say when that was at any count. The time of a request less its own
# prefill says how long it did wait, where its own prefill is that of requests which had no reason to wait. So each
# request that would have waited less at twice the count is evidence for one of the two, and likewise at half of it.
# Evidence is summed until it is `SURE` times the noise of so many predicted prefills.
#
# Evidence needs overlap, which a queue in front of the engine prevents. So where the engine is taken for one queue,
# that queue sends rounds of two (`joins_round`) until there is a verdict, and again after a pause, which doubles with
# each verdict that there is one. The requests of a round begin together, where the two differ most, and its first one
# has not to wait. While what was seen before the first verdict speaks against one queue (`is_doubted`), a second
# prefill may begin at any time: a few requests a second wait for a round longer than they would for the engine. Where
# several go on at once, nothing is held back, and requests overlap by themselves.
#
# Prefills of answers in one piece have no visible end. They count as ended when they should be by the count, and each
# that is before a request adds the noise of a predicted prefill to its evidence.


#: A gateway with more engines than that is never full for one router.
MOST_AT_ONCE = 64
#: A prefill counts for no more than so many times as long as it should take, and so much more, s: a stall is no speed.
_MOST_SLOWER, _STALLED_S = 4.0, 0.3
#: Of a predicted prefill: how wrong the prior and the estimated cached tokens are for one request.
NOISE_SHARE = 0.3
#: Standard deviations of a verdict.
SURE = 2.0
#: Those at which one queue is doubted until a first verdict: a third of what two that begin together show. At half of
#: it engines with one queue are doubted too, by the noise of their first requests.
DOUBTED = 0.5
#: Ended prefills whose times are retained: four times as many as may go on at once.
_ENDS = 4 * MOST_AT_ONCE
#: Requests after which one weighs 1 / e as evidence, and as a prefill that had not to wait.
_EVIDENCE_MEMORY, _ALONE_MEMORY = 24.0, 12.0
#: The latter for the speed by which replicas are compared.
_LONG_MEMORY = 96.0
#: Prefill by the prior at which the speeds of replicas are compared, s: a usual one.
COMPARED_S = 0.3
#: Share of a prefill within which the requests of a round begin.
_TOGETHER = 0.25
#: First and longest pause after a verdict that the count is right, s: engines behind a URL rarely come or go.
OVERLAP_AGAIN_S, LONGEST_AGAIN_S = 1.0, 60.0


@record
class Arrival:
    """The place of a request among the prefills of its replica: how many had ended, and how many were before it.

    `unseen` of those before it have no visible end.
    """

    ended: int
    before: int
    unseen: int = 0


class _Evidence:
    """Whether requests wait as at a smaller number of prefills at once, or at a larger one."""

    __slots__ = ("_squares", "_sum")

    def __init__(self) -> None:
        self._sum = self._squares = 0.0

    def add(self, *, smaller_s: float, larger_s: float, waited_s: float, noise_s: float) -> None:
        """A request has waited, with that noise; it should have at either number."""
        apart_s = smaller_s - larger_s
        if apart_s <= 0.0:
            return
        decay = 1.0 - 1.0 / _EVIDENCE_MEMORY
        # What is beyond either is noise: no single request decides.
        beyond_s = min(max(waited_s - larger_s, -apart_s), 2.0 * apart_s)
        # Weighted by how well a request tells the two apart, as in a ratio of likelihoods.
        weight = apart_s / (noise_s * noise_s)
        self._sum = decay * self._sum + weight * (apart_s / 2.0 - beyond_s)
        self._squares = decay * decay * self._squares + weight * apart_s

    def reset(self) -> None:
        self._sum = self._squares = 0.0

    @property
    def for_larger(self) -> float:
        """Return the evidence for the larger number in standard deviations; negative for the smaller one."""
        return self._sum / sqrt(self._squares) if self._squares > 0.0 else 0.0


class _Alone:
    """How long prefills take that have not to wait: a line over their times by the prior, by least squares.

    One request says little of the slope. Times in proportion to the prior are one extreme and the same time for each
    is the other, so the fit contains half of a proportion with the weight of one request.
    """

    __slots__ = ("_decay", "_products", "_squares", "_sum_prior_s", "_sum_s", "_weight")

    def __init__(self, memory: float) -> None:
        self._decay = 1.0 - 1.0 / memory
        self._weight = self._sum_s = self._sum_prior_s = self._squares = self._products = 0.0

    def add(self, took_s: float, prior_s: float) -> None:
        decay = self._decay
        self._weight = decay * self._weight + 1.0
        self._sum_s = decay * self._sum_s + took_s
        self._sum_prior_s = decay * self._sum_prior_s + prior_s
        self._squares = decay * self._squares + prior_s * prior_s
        self._products = decay * self._products + prior_s * took_s

    @property
    def sums(self) -> tuple[float, float]:
        """Times, and times by the prior, s, both fading."""
        return self._sum_s, self._sum_prior_s

    @property
    def mean_s(self) -> float:
        """Return the mean time; infinite while unknown."""
        return self._sum_s / self._weight if self._weight > 0.0 else inf

    def prefill_s(self, prior_s: float) -> tuple[float, float] | None:
        """Return the time of a prefill and its noise, s; `None` while unknown."""
        if self._sum_prior_s <= 0.0:
            return None
        mean_s, mean_prior_s = self.mean_s, self._sum_prior_s / self._weight
        prior_weight = mean_prior_s * mean_prior_s
        varied = max(0.0, self._squares - mean_prior_s * self._sum_prior_s) + prior_weight
        product = self._products - mean_prior_s * self._sum_s + prior_weight * 0.5 * mean_s / mean_prior_s
        own_s = max(0.0, mean_s + product / varied * (prior_s - mean_prior_s))
        return own_s, max(NOISE_SHARE * max(own_s, mean_s), STEP_IN_PROGRESS_S)


class ParallelPrefills:
    """The number of one replica.

    Example
    -------
    >>> parallel = ParallelPrefills()
    >>> for second in range(0, 40, 4):  # two arrive together, and each has its first token after a second
    ...     both = [parallel.on_arrival(before) for before in (0, 1)]
    ...     for arrival in both:
    ...         parallel.on_first_token(arrival, arrived_s=second, engine_s=second + 1.0, prior_s=1.0)
    >>> parallel.count
    2
    """

    __slots__ = (
        "_alone",
        "_ended",
        "_ends",
        "_long",
        "_of_double",
        "_of_half",
        "_verdicts",
        "confirmed_until_s",
        "count",
        "mean_s",
    )

    def __init__(self) -> None:
        self.count = 1
        #: Mean time of a prefill from its begin to its first token, s; 0 while unknown.
        self.mean_s = 0.0
        #: When the last prefills ended, and how many have.
        self._ends = [-inf] * _ENDS
        self._ended = 0
        #: Of requests without a reason to wait.
        self._alone, self._long = _Alone(_ALONE_MEMORY), _Alone(_LONG_MEMORY)
        self._of_double, self._of_half = _Evidence(), _Evidence()
        #: Verdicts in a row that the count is right.
        self._verdicts = 0
        #: Until when the last of them holds: the end of the pause behind it; the past if there is none.
        self.confirmed_until_s = -inf

    def on_arrival(self, before: int, unseen: int = 0) -> Arrival:
        """Return the place of a request that arrives now behind `before` others, `unseen` without a visible end."""
        return Arrival(self._ended, before, unseen)

    def on_end(self, engine_s: float) -> None:
        """Count a prefill that has ended without a first token."""
        self._ends[self._ended % _ENDS] = engine_s
        self._ended += 1

    def on_first_token(self, arrival: Arrival, *, arrived_s: float, engine_s: float, prior_s: float) -> None:
        """Record a first token."""
        self._learn(arrival.before, arrival, arrived_s, engine_s, prior_s)
        self.on_end(engine_s)

    def waited_s(self, arrival: Arrival, count: int, *, arrived_s: float, engine_s: float) -> float:
        """Return how long a request had to wait until `engine_s` if the engine does `count` prefills at once."""
        before = arrival.before
        if before < count:
            return 0.0
        last = arrival.ended + before - count
        if last >= self._ended:
            return max(0.0, engine_s - arrived_s)
        return max(0.0, self._ends[last % _ENDS] - arrived_s) if self._ended - last <= _ENDS else 0.0

    def alone_s(self, prior_s: float) -> float | None:
        """Return the time of a prefill that has not to wait; `None` while unknown."""
        expected = self._alone.prefill_s(prior_s)
        return None if expected is None else expected[0]

    @property
    def is_doubted(self) -> bool:
        """Return whether what has been seen before the first verdict speaks against one queue."""
        return self.count == 1 and not self._verdicts and self._of_double.for_larger > DOUBTED

    def needs_evidence(self, *, engine_s: float) -> bool:
        """Return whether rounds are to show if there is one queue; without a prefill of known length they cannot."""
        return self.count == 1 and engine_s >= self.confirmed_until_s and self._alone.mean_s < inf

    def joins_round(self, queued: int, *, since_s: float) -> bool:
        """Return whether one more belongs to the round of `queued` requests, the last of which came `since_s` ago."""
        return not queued or (queued < 2 and since_s <= _TOGETHER * self._alone.mean_s)

    @property
    def sums(self) -> tuple[float, float]:
        """Time spent and time by the prior, s, both fading, where several prefills go on at once."""
        factor, (_, prior_s) = self.factor(1.0), self._alone.sums
        return factor * prior_s, prior_s

    def factor(self, start: float) -> float:
        """Return how much slower than the prior a prefill of `COMPARED_S` is beside others; `start` while unknown.

        Of one length, because the factor of what a replica happened to prefill would draw more of that to it.
        """
        expected = self._long.prefill_s(COMPARED_S)
        return start if expected is None else expected[0] / COMPARED_S

    def _learn(self, before: int, arrival: Arrival, arrived_s: float, engine_s: float, prior_s: float) -> None:
        count, half = self.count, self.count // 2
        if not before and count == 1:  # most often; a stall is no speed
            self._add_alone(min(engine_s - arrived_s, _MOST_SLOWER * self._alone.mean_s + _STALLED_S), prior_s)
            return
        waits_s = self.waited_s(arrival, count, arrived_s=arrived_s, engine_s=engine_s)
        expected = self._alone.prefill_s(prior_s)
        took_s = engine_s - arrived_s
        if expected is not None:
            took_s = min(took_s, waits_s + _MOST_SLOWER * max(expected[0], self._alone.mean_s) + _STALLED_S)
        spent_s = took_s - waits_s
        self.mean_s = spent_s if not self.mean_s else self.mean_s + (spent_s - self.mean_s) / _ALONE_MEMORY
        if before < max(1, half):
            self._add_alone(took_s, prior_s)
            return
        if expected is None:
            return
        waited_s, noise_s = took_s - expected[0], expected[1] * sqrt(1.0 + arrival.unseen)
        if before >= count and count < MOST_AT_ONCE:
            less_s = self.waited_s(arrival, 2 * count, arrived_s=arrived_s, engine_s=engine_s)
            self._of_double.add(smaller_s=waits_s, larger_s=less_s, waited_s=waited_s, noise_s=noise_s)
        if half:
            more_s = self.waited_s(arrival, half, arrived_s=arrived_s, engine_s=engine_s)
            self._of_half.add(smaller_s=more_s, larger_s=waits_s, waited_s=waited_s, noise_s=noise_s)
        self._judge(engine_s)

    def _add_alone(self, took_s: float, prior_s: float) -> None:
        self._alone.add(took_s, prior_s)
        self._long.add(took_s, prior_s)

    def _judge(self, engine_s: float) -> None:
        if self.count > 1 and self._of_half.for_larger < -SURE:
            self._set(self.count // 2)
            return
        evidence = self._of_double.for_larger
        if evidence > SURE:
            self._set(2 * self.count)
        elif evidence < -SURE:
            self._verdicts += 1
            pause_s = backoff_s(self._verdicts, first_s=OVERLAP_AGAIN_S, longest_s=LONGEST_AGAIN_S)
            self.confirmed_until_s = engine_s + pause_s
            self._of_double.reset()

    def _set(self, count: int) -> None:
        self.count, self._verdicts, self.confirmed_until_s = count, 0, -inf
        self._of_double.reset()
        self._of_half.reset()


# The reported prefill factor of an engine: how much slower than its prior it is, by its own counters.
#
# Owns the record of one replica's counters. `PrefillSpeed` starts its learning from the result.
#
# Theory of operation. The counters only grow, so two scrapes give the seconds per token in between; the first gives
# those since the engine's start, and counters that went back are a restarted engine. Seconds per token are no rate of
# a prior: they contain the constant and the attention part of all that was prefilled. So they are compared with the
# prior's seconds per token of the requests that this proxy dispatched there. The quotient is a factor on the whole
# prior: right for the present traffic, whatever its lengths. Until this proxy has dispatched enough, one usual request
# stands for them. Both sides decay with the work done, so a throttled replica shows within some scrapes.
#
# Engines with data-parallel ranks report both counters as sums over ranks: the quotient is one rank's time per
# request.


#: Fewer tokens than this since the last scrape are left for the next one: half a second's work or less.
MIN_TOKENS = 4096
#: Tokens after which a report weighs 1 / e, and the most that one weighs: some minutes of a busy replica.
MEMORY_TOKENS = 1_000_000.0
#: The same for own requests, which decay sooner: the mix changes with the hour.
MIX_MEMORY_TOKENS = 200_000.0
#: Seconds per token that an engine could mean: 10 million tokens a second to 1.
PLAUSIBLE_S = (1e-7, 1.0)
#: New and cached tokens of a usual request (a turn of a conversation), and its weight beside those really sent.
TYPICAL_NEW, TYPICAL_CACHED = 1500, 5500


class ReportedSpeed:
    """The factor by one engine's counters.

    Parameters
    ----------
    prior:
        Multiplied by the factor.

    Example
    -------
    >>> speed = ReportedSpeed(PrefillPrior())
    >>> speed.factor is None, speed.on_counters(1000, 0.1), speed.on_counters(100_000, 30.0)
    (True, False, True)
    >>> 2.5 < speed.factor < 3.5  # 300 us a token, where the prior says about 100
    True
    """

    __slots__ = ("_base", "_mix_s", "_mix_tokens", "_spent_s", "_tokens", "factor")

    def __init__(self, prior: PrefillPrior) -> None:
        #: On the prior; `None` until the engine has reported enough.
        self.factor: float | None = None
        self._base = (0.0, 0.0)
        self._tokens = self._spent_s = 0.0
        self._mix_tokens, self._mix_s = float(TYPICAL_NEW), prior.seconds(TYPICAL_NEW, TYPICAL_CACHED)

    def on_request(self, new_tokens: float, prior_s: float) -> None:
        """Add a prefill of `new_tokens` that takes `prior_s` by the prior."""
        decay = exp(-new_tokens / MIX_MEMORY_TOKENS)
        self._mix_tokens = self._mix_tokens * decay + new_tokens
        self._mix_s = self._mix_s * decay + prior_s

    def on_counters(self, tokens_total: float | None, busy_s_total: float | None) -> bool:
        """The counters as scraped; whether the factor changed."""
        if tokens_total is None or busy_s_total is None or not isfinite(tokens_total + busy_s_total):
            return False
        if tokens_total < self._base[0] or busy_s_total < self._base[1]:
            self._base = (0.0, 0.0)
        tokens, spent_s = tokens_total - self._base[0], busy_s_total - self._base[1]
        if tokens < MIN_TOKENS:
            return False
        self._base = (tokens_total, busy_s_total)
        token_s = spent_s / tokens
        if not PLAUSIBLE_S[0] <= token_s <= PLAUSIBLE_S[1]:
            return False
        decay, new = exp(-tokens / MEMORY_TOKENS), min(tokens, MEMORY_TOKENS)
        self._tokens, self._spent_s = self._tokens * decay + new, self._spent_s * decay + new * token_s
        self.factor = (self._spent_s / self._tokens) / (self._mix_s / self._mix_tokens)
        return True


# The prefill queue of one replica: predicted work before the first tokens of what was dispatched to it.
#
# Owns the requests without a first token, in order of dispatch, and three values that a cost reads. The length of one
# prefill is `prefill` and `PrefillSpeed`; what a busy replica costs is the policy's.
#
# Theory of operation. All times are the engine's: a request arrives some round trips after its dispatch, and a first
# token left half a round trip before the proxy has it. Between first tokens the time is dead reckoning: each dispatch
# adds its prefill at the end. Each first token corrects it: the engine is free after the prefills still queued.
#
# A stuck replica must not look idle when its predicted work is over. So the head of the queue has a time at which its
# first token is due, and lateness counts as work (the policy's rule). When the head leaves without a first token, the
# engine has spent on it the time until now, at most its prefill; the next one starts there.
#
# An engine serves other routers too, in one line. What they have left there at a dispatch, as they report, comes
# before the request: that long the clock runs for them, and the request is neither done nor late.
#
# An engine that does several prefills at once (`ParallelPrefills`) has no one head. A request there begins when fewer
# than that many are before it, and the engine is free for another as soon as one more would begin. It is stuck when its
# oldest request is later than a mean prefill: in parallel a short one need not be the sooner.
#
# An answer that is not streamed has no visible first token. Such a request stays queued until its prefill should be
# over, until a later one has its first token, or until it ends; it is never late.


#: A first token may be so late before its replica counts as stuck, s.
STUCK_AFTER_S = 0.3
#: Age up to which an answer in one piece says that there will be others, s: rarer ones show in little of the backlog.
MIXED_S = 10.0
#: Requests per prefill at once whose times are predicted one by one.
_MOST_PLACED = 4


@mutable_record
class _Entry:
    arrival_s: float
    #: By the prior; the learned factor is applied on use, so that it is the latest one.
    prior_s: float
    #: Whether its first token is visible.
    streamed: bool
    #: Work of other routers before it, after what is before the one ahead, s.
    shared_s: float
    #: Its place among the prefills of the replica.
    place: Arrival


class PrefillQueue:
    """Requests before their first token on one replica.

    Example
    -------
    >>> queue = PrefillQueue()
    >>> queue.add("a", arrives_s=10.0, prior_s=0.5, streamed=True)
    >>> queue.add("b", arrives_s=10.1, prior_s=0.25, streamed=True)
    >>> queue.drained_at_s, queue.head_due_s, queue.backlog_s
    (10.75, 10.5, 0.75)
    >>> queue.on_first_token("a", engine_s=11.0)  # half a second late: all that is behind it is
    >>> 11.25 < queue.drained_at_s < 11.3, round(queue.head_due_s - queue.drained_at_s, 9)
    (True, 0.0)
    """

    __slots__ = (
        "_anchor_s",
        "_entries",
        "_invisible",
        "_prior_s",
        "_silent_s",
        "_unseen_s",
        "drained_at_s",
        "head_due_s",
        "on_change",
        "shared_s",
        "speed",
    )

    def __init__(self) -> None:
        self.speed = PrefillSpeed()
        #: Called after each change of the public values.
        self.on_change: Callable[[], None] = _no_observer
        #: When the engine has done all prefills dispatched to it, or may begin with one more; in the past when it may.
        self.drained_at_s = -inf
        #: When the engine should have the first token of the head; infinite when none is expected.
        self.head_due_s = inf
        #: When the engine began with the head, if it had arrived.
        self._anchor_s = -inf
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._prior_s = 0.0
        #: Queued requests whose first token is not visible.
        self._invisible = 0
        #: When a request without a visible first token last arrived.
        self._unseen_s = -inf
        #: When the engine last did not answer a probe.
        self._silent_s = -inf
        #: Work of other routers before the queued requests, as of their dispatches, s; `drained_at_s` contains it.
        self.shared_s = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def backlog_s(self) -> float:
        """Time of the engine for the prefills of all queued requests."""
        return self.engine_time_s(self._prior_s) if self._entries else 0.0

    def engine_time_s(self, prior_s: float) -> float:
        """Return the time that a prefill takes from others, s: its own, or a share where several go on at once."""
        count = self.speed.parallel.count
        return prior_s * self.speed.factor if count == 1 else prior_s * self.speed.factor / count

    def needs_evidence(self, *, engine_s: float) -> bool:
        """Return whether rounds are to show if there is one queue; answers in one piece show nothing."""
        return not self._is_mixed(engine_s) and self.speed.parallel.needs_evidence(engine_s=engine_s)

    def is_one_queue(self, *, engine_s: float, is_usual: bool = True) -> bool:
        """Return whether the predicted work tells when the engine begins with one more; `is_usual` says if others have.

        Not where several prefills go on at once. Nor where no request has shown lately that there is one queue, and
        either others do several or there are answers in one piece, which no first token corrects.
        """
        parallel = self.speed.parallel
        if parallel.count > 1:
            return False
        return (is_usual and not self._is_mixed(engine_s)) or engine_s < parallel.confirmed_until_s

    def one_queue_until_s(self, *, engine_s: float, is_usual: bool = True) -> float:
        """Return when `is_one_queue` ends without an event; infinite if it does not."""
        return inf if is_usual and not self._is_mixed(engine_s) else self.speed.parallel.confirmed_until_s

    def _is_mixed(self, engine_s: float) -> bool:
        return engine_s - self._unseen_s <= MIXED_S

    def joins_round(self, *, engine_s: float) -> bool:
        """Return whether one more request belongs to the round that is queued."""
        if not self._entries:
            return True
        last = self._entries[next(reversed(self._entries))]
        return self.speed.parallel.joins_round(len(self._entries), since_s=engine_s - last.arrival_s)

    @property
    def takes_a_second(self) -> bool:
        """Return whether a second prefill may begin beside the first, because one queue is doubted."""
        return len(self._entries) < 2 and self.speed.parallel.is_doubted

    def left_s(self, *, engine_s: float) -> float:
        """Return the work left at `engine_s`: at least what is behind the head, of which nothing is done yet."""
        if not self._entries:
            return 0.0
        backlog_s = self.backlog_s
        if self.speed.parallel.count > 1:
            return backlog_s
        behind_s = backlog_s - self._head().prior_s * self.speed.factor
        own_s = self.own_drained_at_s(engine_s=engine_s) - engine_s
        return max(0.0, behind_s, min(own_s, backlog_s))

    def own_drained_at_s(self, *, engine_s: float) -> float:
        """Return when the engine would have done the queued prefills if it went on with them at `engine_s`."""
        return self.drained_at_s - self.shared_left_s(engine_s=engine_s) if self.shared_s else self.drained_at_s

    def shared_left_s(self, *, engine_s: float) -> float:
        """Return the work of other routers left before the queued requests, as of their dispatches, s."""
        if not self.shared_s:
            return 0.0
        return self.shared_s - clamp(engine_s - self._began_s(), 0.0, self._head().shared_s)

    @property
    def head_shared_s(self) -> float:
        """Work of other routers before the head alone, s."""
        return self._head().shared_s if self._entries else 0.0

    @property
    def head_began_s(self) -> float:
        """When the engine began with that; the past if nothing is queued."""
        return self._began_s() if self._entries else -inf

    def before(self, key: str) -> list[str]:
        """Return the streamed requests queued before `key`; empty if it is not queued or in no one queue."""
        if key not in self._entries or self.speed.parallel.count > 1:
            return []
        ahead: list[str] = []
        for other, entry in self._entries.items():
            if other == key:
                break
            if entry.streamed:
                ahead.append(other)
        return ahead

    def add(self, key: str, *, arrives_s: float, prior_s: float, streamed: bool, shared_s: float = 0.0) -> None:
        """Add a dispatched request; `shared_s` is work of other routers before it that is not before others queued."""
        assert key not in self._entries, "an attempt is dispatched once"
        position = self.speed.parallel.on_arrival(len(self._entries), self._invisible)
        self._entries[key] = _Entry(arrives_s, prior_s, streamed, shared_s, position)
        if not streamed:
            self._invisible += 1
            self._unseen_s = arrives_s
        self._prior_s += prior_s
        self.shared_s += shared_s
        begins_s = arrives_s if arrives_s > self.drained_at_s else self.drained_at_s
        self.drained_at_s = begins_s + shared_s + prior_s * self.speed.factor
        self._advance(arrives_s)
        self.on_change()

    def on_first_token(self, key: str, *, engine_s: float, shared_until_s: float = -inf) -> None:
        """Remove `key`: the engine has its first token. A key that is not queued is ignored.

        Until `shared_until_s` the engine had prefills of other routers.
        """
        entry = self._entries.get(key)
        if entry is None:
            return
        ahead, began_s = 0.0, self._began_s()
        while (head_key := self._head_key()) != key and not self._entries[head_key].streamed:
            if self.speed.parallel.count > 1:
                break
            ahead += self._entries[head_key].prior_s
            self._pass_head()
        self.speed.on_first_token(
            engine_s=engine_s,
            arrived_s=entry.arrival_s,
            prior_s=entry.prior_s,
            head=head_key == key,
            shared_until_s=max(shared_until_s, self._silent_s),
            arrival=entry.place,
            unseen=(began_s, ahead) if ahead else None,
            in_turn=not entry.place.before or self.is_one_queue(engine_s=engine_s),
        )
        self._remove(key)
        self._anchor_s = engine_s
        self.drained_at_s = engine_s + self.backlog_s + self.shared_s
        self._advance(engine_s)
        self.on_change()

    def remove(self, key: str, *, engine_s: float) -> None:
        """Remove `key`, which ended without a visible first token; the engine stops at `engine_s`."""
        entry = self._entries.get(key)
        if entry is None:
            return
        self.speed.parallel.on_end(engine_s)
        spent_s = 0.0
        if self._head_key() == key:
            began_s = self._anchor_s if self._anchor_s > entry.arrival_s else entry.arrival_s
            shared_s = clamp(engine_s - began_s, 0.0, entry.shared_s) if entry.shared_s else 0.0
            spent_s = clamp(engine_s - began_s - entry.shared_s, 0.0, entry.prior_s * self.speed.factor)
            self._anchor_s = began_s + shared_s + spent_s
            if shared_s:
                self._use_shared(entry, shared_s)
        self.drained_at_s -= entry.prior_s * self.speed.factor - spent_s
        if entry.shared_s:
            self._pass_on_shared(key, entry)
        self._remove(key)
        self._advance(engine_s)
        self.on_change()

    def on_silence(self, *, engine_s: float) -> None:
        """Record a failed probe: what is queued now has stalled."""
        self._silent_s = engine_s

    def set_speed_prior(self, factor: float) -> None:
        """Take the engine's reported factor as the prior of the learned one."""
        self.speed.set_prior(factor)
        self.on_change()

    def reset_speed(self) -> None:
        """Forget the learned factor: the prior that it corrects has changed."""
        self.speed = PrefillSpeed()
        self.on_change()

    def check(self) -> None:
        """Assert every invariant; for tests."""
        total = sum(entry.prior_s for entry in self._entries.values())
        assert abs(total - self._prior_s) <= 1e-9 * (1.0 + total)
        assert (self.head_due_s < inf) == bool(self._entries and self._head().streamed)
        assert self._entries or self._prior_s == 0.0, "an empty queue has no work"
        shared = sum(entry.shared_s for entry in self._entries.values())
        assert abs(shared - self.shared_s) <= 1e-9 * (1.0 + shared)

    def _advance(self, engine_s: float) -> None:
        """Drop requests at the head whose invisible prefill must be over, and set when the head is due."""
        self.head_due_s = inf
        if self.speed.parallel.count > 1:
            self._advance_parallel(engine_s)
            return
        while self._entries:
            head = self._head()
            began_s = self._anchor_s if self._anchor_s > head.arrival_s else head.arrival_s
            due_s = began_s + head.shared_s + head.prior_s * self.speed.factor
            if head.streamed:
                self.head_due_s = due_s
                return
            if due_s > engine_s:
                return
            self._pass_head()
        # The rest of dead reckoning is noise: an empty queue is an idle engine.
        if self.drained_at_s > engine_s:
            self.drained_at_s = engine_s

    def _advance_parallel(self, engine_s: float) -> None:
        """Drop requests whose invisible prefill must be over, and set when one more may begin and the head is due."""
        parallel = self.speed.parallel
        if self._invisible:
            for key, entry in list(self._entries.items()):
                ends_s = self._begins_s(entry, engine_s) + self._takes_s(entry)
                if not entry.streamed and ends_s <= engine_s:
                    parallel.on_end(ends_s)
                    self._remove(key)
        self.drained_at_s = self._free_at_s(engine_s) + self.shared_s
        if self._entries and (head := self._head()).streamed:
            own_s = max(self._takes_s(head), parallel.mean_s)
            self.head_due_s = self._begins_s(head, engine_s) + head.shared_s + own_s

    def _free_at_s(self, engine_s: float) -> float:
        """Return when an engine that does several prefills at once may begin with one more; `engine_s` if now."""
        count = self.speed.parallel.count
        if len(self._entries) < count:
            return engine_s
        if len(self._entries) > _MOST_PLACED * count:  # one by one would take too long, and says no more
            return engine_s + self.backlog_s
        ends_s: list[float] = []
        for entry in self._entries.values():
            begins_s = self._begins_s(entry, engine_s) if len(ends_s) < count else max(entry.arrival_s, heappop(ends_s))
            heappush(ends_s, max(engine_s, begins_s + self._takes_s(entry)))
        return ends_s[0]

    def _takes_s(self, entry: _Entry) -> float:
        """Return the time of a prefill beside others: as those took that had not to wait, which has a constant part."""
        alone = self.speed.parallel.alone_s(entry.prior_s)
        return entry.prior_s * self.speed.factor if alone is None else alone

    def _begins_s(self, entry: _Entry, engine_s: float) -> float:
        """Return when the engine has begun with a request that is among the first."""
        parallel, arrived_s = self.speed.parallel, entry.arrival_s
        waited_s = parallel.waited_s(entry.place, parallel.count, arrived_s=arrived_s, engine_s=engine_s)
        return arrived_s + waited_s

    def _pass_head(self) -> None:
        head = self._head()
        self.speed.parallel.on_end(max(self._anchor_s, head.arrival_s) + head.prior_s * self.speed.factor)
        self._anchor_s = max(self._anchor_s, head.arrival_s) + head.shared_s + head.prior_s * self.speed.factor
        self._remove(self._head_key())

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key)
        self._invisible -= not entry.streamed
        self._prior_s -= entry.prior_s
        self.shared_s -= entry.shared_s
        if not self._entries:
            self._prior_s = self.shared_s = 0.0  # sums of floats drift

    def _use_shared(self, entry: _Entry, shared_s: float) -> None:
        entry.shared_s -= shared_s
        self.shared_s -= shared_s

    def _pass_on_shared(self, key: str, entry: _Entry) -> None:
        """Move the work of other routers before `key` to the request behind it; behind the last one nobody waits."""
        behind = iter(self._entries)
        while next(behind) != key:
            pass
        following = next(behind, None)
        if following is None:
            self.drained_at_s -= entry.shared_s
        else:
            self._entries[following].shared_s += entry.shared_s
            entry.shared_s = 0.0

    def _head_key(self) -> str:
        return next(iter(self._entries))

    def _head(self) -> _Entry:
        return next(iter(self._entries.values()))

    def _began_s(self) -> float:
        return max(self._anchor_s, self._head().arrival_s)


def _no_observer() -> None:
    pass
