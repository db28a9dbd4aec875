"""Quantiles of times in short neighbouring windows of several kinds, as ratios with bootstrap intervals.

A block has two windows of each kind, in an order and then in the reverse one (ABBA, the next block BAAB), so that a
machine that drifts favours none. The ratio is the median over blocks of the ratio of a quantile within a block: a
machine that is disturbed for a second spoils a block, not the quantile of all times. Blocks are drawn again with
replacement for the interval. The same is done for the two windows of one kind: what is left between these is chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gorgo.core.numeric import Floats

#: Times of a block by kind: those of its first and of its second window.
Block = Mapping[str, tuple[Sequence[float], Sequence[float]]]
DRAWS, SEED = 4000, 0
QUANTILES = (0.5, 0.99)


def print_ratios(blocks: Sequence[Block], *, over: str) -> None:
    """Print p50 and p99 of each kind, ms, its ratios to the kind `over`, and the ratio of two halves of that."""
    print(f"{'time to first byte':<31}  {'requests':>8}  {'p50 ms':>7}  {'p99 ms':>7}")
    pooled = {kind: [[*block[kind][0], *block[kind][1]] for block in blocks] for kind in blocks[0]}
    for kind, times in pooled.items():
        p50, p99 = np.median(_quantiles(times), axis=0)
        print(f"{kind:<31}  {sum(map(len, times)):>8,}  {p50:>7.2f}  {p99:>7.2f}")
    for kind, times in pooled.items():
        if kind != over:
            _print_ratio(f"{kind} / {over}", times, pooled[over])
    _print_ratio("by chance", *([block[over][half] for block in blocks] for half in (0, 1)))


def _print_ratio(name: str, times: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> None:
    logs = np.log(_quantiles(times)) - np.log(_quantiles(others))
    ratios = [median_ratio(logs[:, column]) for column in range(len(QUANTILES))]
    print(f"{name:<41}  " + "  ".join(f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, low, high in ratios))


def median_ratio(logs: Floats) -> tuple[float, float, float]:
    """Return the median of ratios that are given as logarithms, with its 95 % interval.

    >>> median_ratio(np.log([2.0, 2.0, 2.0]))
    (2.0, 2.0, 2.0)
    """
    rng = np.random.default_rng(SEED)
    drawn = np.median(logs[rng.integers(len(logs), size=(DRAWS, len(logs)))], axis=1)
    value, low, high = np.exp([np.median(logs), *np.quantile(drawn, (0.025, 0.975))]).round(12)
    return float(value), float(low), float(high)


def _quantiles(times: Sequence[Sequence[float]]) -> Floats:
    return np.array([np.quantile(each, QUANTILES) for each in times])
