"""Pods to replicas: one per pod, or one per pod and port where a pool has several ports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gorgo.config.fleet.source import SourceReplicaConfig
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
    conditions = {text(row, "type"): text(row, "status") for row in mappings(status, "conditions")}
    ready = conditions.get("Ready") == "True" and not text(metadata, "deletionTimestamp")
    ports = tuple(
        (text(row, "name"), found)
        for container in mappings(spec, "containers")
        for row in mappings(container, "ports")
        if (found := number(row, "containerPort")) is not None
    )
    return Pod(
        name=name,
        namespace=text(metadata, "namespace"),
        ip=text(status, "podIP"),
        node=text(spec, "nodeName"),
        described=described(document),
        state=ReplicaState.READY if ready else ReplicaState.NOT_READY,
        ports=ports,
    )


def read_node(document: Document) -> str:
    """Return the region of a node, an empty text without one. Raises `ObjectError` without a name."""
    object_name(document)
    return dict(described(document)).get("topology.kubernetes.io/region", "")


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
            place = f"pod {pod.namespace}/{pod.name}"
            if used is None:
                have = ", ".join(known for known, _ in pod.ports if known) or "none"
                rejected[name] = f"{place}: no port named {port!r}; its named ports: {have}"
                continue
            region = (regions or {}).get(pod.node) or None
            entry = make_entry(name, pod.ip, used, pod.described, shared, region)
            if isinstance(entry, str):
                rejected[name] = f"{place}: {entry}"
            else:
                replicas.append(FoundReplica(entry, pod.state))
    return Found(tuple(replicas), rejected)
