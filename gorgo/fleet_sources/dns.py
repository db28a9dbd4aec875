"""Answers of DNS to replicas: one per address."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gorgo.config.fleet.source import FleetSourceConfig
from gorgo.fleet_sources.entries import make_entry, replica_name
from gorgo.fleet_sources.found import Found, FoundReplica


@dataclass(frozen=True, slots=True, order=True)
class HostPort:
    """Host or address, and port."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """Addresses, and how long they are valid, s; `None` is unknown."""

    addresses: Sequence[HostPort]
    ttl_s: float | None = None


def found_addresses(addresses: Iterable[HostPort], source: FleetSourceConfig) -> Found:
    """Return the replicas of addresses; names have the source's and the address, as `engines-10.0.0.5-30000`."""
    replicas: list[FoundReplica] = []
    rejected: dict[str, str] = {}
    for address in sorted(set(addresses)):
        name = replica_name(f"{source.name}-{address.host}-{address.port}")
        entry = make_entry(name, address.host, address.port, (), source.replica)
        if isinstance(entry, str):
            rejected[name] = f"{source.host}: {entry}"
        else:
            replicas.append(FoundReplica(entry))
    return Found(tuple(replicas), rejected)
