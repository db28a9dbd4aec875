"""Off-policy estimates: what decisions would have brought under another policy, from a log of decisions by chance.

Owns the estimators and their intervals. Leaves to `gorgo.lab.whatif.judge` what a policy would have chosen.

Theory of operation. A row has the outcome r of a decision, the chance p that its replica had, and the chance pi that
the other policy gives it. The weight is w = pi / p: where one in a hundred decisions goes to any of four replicas, one
that the other policy would have made there stands for four hundred. Three estimates of the mean outcome under the other
policy are made of them:

- `ips`, inverse propensity scoring: the mean of w r (Horvitz and Thompson), unbiased and noisy;
- `snips`, self-normalised: the same over the mean of w, which cancels most of the noise of the weights;
- `dr`, doubly robust: the mean of q(pi) + w (r - q), q the outcome that a model predicts (Dudik, Langford and Li,
  arXiv 1103.4601). It is unbiased whatever the model predicts, as p is known; the noise left is that of the model's
  error.

What counts is the change from the log's own mean, since both have the noise of the traffic. A decision changes the
queues and caches of the next ones, so outcomes of one minute are alike: the interval comes from the sums of blocks of
minutes, as if these were independent. Few decisions by chance carry most of the variance, and the fewer blocks they
fall into, the wider the interval: its Student's t has as many degrees of freedom as a variance with the spread of the
blocks' squares would have (Satterthwaite).

References
----------
D. G. Horvitz and D. J. Thompson, "A Generalization of Sampling Without Replacement from a Finite Universe", JASA
47(260), 1952. A. Swaminathan and T. Joachims, "The Self-Normalized Estimator for Counterfactual Learning", NIPS 2015.
M. Dudik, J. Langford and L. Li, "Doubly Robust Policy Evaluation and Learning", ICML 2011. F. E. Satterthwaite, "An
Approximate Distribution of Estimates of Variance Components", Biometrics Bulletin 2(6), 1946.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gorgo.core.numeric import Floats

Estimator = Literal["ips", "snips", "dr"]

#: Blocks are of a minute, and longer in a long log, so that each has its part of slower changes too.
BLOCK_S = 60.0
MOST_BLOCKS = 120
#: A decision counts as one by chance where the other policy gives it so many times the chance that it had.
BY_CHANCE = 1.5
#: From this chance on a decision was the log's policy's own.
USUAL = 0.5
#: Fewer decisions by chance, in effect, are no support for an estimate: below, intervals missed the truth more often.
LEAST_SUPPORT = 30.0
#: Quantile of the normal distribution for intervals of 95 %.
_Z = 1.959963984540054


@dataclass(frozen=True, slots=True)
class EstimatedChange:
    """The change of a mean outcome, with its interval of 95 %."""

    change: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Weighted:
    """A policy's weight of each row, and the outcome that a model predicts for its choice there."""

    weights: Floats
    predicted: Floats


@dataclass(frozen=True, slots=True)
class Support:
    """How far a log carries.

    Parameters
    ----------
    decisions:
        Of the log.
    changed:
        Share of them that another policy would have made otherwise.
    effective:
        Effective number of decisions that went, by chance, where only the other policy would have sent them
        (Kish: the square of the sum of their weights over the sum of squares).
    """

    decisions: int
    changed: float
    effective: float

    @property
    def is_enough(self) -> bool:
        """Return whether there are enough of them for an estimate."""
        return self.effective >= LEAST_SUPPORT

    @property
    def needed(self) -> float:
        """Return how many times as many decisions would be enough."""
        return LEAST_SUPPORT / self.effective if self.effective else inf


def support(chances: Floats, probabilities: Floats, reference: Floats | None = None) -> Support:
    """Return the support for a policy that gives each row's replica so much chance, where it had such a probability.

    `reference` has the chances of the weights that it is compared with, if these are not the log's.
    """
    usual = probabilities >= USUAL
    rows = usual if usual.any() else np.ones(len(chances), dtype=np.bool_)
    if reference is None:
        return Support(len(chances), float(1.0 - chances[rows].mean()), _effective(chances / probabilities))
    differs = chances != reference
    found = [_effective(np.where(differs, each / probabilities, 0.0)) for each in (chances, reference)]
    # Where the reference is what the log did, nothing of it went by chance alone.
    return Support(len(chances), float(differs[rows].mean()), min(found) if min(found) > 0.0 else max(found))


