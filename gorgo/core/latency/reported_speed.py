"""The reported prefill factor of an engine: how much slower than its prior it is, by its own counters.

Owns the record of one replica's counters. `core.latency.prefill_speed` starts its learning from the result.

Theory of operation. The counters only grow, so two scrapes give the seconds per token in between; the first gives those
since the engine's start, and counters that went back are a restarted engine. Seconds per token are no rate of a
prior: they contain the constant and the attention part of all that was prefilled. So they are compared with the prior's
seconds per token of the requests that this proxy dispatched there. The quotient is a factor on the whole prior: right
for the present traffic, whatever its lengths. Until this proxy has dispatched enough, one usual request stands for
them. Both sides decay with the work done, so a throttled replica shows within some scrapes.

Engines with data-parallel ranks report both counters as sums over ranks: the quotient is one rank's time per request.
"""

from __future__ import annotations

from math import exp, isfinite

from gorgo.core.latency.prefill import PrefillPrior

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
