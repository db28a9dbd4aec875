"""What operators and tuners change while the proxy runs: weights, policy, freeze and unfreeze, drain marks.

Owns who may change what and when, and the history of versions. That changes come one at a time and outlive the process
is `orders`', the words of HTTP are `steering_routes`', the file is `kept`'s, and what a changed regions.yaml asks for
`reload`'s. Each public change makes a plan, which is checked in full before anything is written or done.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import UTC, datetime

from gorgo.config.model import Config
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.shadow import required_index
from gorgo.core.policy.weights import Weights
from gorgo.core.router import Router
from gorgo.errors import UnknownReplica, VersionConflict, WeightsFrozen
from gorgo.policies.registry import make_policy
from gorgo.proxy.clock import Clock
from gorgo.proxy.control.startup import InitialState
from gorgo.proxy.control.state_file import ConfigSnapshot, Frozen, PersistedState, StateFile
from gorgo.proxy.control.transactions import ChangeQueue, ChangeRequest, PlannedChange, WeightsChange
from gorgo.proxy.logs import log
from gorgo.proxy.telemetry.metrics import Metrics

#: A day of a tuner that proposes every quarter of an hour.
HISTORY_KEPT = 100


class ControlService:
    """The changes of one proxy.

    Parameters
    ----------
    router:
        What is steered.
    start:
        With what it starts.
    config:
        The configuration in force.
    file:
        Where it is kept; without one nothing outlives the process, and `durable` says so.
    """

    def __init__(
        self,
        router: Router,
        clock: Clock,
        metrics: Metrics,
        start: InitialState,
        config: Config,
        file: StateFile | None,
    ) -> None:
        self._router = router
        self._clock = clock
        self._metrics = metrics
        self._configured = ConfigSnapshot.by(config)
        self._orders = ChangeQueue(file, metrics)
        self._history: deque[WeightsChange] = deque(maxlen=HISTORY_KEPT)
        self.frozen: Frozen | None = None
        self._set_frozen(start.frozen)
        self._note(ChangeRequest(source=start.source))

    @property
    def durable(self) -> bool:
        """Whether what is set outlives the process."""
        return self._orders.durable

    @property
    def busy(self) -> bool:
        """Whether a change is under way, or waits for its turn."""
        return self._orders.busy

    @property
    def history(self) -> list[WeightsChange]:
        """The newest versions since the start, oldest first."""
        return list(self._history)

    async def begin(self, *, fresh: bool) -> None:
        """Write what is in force at the start.

        Raises `StateError` if there was no file and none can be made: that is a wrong path. A disk that fills up later
        must not keep a proxy from starting.
        """
        policy, weights = self._active()
        version, (row,) = self._router.weights.version, self._history
        log("weights_in_force", policy=policy, version=version, weights=weights, source=row.source)
        await (self._orders.write if fresh else self._orders.persist)(self._in_force())

    async def aclose(self) -> None:
        """Wait for a change that is under way."""
        await self._orders.aclose()

    # -- changes

    async def set_weights(self, values: Mapping[str, float], order: ChangeRequest) -> None:
        """Replace the values named. Raises `WeightsFrozen`, `VersionConflict`, `WeightsError` or `StateError`."""

        def plan() -> PlannedChange:
            self._refuse_frozen()
            self._expect(order)
            return self._weighted(values, order)

        await self._orders.execute(plan)

    async def set_policy(self, name: str, values: Mapping[str, float], order: ChangeRequest) -> None:
        """Route by another policy.

        Raises as `set_weights` does, `UnknownPolicy`, and `ConfigError` if the shadow policy cannot go with it.
        """

        def plan() -> PlannedChange:
            self._refuse_frozen()
            self._expect(order)
            return self._switched(make_policy(name), values, order)

        await self._orders.execute(plan)

    async def freeze(
        self, values: Mapping[str, float] | None, order: ChangeRequest, *, policy: str | None = None
    ) -> None:
        """Pin the weights in force, or `values`; with `policy`, those are for it and its defaults fill them up.

        Again with the same weights it changes nothing. Raises as `set_policy` does.
        """

        def plan() -> PlannedChange:
            self._expect(order)
            wanted = self._requested(values, order, policy)
            if self.frozen is not None:
                if (wanted.state.policy, wanted.state.weights) != self._active():
                    self._refuse_frozen()
                return PlannedChange(self._in_force(), _nothing)
            return self._pinned(wanted, Frozen(self._now(), order.reason, order.by))

        await self._orders.execute(plan)

    async def unfreeze(self, order: ChangeRequest) -> None:
        """Let weights be changed again; they stay as they are. Raises `VersionConflict` or `StateError`."""

        def plan() -> PlannedChange:
            self._expect(order)
            return self._pinned(PlannedChange(self._in_force(), _nothing), None)

        was = self.frozen
        await self._orders.execute(plan)
        if was is not None and self.frozen is None:
            log("weights_unfrozen", version=self._router.weights.version, reason=order.reason, by=order.by)

    async def drain(self, name: str, draining: bool) -> None:
        """Set or take off a replica's mark, frozen or not. Raises `UnknownReplica` or `StateError`."""

        def plan() -> PlannedChange:
            if name not in self._router.health_states():
                raise UnknownReplica(f"no replica named {name!r}")
            kept = self._in_force()
            marked = kept.draining | {name} if draining else kept.draining - {name}
            return PlannedChange(
                replace(kept, draining=marked), lambda: self._router.drain(name, draining, now=self._clock())
            )

        await self._orders.execute(plan)
        log("drain_set", replica=name, drain=draining)

    # -- what the configuration says

    def exclusive(self) -> AbstractAsyncContextManager[None]:
        """Nothing else is changed within. What is in force at its end is kept as far as the disk allows.

        For a reload: what regions.yaml says outlives the process by itself.
        """
        return self._orders.is_paused(self._in_force)

    def apply_config(self, config: Config, *, policy: Policy | None, weights: Weights | None) -> None:
        """A reload: `policy` and `weights` are what the file newly says, `None` where it says what it said."""
        self._configured = ConfigSnapshot.by(config)
        if weights is None:
            return
        weights = replace(weights, version=self._router.weights.version + 1)
        if self.frozen is not None:
            log("weights_not_set", level=logging.WARNING, policy=config.proxy.policy, in_force=str(self.frozen))
        elif policy is not None:
            self._switch(policy, weights, ChangeRequest(source="reload"))
        elif self._router.policy.name == config.proxy.policy:
            self._set(weights, ChangeRequest(source="reload"))
        else:
            log(
                "weights_not_set",
                level=logging.WARNING,
                policy=config.proxy.policy,
                in_force=self._router.policy.name,
            )

    # -- plans

    def _weighted(self, values: Mapping[str, float], order: ChangeRequest) -> PlannedChange:
        specs = self._router.policy.weight_specs
        after = self._router.weights.changed(specs, values, allow_out_of_range=order.allow_out_of_range)
        kept = replace(self._in_force(), weights=dict(after), version=after.version)
        return PlannedChange(kept, lambda: self._set(after, order))

    def _switched(self, policy: Policy, values: Mapping[str, float], order: ChangeRequest) -> PlannedChange:
        required_index(policy, self._router.shadow)
        version = self._router.weights.version + 1
        after = Weights.of(policy.weight_specs, values, version=version, allow_out_of_range=order.allow_out_of_range)
        kept = replace(self._in_force(), policy=policy.name, weights=dict(after), version=version)
        return PlannedChange(kept, lambda: self._switch(policy, after, order))

    def _requested(self, values: Mapping[str, float] | None, order: ChangeRequest, policy: str | None) -> PlannedChange:
        """What a freeze pins; under the same version if it is what is in force."""
        order = replace(order, source="freeze")
        if policy is not None:
            running = self._router.policy
            plan = self._switched(running if policy == running.name else make_policy(policy), values or {}, order)
        else:
            plan = self._weighted(values or {}, order)
        same = (plan.state.policy, plan.state.weights) == self._active()
        return PlannedChange(self._in_force(), _nothing) if same else plan

    def _pinned(self, plan: PlannedChange, frozen: Frozen | None) -> PlannedChange:
        def apply() -> None:
            plan.apply()
            self._set_frozen(frozen)

        return PlannedChange(replace(plan.state, frozen=frozen), apply)

    def _refuse_frozen(self) -> None:
        if self.frozen is not None:
            raise WeightsFrozen(f"the weights are {self.frozen}; unfreeze them first")

    def _expect(self, order: ChangeRequest) -> None:
        version = self._router.weights.version
        if order.expected_version is not None and order.expected_version != version:
            raise VersionConflict(
                f"version {version} is in force, not {order.expected_version}: read the weights again"
            )

    def _active(self) -> tuple[str, Mapping[str, float]]:
        return self._router.policy.name, dict(self._router.weights)

    # -- steps

    def _set(self, weights: Weights, order: ChangeRequest) -> None:
        self._router.set_weights(weights, now=self._clock())
        self._publish("weights_set", order)

    def _switch(self, policy: Policy, weights: Weights, order: ChangeRequest) -> None:
        self._router.set_policy(policy, weights, now=self._clock())
        self._publish("policy_set", order)

    def _publish(self, event: str, order: ChangeRequest) -> None:
        self._note(order)
        policy, weights = self._router.policy.name, self._router.weights
        log(event, policy=policy, version=weights.version, weights=dict(weights), source=order.source)

    def _note(self, order: ChangeRequest) -> None:
        policy, weights = self._router.policy.name, self._router.weights
        row = (weights.version, policy, dict(weights), self._now(), order.source, order.reason, order.by)
        self._history.append(WeightsChange(*row))

    def _set_frozen(self, frozen: Frozen | None) -> None:
        self.frozen = frozen
        self._metrics.config.frozen = frozen is not None
        if frozen is not None:
            version = self._router.weights.version
            log("weights_frozen", version=version, since=frozen.since, reason=frozen.reason, by=frozen.by)

    # -- what is in force

    def _in_force(self) -> PersistedState:
        policy, weights = self._active()
        views = self._router.fleet_view(now=self._clock())
        return PersistedState(
            policy=policy,
            weights=weights,
            version=self._router.weights.version,
            frozen=self.frozen,
            draining=frozenset(view.name for view in views if view.state == "draining"),
            configured=self._configured,
        )

    def _now(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")


def _nothing() -> None:
    pass
