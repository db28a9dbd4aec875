"""Durable changes, one at a time: request, plan, write, apply.

Owns the order of changes (`ChangeQueue`), and the plans and results of changes of the fleet (`FleetPlans`,
`FleetChanges`). Leaves changes of weights and policy to `service`.

Theory of operation: a change is planned in full, written to the state file in a thread, and then applied in one step
of the event loop. If the write fails, the change is refused and nothing differs. A process that is killed between
write and apply starts with the written state. Each change runs in its own task, so that a cancelled caller cannot
separate write and apply.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config
from gorgo.config.registered import MAX_REGISTERED, RegisteredReplicas
from gorgo.core.router import Router
from gorgo.errors import StateError, TooManyReplicas, UnknownReplica, closest
from gorgo.live.control.state_file import PersistedState, StateFile
from gorgo.live.event_loop import Clock
from gorgo.live.logs import log
from gorgo.live.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRequest:
    """Options of a change of weights.

    Parameters
    ----------
    expected_version:
        The change is refused if another version is in force. `None`: any version.
    allow_out_of_range:
        Accept values outside the policy's range.
    reason, by:
        For the history and the message of a freeze.
    source:
        The requester in one word, as `admin` or `reload`.
    """

    expected_version: int | None = None
    allow_out_of_range: bool = False
    reason: str | None = None
    by: str | None = None
    source: str = "admin"


@dataclass(frozen=True, slots=True)
class WeightsChange:
    """One version, and the wall-clock time at which it was applied."""

    version: int
    policy: str
    weights: Mapping[str, float]
    at: str
    source: str
    reason: str | None = None
    by: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """The state to write, and the step that applies it."""

    state: PersistedState
    apply: Callable[[], None]


class ChangeQueue:
    """Runs one change at a time and writes each before it is applied.

    Parameters
    ----------
    file:
        The state file. Without one `durable` is false: changes end with the process.
    """

    def __init__(self, file: StateFile | None, metrics: Metrics) -> None:
        self._file = file
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[bool]] = set()

    @property
    def durable(self) -> bool:
        """Whether changes outlive the process."""
        return self._file is not None

    def write_to(self, file: StateFile | None) -> None:
        """Write changes to `file` from now on, or to none."""
        self._file = file

    @property
    def busy(self) -> bool:
        """Whether a change runs or is queued."""
        return bool(self._running)

    async def execute(self, plan: Callable[[], PlannedChange], *, required: bool = True) -> bool:
        """Plan, write and apply one change after all earlier ones. Raises what `plan` raises, and `StateError`.

        Without `required` a change that cannot be written is applied all the same, and the next one writes it. Return
        whether it is durable.
        """
        task = asyncio.create_task(self._run(plan, required))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    @asynccontextmanager
    async def paused(self, in_force: Callable[[], PersistedState]) -> AsyncIterator[None]:
        """Block other changes, then write the state in force. A failed write is logged."""
        async with self._lock:
            yield
            await self.persist(in_force())

    async def keep_copy(self) -> str | None:
        """Keep a copy of the state file as another version left it; return where."""
        path = None if self._file is None else await asyncio.to_thread(self._file.keep_copy)
        return None if path is None else str(path)

    async def persist(self, state: PersistedState) -> bool:
        """Write the state; log a failure. Return whether it is durable."""
        try:
            await self.write(state)
        except StateError as error:
            log("state_not_written", level=logging.ERROR, error=str(error))
            return False
        return self.durable

    async def write(self, state: PersistedState) -> None:
        """Write the state. Raises `StateError`."""
        if self._file is None:
            return
        try:
            await asyncio.to_thread(self._file.write, state)
        except StateError:
            self._metrics.state_written(False)
            raise
        self._metrics.state_written(True)

    async def aclose(self) -> None:
        """Wait for running changes."""
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self, plan: Callable[[], PlannedChange], required: bool) -> bool:
        async with self._lock:
            planned = plan()
            if required:
                await self.write(planned.state)
                durable = self.durable
            else:
                durable = await self.persist(planned.state)
            planned.apply()
            return durable


# Plans of drain marks and of registered replicas: the state to write, and the step that applies it.


class FleetPlans:
    """The plans of one proxy, with its `registered` replicas."""

    def __init__(self, router: Router, clock: Clock, registered: RegisteredReplicas) -> None:
        self._router = router
        self._clock = clock
        self._registered = registered

    def drain(self, name: str, draining: bool, state: PersistedState) -> PlannedChange:
        """Plan a drain mark, or its end. Raises `UnknownReplica`."""
        health_states = self._router.view.health_states()
        if name not in health_states:
            raise UnknownReplica(f"no replica named {name!r}{closest(name, health_states)}")
        marked = state.draining | {name} if draining else state.draining - {name}
        return PlannedChange(
            replace(state, draining=marked), lambda: self._router.replicas.drain(name, draining, now=self._clock())
        )

    def add(self, entry: ReplicaConfig, state: PersistedState) -> PlannedChange:
        """Plan an entry; one that is leaving stays, with its own drain mark. Raises `TooManyReplicas`."""
        registered, name = self._registered.entries, entry.name
        if name not in registered and len(registered) >= MAX_REGISTERED:
            raise TooManyReplicas(f"{MAX_REGISTERED} replicas are registered, which is the most")
        after = (registered | {name: entry}).values()

        def apply() -> None:
            rejoins = name in self._registered.leaving
            self._registered.add(entry)
            if rejoins:
                self._router.replicas.drain(name, entry.draining, now=self._clock())

        return PlannedChange(replace(state, registered=tuple(after)), apply)

    def leave(self, name: str, state: PersistedState) -> PlannedChange:
        """Plan that an entry drains and leaves."""
        after = (entry for entry in self._registered.entries.values() if entry.name != name)

        def apply() -> None:
            if name in self._registered.entries:  # unless a reload removed it meanwhile
                self._registered.leave(name)
                self._router.replicas.drain(name, now=self._clock())

        return PlannedChange(replace(state, registered=tuple(after)), apply)

    def drop_named(self, file: Config) -> None:
        """Remove the entries that the file names, with the drain of those that were leaving."""
        named = {replica.name: replica for replica in file.replicas}
        for name in self._registered.named_by(file):
            if name in self._registered.leaving:
                self._router.replicas.drain(name, named[name].draining, now=self._clock())
            self._registered.remove(name)
            log("registration_ended", replica=name, reason="regions.yaml names it")


# Changes of the fleet that operators request, as the admin listener calls them, with their results.


@dataclass(frozen=True, slots=True)
class AppliedReload:
    """An applied file: replicas of the fleet, and the changes as in the log."""

    replicas: int
    changes: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {"replicas": self.replicas, "changes": dict(self.changes)}


@dataclass(frozen=True, slots=True)
class Registration:
    """A registered replica, and the change that its entry made to the fleet."""

    replica: str
    change: Literal["added", "replaced", "updated", "none"]
    #: What is valid in the entry and rarely meant, as `gorgo check` shows it.
    warnings: tuple[str, ...] = ()


class FleetChanges(Protocol):
    """Reload, registration and removal."""

    async def reload(self) -> AppliedReload:
        """Read the configuration file now.

        Raises the `GorgoError` of a refused file, `NoConfigFile` without one, and `TimeoutError` if it takes long.
        """
        ...

    async def register(self, entry: Mapping[str, Any]) -> Registration:
        """Add a replica, or change the registered one of its name.

        Raises `ConfigError`, `ReplicaInFile`, `TooManyReplicas` or `StateError`; then nothing has changed.
        """
        ...

    def move_streams(self, name: str) -> None:
        """Have the streams of a drained replica go on at others, as far as they can."""
        ...

    async def remove(self, name: str) -> int:
        """Drain a registered replica and remove it later. Return its requests in flight.

        Raises `UnknownReplica`, `ReplicaInFile` or `StateError`.
        """
        ...
