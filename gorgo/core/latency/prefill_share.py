"""Share of an engine's time that its prefills take, from what was dispatched to it lately.

Theory of operation. A prefill stalls all that decodes, so an engine that spends the share s of its time on prefills
decodes for 1 - s of it. Requests in flight say how full the batch is now; s says how often it will be stalled while a
new request decodes. Each dispatch adds its predicted prefill over `FADE_S`, and what was added fades with that time: in
a steady stream the sum is s. It may exceed 1 for a moment, after long prompts in a row.

The fade is (1 + x / 4)^-4 for x = age / `FADE_S`, which is e^-x where dispatches are dense. Multiplication and division
give rows and columns the same bits; an exponential would not.
"""

from __future__ import annotations

from collections.abc import Sequence

from gorgo.core.arrays import Floats

#: Memory, s: many prompts, and no longer than load stays as it is.
FADE_S = 30.0
_RATE = 0.25 / FADE_S


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
    left: Floats = 1.0 / (1.0 + (now - since_s) * _RATE)
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
    return float(shares.cumsum()[-1] / len(shares))
