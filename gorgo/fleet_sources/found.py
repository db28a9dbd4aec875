"""What a source found: replicas with their state, and objects that make none, each with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from gorgo.config.model import Config, ReplicaConfig

#: Replicas that one source may have. Above it the source is misconfigured; 10,000 take the Router milliseconds.
MAX_REPLICAS = 10_000


class ReplicaState(Enum):
    """Whether an object may get requests."""

    READY = "ready"
    #: Starts, fails its readiness probe, or is about to end.
    NOT_READY = "not_ready"


@dataclass(frozen=True, slots=True)
class FoundReplica:
    """A replica of a source."""

    entry: ReplicaConfig
    state: ReplicaState = ReplicaState.READY


@dataclass(frozen=True, slots=True)
class Found:
    """The whole result of a source at one time.

    Parameters
    ----------
    replicas:
        Each name once.
    rejected:
        Reason by the name that the replica would have: a label that cannot be read, no region.
    """

    replicas: tuple[FoundReplica, ...] = ()
    rejected: Mapping[str, str] = field(default_factory=dict)


def next_entries(before: Mapping[str, ReplicaConfig], found: Found) -> dict[str, ReplicaConfig]:
    """Return the entries of a source after `found`, by name.

    A replica that is not ready drains if it was in use, and is left out otherwise. A replica whose object became
    invalid stays as it was: an edit with an error must not take it away.
    """
    after: dict[str, ReplicaConfig] = {}
    for replica in found.replicas:
        entry = replica.entry
        was = before.get(entry.name)
        if replica.state is ReplicaState.READY:
            after[entry.name] = entry
        elif was is not None and was.url == entry.url:
            after[entry.name] = replace(entry, draining=True)
    for name in found.rejected:
        if name in before and name not in after:
            after[name] = before[name]
    return after


def merge(
    file: Config, sources: Mapping[str, Iterable[ReplicaConfig]]
) -> tuple[Config, dict[str, str], dict[tuple[str, str], str]]:
    """Return the configuration with the entries of all sources.

    The file goes first, then the sources in their order: a name or a URL counts once. Also return the source of each
    replica that joined, and the reason for each that did not, by source and name.
    """
    names = {row.name for row in file.replicas}
    urls = {row.url.rstrip("/"): row.name for row in file.replicas}
    regions = {region.name for region in file.regions}
    added: list[ReplicaConfig] = []
    origin: dict[str, str] = {}
    refused: dict[tuple[str, str], str] = {}
    for source, entries in sources.items():
        for entry in entries:
            url = entry.url.rstrip("/")
            if entry.name in names:
                refused[source, entry.name] = "another replica has its name"
            elif url in urls:
                refused[source, entry.name] = f"{url} is the url of {urls[url]}"
            elif entry.region not in regions:
                refused[source, entry.name] = f"its region {entry.region!r} is not one of `regions`"
            else:
                names.add(entry.name)
                urls[url] = entry.name
                origin[entry.name] = source
                added.append(entry)
    return replace(file, replicas=(*file.replicas, *added)), origin, refused
