"""Readiness: whether some replica could serve a request now, and the reason for each that could not. Pure.

Owns the rule of `/ready` and of the status page's alert. In a panic the Router also tries ejected replicas; a load
balancer with another proxy to choose should not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from gorgo.core.fleet.snapshot import ReplicaSnapshot

#: Regions that may serve a model, for models with such a rule.
AllowedRegions = Mapping[str, frozenset[str]]


class NotReady(NamedTuple):
    """Code and message of the error."""

    code: str
    message: str


def why_not_ready(
    views: Sequence[ReplicaSnapshot],
    allowed: AllowedRegions,
    *,
    required: int = 1,
    unreachable: Container[str] = (),
) -> NotReady | None:
    """Return the error if fewer than `required` replicas can serve a request.

    `unreachable` has the replicas whose last pings found no connection. A load balancer that requires several replicas
    counts those with a recent probe alone.
    """
    if not views:
        return NotReady("no_replica", "no replica can serve a request: the fleet is empty")
    obstacles = [_obstacle(view, allowed, view.name in unreachable) for view in views]
    if all(obstacles):
        # Without names: this route needs no key.
        counts = Counter(obstacle for obstacle in obstacles if obstacle is not None)
        reasons = ", ".join(f"{n} {reason}" for reason, n in counts.most_common())
        return NotReady("no_replica", f"no replica can serve a request: {reasons}")
    ready = sum(view.state == "healthy" and view.rtt_ms is not None for view in views)
    # For 1, any replica that can serve counts: a single lost ping must not take the only one away.
    if ready < required and required > 1:
        return NotReady("too_few_replicas", f"{ready} replicas are ready; {required} are required")
    return None


def _obstacle(view: ReplicaSnapshot, allowed: AllowedRegions, unreachable: bool) -> str | None:
    if view.state == "draining":
        return "draining"
    if view.models and all(view.region not in allowed.get(model, (view.region,)) for model in view.models):
        return "without a model that its region may serve"
    if unreachable:
        return "without a connection"
    if view.state == "ejected":
        return "ejected after failed requests" if view.ejected_by == "attempts" else "without an answer to probes"
    if view.state == "half_open":
        # A back-off also ends for a replica that is still silent.
        return None if view.answers else "without an answer to probes"
    # One lost ping says little while the round trip before it is recent, or requests succeed.
    alive = view.answers is not False or view.rtt_ms is not None or not view.failures_in_a_row
    return None if alive else "without an answer to probes"
