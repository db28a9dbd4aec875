"""The replicas of all sources of one proxy, and the state of each source. Pure: times are arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gorgo.config.fleet import FleetSourceConfig, ReplicaConfig
from gorgo.config.model import Config
from gorgo.fleet_sources.entries import MAX_REPLICAS, Found, ReplicaState, merge, next_entries, without_refused

#: From the start, `/ready` waits no longer for a source that does not answer: others may have replicas.
FIRST_SYNC_S = 30.0
#: Rejected objects that `GET /admin/fleet` lists; the rest is counted.
MAX_SHOWN = 50


@dataclass(slots=True)
class SourceState:
    """One source.

    Parameters
    ----------
    since_s:
        When it was configured.
    """

    config: FleetSourceConfig
    since_s: float
    #: Whether a whole result came.
    synced: bool = False
    #: Why the last request failed; `None` while requests succeed.
    error: str | None = None
    #: Of the last request that succeeded.
    answered_s: float | None = None
    entries: dict[str, ReplicaConfig] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    #: Names of entries that announce their end.
    stopping: frozenset[str] = frozenset()

    @property
    def up(self) -> bool:
        return self.synced and self.error is None


class FoundFleet:
    """The sources of one proxy, by name."""

    def __init__(self, configs: Iterable[FleetSourceConfig] = (), *, now: float = 0.0) -> None:
        self.sources: dict[str, SourceState] = {}
        #: Source of each replica in the fleet, and why others are not, since the last `merged`.
        self.origin: Mapping[str, str] = {}
        self.refused: Mapping[tuple[str, str], str] = {}
        #: The entries that joined by it, by source and name.
        self._joined: Mapping[tuple[str, str], ReplicaConfig] = {}
        #: Called after a change of the replicas or of the sources.
        self.on_change: Callable[[], None] = _nothing
        self.configure(configs, now=now)

    def configure(self, configs: Iterable[FleetSourceConfig], *, now: float) -> None:
        """Replace the sources. Replicas of a source that changed stay until its first result."""
        before, self.sources = self.sources, {}
        for config in configs:
            old = before.get(config.name)
            if old is not None and old.config == config:
                self.sources[config.name] = old
            else:
                entries = {} if old is None else old.entries
                self.sources[config.name] = SourceState(config, now, entries=entries)
        self.on_change()

    def apply_result(self, name: str, result: Found, *, now: float) -> SourceState | None:
        """Take the whole result of a source. Return its state if anything changed."""
        source = self.sources.get(name)
        if source is None:
            return None
        if len(result.replicas) > MAX_REPLICAS:
            self.fail(name, f"{len(result.replicas)} replicas; expected at most {MAX_REPLICAS}", now=now)
            return None
        result = without_refused(result, source.config)
        entries = next_entries(source.entries, result)
        rejected = dict(result.rejected)
        stopping = frozenset(
            each.entry.name
            for each in result.replicas
            if each.state is ReplicaState.STOPPING and each.entry.name in entries
        )
        before = source.entries, source.rejected, source.stopping
        changed = not source.synced or (entries, rejected, stopping) != before
        source.entries, source.rejected, source.stopping, source.synced = entries, rejected, stopping, True
        source.answered_s = now
        if not changed:
            return None
        self.on_change()
        return source

    def succeed(self, name: str, *, now: float) -> bool:
        """Record a request that succeeded. Return whether the one before had failed."""
        source = self.sources.get(name)
        if source is None:
            return False
        recovered = source.error is not None
        source.error, source.answered_s = None, now
        return recovered

    def fail(self, name: str, reason: str, *, now: float) -> bool:  # noqa: ARG002 - an event has a time
        """Record a request that failed: the replicas stay. Return whether this is the first of a row."""
        source = self.sources.get(name)
        if source is None:
            return False
        first = source.error is None
        source.error = reason
        return first

    def merged(self, config: Config) -> Config:
        """Return the configuration with the replicas of its sources, in their order."""
        entries = {
            each.name: self.sources[each.name].entries.values()
            for each in config.fleet_sources
            if each.name in self.sources
        }
        merged = merge(config, entries, self._joined)
        self._joined, self.refused = merged.joined, merged.refused
        self.origin = {name: source for source, name in merged.joined}
        return merged.config

    def stopping(self) -> list[str]:
        """Return the replicas of the fleet that announce their end."""
        return [
            name
            for name, source in self.origin.items()
            if source in self.sources and name in self.sources[source].stopping
        ]

    def pending(self, now: float) -> list[str]:
        """Return the sources without a first result, for `FIRST_SYNC_S` after they were configured."""
        return [
            name for name, source in self.sources.items() if not source.synced and now - source.since_s < FIRST_SYNC_S
        ]

    def as_rows(self, now: float) -> list[dict[str, Any]]:
        """Return the sources as JSON."""
        return [self._row(name, source, now) for name, source in self.sources.items()]

    def _row(self, name: str, source: SourceState, now: float) -> dict[str, Any]:
        refused = {key: why for (origin, key), why in self.refused.items() if origin == name}
        problems = [f"{key}: {why}" for key, why in sorted({**refused, **source.rejected}.items())]
        count, problems = len(problems), problems[:MAX_SHOWN]
        return {
            "name": name,
            "kind": source.config.kind,
            "up": source.up,
            "synced": source.synced,
            "error": source.error,
            "age_s": None if source.answered_s is None else max(0.0, now - source.answered_s),
            "replicas": sum(origin == name for origin in self.origin.values()),
            "problem_count": count,
            "problems": problems,
        }


def _nothing() -> None:
    pass
