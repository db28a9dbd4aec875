"""Reloads of regions.yaml, and of replicas that sources find, while requests run.

Owns the changes of one file (`Reloader`), the difference of two configurations (`ConfigDiff`), and the refusal of a
file that protects less. Leaves changes of weights and policy to `gorgo.live.control`.

Order of a reload: read and check all that can fail, probe new replicas, change Router, targets and settings in one
step without an await, then drain removed replicas. A refused file changes nothing.

Theory of operation: an exchange takes its target in the step in which the Router dispatches it, so both always mean
the same process. A running stream keeps its target. A removed replica's streams go on at others where they can, and it
is closed after its last one.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import ClientRuleConfig, Config, LimitsConfig
from gorgo.config.router_settings import deadlines_by_region, max_buffered_bytes, replica_specs
from gorgo.core.continuation import MOST_BACKLOG_S, MOVE_INTERVAL_S
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.errors import ConfigError, GorgoError, NoConfigFile
from gorgo.live.control.transactions import AppliedReload
from gorgo.live.http.tls import SharedTls, upstream_tls
from gorgo.live.logs import log, log_config_warnings, log_failure
from gorgo.live.monitor.fleet_monitor import FleetMonitor
from gorgo.live.monitor.replica_monitor import ProbeResult, ReplicaMonitor
from gorgo.live.prompt_tokens import read_tokenizers
from gorgo.live.reload.file_watch import ConfigFile, Found
from gorgo.live.replica_secrets import ReplicaSecrets, replica_secrets
from gorgo.live.request_options import ClientPolicies, read_client_keys
from gorgo.live.state import LiveState
from gorgo.live.upstream.target import MOVED, RunningStream, Target, make_target
from gorgo.policies.registry import make_policy, make_shadow

# The difference of two configurations, by the changes it needs in a running proxy. Pure.
#
# Only keys that differ between the two files count. Live changes of weights, policy and drain marks therefore hold
# until the file itself changes them.


#: Sockets and the exporter are made once. So is the store's client: another group has another fingerprint key.
_BOUND = ("processes", "bind", "admin_bind", "tracing")
#: Sections that are read once.
_RESTART = ("shared", "picker")
_INTERVALS = ("probe_interval_s", "scrape_interval_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDiff:
    """The difference, by kind of change."""

    added: tuple[ReplicaConfig, ...] = ()
    #: The same name with another URL, engine or TLS file: another process, with new state.
    replaced: tuple[ReplicaConfig, ...] = ()
    #: The same process with other models, region, key, capacity or usage.
    updated: tuple[ReplicaConfig, ...] = ()
    removed: tuple[str, ...] = ()
    #: Drain marks to set or remove.
    drains: Mapping[str, bool] = field(default_factory=dict)
    policy: bool = False
    weights: bool = False
    shadow: bool = False
    #: Aliases or regions of models.
    models: bool = False
    intervals: bool = False
    #: Other changed keys; in force at once.
    settings: tuple[str, ...] = ()
    #: Changed keys that need a restart.
    restart: tuple[str, ...] = ()
    #: Changed keys that the proxy does not follow now, with the reason.
    not_in_force: Mapping[str, str] = field(default_factory=dict)

    @property
    def fleet(self) -> bool:
        return bool(self.added or self.replaced or self.updated or self.removed)

    def as_log(self) -> dict[str, Any]:
        """Return the fields of the log event, empty ones left out."""
        fields: dict[str, Any] = {
            kind: [replica.name for replica in getattr(self, kind)] for kind in ("added", "replaced", "updated")
        }
        fields |= {"removed": list(self.removed), "drains": dict(self.drains)}
        # Other weights come with another policy.
        routed = {"proxy.policy", "proxy.weights"} if self.not_in_force else set()
        fields |= {"settings": [key for key in self.settings if key not in routed]}
        fields |= {"not_in_force": dict(self.not_in_force), "restart_needed": list(self.restart)}
        return {key: value for key, value in fields.items() if value}


def diff(old: Config, new: Config) -> ConfigDiff:
    """Return the changes from the running `old` to `new`."""
    before = {replica.name: replica for replica in old.replicas}
    after = {replica.name: replica for replica in new.replicas}
    stay = [(before[name], replica) for name, replica in after.items() if name in before]
    sections = ("proxy", "clients", "limits", "overload", "scaling")
    settings = [key for name in sections for key in _differ(getattr(old, name), getattr(new, name), name)]
    settings += [key for key in ("regions", "models", "fleet_sources") if getattr(old, key) != getattr(new, key)]
    settings += [key for key in _RESTART if getattr(old, key) != getattr(new, key)]
    restart = (*(f"proxy.{key}" for key in (*_BOUND, *_tls_toggled(old, new))), *_RESTART)
    return ConfigDiff(
        added=tuple(replica for name, replica in after.items() if name not in before),
        replaced=tuple(now for was, now in stay if _process(was) != _process(now)),
        updated=tuple(
            now for was, now in stay if _process(was) == _process(now) and _without_drain(was) != _without_drain(now)
        ),
        removed=tuple(name for name in before if name not in after),
        drains=_drains(before, after),
        policy=old.proxy.policy != new.proxy.policy,
        weights=dict(old.proxy.weights) != dict(new.proxy.weights),
        models=old.models != new.models,
        shadow=old.proxy.shadow_policy != new.proxy.shadow_policy,
        intervals=any(getattr(old.proxy, key) != getattr(new.proxy, key) for key in _INTERVALS),
        settings=tuple(key for key in settings if key not in restart),
        restart=tuple(key for key in settings if key in restart),
    )


def keep_restart_only(running: Config, new: Config) -> Config:
    """Return `new` with the restart-only keys of `running`, so that the next diff names them again."""
    retained = (*_BOUND, *_tls_toggled(running, new))
    proxy = replace(new.proxy, **{key: getattr(running.proxy, key) for key in retained})
    return replace(new, proxy=proxy, **{key: getattr(running, key) for key in _RESTART})


def _tls_toggled(old: Config, new: Config) -> tuple[str, ...]:
    """Return `tls` if TLS for clients is turned on or off; another certificate needs no restart."""
    return ("tls",) if (old.proxy.tls.cert is None) != (new.proxy.tls.cert is None) else ()


def _process(replica: ReplicaConfig) -> tuple[str | None, ...]:
    # Open connections use the old files.
    return replica.url.rstrip("/"), replica.engine, replica.ca_file, replica.client_cert, replica.client_key


def _without_drain(replica: ReplicaConfig) -> ReplicaConfig:
    """Return the entry without its drain mark, which is compared apart."""
    return replace(replica, draining=False)


def _drains(before: Mapping[str, ReplicaConfig], after: Mapping[str, ReplicaConfig]) -> dict[str, bool]:
    marked = {name: before[name].draining if name in before else False for name in after}
    return {name: replica.draining for name, replica in after.items() if replica.draining != marked[name]}


def _differ(old: Any, new: Any, section: str) -> list[str]:
    return [f"{section}.{key}" for key in new.__dataclass_fields__ if getattr(old, key) != getattr(new, key)]


# Parts of a new configuration that are made before it is applied; each may fail.


def tls_contexts(config: Config, shared: SharedTls) -> dict[str, ssl.SSLContext]:
    """Return the TLS context per replica. Reading authorities takes the time of a hundred stream events."""
    return {replica.name: upstream_tls(replica, shared) for replica in config.replicas}


def file_policy(config: Config, running: Config) -> tuple[Policy, Weights]:
    """Return policy and complete weights of the file. Raises `UnknownPolicy` or `WeightsError`."""
    policy = make_policy(config.proxy.policy)
    # Weights of the start may come from a weights file with values out of range.
    unchanged = (config.proxy.policy, config.proxy.weights) == (running.proxy.policy, running.proxy.weights)
    return policy, Weights.of(policy.weight_specs, config.proxy.weights, allow_out_of_range=unchanged)


# Protection that a new configuration would take away: keys, rules and regions of clients and models, keys, files and
# models of replicas, and bounds. Pure.
#
# A file that was cut while it was written is a valid file with fewer sections. So a reload that protects less is
# refused unless the file says `clients: {open: true}`. A number that lost digits is not noticed by this; the line
# `# end` of a file is for that (`file_watch.END`).


#: Of a replica that stays: what authenticates it or the proxy, and what it may be sent.
_OF_REPLICA = ("api_key_env", "push_token_env", "ca_file", "client_cert", "models")
_QUOTAS = ("max_in_flight", "requests_per_minute", "tokens_per_minute")


def refuse_loss(old: Config, new: Config) -> None:
    """Raise `ConfigError` if `new` protects less than the running `old` and does not say that it may."""
    lost = list(_lost(old, new))
    if lost and not new.clients.open:
        raise ConfigError(
            f"the file has less protection than the running configuration: without {', '.join(lost)}; "
            "if that is intended, add `open: true` to `clients`"
        )


def _lost(old: Config, new: Config) -> Iterator[str]:
    """Yield the keys of the configuration that protect in `old` and not in `new`."""
    if old.clients.keys_file is not None and new.clients.keys_file is None:
        yield "clients.keys_file"
    for quota in _QUOTAS:
        if getattr(old.clients, quota) and not getattr(new.clients, quota):
            yield f"clients.{quota}"
    rules = {rule.name: rule for rule in new.clients.rules}
    for rule in old.clients.rules:
        yield from _lost_of_rule(rule, rules.get(rule.name))
    regions = {model.name: model.allowed_regions for model in new.models}
    for model in old.models:
        if model.allowed_regions and not regions.get(model.name):
            yield f"allowed_regions of model {model.name!r}"
    replicas = {replica.name: replica for replica in new.replicas}
    for replica in old.replicas:
        now = replicas.get(replica.name)
        for key in _OF_REPLICA if now is not None else ():
            if getattr(replica, key) and not getattr(now, key):
                yield f"{key} of replica {replica.name!r}"
    # One bound may go back to its default; all of them at once are a section that is missing.
    if old.limits != LimitsConfig() and new.limits == LimitsConfig():
        yield "limits"


def _lost_of_rule(rule: ClientRuleConfig, now: ClientRuleConfig | None) -> Iterator[str]:
    if now is None:
        yield f"the rule of client {rule.name!r}"
        return
    for key in (*_QUOTAS, "allowed_regions"):
        if getattr(rule, key) and not getattr(now, key):
            yield f"{key} of client {rule.name!r}"
    if rule.priority < 0 and now.priority == 0:
        yield f"priority of client {rule.name!r}"


RELOAD_S = 8.0  # probes take 5 s at most; operators' tools give up after ten

ProbeResults = Sequence[tuple[ReplicaMonitor, ProbeResult]]
_Secrets = Mapping[str, ReplicaSecrets]


class Reloader:
    """Applies the changes of one file, and of the registered replicas, to a running proxy.

    Parameters
    ----------
    file:
        The followed file, `None` without one.
    monitors:
        The running monitors.
    environ:
        Holds the secrets of replicas.
    """

    def __init__(
        self, state: LiveState, file: ConfigFile | None, monitors: FleetMonitor, *, environ: Mapping[str, str]
    ) -> None:
        self._state = state
        self._file = file
        self._monitors = monitors
        self._environ = environ
        #: Held by one change at a time: each starts from the configuration in force.
        self.turn = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None
        #: Those whose streams are being moved.
        self._moving: set[Target] = set()
        #: Called with the text of each file that was applied.
        self.on_applied: Callable[[bytes], Awaitable[None]] | None = None
        #: Callers of `reload` by the number of their request.
        self._callers: dict[int, asyncio.Future[AppliedReload]] = {}

    async def run(self) -> None:
        """Reload until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            if self._file is None:
                await asyncio.Event().wait()
                return
            self._file.watch_also(self._state.config.clients.keys_file)
            if self._state.link is not None:
                await self._state.link.leads_now.wait()  # until then the leader's readings are applied
            while True:
                content = await self._file.changed()
                answered = self._file.answered
                async with self.turn:
                    result = await self._reload(self._file, content)
                self._answer(answered, result)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it ends or this reloader is cancelled."""
        assert self._tasks is not None, "runs since the start"
        self._tasks.create_task(work)

    def move_streams(self, name: str) -> None:
        """Have the streams of a draining replica go on at others; once at a time."""
        target = self._state.replicas.targets.get(name)
        if target is not None:
            self._move(target)

    def _move(self, target: Target) -> None:
        if target not in self._moving:
            self._moving.add(target)
            self.spawn(self._move_once(target))

    async def _move_once(self, target: Target) -> None:
        try:
            await move_streams(self._state, target)
        except Exception as failure:  # noqa: BLE001 - streams that stay are no reason to end the process
            log_failure("internal_error", failure, replica=target.name)
        finally:
            self._moving.discard(target)

    async def reload(self) -> AppliedReload:
        """Read the file now; see `FleetChanges`. Raises `TimeoutError` after `RELOAD_S`."""
        if self._file is None:
            raise NoConfigFile("the proxy follows no regions.yaml: it was started without a file, or from a pipe")
        number = self._file.request_reload()
        caller: asyncio.Future[AppliedReload]
        caller = self._callers[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(RELOAD_S):
                return await caller
        finally:
            del self._callers[number]

    async def apply_text(self, text: bytes) -> bool:
        """Apply what another worker has read of the file; return whether it could be applied."""
        assert self._file is not None, "workers have one command line"
        async with self.turn:
            return isinstance(await self._reload(self._file, text), AppliedReload)

    def _answer(self, number: int, result: AppliedReload | GorgoError) -> None:
        for requested, caller in self._callers.items():
            if requested > number or caller.done():
                continue
            if isinstance(result, GorgoError):
                caller.set_exception(result)
            else:
                caller.set_result(result)

    def current_config(self) -> Config:
        """Return the configuration in force with the replicas that are registered or found now."""
        return self._whole(replace(self._state.config, replicas=self._state.file_config.replicas))

    async def apply_fleet(self, config: Config) -> ConfigDiff:
        """Bring the replicas of `config` into the fleet, and others out of it. The caller holds `turn`.

        Raises `ConfigError` for a missing key or file of a new one.
        """
        state = self._state
        secrets = {replica.name: replica_secrets(replica, self._environ) for replica in config.replicas}
        changes = diff(state.config, config)
        if not (changes.fleet or changes.drains):
            return changes
        results = await self._probe_new(changes, config, secrets)
        await state.begin_flush(_leaving(changes))
        async with state.routing.control.exclusive():
            policy, weights = state.routing.router.settings.policy, state.routing.router.settings.weights
            left, changes = self._change(changes, config, secrets, policy, weights, None, results)
        log("fleet_changed", replicas=len(state.replicas.targets), **changes.as_log())
        self._drain(left)
        return changes

    def _whole(self, file: Config) -> Config:
        """Return the file's configuration with the registered replicas and those of fleet sources."""
        return self._state.replicas.found.merged(self._state.routing.control.registered.merged(file))

    async def _reload(self, file: ConfigFile, content: Found) -> AppliedReload | GorgoError:
        try:
            from_file = await file.parse(content)
            config = self._whole(from_file)
            secrets = {replica.name: replica_secrets(replica, self._environ) for replica in config.replicas}
            refuse_loss(self._state.config, config)
            policy, weights = file_policy(config, self._state.config)
            shadow = make_shadow(config.proxy.shadow_policy, policy)
            changes = diff(self._state.config, config)
            client_keys = read_client_keys(config.clients)
            # Read before any change, because files can be wrong.
            tls_of = await asyncio.to_thread(tls_contexts, config, self._state.replicas.tls)
            tokenizers = await asyncio.to_thread(
                read_tokenizers, config.models, self._state.routing.prompt_tokens.models
            )
            results = await self._probe_new(changes, config, secrets)
            if self._state.served_tls is not None:
                self._state.served_tls.renew(config.proxy.tls)
        except GorgoError as refusal:
            self._state.telemetry.metrics.reload_refused()
            log("config_refused", level=logging.ERROR, error=str(refusal), in_force="the configuration as it was")
            return refusal
        except Exception as failure:  # noqa: BLE001 - nothing has changed yet, and a file must not end the process
            self._state.telemetry.metrics.reload_refused()
            log_failure("config_refused", failure)
            return ConfigError(f"the reload failed: {type(failure).__name__}; the log has the traceback")
        await self._state.begin_flush(_leaving(changes))
        async with self._state.routing.control.exclusive():
            self._state.routing.control.fleet.drop_named(from_file)
            left, changes = self._change(changes, config, secrets, policy, weights, shadow, results)
            self._state.file_config, self._state.routing.prompt_tokens.models = from_file, tokenizers
            self._state.replicas.found.configure(from_file.fleet_sources, now=self._state.routing.clock())
            self._state.routing.client_keys = client_keys
            self._state.telemetry.metrics.clients.retain(() if client_keys is None else client_keys.names)
            file.watch_also(config.clients.keys_file)
            for name, tls in tls_of.items():
                self._state.replicas.targets[name].upstream.set_tls(tls)
        self._state.telemetry.metrics.reload_applied(self._state.routing.clock())
        level = logging.WARNING if changes.restart or changes.not_in_force else logging.INFO
        log("config_reloaded", level=level, replicas=len(self._state.replicas.targets), **changes.as_log())
        log_config_warnings(config)
        self._drain(left)
        if self.on_applied is not None and isinstance(content, bytes):
            await self.on_applied(content)
        return AppliedReload(len(config.replicas), changes.as_log())

    # -- with an await

    async def _probe_new(self, changes: ConfigDiff, config: Config, secrets: _Secrets) -> ProbeResults:
        """Probe new replicas before they take traffic. One without an answer joins all the same, as at the start."""
        async with AsyncExitStack() as undo:
            monitors = []
            deadlines = deadlines_by_region(config)
            for replica in (*changes.added, *changes.replaced):
                tls = upstream_tls(replica, self._state.replicas.tls)
                target = make_target(
                    replica,
                    config.limits,
                    deadlines[replica.region],
                    secrets[replica.name],
                    tls,
                    self._state.buffers,
                    plain=self._state.plain,
                )
                undo.push_async_callback(target.upstream.aclose)
                monitors.append(ReplicaMonitor(self._state, target))
            results = await asyncio.gather(*(monitor.probe_once() for monitor in monitors))
            undo.pop_all()
        return list(zip(monitors, results, strict=True))

    async def _drain_removed(self, target: Target, monitor_task: asyncio.Task[None]) -> None:
        """Close the connections of a removed replica after its last stream."""
        await asyncio.wait((monitor_task,))
        await target.wait_drained()
        await target.upstream.aclose()
        self._state.replicas.draining_targets.discard(target)
        self._retain_series()

    # -- the one step

    def _change(
        self,
        changes: ConfigDiff,
        config: Config,
        secrets: _Secrets,
        policy: Policy,
        weights: Weights,
        shadow: Policy | None,
        results: ProbeResults,
    ) -> tuple[list[tuple[Target, asyncio.Task[None]]], ConfigDiff]:
        """Apply all visible changes at once.

        Return removed targets with their cancelled monitor tasks, and the changes with those not in force.
        """
        state = self._state
        joined = {monitor.target.name: monitor.target for monitor, _ in results}
        self._change_fleet(changes, config)
        if changes.shadow:
            # The old shadow policy may read another index than the new policy.
            state.routing.router.settings.set_shadow(None, now=state.routing.clock())
        waiting = state.routing.control.apply_config(
            config, policy, weights, switched=changes.policy, edited=changes.policy or changes.weights
        )
        if changes.shadow:
            self._set_shadow(shadow)
        removed = [state.replicas.targets[name] for name in _leaving(changes)]
        state.replicas.targets = {
            replica.name: joined.get(replica.name) or state.replicas.targets[replica.name]
            for replica in config.replicas
        }
        deadlines = deadlines_by_region(config)
        for replica in config.replicas:
            state.replicas.targets[replica.name].update(
                replica, config.limits, deadlines[replica.region], secrets[replica.name]
            )
        state.routing.client_policies = ClientPolicies.for_client(config)
        state.apply_config(config)
        state.routing.models.configure(config, restarted={target.name for target in removed})
        for name in state.replicas.targets:
            state.routing.gateway.apply(
                state.routing.router.replicas.on_models(
                    name,
                    state.routing.models.listed(name),
                    contexts=state.routing.models.contexts(name),
                    now=state.routing.clock(),
                )
            )
        state.config, state.limits = keep_restart_only(state.config, config), config.limits
        state.routing.training.configure(config.proxy.learning)
        state.routing.scaling.set_scaling(config.scaling)
        state.buffers.limit_bytes = max_buffered_bytes(config.limits)
        state.replicas.draining_targets.update(removed)
        left = [(target, self._monitors.stop(target.name)) for target in removed]
        self._start_monitors(changes, results)
        for target in removed:
            state.replicas.stored_responses.forget(target.name)
        if changes.fleet:
            state.replicas.model_lists.clear()
        self._retain_series()
        return left, replace(changes, not_in_force=waiting)

    def _drain(self, left: Sequence[tuple[Target, asyncio.Task[None]]]) -> None:
        for target, monitor_task in left:
            self.spawn(self._drain_removed(target, monitor_task))
            self._move(target)

    def _change_fleet(self, changes: ConfigDiff, config: Config) -> None:
        router, now = self._state.routing.router, self._state.routing.clock()
        limits = self._state.kind.router_limits(config)
        if limits != router.settings.limits:
            router.settings.set_limits(limits, now=now)
        if changes.fleet or changes.models:
            replaced = {replica.name for replica in changes.replaced}
            # A drain mark belongs to the name: it outlives an exchange of the process.
            marked = router.view.draining() & replaced
            # Leaving and joining resets load, health and prefix index in the Router.
            specs = replica_specs(config)
            router.replicas.set_fleet([spec for spec in specs if spec.name not in replaced], now=now)
            router.replicas.set_fleet(specs, now=now)
            for name in marked:
                router.replicas.drain(name, now=now)
        for name, draining in changes.drains.items():
            router.replicas.drain(name, draining, now=now)

    def _set_shadow(self, shadow: Policy | None) -> None:
        try:
            self._state.routing.router.settings.set_shadow(shadow, now=self._state.routing.clock())
        except ConfigError as error:  # the live policy differs from the file's
            log("shadow_not_set", level=logging.WARNING, error=str(error))

    def _start_monitors(self, changes: ConfigDiff, results: ProbeResults) -> None:
        if changes.intervals:
            self._monitors.restart()
        for monitor, result in results:
            monitor.publish(result)
            self._monitors.start(monitor)

    def _retain_series(self) -> None:
        targets = (*self._state.replicas.targets.values(), *self._state.replicas.draining_targets)
        self._state.telemetry.metrics.retain_replicas({(target.name, target.region) for target in targets})


