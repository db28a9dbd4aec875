"""Objects of Kubernetes to replicas: pods, EndpointSlices of a Service, and an InferencePool.

Owns the readers of a document, which may be anything (each returns its type or the neutral value), what is read of each
object, and which replicas follow: one per pod, or one per pod and port where a pool has
several ports. Leaves labels and annotations to `entries`, and requests to the API to `gorgo.live.fleet_sources`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gorgo.config.fleet import FleetSourceConfig, SourceReplicaConfig
from gorgo.errors import GorgoError
from gorgo.fleet_sources.entries import (
    PREFIX,
    REGION_LABEL,
    Described,
    Found,
    FoundReplica,
    ReplicaState,
    make_entry,
    replica_name,
)

#: Longest value that is stored; the rest of a longer one is of no use.
_MAX_VALUE = 4096

Document = Mapping[str, Any]


class ObjectError(GorgoError):
    """An object is not what its kind should be. The message says what is wrong with it."""


def mapping(data: object, *keys: str) -> Document:
    """Return the mapping at `keys`, an empty one without it.

    >>> mapping({"a": {"b": {"c": 1}}}, "a", "b")
    {'c': 1}
    """
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data if isinstance(data, Mapping) else {}


def text(data: Document, key: str) -> str:
    """Return the text at `key`, an empty one without it."""
    value = data.get(key)
    return value if isinstance(value, str) else ""


def mappings(data: Document, key: str) -> Iterator[Document]:
    """Yield the mappings of the list at `key`."""
    value = data.get(key)
    for item in value if isinstance(value, list) else ():
        if isinstance(item, Mapping):
            yield item


def number(data: Document, key: str) -> int | None:
    """Return the whole number at `key`."""
    value = data.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def described(document: Document) -> Described:
    """Return the labels and annotations that describe a replica; an annotation takes precedence over a label."""
    metadata = mapping(document, "metadata")
    labels, annotations = mapping(metadata, "labels"), mapping(metadata, "annotations")
    merged = {**labels, **{key: value for key, value in annotations.items() if str(key).startswith(PREFIX)}}
    return tuple(
        (key, value[:_MAX_VALUE])
        for key, value in sorted(merged.items())
        if isinstance(value, str) and (key.startswith(PREFIX) or key == REGION_LABEL)
    )


def object_name(document: Document) -> str:
    """Return the name of an object. Raises `ObjectError` without one."""
    name = text(mapping(document, "metadata"), "name")
    if not name:
        raise ObjectError("an object without metadata.name")
    return name


@dataclass(frozen=True, slots=True)
class Pod:
    """The parts of a pod that matter. A pod changes its status often, and these rarely."""

    name: str
    namespace: str
    #: Empty until it has one.
    ip: str
    node: str
    described: Described
    state: ReplicaState
    #: Ports of its containers by name.
    ports: tuple[tuple[str, int], ...]


def read_pod(document: Document) -> Pod:
    """Return the pod of a document. Raises `ObjectError` if it is none."""
    metadata, spec, status = (mapping(document, key) for key in ("metadata", "spec", "status"))
    name = object_name(document)
    if not spec:
        raise ObjectError(f"pod {name}: no spec")
    conditions = {text(condition, "type"): text(condition, "status") for condition in mappings(status, "conditions")}
    stopping = bool(text(metadata, "deletionTimestamp"))
    state = ReplicaState.READY if conditions.get("Ready") == "True" else ReplicaState.NOT_READY
    ports = tuple(
        (text(port, "name"), port_number)
        for container in mappings(spec, "containers")
        for port in mappings(container, "ports")
        if (port_number := number(port, "containerPort")) is not None
    )
    return Pod(
        name=name,
        namespace=text(metadata, "namespace"),
        ip=text(status, "podIP"),
        node=text(spec, "nodeName"),
        described=described(document),
        state=ReplicaState.STOPPING if stopping else state,
        ports=ports,
    )


def read_node(document: Document) -> str:
    """Return the region of a node, an empty text without one. Raises `ObjectError` without a name."""
    object_name(document)
    return dict(described(document)).get(REGION_LABEL, "")


def found_pods(
    pods: Iterable[Pod],
    ports: Sequence[int | str],
    shared: SourceReplicaConfig,
    regions: Mapping[str, str] | None = None,
) -> Found:
    """Return the replicas of pods.

    Parameters
    ----------
    ports:
        Numbers, or names of a container's ports. With several, each port is a replica.
    regions:
        By node, where the nodes are known.
    """
    replicas: list[FoundReplica] = []
    rejected: dict[str, str] = {}
    for pod in pods:
        if not pod.ip:
            continue
        for port in ports:
            name = replica_name(pod.name if len(ports) == 1 else f"{pod.name}-{port}")
            used = dict(pod.ports).get(port) if isinstance(port, str) else port
            subject = f"pod {pod.namespace}/{pod.name}"
            if used is None:
                have = ", ".join(port_name for port_name, _ in pod.ports if port_name) or "none"
                rejected[name] = f"{subject}: no port named {port!r}; its named ports: {have}"
                continue
            region = (regions or {}).get(pod.node) or None
            entry = make_entry(name, pod.ip, used, pod.described, shared, region)
            if isinstance(entry, str):
                rejected[name] = f"{subject}: {entry}"
            else:
                replicas.append(FoundReplica(entry, pod.state))
    return Found(tuple(replicas), rejected)


# EndpointSlices of one Service to replicas.
#
# The slices have the labels and annotations of their Service, which therefore describe all replicas; pods have none
# here.


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
    ports = ((text(port, "name"), number(port, "port")) for port in mappings(document, "ports"))
    return EndpointSlice(
        name=name,
        namespace=text(mapping(document, "metadata"), "namespace"),
        described=described(document),
        ports=tuple((port, port_number) for port, port_number in ports if port_number is not None),
        endpoints=tuple(_endpoints(document)),
    )


def _endpoints(document: Document) -> Iterable[Endpoint]:
    for endpoint in mappings(document, "endpoints"):
        addresses, conditions, target = (
            endpoint.get("addresses"),
            mapping(endpoint, "conditions"),
            mapping(endpoint, "targetRef"),
        )
        # All addresses of an endpoint are the same pod; the API allows to use the first.
        address = addresses[0] if isinstance(addresses, list) and addresses else None
        if not isinstance(address, str):
            continue
        # Unknown means ready.
        ready = conditions.get("ready") is not False
        pod = text(target, "name") if text(target, "kind") == "Pod" else ""
        state = ReplicaState.READY if ready else ReplicaState.NOT_READY
        if conditions.get("terminating") is True:
            state = ReplicaState.STOPPING
        yield Endpoint(address, state, pod, text(endpoint, "nodeName"))


def found_slices(
    slices: Iterable[EndpointSlice], source: FleetSourceConfig, regions: Mapping[str, str] | None = None
) -> Found:
    """Return the replicas of the slices; `regions` are by node. An endpoint in two slices is one replica."""
    replicas: dict[str, FoundReplica] = {}
    rejected: dict[str, str] = {}
    for each in slices:
        subject = f"endpointslice {each.namespace}/{each.name}"
        port = _port(each, source)
        for endpoint in each.endpoints:
            name = replica_name(endpoint.pod or f"{source.name}-{endpoint.address}")
            if isinstance(port, str):
                rejected[name] = f"{subject}: {port}"
                continue
            region = (regions or {}).get(endpoint.node) or None
            entry = make_entry(name, endpoint.address, port, each.described, source.replica, region)
            if isinstance(entry, str):
                rejected[name] = f"{subject}: {entry}"
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


# An InferencePool of the Gateway API: which pods are its replicas, and on which ports.


#: As the API has it.
MAX_PORTS = 8


@dataclass(frozen=True, slots=True)
class InferencePool:
    """Selector and ports of a pool."""

    name: str
    #: Labels that its pods have, ascending.
    selector: tuple[tuple[str, str], ...]
    ports: tuple[int, ...]


def read_pool(document: Document) -> InferencePool:
    """Return the pool of a document. Raises `ObjectError` if it selects no pods or has no port."""
    name, spec = object_name(document), mapping(document, "spec")
    labels = mapping(spec, "selector", "matchLabels")
    selector = tuple(sorted((key, value) for key, value in labels.items() if isinstance(value, str)))
    ports = tuple(port for target in mappings(spec, "targetPorts") if (port := number(target, "number")) is not None)
    if not selector:
        raise ObjectError(f"inferencepool {name}: no selector.matchLabels")
    if not ports:
        raise ObjectError(f"inferencepool {name}: no targetPorts")
    return InferencePool(name, selector, ports[:MAX_PORTS])


def selector_text(selector: tuple[tuple[str, str], ...]) -> str:
    """Return a selector as the API takes it.

    >>> selector_text((("app", "qwen"), ("tier", "chat")))
    'app=qwen,tier=chat'
    """
    return ",".join(f"{key}={value}" for key, value in selector)
