"""As much of JSON Schema as the descriptions use: anything else in them is an error here too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}
_WORDS = {"description", "default"}


def resolve(document: Mapping[str, Any], node: Any) -> Any:
    """What a `$ref` stands for."""
    while isinstance(node, Mapping) and "$ref" in node:
        found: Any = document
        for part in node["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        node = found
    return node


def faults(document: Mapping[str, Any], schema: Any, value: Any, where: str = "$") -> Iterator[str]:
    """What is wrong with `value`, in words."""
    schema = resolve(document, schema)
    for key, wanted in schema.items():
        if key not in _WORDS:
            yield from _CHECKS[key](document, schema, wanted, value, where)


def _type(_: Any, __: Any, wanted: Any, value: Any, where: str) -> Iterator[str]:
    names = [wanted] if isinstance(wanted, str) else wanted
    allowed = tuple(kind for name in names for kind in _TYPES[name])
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        yield f"{where}: {type(value).__name__} instead of {wanted}"


def _required(_: Any, __: Any, wanted: Any, value: Any, where: str) -> Iterator[str]:
    yield from (f"{where}: no {key}" for key in wanted if isinstance(value, dict) and key not in value)


def _properties(document: Any, _: Any, wanted: Any, value: Any, where: str) -> Iterator[str]:
    for key in set(wanted) & set(value if isinstance(value, dict) else ()):
        yield from faults(document, wanted[key], value[key], f"{where}.{key}")


def _additional(document: Any, schema: Any, wanted: Any, value: Any, where: str) -> Iterator[str]:
    for key in set(value if isinstance(value, dict) else ()) - set(schema.get("properties", ())):
        if wanted is False:
            yield f"{where}: {key} is unknown"
        else:
            yield from faults(document, wanted, value[key], f"{where}.{key}")


def _items(document: Any, _: Any, wanted: Any, value: Any, where: str) -> Iterator[str]:
    for number, item in enumerate(value if isinstance(value, list) else ()):
        yield from faults(document, wanted, item, f"{where}[{number}]")


def _all_of(document: Any, _: Any, wanted: Any, value: Any, where: str) -> Iterator[str]:
    for schema in wanted:
        yield from faults(document, schema, value, where)


def _any_of(document: Any, _: Any, wanted: Any, value: Any, where: str) -> Iterator[str]:
    if all(list(faults(document, schema, value, where)) for schema in wanted):
        yield f"{where}: none of the alternatives"


def _one_of(document: Any, _: Any, wanted: Any, value: Any, where: str) -> Iterator[str]:
    if sum(not list(faults(document, schema, value, where)) for schema in wanted) != 1:
        yield f"{where}: not exactly one of the alternatives"


def _equal(_: Any, __: Any, wanted: Any, value: Any, where: str) -> Iterator[str]:
    if value not in (wanted if isinstance(wanted, list) else [wanted]):
        yield f"{where}: {value!r} instead of {wanted}"


def _bound(holds: Any) -> Any:
    def check(_: Any, __: Any, wanted: Any, value: Any, where: str) -> Iterator[str]:
        if value is not None and not holds(value, wanted):
            yield f"{where}: {value!r} is out of bounds"

    return check


_CHECKS: Mapping[str, Any] = {
    "type": _type,
    "required": _required,
    "properties": _properties,
    "additionalProperties": _additional,
    "items": _items,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "enum": _equal,
    "const": _equal,
    "minimum": _bound(lambda value, least: value >= least),
    "maximum": _bound(lambda value, most: value <= most),
    "exclusiveMinimum": _bound(lambda value, least: value > least),
    "minItems": _bound(lambda value, least: not isinstance(value, list) or len(value) >= least),
    "minLength": _bound(lambda value, least: not isinstance(value, str) or len(value) >= least),
    "maxLength": _bound(lambda value, most: not isinstance(value, str) or len(value) <= most),
    "pattern": _bound(lambda value, form: not isinstance(value, str) or re.search(form, value)),
}
