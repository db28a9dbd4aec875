"""Changes of the fleet that operators request, as the admin listener calls them, with their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol


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

    async def remove(self, name: str) -> int:
        """Drain a registered replica and remove it later. Return its requests in flight.

        Raises `UnknownReplica`, `ReplicaInFile` or `StateError`.
        """
        ...
