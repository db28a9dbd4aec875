"""Replicas that register and leave by the admin API, while requests run.

A new replica is stored, probed, and then eligible, as one that is added to the file. One that leaves is drained: its
removal is stored at once, so a restart does not bring it back, and it is in the fleet until its requests have ended.
Its streams go on at other replicas, as far as they can: an engine that leaves is about to stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.registered import parse_entry
from gorgo.config.replica_advice import url_warnings
from gorgo.errors import GorgoError, ReplicaInFile, UnknownReplica, closest
from gorgo.live.control.transactions import AppliedReload, Registration
from gorgo.live.extras import check_extras
from gorgo.live.http.tls import upstream_tls
from gorgo.live.logs import log
from gorgo.live.reload.reloader import Reloader
from gorgo.live.replica_secrets import replica_secrets
from gorgo.live.state import LiveState


class Registrar:
    """The changes of one proxy's fleet, as `FleetChanges`.

    Parameters
    ----------
    environ:
        Holds the secrets of replicas.
    """

    def __init__(self, state: LiveState, reloader: Reloader, *, environ: Mapping[str, str]) -> None:
        self._state = state
        self._reloader = reloader
        self._environ = environ
        #: Entries whose removal runs.
        self._removing: dict[str, ReplicaConfig] = {}

    def move_streams(self, name: str) -> None:
        self._reloader.move_streams(name)

    async def reload(self) -> AppliedReload:
        return await self._reloader.reload()

    async def register(self, entry: Mapping[str, Any]) -> Registration:
        state, registered = self._state, self._state.routing.control.registered
        async with self._reloader.turn:
            replica = parse_entry(entry, state.config)
            replica_secrets(replica, self._environ)
            check_extras([replica])
            await asyncio.to_thread(upstream_tls, replica, state.replicas.tls)
            name = replica.name
            if name in state.replicas.targets and name not in registered:
                raise ReplicaInFile(f"{self._owner(name)} names {name!r}: change it there")
            running = next((row for row in state.config.replicas if row.name == name), None)
            if registered.entries.get(name) == replica == running:
                return Registration(name, "none", self._warnings(name))
            await state.routing.control.execute(partial(state.routing.control.fleet.add, replica))
            changes = await self._reloader.apply_fleet(self._reloader.current_config())
        warnings = self._warnings(name)
        for warning in warnings:
            log("config_warning", level=logging.WARNING, replica=name, warning=warning)
        if any(row.name == name for row in changes.added):
            return Registration(name, "added", warnings)
        replaced = any(row.name == name for row in changes.replaced)
        return Registration(name, "replaced" if replaced else "updated", warnings)

    def _owner(self, name: str) -> str:
        source = self._state.replicas.found.origin.get(name)
        return "regions.yaml" if source is None else f"the fleet source {source}"

    def _warnings(self, name: str) -> tuple[str, ...]:
        """Return the warnings of `gorgo check` about one replica."""
        replicas = self._state.config.replicas
        place = next(f"replicas[{number}]." for number, row in enumerate(replicas) if row.name == name)
        found = (warning for warning in url_warnings(replicas) if warning.startswith(place))
        return tuple(warning.removeprefix(place) for warning in found)

    async def remove(self, name: str) -> int:
        state, registered = self._state, self._state.routing.control.registered
        async with self._reloader.turn:
            if name not in state.replicas.targets:
                raise UnknownReplica(f"no replica named {name!r}{closest(name, registered.entries)}")
            if name not in registered:
                raise ReplicaInFile(f"{self._owner(name)} names {name!r}: remove it there")
            if name in registered.entries:
                await state.routing.control.execute(partial(state.routing.control.fleet.leave, name))
                log("replica_leaving", replica=name, in_flight=state.replicas.targets[name].active)
            entry = registered.leaving[name]
            if self._removing.get(name) is not entry:
                self._removing[name] = entry
                self._reloader.spawn(self._remove(entry))
                self._reloader.move_streams(name)
            return state.replicas.targets[name].active

    async def _remove(self, entry: ReplicaConfig) -> None:
        """Remove a leaving replica when its requests have ended, at the latest after the grace period.

        Requests that are still open then end by themselves, outside the fleet.
        """
        state, registered = self._state, self._state.routing.control.registered
        with suppress(TimeoutError):
            async with asyncio.timeout(state.limits.shutdown_grace_s):
                await state.replicas.targets[entry.name].wait_drained()
        async with self._reloader.turn:
            if self._removing.get(entry.name) is entry:
                del self._removing[entry.name]
            if registered.leaving.get(entry.name) is not entry:
                return  # it registered again, or regions.yaml names it
            registered.remove(entry.name)
            try:
                await self._reloader.apply_fleet(self._reloader.current_config())
            except GorgoError as error:  # a key of another replica: the next change of the fleet removes this one
                log("replica_not_removed", level=logging.ERROR, replica=entry.name, error=str(error))
