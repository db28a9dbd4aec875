"""From pairs of blocks to a verdict: accept a significant gain, refuse a significant loss, otherwise measure on.

Owns the comparison of two weight sets. Leaves the blocks and their order to `tuner.campaign.switchback`. Its parts, in
the order of the file:

- `SignFlipTest`: the test of significance;
- `Guardrail`: figures that a gain in TTFT must not cost;
- `Trial`: the interface of a trial, and its results;
- `PairComparison`: the decision on the pairs measured so far.

Theory of operation: each pair gives one difference of logarithms per figure, so that a tenth is a tenth at any load. A
candidate is accepted when its p95 TTFT is significantly lower, no guarded figure seems worse by more than the margin,
and p95 E2E, with what earlier candidates have added to it, by no more than a margin of its own. It is refused when a
guarded figure is significantly worse by more than the margin. It is given up when it is not ahead after a number of
pairs, and sooner when it seems worse by more than the margin and the noise of its pairs. Without significance at the
last pair nothing moves.

An audit asks the opposite question about a start that is not the policy's defaults: it stays unless its p95 TTFT or p95
E2E is significantly worse than theirs, at half of alpha each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, lgamma, log, log1p, sqrt
from statistics import stdev
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from gorgo.errors import TunerError
from tuner.campaign.options import CampaignOptions
from tuner.objective import RollingWindow, TunerSample, WindowStats
from tuner.saved_fields import SavedFields

# A sequential test on pairs of blocks, with a known error rate for any noise.
#
# Theory of operation: two weight sets run in pairs of blocks, and a fair coin decides which comes first. If the
# weights made no difference, each pair's difference could as well have had the other sign, whatever trend, burst or
# autocorrelation the traffic has. The test compares the sum of the differences with the sums under `PATHS` random
# choices of signs: no distribution is assumed, and nothing is estimated. It is evaluated after every pair; the error
# rate is spent in proportion to the pairs. At each analysis the highest of the remaining sums are crossed out, as many
# as the spent rate allows, and the gain is significant when the real sum is among them. Without an effect the real sum
# is one of `PATHS` alike, and at most alpha of them are ever crossed out: so alpha bounds the error over all analyses.
#
# References
# ----------
# Bojinov, Simchi-Levi and Zhao, "Design and Analysis of Switchback Experiments", Management Science 69(7), 2023:
# blocks in random order and inference from that order alone. Plamadeala and Rosenberger, "Sequential monitoring with
# conditional randomization tests", Annals of Statistics 40(1), 2012: boundaries from re-randomised paths. Lan and
# DeMets, "Discrete sequential boundaries for clinical trials", Biometrika 70(3), 1983: spending the error rate. Kim
# and DeMets, Biometrika 74(1), 1987: as a power of the time.


#: Random sign patterns, the real one included: alpha 0.05 is a hundred of them. Their number costs power a little, and
#: never the error rate.
PATHS = 2000


class SignFlipTest:
    """Whether gains are significantly above zero, evaluated after every pair.

    Parameters
    ----------
    pairs:
        At most; at the last one all of `alpha` is spent.
    alpha:
        Highest probability of a significant gain without an effect, over all analyses.
    seed:
        Of the sign patterns. The same seed and gains give the same answer, so that only the gains are saved.

    Example
    -------
    >>> test = SignFlipTest(pairs=20, alpha=0.05, seed=0)
    >>> test.is_significant([0.1] * 5), test.is_significant([0.1] * 8)
    (False, True)
    """

    def __init__(self, *, pairs: int, alpha: float, seed: int) -> None:
        if not 0 < alpha < 1 or pairs < 1:
            raise TunerError(f"alpha is {alpha!r} and pairs {pairs!r}; expected 0 < alpha < 1 and 1 pair or more")
        self.pairs, self.alpha = pairs, alpha
        coins = np.random.default_rng(seed).integers(0, 2, (PATHS, pairs), dtype=np.int8)
        self._signs: npt.NDArray[np.int8] = 2 * coins - 1
        self._signs[0] = 1  # the real order

    def is_significant(self, gains: Sequence[float]) -> bool:
        """Return whether any analysis up to the last of `gains`, one per pair, was significant.

        Gains after the last pair are ignored: a campaign may be resumed with fewer pairs than it has scored.
        """
        analysed = np.asarray(gains[: self.pairs], dtype=float)
        sums = np.cumsum(self._signs[:, : len(analysed)] * analysed, axis=1)
        crossed = np.zeros(PATHS, dtype=bool)
        for analysis in range(1, len(analysed) + 1):
            self._cross_out(sums[:, analysis - 1], analysis, crossed)
            if crossed[0]:
                return True
        return False

    def chance(self, gains: Sequence[float]) -> float:
        """Return the share of sign patterns with a sum as high, at this analysis alone."""
        analysed = np.asarray(gains[: self.pairs], dtype=float)
        sums = self._signs[:, : len(analysed)] @ analysed
        return float(np.mean(sums >= sums[0]))

    def _cross_out(self, sums: npt.NDArray[np.float64], analysis: int, crossed: npt.NDArray[np.bool_]) -> None:
        """Cross out the highest of the remaining sums, as many as alpha allows by now; never half of a tie."""
        allowed = int(self.alpha * PATHS * analysis / self.pairs) - int(crossed.sum())
        if allowed <= 0:
            return
        left = np.where(crossed, -np.inf, sums)
        bar = np.partition(left, -(allowed + 1))[-(allowed + 1)]
        crossed |= left > bar


# Guardrails: a gain in TTFT is refused for slower answers, more errors, or concentration on one replica.
#
# Theory of operation: a router can make first tokens fast by sending all requests to the nearest replica; the answers
# then slow down. So a gain counts only if other figures are not worse by more than a margin. Hard bounds on a running
# window are checked besides: they are so wide that they need no test.


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


# The interface of trials: one candidate against the incumbent, as two arms.
#
# Theory of operation: `arm` names the arm that should be in force, and `turn` counts the requests for a put. The
# campaign puts weights when the count has changed, and calls `on_applied` once they are in force. The same arm is put
# again too: every put has a new version of its own, which separates the samples of one block from those of the next.


Arm = Literal["incumbent", "offspring"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a trial.

    `refused`: by the guard, whatever the objective. `breach`: the weights have to be rolled back at once. Objectives
    are p95 TTFT in ms, `stats` the offspring's; None if not measured.
    """

    accepted: bool
    reason: str
    objective_ms: float | None = None
    incumbent_objective_ms: float | None = None
    stats: WindowStats | None = None
    incumbent_stats: WindowStats | None = None
    refused: bool = False
    breach: bool = False


