"""From pairs of blocks to a verdict: accept a significant gain, refuse a significant loss, otherwise measure on.

Owns the decision of the switchback; `sequential` owns the test of significance.

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

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import exp, log, log1p, sqrt
from statistics import stdev
from typing import Any

from tuner.campaign.guardrail import errors_rose, is_concentrated
from tuner.campaign.options import CampaignOptions
from tuner.campaign.sequential import SignFlipTest
from tuner.campaign.trial import Verdict
from tuner.objective import WindowStats
from tuner.saved_fields import SavedFields


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
        found = f"p95 TTFT {change(-mean(gains))} in {len(pairs)} pairs of blocks"
        if self._test.is_significant(gains) and seems_worse is None and too_long is None:
            return True, False, f"{found}, by chance {self._test.chance(gains):.1%}"
        if len(pairs) >= self._options.futility_pairs:
            if mean(gains) <= 0:
                return False, False, f"{found}: not ahead"
            if too_long is not None:
                return False, True, f"{found}, paid for with {too_long}"
        if self._does_harm([-gain for gain in gains], patience):
            return False, False, f"{found}: given up before it does harm"
        if len(pairs) >= self._options.pairs:
            return False, seems_worse is not None, f"{found}: {seems_worse or 'not shown to be better'}"
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
            found = ratios(pairs, figure)
            if self._does_harm(found, patience):
                return f"p95 {name} {change(mean(found))} in {len(pairs)} pairs of blocks: given up before it does harm"
        return None

    def _does_harm(self, losses: Sequence[float], patience: float) -> bool:
        """Return whether the mean is above the margin, by more than the noise of the pairs explains."""
        margin = log1p(self._options.margin)
        return bool(losses) and mean(losses) > patience * margin and mean(losses) - noise(losses) > margin

    def _seems_worse(self, pairs: Sequence[BlockPair]) -> str | None:
        """Return a guarded figure over its margin so far: no reason to refuse yet, but none to accept."""
        for name, figure in GUARDED.items():
            found = ratios(pairs, figure)
            if found and mean(found) > log1p(self._options.margin):
                return f"p95 {name} {change(mean(found))}"
        ours, theirs = pooled([p.offspring for p in pairs]), pooled([p.incumbent for p in pairs])
        return is_concentrated(ours, theirs, self._options.max_share)

    def _ends_later(self, pairs: Sequence[BlockPair]) -> str | None:
        """Return p95 E2E if it is higher than may be accepted, with what earlier candidates have added."""
        found = ratios(pairs, _e2e)
        if not found or self._e2e_lost + mean(found) <= log1p(self._options.e2e_margin):
            return None
        before = f" after {change(self._e2e_lost)} before" if self._e2e_lost else ""
        return f"p95 E2E {change(mean(found))}{before}"


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
    known = [log(value) for value in values if value]
    return exp(mean(known)) if known else None
