"""Stalls as a cost counts them: requests in flight that a prefill stalls, and what later prefills will stall.

Theory of operation. A prefill of P stalls every running request, so its price is P times their number. The mean over
the candidates prices what a cache saves. The differences from the mean choose between replicas with equal caches. With
many requests in flight such a difference is a small part of the number and soon evened out by other arrivals, while
its price exceeds any round trip: all long prompts would go to the replica that happens to run fewest. So beyond a mean
of `WHOLE` the differences are damped, by the mean.

A replica that prefills much of its time will stall this request too. That price is in full up to a mean of `FEW_RUN` in
flight. With more, the batches decide how long an answer takes, and what evens them out counts: it falls as the mean
grows.

Of n requests in flight, n * s are stalled at any time where prefills take the share s. Beyond `STALLED` of these by the
means of the fleet, the engines' time is what is short: a prefill delays all that come until the queues are gone, and a
batch is even soon. So the price of a prefill rises by this excess and the price of a request in flight falls by it,
within a bound: in lasting overload all numbers are large, and one cached prefix would outweigh any queue.

A request in flight makes each step of the others longer until they or it end, so its price grows with the length of
answers. Short ones keep the price as given: where the length is not known nothing else is.
"""

from __future__ import annotations

from gorgo.core.numeric import Floats, clamp

#: Mean number in flight up to which differences count in full. Of 4, 6, 8 and 10 in simulation, 4 raises p95 E2E.
WHOLE = 8.0
#: Mean number in flight up to which the share of time spent on prefills counts in full. Without such an end p95 E2E
#: rose by up to a half in simulation (ART-Chat-like, load 0.8).
FEW_RUN = 4.0
#: Mean number stalled at any time up to which both prices are as given. In simulation 1.5 raises p95 TTFT.
STALLED = 2.0
#: Bound of the rise. Without one and with 4 the p95 TTFT of a lasting overload rises by a quarter, with 2 it falls.
RISE_MAX = 2.0
#: Mean length of answers for which the price of a request in flight is as given, tokens; it is that of ART-Chat-like.
GIVEN_TOKENS = 128.0
#: Bound of its rise with longer ones: beyond it a replica with few requests would outweigh any round trip.
LONGER_MAX = 4.0


def counted(numbers: Floats) -> Floats:
    """Return the numbers with their differences from the mean damped.

    Example
    -------
    >>> import numpy as np
    >>> counted(np.array([2.0, 8.0])).tolist(), counted(np.array([30.0, 34.0])).tolist()
    ([2.0, 8.0], [31.5, 32.5])
    """
    mean = numbers.sum() / len(numbers)
    return numbers if mean <= WHOLE else mean + (numbers - mean) * (WHOLE / mean)


def counted_of_rows(numbers: list[float]) -> list[float]:
    """Return the same of a few candidates, to the last bit: sums of whole numbers are exact in any order."""
    mean = sum(numbers) / len(numbers)
    if mean <= WHOLE:
        return numbers
    damping = WHOLE / mean
    return [mean + (number - mean) * damping for number in numbers]


def stall_ms(full_ms: float, mean: float) -> float:
    """Return the price of a replica that always prefills, at a mean number in flight; `full_ms` where few are.

    Example
    -------
    >>> stall_ms(1000.0, 3.0), stall_ms(1000.0, 8.0)
    (1000.0, 500.0)
    """
    return full_ms if mean <= FEW_RUN else full_ms * (FEW_RUN / mean)


def excess(mean: float, share: float) -> float:
    """Return how many times `STALLED` the requests stalled at any time are, from 1 to `RISE_MAX`.

    Parameters are means over the candidates: number in flight, and share of the time in prefills.

    Example
    -------
    >>> excess(4.0, 0.5), excess(6.0, 0.5), excess(60.0, 0.9)
    (1.0, 1.5, 2.0)
    """
    return clamp(mean * share / STALLED, 1.0, RISE_MAX)


def longer(answer_tokens: float) -> float:
    """Return the factor on the price of a request in flight by the mean length of answers, from 1 to `LONGER_MAX`.

    Example
    -------
    >>> longer(80.0), longer(256.0), longer(1e4)
    (1.0, 2.0, 4.0)
    """
    return clamp(answer_tokens / GIVEN_TOKENS, 1.0, LONGER_MAX)
