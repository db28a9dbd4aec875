"""Plans of drain marks and of registered replicas: the state to write, and the step that applies it."""

from __future__ import annotations

from dataclasses import replace

from gorgo.config.model import Config, ReplicaConfig
from gorgo.config.registered import MAX_REGISTERED, RegisteredReplicas
from gorgo.core.router import Router
from gorgo.errors import TooManyReplicas, UnknownReplica, closest
from gorgo.live.clock import Clock
from gorgo.live.control.state_file import PersistedState
from gorgo.live.control.transactions import PlannedChange
from gorgo.live.logs import log


class FleetPlans:
    """The plans of one proxy, with its `registered` replicas."""

    def __init__(self, router: Router, clock: Clock, registered: RegisteredReplicas) -> None:
        self._router = router
        self._clock = clock
        self._registered = registered

    def drain(self, name: str, draining: bool, state: PersistedState) -> PlannedChange:
        """Plan a drain mark, or its end. Raises `UnknownReplica`."""
        known = self._router.view.health_states()
        if name not in known:
            raise UnknownReplica(f"no replica named {name!r}{closest(name, known)}")
        marked = state.draining | {name} if draining else state.draining - {name}
        return PlannedChange(
            replace(state, draining=marked), lambda: self._router.replicas.drain(name, draining, now=self._clock())
        )

    def add(self, entry: ReplicaConfig, state: PersistedState) -> PlannedChange:
        """Plan an entry; one that is leaving stays, with its own drain mark. Raises `TooManyReplicas`."""
        known, name = self._registered.entries, entry.name
        if name not in known and len(known) >= MAX_REGISTERED:
            raise TooManyReplicas(f"{MAX_REGISTERED} replicas are registered, which is the most")
        after = (known | {name: entry}).values()

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
        named = {row.name: row for row in file.replicas}
        for name in self._registered.named_by(file):
            if name in self._registered.leaving:
                self._router.replicas.drain(name, named[name].draining, now=self._clock())
            self._registered.remove(name)
            log("registration_ended", replica=name, reason="regions.yaml names it")