def _leaving(changes: ConfigDiff) -> tuple[str, ...]:
    """Return the names of the replicas that leave the fleet, some for another process of that name."""
    return (*changes.removed, *(replica.name for replica in changes.replaced))


# Streams of a replica that drains or has left, which go on at other replicas.


#: Until streams that could not leave are tried again, and new ones: an answer may not have begun.
MOVE_AGAIN_S = 1.0
#: Streams that are tried between two of them, at 0.1 ms each.
MOST_TRIED = 32


async def move_streams(state: LiveState, target: Target) -> int:
    """Have the streams of a replica go on elsewhere, the oldest first; return how many have been moved.

    They go no faster than another replica has a short queue, until none is left, or the drain has been undone. A stream
    that cannot go on elsewhere stays until its end.
    """
    if not target.active:
        return 0
    moved, tried = 0, set[RunningStream]()
    while target.active and not state.stopping and _is_leaving(state, target):
        left = [stream for stream in target.streams if stream not in tried][:MOST_TRIED]
        now = state.routing.clock()
        if left and state.routing.router.view.has_short_queue(backlog_s=MOST_BACKLOG_S, now=now):
            leaves = next((stream for stream in left if stream.move(MOVED)), None)
            moved += leaves is not None
            tried.update(left if leaves is None else left[: left.index(leaves) + 1])
        if not left:
            tried.clear()
        await asyncio.sleep(MOVE_INTERVAL_S if left else MOVE_AGAIN_S)
    log("streams_moved", replica=target.name, streams=moved)
    return moved


