"""Changes at run time: weights, policy, freeze and unfreeze, drain marks; and the history of weights.

Owns the changes (`ControlService`) and the last versions of the weights (`WeightsHistory`). Each public method makes a
plan. It is checked in full before anything is written or applied (see `transactions`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from gorgo.config.model import Config
from gorgo.config.registered import RegisteredReplicas
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.core.router import Router
from gorgo.errors import VersionConflict, WeightsFrozen
from gorgo.live.control.state_file import (
    ConfigSnapshot,
    FileRouting,
    Frozen,
    InitialState,
    PendingEdit,
    PersistedState,
    StateFile,
)
from gorgo.live.control.transactions import ChangeQueue, ChangeRequest, FleetPlans, PlannedChange, WeightsChange
from gorgo.live.event_loop import Clock, ahead_s
from gorgo.live.logs import log
from gorgo.live.telemetry.metrics import Metrics
from gorgo.policies.registry import make_policy, make_shadow

#: One day of a tuner with a proposal every 15 minutes.
MAX_HISTORY = 100


class WeightsHistory:
    """The history of one Router, oldest first."""

    def __init__(self, router: Router, clock: Clock) -> None:
        self._router = router
        self._clock = clock
        self._rows: deque[WeightsChange] = deque(maxlen=MAX_HISTORY)

    @property
    def rows(self) -> list[WeightsChange]:
        return list(self._rows)

    def record(self, change: ChangeRequest) -> None:
        """Record the version in force as the result of `change`."""
        policy, weights = self._router.settings.policy.name, self._router.settings.weights
        fields = (
            weights.version,
            policy,
            dict(weights),
            now_text(self._clock),
            change.source,
            change.reason,
            change.by,
        )
        self._rows.append(WeightsChange(*fields))


#: What a killed process may lose is learned again within this time, by the same traffic.
SAVE_INTERVAL_S = 600.0


def now_text(clock: Clock) -> str:
    """Return the time now in ISO 8601, UTC."""
    return datetime.fromtimestamp(clock() + ahead_s(clock), UTC).isoformat(timespec="milliseconds")


class ControlService:
    """The changes of one proxy.

    Parameters
    ----------
    start:
        Policy, weights, freeze and drain marks at the start.
    file:
        The state file. Without one `durable` is false: changes end with the process.
    """

    def __init__(
        self,
        router: Router,
        clock: Clock,
        metrics: Metrics,
        start: InitialState,
        file: StateFile | None,
        registered: RegisteredReplicas,
    ) -> None:
        self._router = router
        self._clock = clock
        self._metrics = metrics
        #: Policy and weights of regions.yaml.
        self.file = start.file
        self.registered = registered
        self.fleet = FleetPlans(router, clock, registered)
        self._changes = ChangeQueue(file, metrics)
        self._history = WeightsHistory(router, clock)
        self.frozen: Frozen | None = None
        self._set_frozen(start.frozen)
        self._start = start
        self._saved = router.learned_tokens()
        self._history.record(ChangeRequest(source=start.source, reason=_reason_of(start)))

    @property
    def durable(self) -> bool:
        """Whether changes outlive the process."""
        return self._changes.durable

    @property
    def busy(self) -> bool:
        return self._changes.busy

    @property
    def history(self) -> list[WeightsChange]:
        """Return the last versions since the start, oldest first."""
        return self._history.rows

    def in_force(self) -> PersistedState:
        """Return the state of now, as another worker of the router starts with it."""
        return self._in_force()

    async def write_to(self, file: StateFile) -> None:
        """Write the state of now, and later ones, to the file of a worker that has ended. A failure is logged."""
        self._changes.write_to(file)
        async with self._changes.paused(self._in_force):
            pass

    def write_no_more(self) -> None:
        """Leave the file to a successor."""
        self._changes.write_to(None)

    async def persist_initial(self, *, fresh: bool) -> None:
        """Write the initial state.

        Raises `StateError` if there was no file and none can be made: the path is wrong. A full disk does not stop a
        proxy whose file exists.
        """
        policy, weights = self._active()
        version, (initial,) = self._router.settings.weights.version, self.history
        log("weights_in_force", policy=policy, version=version, weights=weights, source=initial.source)
        frozen = self.frozen is not None
        if self._start.set_aside:
            copy, unknown = await self._changes.keep_copy(), list(self._start.set_aside)
            log("state_set_aside", level=logging.WARNING, unknown=unknown, frozen=frozen, copy=copy)
        if self._start.gained:
            log("weights_gained", level=logging.WARNING, weights=dict(self._start.gained), frozen=frozen)
        await (self._changes.write if fresh else self._changes.persist)(self._in_force())

    async def run(self) -> None:
        """Save what is learned of prompts' lengths from time to time, until cancelled: no change may come for weeks."""
        while True:
            await asyncio.sleep(SAVE_INTERVAL_S)
            await self._save_learned()

    async def aclose(self) -> None:
        """Wait for running changes, and save what was learned since the last one."""
        await self._changes.aclose()
        await self._save_learned()

    async def _save_learned(self) -> None:
        """Write the state if lengths were learned since this was done last. A failed write is logged."""
        learned = self._router.learned_tokens()
        if self.durable and learned != self._saved:
            async with self._changes.paused(self._in_force):
                self._saved = learned

    # -- changes

    async def set_weights(self, values: Mapping[str, float], change: ChangeRequest) -> None:
        """Replace the named values. Raises `WeightsFrozen`, `VersionConflict`, `WeightsError` or `StateError`."""

        def plan() -> PlannedChange:
            self._refuse_frozen()
            self._expect(change)
            return self._weighted(values, change)

        await self._changes.execute(plan)

    async def set_policy(self, name: str, values: Mapping[str, float], change: ChangeRequest) -> None:
        """Switch the policy.

        Raises as `set_weights` does, `UnknownPolicy`, and `ConfigError` if the shadow policy reads another index.
        """

        def plan() -> PlannedChange:
            self._refuse_frozen()
            self._expect(change)
            return self._switched(make_policy(name), values, change)

        await self._changes.execute(plan)

    async def freeze(
        self, values: Mapping[str, float] | None, change: ChangeRequest, *, policy: str | None = None
    ) -> None:
        """Freeze the weights in force, or `values` of `policy` (default: the policy in force).

        A second freeze of the same weights changes nothing. Raises as `set_policy` does.
        """

        def plan() -> PlannedChange:
            self._expect(change)
            wanted = self._requested(values, change, policy)
            if self.frozen is not None:
                if (wanted.state.policy, wanted.state.weights) != self._active():
                    self._refuse_frozen()
                return PlannedChange(self._in_force(), _nothing)
            return self._pinned(wanted, Frozen(now_text(self._clock), change.reason, change.by))

        await self._changes.execute(plan)

    async def unfreeze(self, change: ChangeRequest) -> None:
        """Allow changes of weights, and apply an edit of regions.yaml that waited. Raises as `set_policy` does."""

        def plan() -> PlannedChange:
            self._expect(change)
            return self._pinned(self._released(), None)

        before = self.frozen
        await self._changes.execute(plan)
        if before is not None and self.frozen is None:
            log("weights_unfrozen", version=self._router.settings.weights.version, reason=change.reason, by=change.by)

    async def drain(self, name: str, draining: bool) -> bool:
        """Set or remove a drain mark, also while weights are frozen or the disk is full. Raises `UnknownReplica`.

        Return whether it outlives the process: an operator who drains a replica cannot wait for a disk.
        """
        plan = partial(self.fleet.drain, name, draining)
        durable = await self._changes.execute(lambda: plan(self._in_force()), required=False)
        log("drain_set", replica=name, drain=draining, durable=durable)
        return durable

    async def execute(self, plan: Callable[[PersistedState], PlannedChange]) -> None:
        """Plan a change from the state in force, write and apply it. Raises what `plan` raises, and `StateError`."""
        await self._changes.execute(lambda: plan(self._in_force()))

    # -- reload

    def exclusive(self) -> AbstractAsyncContextManager[None]:
        """Block other changes during a reload, then write the state. A failed write is logged."""
        return self._changes.paused(self._in_force)

    def apply_config(
        self, config: Config, policy: Policy, weights: Weights, *, switched: bool, edited: bool
    ) -> Mapping[str, str]:
        """Apply a reload. `switched` and `edited` say whether the file changed its policy, and policy or weights.

        Return the changed keys that are not in force, with the reason.
        """
        if not edited:
            self.file = self.file.unedited(config)
            return {}
        if self.frozen is not None:
            self.file = self.file.deferred(config, policy, weights)
            if self.file.pending is None:
                return {}
            key = "proxy.weights" if policy.name == self._router.settings.policy.name else "proxy.policy"
            return {key: f"{self.frozen}; unfreeze applies it"}
        self.file = FileRouting(ConfigSnapshot.by(config))
        weights = replace(weights, version=self._router.settings.weights.version + 1)
        if switched:
            self._switch(policy, weights, ChangeRequest(source="reload"))
        elif self._router.settings.policy.name == config.proxy.policy:
            self._set(weights, ChangeRequest(source="reload"))
        else:
            return {"proxy.weights": f"the policy in force is {self._router.settings.policy.name}"}
        return {}

    # -- plans

    def _weighted(self, values: Mapping[str, float], change: ChangeRequest) -> PlannedChange:
        specs = self._router.settings.policy.weight_specs
        after = self._router.settings.weights.changed(specs, values, allow_out_of_range=change.allow_out_of_range)
        state = replace(self._in_force(), weights=dict(after), version=after.version)
        return PlannedChange(state, lambda: self._set(after, change))

    def _switched(self, policy: Policy, values: Mapping[str, float], change: ChangeRequest) -> PlannedChange:
        self._router.settings.validate_policy(policy)
        version = self._router.settings.weights.version + 1
        after = Weights.of(policy.weight_specs, values, version=version, allow_out_of_range=change.allow_out_of_range)
        state = replace(self._in_force(), policy=policy.name, weights=dict(after), version=version)
        return PlannedChange(state, lambda: self._switch(policy, after, change))

    def _released(self) -> PlannedChange:
        """Plan the edit of regions.yaml that waits, if there is one."""
        edit, file, state = self.file.pending, self.file.released(), self._in_force()
        changed = edit is not None and (edit.policy.name, dict(edit.weights)) != self._active()
        if edit is not None and changed:
            state = replace(state, policy=edit.policy.name, weights=dict(edit.weights), version=state.version + 1)

        def apply() -> None:
            self.file = file
            if edit is not None and changed:
                self._release(edit, replace(edit.weights, version=state.version))

        return PlannedChange(replace(state, configured=file.applied), apply)

    def _requested(
        self, values: Mapping[str, float] | None, change: ChangeRequest, policy: str | None
    ) -> PlannedChange:
        """Plan the weights of a freeze; the version stays if they are in force."""
        change = replace(change, source="freeze")
        if policy is not None:
            running = self._router.settings.policy
            plan = self._switched(running if policy == running.name else make_policy(policy), values or {}, change)
        else:
            plan = self._weighted(values or {}, change)
        same = (plan.state.policy, plan.state.weights) == self._active()
        return PlannedChange(self._in_force(), _nothing) if same else plan

    def _pinned(self, plan: PlannedChange, frozen: Frozen | None) -> PlannedChange:
        def apply() -> None:
            plan.apply()
            self._set_frozen(frozen)

        return PlannedChange(replace(plan.state, frozen=frozen), apply)

    def _refuse_frozen(self) -> None:
        if self.frozen is not None:
            raise WeightsFrozen(f"the weights are {self.frozen}; unfreeze them first (`gorgo unfreeze`)")

    def _expect(self, change: ChangeRequest) -> None:
        version = self._router.settings.weights.version
        if change.expected_version is not None and change.expected_version != version:
            raise VersionConflict(
                f"version {version} is in force, not {change.expected_version}: read the weights again"
            )

    def _active(self) -> tuple[str, Mapping[str, float]]:
        return self._router.settings.policy.name, dict(self._router.settings.weights)

    # -- steps

    def _set(self, weights: Weights, change: ChangeRequest) -> None:
        self._router.settings.set_weights(weights, now=self._clock())
        self._publish("weights_set", change)

    def _switch(self, policy: Policy, weights: Weights, change: ChangeRequest) -> None:
        self._router.settings.set_policy(policy, weights, now=self._clock())
        self._publish("policy_set", change)

    def _release(self, edit: PendingEdit, weights: Weights) -> None:
        if edit.policy.name == self._router.settings.policy.name:
            self._set(weights, ChangeRequest(source="reload"))
            return
        # The shadow policy in force may read another index than the new policy.
        self._router.settings.set_shadow(None, now=self._clock())
        self._switch(edit.policy, weights, ChangeRequest(source="reload"))
        self._router.settings.set_shadow(make_shadow(edit.shadow, edit.policy), now=self._clock())

    def _publish(self, event: str, change: ChangeRequest) -> None:
        self._history.record(change)
        policy, weights = self._router.settings.policy.name, self._router.settings.weights
        log(event, policy=policy, version=weights.version, weights=dict(weights), source=change.source)

    def _set_frozen(self, frozen: Frozen | None) -> None:
        self.frozen = frozen
        self._router.settings.frozen = frozen is not None
        self._metrics.config.frozen = frozen is not None
        if frozen is not None:
            version = self._router.settings.weights.version
            log("weights_frozen", version=version, since=frozen.since, reason=frozen.reason, by=frozen.by)

    def _in_force(self) -> PersistedState:
        policy, weights = self._active()
        return PersistedState(
            policy=policy,
            weights=weights,
            version=self._router.settings.weights.version,
            frozen=self.frozen,
            draining=self._router.view.draining(),
            configured=self.file.applied,
            registered=tuple(self.registered.entries.values()),
            learned=self._router.learned_tokens(),
        )


def _reason_of(start: InitialState) -> str | None:
    """Return what the first version says of a state file of another version."""
    parts = []
    if start.set_aside:
        parts.append(f"unknown to this version and set aside: {', '.join(start.set_aside)}")
    if start.gained:
        gained = ", ".join(f"{name} {value:g}" for name, value in start.gained.items())
        parts.append(f"new in this version, with their defaults: {gained}")
    return "; ".join(parts) or None


def _nothing() -> None:
    pass