@dataclass(frozen=True, slots=True)
class Abandon:
    """A trial that cannot be finished now, without a result."""

    reason: str


Outcome = Verdict | Abandon | None


class Trial(Protocol):
    """Measures two arms and decides between them."""

    turn: int
    offspring_version: int | None

    @property
    def arm(self) -> Arm:
        """Return the arm that should be in force."""
        ...

    def on_applied(self, version: int, *, now: float) -> None:
        """Record that the weights of `arm` are in force under this version."""
        ...

    def on_samples(self, samples: Iterable[TunerSample], *, now: float) -> Outcome: ...

    def on_time(self, *, now: float) -> Outcome: ...

    def void(self) -> None:
        """Drop the current measurement: samples were lost, or the proxy restarted."""
        ...

    def next_time(self) -> float | None:
        """Return when `on_time` has something to do."""
        ...

    def state(self) -> dict[str, Any]:
        """Return finished measurements as JSON."""
        ...

    def load(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class BlockPair:
    """One block of each arm, as statistics."""

    incumbent: WindowStats
    offspring: WindowStats

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, saved: SavedFields) -> BlockPair:
        """Return a saved pair; raise `TunerError` for a wrong value."""
        return cls(WindowStats.of(saved.inner("incumbent")), WindowStats.of(saved.inner("offspring")))


