"""An InferencePool of the Gateway API: which pods are its replicas, and on which ports."""

from __future__ import annotations

from dataclasses import dataclass

from gorgo.fleet_sources.documents import Document, ObjectError, mapping, mappings, number, object_name

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
    ports = tuple(port for row in mappings(spec, "targetPorts") if (port := number(row, "number")) is not None)
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
