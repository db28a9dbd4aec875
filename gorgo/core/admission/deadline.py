"""Whether a request can still meet its deadline: the rules of shedding, as plain functions.

Theory of operation. A request that could meet its deadline on an idle fleet is shed as soon as it no longer can: what
it would cost is taken from requests that still can. A request that could not meet it even on an idle fleet is served,
unless it has been queued for `infeasible_max_wait_s`. Shed by its prediction, it would never get into a cache, and the
later turns of its conversation would be shed as well.
"""

from __future__ import annotations

from gorgo.core.limits import OverloadLimits
from gorgo.core.policy.choice import Choice, Prediction

#: Sums of the same times in another order differ by less.
_NOISE_S = 1e-6


def meets_deadline(choice: Choice, *, deadline_s: float) -> bool:
    """Return whether the replica chosen clearly meets the deadline: no prediction of all others says more."""
    return choice.predicted_ttft_s is not None and choice.predicted_ttft_s < deadline_s - _NOISE_S


def misses_deadline(prediction: Prediction, *, waited_s: float, deadline_s: float, limits: OverloadLimits) -> bool:
    """Return whether to shed a request that has waited for `waited_s`."""
    if feasible_idle(prediction, deadline_s=deadline_s):
        least_s: float = min((prediction.idle_s + prediction.backlog_s).tolist())
        return waited_s + least_s > deadline_s
    return waited_s > limits.infeasible_max_wait_s


def feasible_idle(prediction: Prediction, *, deadline_s: float) -> bool:
    """Return whether the request would meet its deadline on an idle fleet."""
    # Of a list: a reduction of numpy takes five times as long for a few.
    return bool(min(prediction.idle_s.tolist()) <= deadline_s)


def shed_at_s(prediction: Prediction, *, received_s: float, deadline_s: float, limits: OverloadLimits) -> float:
    """Return the latest time at which a queued request becomes infeasible, whatever the fleet does."""
    idle_s: float = min(prediction.idle_s.tolist())
    return received_s + (deadline_s - idle_s if idle_s <= deadline_s else limits.infeasible_max_wait_s)