class PairComparison:
    """Decides on the pairs measured so far.

    Parameters
    ----------
    options:
        Alpha, pairs, margins.
    seed:
        Of the test's sign patterns.
    audit:
        Whether the offspring is a start that stays unless significantly worse.
    e2e_lost:
        Logarithm of what accepted candidates have added to p95 E2E before.
    """

    def __init__(self, options: CampaignOptions, seed: int, *, audit: bool, e2e_lost: float = 0.0) -> None:
        self._options, self._audit, self._e2e_lost = options, audit, e2e_lost
        alpha = options.alpha / 2 if audit else options.alpha
        self._test = SignFlipTest(pairs=options.pairs, alpha=alpha, seed=seed)

    def verdict(self, pairs: Sequence[BlockPair]) -> Verdict | None:
        """Return the verdict of the pairs; None while more pairs are needed."""
        if not pairs:
            return None
        decided = self._audited(pairs) if self._audit else self._decided(pairs)
        if decided is None:
            return None
        accepted, refused, reason = decided
        ours, theirs = pooled([p.offspring for p in pairs]), pooled([p.incumbent for p in pairs])
        return Verdict(accepted, reason, ours.ttft_ms_p95, theirs.ttft_ms_p95, ours, theirs, refused)

    def _decided(self, pairs: Sequence[BlockPair]) -> tuple[bool, bool, str] | None:
        """Return whether to accept, whether the guard refused, and the reason."""
        gains = [-ratio for ratio in ratios(pairs, _ttft)]
        seems_worse = too_long = None
        # The bound is wider for fewer pairs, so that chance does not end half of the trials.
        patience = max(1.0, (self._options.harm_pairs / len(pairs)) ** 2)
        if self._options.guarded:
            if bad := self._shown_bad(pairs) or self._harms(pairs, patience):
                return False, True, bad
            seems_worse, too_long = self._seems_worse(pairs), self._ends_later(pairs)
        measured = f"p95 TTFT {change(-mean(gains))} in {len(pairs)} pairs of blocks"
        if self._test.is_significant(gains) and seems_worse is None and too_long is None:
            return True, False, f"{measured}, by chance {self._test.chance(gains):.1%}"
        if len(pairs) >= self._options.futility_pairs:
            if mean(gains) <= 0:
                return False, False, f"{measured}: not ahead"
            if too_long is not None:
                return False, True, f"{measured}, paid for with {too_long}"
        if self._does_harm([-gain for gain in gains], patience):
            return False, False, f"{measured}: given up before it does harm"
        if len(pairs) >= self._options.pairs:
            return False, seems_worse is not None, f"{measured}: {seems_worse or 'not shown to be better'}"
        return None

    def _audited(self, pairs: Sequence[BlockPair]) -> tuple[bool, bool, str] | None:
        losses = {"TTFT": ratios(pairs, _ttft), "E2E": ratios(pairs, _e2e)}
        for name, loss in losses.items():
            if self._test.is_significant(loss):
                return False, True, f"the start is worse than the defaults: p95 {name} {change(mean(loss))}"
        if len(pairs) >= self._options.futility_pairs:
            ours, theirs = pooled([p.offspring for p in pairs]), pooled([p.incumbent for p in pairs])
            if bad := is_concentrated(ours, theirs, self._options.max_share) or errors_rose(
                ours, theirs, self._options.alpha
            ):
                return False, True, f"the start is worse than the defaults: {bad}"
            if all(mean(loss) <= 0 for loss in losses.values() if loss):
                return True, False, f"the start is not behind the defaults in {len(pairs)} pairs of blocks"
        if len(pairs) >= self._options.pairs:
            return True, False, f"the start is not shown to be worse than the defaults in {len(pairs)} pairs of blocks"
        return None

    def _shown_bad(self, pairs: Sequence[BlockPair]) -> str | None:
        for name, figure in GUARDED.items():
            excess = [ratio - log1p(self._options.margin) for ratio in ratios(pairs, figure)]
            if self._test.is_significant(excess):
                return f"p95 {name} is worse: {change(mean(ratios(pairs, figure)))} in {len(pairs)} pairs of blocks"
        if len(pairs) < self._options.futility_pairs:  # too few blocks for a test of errors
            return None
        ours, theirs = pooled([p.offspring for p in pairs]), pooled([p.incumbent for p in pairs])
        # Bonferroni over the analyses: each may refuse.
        alpha = self._options.alpha / self._options.pairs
        return errors_rose(ours, theirs, alpha) or is_concentrated(ours, theirs, self._options.max_share)

    def _harms(self, pairs: Sequence[BlockPair], patience: float) -> str | None:
        """Return a guarded latency that is worse by so much that no significance is needed."""
        for name, figure in GUARDED.items():
            logs = ratios(pairs, figure)
            if self._does_harm(logs, patience):
                return f"p95 {name} {change(mean(logs))} in {len(pairs)} pairs of blocks: given up before it does harm"
        return None

    def _does_harm(self, losses: Sequence[float], patience: float) -> bool:
        """Return whether the mean is above the margin, by more than the noise of the pairs explains."""
        margin = log1p(self._options.margin)
        return bool(losses) and mean(losses) > patience * margin and mean(losses) - noise(losses) > margin

    def _seems_worse(self, pairs: Sequence[BlockPair]) -> str | None:
        """Return a guarded figure over its margin so far: no reason to refuse yet, but none to accept."""
        for name, figure in GUARDED.items():
            logs = ratios(pairs, figure)
            if logs and mean(logs) > log1p(self._options.margin):
                return f"p95 {name} {change(mean(logs))}"
        ours, theirs = pooled([p.offspring for p in pairs]), pooled([p.incumbent for p in pairs])
        return is_concentrated(ours, theirs, self._options.max_share)

    def _ends_later(self, pairs: Sequence[BlockPair]) -> str | None:
        """Return p95 E2E if it is higher than may be accepted, with what earlier candidates have added."""
        logs = ratios(pairs, _e2e)
        if not logs or self._e2e_lost + mean(logs) <= log1p(self._options.e2e_margin):
            return None
        before = f" after {change(self._e2e_lost)} before" if self._e2e_lost else ""
        return f"p95 E2E {change(mean(logs))}{before}"


