"""A changed regions.yaml, carried out while requests go on.

Owns the order of a reload: read and check everything that can fail, ask newcomers who they are, then change the Router,
the targets and the settings in one step without an await, and at last see off who has left. Leaves what differs to
`changes`, when to look to `config_file`.

Theory of operation: an exchange takes its target in the very step in which the Router dispatched it, so the two always
mean the same process, and a stream that runs keeps the target it has. A replica that left the fleet is closed when its
last stream has ended. A file that is refused changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from gorgo.config.deadlines import deadlines_by_region
from gorgo.config.model import Config
from gorgo.config.router_settings import replica_spec, router_limits
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.errors import ConfigError, GorgoError
from gorgo.policies.registry import make_policy, make_shadow
from gorgo.proxy.http.client_auth import read_client_keys
from gorgo.proxy.http.tls import upstream_tls
from gorgo.proxy.logs import log, log_failure
from gorgo.proxy.monitor.fleet_monitor import FleetMonitor
from gorgo.proxy.monitor.replica_monitor import ProbeResult, ReplicaMonitor
from gorgo.proxy.reload.config_diff import ConfigDiff, diff, keep_restart_only
from gorgo.proxy.reload.file_watch import ConfigFile, Found
from gorgo.proxy.request_options import ClientPolicies
from gorgo.proxy.state import RunningProxy
from gorgo.proxy.upstream.target import Target, api_key, make_target

ProbeResults = Sequence[tuple[ReplicaMonitor, ProbeResult]]


class Reloader:
    """Follows one file for one running proxy.

    Parameters
    ----------
    state:
        What is changed.
    file:
        What is followed.
    watchers:
        Of the replicas in `state`, at work.
    environ:
        Where replicas' API keys are.
    """

    def __init__(
        self, state: RunningProxy, file: ConfigFile, watchers: FleetMonitor, *, environ: Mapping[str, str]
    ) -> None:
        self._state = state
        self._file = file
        self._watchers = watchers
        self._environ = environ

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as farewells:
            while True:
                await self._reload(await self._file.changed(), farewells)

    async def _reload(self, found: Found, farewells: asyncio.TaskGroup) -> None:
        try:
            config = await self._file.parse(found)
            keys = {replica.name: api_key(replica, self._environ) for replica in config.replicas}
            policy, weights = _policy(config, self._state.config)
            shadow = make_shadow(config.proxy.shadow_policy, policy)
            changes = diff(self._state.config, config)
            client_keys = read_client_keys(config.clients)
            # Read before anything changes, because files can be wrong; those who join read their own.
            tls_of = await asyncio.to_thread(_tls_of, config, self._state.tls)
            looks = await self._probe_new(changes, config, keys)
            if self._state.served_tls is not None:
                self._state.served_tls.renew(config.proxy.tls)
        except GorgoError as refusal:
            self._state.metrics.reload_refused()
            log("config_refused", level=logging.ERROR, error=str(refusal), in_force="the configuration as it was")
            return
        except Exception as failure:  # noqa: BLE001 - nothing is changed yet; a proxy that works must not end by a file
            self._state.metrics.reload_refused()
            log_failure("config_refused", failure)
            return
        async with self._state.control.exclusive():
            left = self._change(changes, config, keys, policy, weights, shadow, looks)
            self._state.client_keys = client_keys
            for name, tls in tls_of.items():
                self._state.targets[name].upstream.set_tls(tls)
        for target, watch in left:
            farewells.create_task(self._drain_removed(target, watch))

    # -- what waits

    async def _probe_new(self, changes: ConfigDiff, config: Config, keys: Mapping[str, str | None]) -> ProbeResults:
        """Probe newcomers before they take traffic; who does not answer joins all the same, as at the start."""
        async with AsyncExitStack() as undo:
            watchers = []
            deadlines = deadlines_by_region(config)
            for replica in (*changes.added, *changes.replaced):
                tls = upstream_tls(replica, self._state.tls)
                target = make_target(replica, config.limits, deadlines[replica.region], keys[replica.name], tls)
                undo.push_async_callback(target.upstream.aclose)
                watchers.append(ReplicaMonitor(self._state, target))
            looks = await asyncio.gather(*(watcher.probe_once() for watcher in watchers))
            undo.pop_all()
        return list(zip(watchers, looks, strict=True))

    async def _drain_removed(self, target: Target, watch: asyncio.Task[None]) -> None:
        """Close the connections to a replica that has left when nothing runs on them any more."""
        await asyncio.wait((watch,))
        await target.wait_drained()
        await target.upstream.aclose()
        self._state.draining_targets.discard(target)
        self._keep_series()

    # -- the one step

    def _change(
        self,
        changes: ConfigDiff,
        config: Config,
        keys: Mapping[str, str | None],
        policy: Policy,
        weights: Weights,
        shadow: Policy | None,
        looks: ProbeResults,
    ) -> list[tuple[Target, asyncio.Task[None]]]:
        """Everything that others can see, at once. Answers who has left, with the end of their watch."""
        state = self._state
        joined = {watcher.target.name: watcher.target for watcher, _ in looks}
        self._change_fleet(changes, config)
        if changes.shadow:
            # The one that goes may not suit the policy that comes.
            state.router.set_shadow(None, now=state.clock())
        self._state.control.apply_config(
            config,
            policy=policy if changes.policy else None,
            weights=weights if changes.policy or changes.weights else None,
        )
        if changes.shadow:
            self._set_shadow(shadow)
        gone = [state.targets[name] for name in (*changes.removed, *(replica.name for replica in changes.replaced))]
        state.targets = {row.name: joined.get(row.name) or state.targets[row.name] for row in config.replicas}
        deadlines = deadlines_by_region(config)
        for row in config.replicas:
            state.targets[row.name].update(row, config.limits, deadlines[row.region], keys[row.name])
        state.client_policies = ClientPolicies.for_client(config)
        state.config, state.limits = keep_restart_only(state.config, config), config.limits
        state.draining_targets.update(gone)
        left = [(target, self._watchers.stop(target.name)) for target in gone]
        self._watch(changes, looks)
        for target in gone:
            state.stored_responses.forget(target.name)
        self._keep_series()
        state.metrics.reload_applied(state.clock())
        level = logging.WARNING if changes.restart else logging.INFO
        log("config_reloaded", level=level, replicas=len(state.targets), **changes.as_log())
        return left

    def _change_fleet(self, changes: ConfigDiff, config: Config) -> None:
        router, now = self._state.router, self._state.clock()
        limits = router_limits(config)
        if limits != router.limits:
            router.set_limits(limits, now=now)
        if changes.fleet:
            replaced = {replica.name for replica in changes.replaced}
            # A mark belongs to the name: who drained it to exchange the process may not want traffic there yet.
            marked = {view.name for view in router.fleet_view(now=now) if view.state == "draining"} & replaced
            # Leaving and joining again is what makes the Router forget: load, health, belief.
            router.set_fleet([replica_spec(row) for row in config.replicas if row.name not in replaced], now=now)
            router.set_fleet([replica_spec(row) for row in config.replicas], now=now)
            for name in marked:
                router.drain(name, now=now)
        for name, draining in changes.drains.items():
            router.drain(name, draining, now=now)

    def _set_shadow(self, shadow: Policy | None) -> None:
        try:
            self._state.router.set_shadow(shadow, now=self._state.clock())
        except ConfigError as error:  # it suits the file's policy; another one was set live
            log("shadow_not_set", level=logging.WARNING, error=str(error))

    def _watch(self, changes: ConfigDiff, looks: ProbeResults) -> None:
        if changes.intervals:
            self._watchers.restart()
        for watcher, look in looks:
            watcher.publish(look)
            self._watchers.start(watcher)

    def _keep_series(self) -> None:
        targets = (*self._state.targets.values(), *self._state.draining_targets)
        self._state.metrics.retain_replicas({(target.name, target.region) for target in targets})


def _tls_of(config: Config, shared: ssl.SSLContext) -> dict[str, ssl.SSLContext]:
    """By replica. Each reads a list of authorities, which takes the time of a hundred events of a stream."""
    return {row.name: upstream_tls(row, shared) for row in config.replicas}


def _policy(config: Config, running: Config) -> tuple[Policy, Weights]:
    """What the file names, complete. Raises `UnknownPolicy` or `WeightsError`."""
    policy = make_policy(config.proxy.policy)
    # What is in force since the start may come from a weights file that was written with a wider box.
    known = (config.proxy.policy, config.proxy.weights) == (running.proxy.policy, running.proxy.weights)
    return policy, Weights.of(policy.weight_specs, config.proxy.weights, allow_out_of_range=known)
