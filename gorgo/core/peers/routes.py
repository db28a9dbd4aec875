"""Routes of peers for a policy that has routes of its own beside the prefix index."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from gorgo.core.peers.records import PrefixMarks
from gorgo.core.policy.interface import Policy
from gorgo.core.prefix.origin import Origin
from gorgo.core.prefix.residency import BLOCK_HASH_BYTES


@runtime_checkable
class RoutePolicy(Protocol):
    """A policy with routes of its own, which takes in those of peers."""

    @property
    def evicted_routes(self) -> Mapping[Origin, int]: ...

    def add_remote_route(self, model: str | None, prefix: bytes, replica: str, *, now: float) -> None: ...


class PolicyRoutes:
    """The routes of the present policy, if it has any."""

    def __init__(self, policy: Callable[[], Policy]) -> None:
        self._policy = policy
        self._checked: tuple[Policy, RoutePolicy | None] | None = None

    def add(self, marks: PrefixMarks, *, now: float) -> None:
        """Add a route per mark of a peer's prompt."""
        policy = self._route_policy()
        if policy is not None:
            for at in range(0, len(marks.hashes), BLOCK_HASH_BYTES):
                policy.add_remote_route(marks.model, marks.hashes[at : at + BLOCK_HASH_BYTES], marks.replica, now=now)

    def evicted(self) -> Mapping[Origin, int]:
        """Return the routes evicted so far, by origin."""
        policy = self._route_policy()
        return {} if policy is None else policy.evicted_routes

    def _route_policy(self) -> RoutePolicy | None:
        """Return the policy if it has routes; the check is slow, and policies change seldom."""
        policy = self._policy()
        if self._checked is None or self._checked[0] is not policy:
            self._checked = policy, policy if isinstance(policy, RoutePolicy) else None
        return self._checked[1]
