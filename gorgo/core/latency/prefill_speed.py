"""The learned prefill factor of a replica: how much slower than its prior it is, by the times of its first tokens.

A prior may be wrong by a constant factor, and a replica may be slow for a while (throttled, shared, failing). Both show
in the time from one first token to the next, or from an arrival to its first token.

Theory of operation. All times are the engine's: measured here, less half a round trip. A request that arrived well
before the previous first token has had the engine since then, so the time between the two tokens is its prefill. A
later one had to wait for the step in progress (5 ms in the mean) and then had the engine. While an older request is
still queued, it is unknown how much of the time went to that one: both count together when the older one has its token.
Engines that end several prefills in one step have their tokens at one time and in any order, so a short prompt passes a
long one that is as good as done. Time is left out while a request of another router waits there. Tokens that come
together count, the later ones with nothing, because their prefill was in the first one's time. Sums decay with the work
done, not with time: an idle replica forgets nothing.

There are two averages, because no single one is both steady and quick. The steady one leans on the prior and remembers
long: where the prior is about right, each change of the factor would move requests to and fro. But its lean never
fades, so that a replica three times slower would look 2.3 times slower for ever. The quick one leans on the prior for a
few requests only and remembers half as long; it counts where it is further from the prior than noise takes it.

Without a configured prior, learning starts from the speed that the engine reports (`core.latency.reported_speed`). The
reported speed has the weight of a prior. Samples stay in seconds of the default prior, so no sample counts twice and
no queued prefill changes its length.
"""

from __future__ import annotations

from math import exp, inf

#: Prefill work after which a sample weighs 1 / e, and weight of "as fast as the prior says", both in s of work.
STEADY_MEMORY_S, STEADY_TRUST_S = 10.0, 5.0
QUICK_MEMORY_S, QUICK_TRUST_S = 5.0, 0.5
#: A quick average beyond this, or below its inverse, is no noise.
NOISE = 2.0
#: Mean rest of the step in progress when a request arrives: half a decode iteration.
STEP_IN_PROGRESS_S = 0.005
#: Requests that may pass one: a stuck one is passed until it fails.
MOST_PASSED = 64
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

    __slots__ = ("_passed", "_quick", "_start", "_steady", "factor", "last_s")

    def __init__(self) -> None:
        self.factor = 1.0
        self._start = 1.0
        #: When the engine produced the last first token that was counted.
        self.last_s = -inf
        #: Of the requests that have passed an older one since: first token, prior, end of others' work.
        self._passed: list[tuple[float, float, float]] = []
        self._steady = _Average(STEADY_MEMORY_S, STEADY_TRUST_S)
        self._quick = _Average(QUICK_MEMORY_S, QUICK_TRUST_S)

    def on_first_token(
        self, *, engine_s: float, arrived_s: float, prior_s: float, head: bool, shared_until_s: float = -inf
    ) -> None:
        """The first token of a request that should take `prior_s`; `head` if no older one still waits for its own.

        Until `shared_until_s` the engine had prefills of other routers.
        """
        if not head:
            self._pass(engine_s, prior_s, shared_until_s)
            return
        begun_s = max(arrived_s, self.last_s)
        spent_s = engine_s - begun_s
        if arrived_s + STEP_IN_PROGRESS_S > self.last_s:
            spent_s -= STEP_IN_PROGRESS_S
        for passed_s, passed_prior_s, passed_shared_s in self._passed:
            if passed_s > begun_s:
                prior_s += passed_prior_s
                shared_until_s = max(shared_until_s, passed_shared_s)
        if shared_until_s <= begun_s:
            self._learn(spent_s, prior_s)
        self._begin(engine_s)

    @property
    def samples(self) -> tuple[float, float]:
        """Time spent and time by the prior, s, both fading."""
        return self._steady.sums

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
        self._weigh()

    def _weigh(self) -> None:
        quick = self._quick.value(self._start)
        clear = not 1.0 / NOISE < quick / self._start < NOISE
        ratio = quick if clear else self._steady.value(self._start)
        self.factor = min(max(ratio, FASTEST), SLOWEST)


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

    @property
    def sums(self) -> tuple[float, float]:
        return self._spent_s, self._done_s

    def value(self, start: float) -> float:
        """`start` as long as nothing was learned."""
        return (self._spent_s + self._trust_s * start) / (self._done_s + self._trust_s)
