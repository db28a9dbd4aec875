"""Values of a Kubernetes document, which may be anything: each reader returns its type or the neutral value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gorgo.errors import GorgoError

#: Prefix of the labels and annotations that describe a replica.
PREFIX = "gorgo-router/"
#: Kubernetes sets it on nodes, and from version 1.35 on their pods.
REGION_LABEL = "topology.kubernetes.io/region"

#: Longest value that is stored; the rest of a longer one is of no use.
_MAX_VALUE = 4096

Document = Mapping[str, Any]
#: Labels and annotations by key, ascending.
Described = tuple[tuple[str, str], ...]


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
    found = {**labels, **{key: value for key, value in annotations.items() if str(key).startswith(PREFIX)}}
    return tuple(
        (key, value[:_MAX_VALUE])
        for key, value in sorted(found.items())
        if isinstance(value, str) and (key.startswith(PREFIX) or key == REGION_LABEL)
    )


def object_name(document: Document) -> str:
    """Return the name of an object. Raises `ObjectError` without one."""
    name = text(mapping(document, "metadata"), "name")
    if not name:
        raise ObjectError("an object without metadata.name")
    return name