def changes(
    outcomes: Floats,
    blocks: NDArray[np.intp],
    predicted: Floats,
    other: Weighted,
    reference: Weighted | None = None,
) -> Mapping[Estimator, EstimatedChange]:
    """Return the change of the mean outcome by each estimator.

    Parameters
    ----------
    outcomes:
        Of each row.
    blocks:
        Number of its block.
    predicted:
        The outcome that a model predicts for the replica of the row.
    other, reference:
        What is compared; without a reference the log itself.
    """
    ours = _values(outcomes, predicted, other)
    theirs = None if reference is None else _values(outcomes, predicted, reference)
    found: dict[Estimator, EstimatedChange] = {}
    for name, (value, parts) in ours.items():
        before, less = (outcomes.mean(), outcomes) if theirs is None else theirs[name]
        found[name] = _estimate(float(value - before), parts - less, blocks)
    return found


def _values(outcomes: Floats, predicted: Floats, other: Weighted) -> Mapping[Estimator, tuple[float, Floats]]:
    """Return the mean outcome by each estimator, and each row's part of it; of a ratio by its first derivative."""
    weights = other.weights
    weighted = weights * outcomes
    mean_weight = float(weights.mean()) or 1.0
    normalised = float(weighted.mean()) / mean_weight
    robust = other.predicted + weights * (outcomes - predicted)
    return {
        "ips": (float(weighted.mean()), weighted),
        "snips": (normalised, normalised + weights * (outcomes - normalised) / mean_weight),
        "dr": (float(robust.mean()), robust),
    }


def _effective(weights: Floats) -> float:
    """Return the effective number of rows that stand for more than themselves."""
    off = weights[weights > BY_CHANCE]
    squares = float(np.sum(off**2))
    return float(np.sum(off)) ** 2 / squares if squares else 0.0


def blocks_of(times_s: Floats) -> NDArray[np.intp]:
    """Return the number of the block of each row.

    Example
    -------
    >>> blocks_of(np.array([0.0, 59.0, 61.0])).tolist(), len(set(blocks_of(np.arange(86_400.0)).tolist()))
    ([0, 0, 1], 120)
    """
    since_s = times_s - times_s.min()
    block_s = max(BLOCK_S, float(since_s.max()) / (MOST_BLOCKS - 1e-6))
    found: NDArray[np.intp] = np.floor(since_s / block_s).astype(np.intp)
    return found


def binned_means(values: Floats, outcomes: Floats, *, bins: int = 20) -> tuple[Floats, Floats]:
    """Return a model of outcomes: the upper edges of bins of a value with as many rows each, and the mean in each."""
    edges = np.unique(np.quantile(values, np.linspace(0.0, 1.0, bins + 1)[1:-1]))
    places = np.searchsorted(edges, values)
    counts = np.bincount(places, minlength=len(edges) + 1)
    sums = np.bincount(places, weights=outcomes, minlength=len(edges) + 1)
    return edges, np.where(counts > 0, sums / np.maximum(counts, 1), outcomes.mean())


def _estimate(change: float, parts: Floats, blocks: NDArray[np.intp]) -> EstimatedChange:
    """Return the interval by the sums of the blocks' deviations."""
    sums = np.bincount(blocks, weights=parts - parts.mean()) / len(parts)
    squares = sums**2
    total = float(squares.sum())
    if not total:
        return EstimatedChange(change, change, change)
    count = len(np.unique(blocks))
    if count < 2:
        return EstimatedChange(change, -inf, inf)
    spread = float(np.sum(squares**2)) - total**2 / count
    freedom = min(count - 1.0, 2.0 * total**2 / spread) if spread > 0.0 else count - 1.0
    reach = _student(max(freedom, 1.0)) * sqrt(total * count / (count - 1))
    return EstimatedChange(change, change - reach, change + reach)


def _student(freedom: float) -> float:
    """Return the quantile of Student's t for intervals of 95 % (Cornish and Fisher's expansion)."""
    z = _Z
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