def _ttft(stats: WindowStats) -> float | None:
    return stats.ttft_ms_p95


def _e2e(stats: WindowStats) -> float | None:
    return stats.e2e_s_p95


def _itl(stats: WindowStats) -> float | None:
    return stats.itl_ms_p95


#: Student's t for a chance of one in five, from one degree of freedom on; the last for any more.
STUDENT = (1.376, 1.061, 0.978, 0.941, 0.920, 0.906, 0.896, 0.889, 0.883, 0.879)

GUARDED: dict[str, Callable[[WindowStats], float | None]] = {"E2E": _e2e, "ITL": _itl}


def ratios(pairs: Sequence[BlockPair], figure: Callable[[WindowStats], float | None]) -> list[float]:
    """Return the logarithm of offspring over incumbent for pairs in which both have the figure."""
    both = [(figure(pair.offspring), figure(pair.incumbent)) for pair in pairs]
    return [log(ours / theirs) for ours, theirs in both if ours and theirs]


def noise(losses: Sequence[float]) -> float:
    """Return by how much the mean exceeds the truth with a chance of one in five; 0 of fewer than two."""
    if len(losses) < 2:
        return 0.0
    return STUDENT[min(len(losses) - 2, len(STUDENT) - 1)] * stdev(losses) / sqrt(len(losses))


def pooled(blocks: Sequence[WindowStats]) -> WindowStats:
    """Return all blocks of an arm as one: geometric means of the quantiles, as the test takes them.

    `max_share` is the mean of the blocks' largest shares, weighted by requests: at least the largest share over all.
    """
    n = sum(block.n for block in blocks)
    shares = sum(block.n * (block.max_share or 0.0) for block in blocks)
    return WindowStats(
        n=n,
        ttft_ms_p95=_geometric([block.ttft_ms_p95 for block in blocks]),
        e2e_s_p95=_geometric([block.e2e_s_p95 for block in blocks]),
        itl_ms_p95=_geometric([block.itl_ms_p95 for block in blocks]),
        errors=sum(block.errors for block in blocks),
        max_share=shares / n if n else None,
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def change(ratio: float) -> str:
    """Return the logarithm of a ratio in words."""
    percent = abs(exp(ratio) - 1)
    return f"{percent:.1%} {'higher' if ratio > 0 else 'lower'}"


def _geometric(values: Sequence[float | None]) -> float | None:
    logs = [log(value) for value in values if value]
    return exp(mean(logs)) if logs else None
