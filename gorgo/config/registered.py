"""Replicas registered at run time, beside those of regions.yaml: checks of an entry, and the fleet of both.

An entry has the keys of `replicas` in regions.yaml. The file goes first: a replica that it names is not
registered any longer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from gorgo.config.document import Document, show_path
from gorgo.config.fleet import ReplicaConfig
from gorgo.config.load import check_document
from gorgo.config.model import Config
from gorgo.errors import ConfigError

#: Some hundred entries of a few hundred bytes fit the state file.
MAX_REGISTERED = 256


class RegisteredReplicas:
    """The registered replicas of one proxy, and those that leave: in the fleet until their requests have ended."""

    def __init__(self, entries: Iterable[ReplicaConfig] = ()) -> None:
        self.entries = {entry.name: entry for entry in entries}
        self.leaving: dict[str, ReplicaConfig] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.entries or name in self.leaving

    def add(self, entry: ReplicaConfig) -> None:
        """Add an entry, or replace the one of its name."""
        self.leaving.pop(entry.name, None)
        self.entries[entry.name] = entry

    def leave(self, name: str) -> None:
        """Mark an entry as leaving."""
        self.leaving[name] = self.entries.pop(name)

    def remove(self, name: str) -> None:
        """Remove an entry, leaving or not."""
        self.entries.pop(name, None)
        self.leaving.pop(name, None)

    def merged(self, file: Config) -> Config:
        """Return the file's configuration with all entries that the file does not name.

        Raises `ConfigError` if the file lacks the region of one.
        """
        added = [entry for entry in self._all() if entry.name not in _names(file)]
        for entry in added:
            if not _fits(entry, file):
                raise ConfigError(
                    f"regions: {entry.region!r} is missing, and the registered replica {entry.name!r} is there; "
                    f"expected the region, or DELETE /admin/replicas/{entry.name} first"
                )
        return replace(file, replicas=(*file.replicas, *added))

    def named_by(self, file: Config) -> list[str]:
        """Return the names of the entries that the file names too."""
        return [entry.name for entry in self._all() if entry.name in _names(file)]

    def unfit(self, file: Config) -> list[str]:
        """Return the names of the entries in regions that the file lacks."""
        return [entry.name for entry in self._all() if not _fits(entry, file)]

    def _all(self) -> Iterator[ReplicaConfig]:
        yield from self.entries.values()
        yield from self.leaving.values()


def parse_entry(body: Mapping[str, Any], config: Config) -> ReplicaConfig:
    """Check the entry of a registration by every rule for `replicas` of regions.yaml.

    Raises `ConfigError` with all errors, each with its key.
    """
    document = Document(
        data={
            "proxy": {"region": config.proxy.region},
            "regions": [{"name": region.name} for region in config.regions],
            "replicas": [dict(body)],
        }
    )
    checked = check_document(document)
    if document.problems or checked is None:
        rows = [(show_path(problem.path[2:]), problem) for problem in document.problems]
        raise ConfigError("\n".join(f"{key}: {problem.found}; expected {problem.expected}" for key, problem in rows))
    return checked.replicas[0]


def entry_as_json(entry: ReplicaConfig) -> dict[str, Any]:
    """Return the entry for the state file; keys at their defaults are left out."""
    found: dict[str, Any] = entry_adapter().dump_python(entry, mode="json", exclude_defaults=True)
    return found


def entry_from_json(value: object) -> ReplicaConfig:
    """Return the entry of the state file. Raises `ValueError`."""
    return entry_adapter().validate_json(json.dumps(value), strict=True)


def _names(file: Config) -> set[str]:
    return {row.name for row in file.replicas}


def _fits(entry: ReplicaConfig, file: Config) -> bool:
    return any(region.name == entry.region for region in file.regions)


@cache
def entry_adapter() -> TypeAdapter[ReplicaConfig]:
    """Return the check of an entry; making it takes milliseconds, which a process without one does not need."""
    return TypeAdapter(ReplicaConfig)