def _is_leaving(state: LiveState, target: Target) -> bool:
    if state.replicas.targets.get(target.name) is not target:
        return True
    return target.name in state.routing.router.view.draining()


# Replicas of fleet sources that join, drain and leave while requests run.


async def apply_found(state: LiveState, reloader: Reloader) -> None:
    """Bring the replicas of fleet sources into the fleet, and out of it.

    Those that leave or drain do so first: the probes of new ones may take seconds. The streams of those that leave, or
    announce their end, go on at others. Raises `ConfigError` for a missing
    key or file of a new one.
    """
    async with reloader.turn:
        config = reloader.current_config()
        changes = diff(state.config, config)
        new = {replica.name for replica in (*changes.added, *changes.replaced)}
        if new and (changes.removed or changes.updated or changes.drains):
            running = {replica.name: replica for replica in state.config.replicas}
            rows = [running.get(replica.name) if replica.name in new else replica for replica in config.replicas]
            await reloader.apply_fleet(
                replace(config, replicas=tuple(replica for replica in rows if replica is not None))
            )
            _move_stopping(state, reloader)
        await reloader.apply_fleet(config)
        _move_stopping(state, reloader)


def _move_stopping(state: LiveState, reloader: Reloader) -> None:
    for name in state.replicas.found.stopping():
        reloader.move_streams(name)
