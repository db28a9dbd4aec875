"""A sequential test on pairs of blocks, with a known error rate for any noise.

Theory of operation: two weight sets run in pairs of blocks, and a fair coin decides which comes first. If the weights
made no difference, each pair's difference could as well have had the other sign, whatever trend, burst or
autocorrelation the traffic has. The test compares the sum of the differences with the sums under `PATHS` random choices
of signs: no distribution is assumed, and nothing is estimated. It is evaluated after every pair; the error rate is
spent in proportion to the pairs. At each analysis the highest of the remaining sums are crossed out, as many as the
spent rate allows, and the gain is significant when the real sum is among them. Without an effect the real sum is one
of `PATHS` alike, and at most alpha of them are ever crossed out: so alpha bounds the error over all analyses.

References
----------
Bojinov, Simchi-Levi and Zhao, "Design and Analysis of Switchback Experiments", Management Science 69(7), 2023: blocks
in random order and inference from that order alone. Plamadeala and Rosenberger, "Sequential monitoring with conditional
randomization tests", Annals of Statistics 40(1), 2012: boundaries from re-randomised paths. Lan and DeMets, "Discrete
sequential boundaries for clinical trials", Biometrika 70(3), 1983: spending the error rate. Kim and DeMets, Biometrika
74(1), 1987: as a power of the time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gorgo.errors import TunerError

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
