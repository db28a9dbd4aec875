"""EndpointSlices of one Service to replicas.

The slices have the labels and annotations of their Service, which therefore describe all replicas; pods have none here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gorgo.config.fleet.source import FleetSourceConfig
from gorgo.fleet_sources.documents import (
    Described,
    Document,
    ObjectError,
    described,
    mapping,
    mappings,
    number,
    object_name,
    text,
)
from gorgo.fleet_sources.entries import make_entry, replica_name
from gorgo.fleet_sources.found import Found, FoundReplica, ReplicaState

#: Label of a slice with the name of its Service.
SERVICE_LABEL = "kubernetes.io/service-name"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address of a slice."""

    address: str
    state: ReplicaState
    pod: str
    node: str


@dataclass(frozen=True, slots=True)
class EndpointSlice:
    """One slice; a Service may have many."""

    name: str
    namespace: str
    described: Described
    #: Name, which may be empty, and number.
    ports: tuple[tuple[str, int], ...]
    endpoints: tuple[Endpoint, ...]


def read_slice(document: Document) -> EndpointSlice:
    """Return the slice of a document. Raises `ObjectError` if it is none."""
    name = object_name(document)
    if text(document, "addressType") not in ("IPv4", "IPv6"):
        raise ObjectError(f"endpointslice {name}: expected addressType IPv4 or IPv6")
    ports = ((text(row, "name"), number(row, "port")) for row in mappings(document, "ports"))
    return EndpointSlice(
        name=name,
        namespace=text(mapping(document, "metadata"), "namespace"),
        described=described(document),
        ports=tuple((port, found) for port, found in ports if found is not None),
        endpoints=tuple(_endpoints(document)),
    )


def _endpoints(document: Document) -> Iterable[Endpoint]:
    for row in mappings(document, "endpoints"):
        addresses, conditions, target = row.get("addresses"), mapping(row, "conditions"), mapping(row, "targetRef")
        # All addresses of an endpoint are the same pod; the API allows to use the first.
        address = addresses[0] if isinstance(addresses, list) and addresses else None
        if not isinstance(address, str):
            continue
        # Unknown means ready.
        ready = conditions.get("ready") is not False and conditions.get("terminating") is not True
        pod = text(target, "name") if text(target, "kind") == "Pod" else ""
        state = ReplicaState.READY if ready else ReplicaState.NOT_READY
        yield Endpoint(address, state, pod, text(row, "nodeName"))


def found_slices(
    slices: Iterable[EndpointSlice], source: FleetSourceConfig, regions: Mapping[str, str] | None = None
) -> Found:
    """Return the replicas of the slices; `regions` are by node. An endpoint in two slices is one replica."""
    replicas: dict[str, FoundReplica] = {}
    rejected: dict[str, str] = {}
    for each in slices:
        place = f"endpointslice {each.namespace}/{each.name}"
        port = _port(each, source)
        for endpoint in each.endpoints:
            name = replica_name(endpoint.pod or f"{source.name}-{endpoint.address}")
            if isinstance(port, str):
                rejected[name] = f"{place}: {port}"
                continue
            region = (regions or {}).get(endpoint.node) or None
            entry = make_entry(name, endpoint.address, port, each.described, source.replica, region)
            if isinstance(entry, str):
                rejected[name] = f"{place}: {entry}"
            elif name not in replicas or endpoint.state is ReplicaState.READY:
                replicas[name] = FoundReplica(entry, endpoint.state)
    return Found(tuple(replicas.values()), {name: why for name, why in rejected.items() if name not in replicas})


def _port(each: EndpointSlice, source: FleetSourceConfig) -> int | str:
    """Return the port of a slice's replicas, or why there is none."""
    if source.port is not None:
        return source.port
    named = {name: port for name, port in each.ports if source.port_name in (None, name)}
    if len(named) == 1:
        return next(iter(named.values()))
    have = ", ".join(f"{name or 'unnamed'} ({port})" for name, port in each.ports) or "none"
    if source.port_name is not None:
        return f"no port named {source.port_name!r}; its ports: {have}"
    return f"expected one port, or port_name in the source; its ports: {have}"
