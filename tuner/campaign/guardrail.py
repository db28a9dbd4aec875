"""Guardrails: a gain in TTFT is refused for slower answers, more errors, or concentration on one replica.

Theory of operation: a router can make first tokens fast by sending all requests to the nearest replica; the answers
then slow down. So a gain counts only if other figures are not worse by more than a margin. Hard bounds on a running
window are checked besides: they are so wide that they need no test.
"""

from __future__ import annotations

from math import exp, lgamma, log, log1p

from tuner.campaign.options import CampaignOptions
from tuner.objective import RollingWindow, TunerSample, WindowStats


def errors_rose(offspring: WindowStats, incumbent: WindowStats, alpha: float) -> str | None:
    """Return a reason if there are more errors than chance explains under equal error rates.

    Given the number of errors, each belongs to the offspring with the probability of its share of the requests: an
    exact test (Przyborowski and Wilenski, Biometrika 31, 1940). Errors come in bursts, which makes it stricter still.
    """
    total, n = offspring.errors + incumbent.errors, offspring.n + incumbent.n
    if not offspring.errors or not incumbent.n:
        return None
    if _binomial_tail(offspring.errors, total, offspring.n / n) > alpha:
        return None
    return f"errors rose: {offspring.errors} of {offspring.n} requests, {incumbent.errors} of {incumbent.n} before"


def is_concentrated(offspring: WindowStats, incumbent: WindowStats, bound: float) -> str | None:
    """Return a reason if one replica takes more than its bound, and more than under the incumbent.

    Not if its answers end earlier than the incumbent's: then one replica is enough for the load.
    """
    ours, theirs = offspring.max_share or 0.0, incumbent.max_share or 0.0
    if ours <= max(bound, theirs) or _ends_earlier(offspring.e2e_s_p95, incumbent.e2e_s_p95):
        return None
    return f"one replica takes {ours:.0%} of the requests; {theirs:.0%} before"


def _ends_earlier(ours: float | None, theirs: float | None) -> bool:
    return ours is not None and theirs is not None and ours < theirs


class Guardrail:
    """A running window of the candidate against hard bounds; counts the discarded start of a block too."""

    def __init__(self, options: CampaignOptions, reference: WindowStats | None) -> None:
        self._options = options
        self.reference = reference
        # Half a window is enough for bounds as wide as these.
        self._window = RollingWindow(max(options.window // 2, 1), min(options.hop, max(options.window // 2, 1)))

    def add(self, sample: TunerSample) -> str | None:
        """Return a reason to roll back now, or None."""
        return self._breach(self._window.stats()) if self._window.add(sample) else None

    def clear(self) -> None:
        self._window.clear()

    def _breach(self, running: WindowStats) -> str | None:
        options = self._options
        if running.error_share > options.hard_errors and running.errors > 1:
            before = self.reference
            if before is None or running.error_share > 2 * before.error_share:
                return f"{running.errors} of the last {running.n} requests failed"
        e2e_s = running.e2e_s_p95
        if e2e_s is None:
            return None
        if options.hard_e2e_s is not None and e2e_s > options.hard_e2e_s:
            return f"running p95 E2E is {e2e_s:.2f} s, above the bound of {options.hard_e2e_s:g} s"
        usual = self.reference.e2e_s_p95 if self.reference else None
        if usual and e2e_s > options.hard_e2e_factor * usual:
            return f"running p95 E2E is {e2e_s:.2f} s, {e2e_s / usual:.1f} times the usual {usual:.2f} s"
        return None


def _binomial_tail(least: int, total: int, p: float) -> float:
    """Return the probability of `least` or more of `total`."""
    return min(1.0, sum(exp(_log_binomial(k, total, p)) for k in range(least, total + 1)))


def _log_binomial(k: int, total: int, p: float) -> float:
    ways = lgamma(total + 1) - lgamma(k + 1) - lgamma(total - k + 1)
    return ways + k * log(p) + ((total - k) * log1p(-p) if total > k else 0.0)
