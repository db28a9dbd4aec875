"""Documents as an API server has them."""

from __future__ import annotations

import json
from typing import Any


def pod(
    name: str,
    ip: str = "10.0.0.5",
    *,
    ready: bool = True,
    terminating: bool = False,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    node: str = "node-a",
    version: str = "1",
    ports: dict[str, int] | None = None,
) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": "llm",
        "resourceVersion": version,
        "labels": {"app": "qwen", **(labels or {})},
        "annotations": {"kubernetes.io/config.seen": "2026", **(annotations or {})},
    }
    if terminating:
        metadata["deletionTimestamp"] = "2026-11-23T05:00:00Z"
    used = [{"name": port, "containerPort": number} for port, number in (ports or {"http": 30000}).items()]
    return {
        "metadata": metadata,
        "spec": {"nodeName": node, "containers": [{"name": "engine", "ports": used}, {"name": "sidecar"}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "True" if ready else "False"},
            ],
        },
    }


def node(name: str, region: str | None, *, version: str = "1") -> dict[str, Any]:
    labels = {} if region is None else {"topology.kubernetes.io/region": region}
    return {"metadata": {"name": name, "labels": labels, "resourceVersion": version}}


def endpoint(address: str, pod_name: str | None = None, *, node_name: str = "node-a", **conditions: Any) -> Any:
    row: dict[str, Any] = {"addresses": [address], "conditions": conditions, "nodeName": node_name}
    if pod_name is not None:
        row["targetRef"] = {"kind": "Pod", "name": pod_name, "namespace": "llm"}
    return row


def endpoint_slice(
    name: str, endpoints: list[Any], *, ports: dict[str, int] | None = None, annotations: dict[str, str] | None = None
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "llm", "annotations": annotations or {}, "resourceVersion": "1"},
        "addressType": "IPv4",
        "ports": [{"name": port, "port": number} for port, number in (ports or {"": 30000}).items()],
        "endpoints": endpoints,
    }


def pool(selector: dict[str, str], ports: list[int], *, version: str = "1") -> dict[str, Any]:
    return {
        "metadata": {"name": "qwen", "namespace": "llm", "resourceVersion": version},
        "spec": {"selector": {"matchLabels": selector}, "targetPorts": [{"number": port} for port in ports]},
    }


def page(items: list[dict[str, Any]], *, version: str = "10", token: str = "") -> bytes:
    return json.dumps(
        {"kind": "List", "metadata": {"resourceVersion": version, "continue": token}, "items": items}
    ).encode()


def event(kind: str, item: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode()


def bookmark(version: str) -> bytes:
    return event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": version}})


def status_event(code: int, reason: str) -> bytes:
    return event("ERROR", {"kind": "Status", "code": code, "reason": reason, "message": f"{reason} it is"})
