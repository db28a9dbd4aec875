"""A value that a JSON schema accepts, for tool calls and structured answers.

Owns the choice of the value: the same schema has the same one. A keyword whose values cannot be constructed is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor
from typing import Any

from gorgo.errors import BadRequest

#: Depth at which a schema that refers to itself is refused; optional properties end at half of it.
MAX_DEPTH = 16
#: Values in one answer: more than fit into the context of an engine.
MAX_VALUES = 4_096
#: Characters of one text.
MAX_TEXT = 65_536

_REFUSED = (
    "pattern", "patternProperties", "propertyNames", "not", "if", "multipleOf", "contains", "minProperties",
    "dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
_FORMATS = {
    "date-time": "2026-01-01T00:00:00Z",
    "date": "2026-01-01",
    "time": "00:00:00Z",
    "duration": "P1D",
    "email": "user@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_WORD = "simulated"


def value_of(schema: object, place: str) -> Any:
    """Return a value that `schema` accepts.

    Raises `BadRequest` that names the place in the body, such as `tools[0].function.parameters.properties.city`.

    Example
    -------
    >>> value_of({"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}}, "schema")
    {'n': 3}
    """
    return _SchemaReader(schema).value(schema, place, 0)


class _SchemaReader:
    """Reads one schema, to whose root references lead."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._left = MAX_VALUES

    def value(self, schema: object, place: str, depth: int) -> Any:
        self._left -= 1
        if depth > MAX_DEPTH or self._left < 0:
            raise BadRequest(f"{place}: nested too deeply or too large to simulate")
        if schema is True:
            return _WORD
        if not isinstance(schema, Mapping):
            raise BadRequest(f"{place}: expected a JSON schema, an object")
        for name in _REFUSED:
            if name in schema:
                raise BadRequest(f"{place}.{name}: not simulated; leave it out")
        if "const" in schema:
            return schema["const"]
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return schema["enum"][0]
        if "$ref" in schema:
            return self.value(self._referred(schema["$ref"], place), place, depth + 1)
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list) and schema[name]:
                return self.value(schema[name][0], f"{place}.{name}[0]", depth + 1)
        if isinstance(schema.get("allOf"), list) and schema["allOf"]:
            return self.value(self._merged(schema, place), place, depth + 1)
        return self._typed(schema, place, depth)

    def _typed(self, schema: Mapping[str, Any], place: str, depth: int) -> Any:
        kind = _type_of(schema)
        if kind == "object":
            return self._object(schema, place, depth)
        if kind == "array":
            return self._array(schema, place, depth)
        if kind == "string":
            return _text(schema, place)
        if kind in ("integer", "number"):
            return _number(schema, place, whole=kind == "integer")
        if kind == "boolean":
            return True
        if kind == "null":
            return None
        raise BadRequest(f"{place}.type: expected a type of JSON, got {str(kind)[:40]!r}")

    def _object(self, schema: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise BadRequest(f"{place}: expected properties as an object and required as a list")
        names = [name for name in properties if name in required or depth < MAX_DEPTH // 2]
        made = {name: self.value(properties[name], f"{place}.properties.{name}", depth + 1) for name in names}
        others = schema.get("additionalProperties", True)
        for name in required:
            if name not in made:
                if others is False or not isinstance(name, str):
                    raise BadRequest(f"{place}.required: {name!r} is no property")
                made[name] = self.value(others, f"{place}.additionalProperties", depth + 1)
        return made

    def _array(self, schema: Mapping[str, Any], place: str, depth: int) -> list[Any]:
        first = schema.get("prefixItems") or []
        most = _count(schema, "maxItems", place, default=MAX_TEXT)
        count = max(_count(schema, "minItems", place, default=0), min(1, most), min(len(first), most))
        if count > most or (schema.get("uniqueItems") and count > 1):
            raise BadRequest(f"{place}: no list of these items is simulated")
        rest = schema.get("items", True)
        if count > len(first) and rest is False:
            count = len(first)
        return [self.value(first[n] if n < len(first) else rest, f"{place}.items", depth + 1) for n in range(count)]

    def _referred(self, reference: object, place: str) -> object:
        found: object = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise BadRequest(f"{place}.$ref: expected a reference within the schema, as #/$defs/name")
        for part in reference.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Mapping) and name in found:
                found = found[name]
            else:
                raise BadRequest(f"{place}.$ref: nothing is at {reference[:80]}")
        return found

    def _merged(self, schema: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return `allOf` and its siblings as one schema: properties and required names together."""
        merged: dict[str, Any] = {}
        for part in ({name: schema[name] for name in schema if name != "allOf"}, *schema["allOf"]):
            while isinstance(part, Mapping) and "$ref" in part:
                self._left -= 1
                if self._left < 0:
                    raise BadRequest(f"{place}: nested too deeply or too large to simulate")
                part = self._referred(part["$ref"], place)
            if not isinstance(part, Mapping):
                raise BadRequest(f"{place}.allOf: expected a list of JSON schemas")
            properties = {**merged.get("properties", {}), **(part.get("properties") or {})}
            required = [*merged.get("required", []), *(part.get("required") or [])]
            merged = {**merged, **part, "properties": properties, "required": required}
        if not merged["properties"] and not merged["required"]:
            del merged["properties"], merged["required"]
        return merged


def _type_of(schema: Mapping[str, Any]) -> object:
    kind = schema.get("type")
    if isinstance(kind, list):
        return next((one for one in kind if one != "null"), "null")
    if kind is None:
        hints = {"properties": "object", "required": "object", "items": "array", "prefixItems": "array"}
        hints |= {"minimum": "number", "maximum": "number"}
        return next((hints[name] for name in hints if name in schema), "string")
    return kind


def _text(schema: Mapping[str, Any], place: str) -> str:
    text = _FORMATS.get(str(schema.get("format")), _WORD)
    least = _count(schema, "minLength", place, default=0)
    most = _count(schema, "maxLength", place, default=MAX_TEXT)
    if least > most or (schema.get("format") in _FORMATS and not least <= len(text) <= most):
        raise BadRequest(f"{place}: no text of these lengths is simulated")
    return (text * (least // len(text) + 1))[: max(least, min(len(text), most))]


def _number(schema: Mapping[str, Any], place: str, *, whole: bool) -> float:
    low, high = _bound(schema, "minimum", place), _bound(schema, "maximum", place)
    above, below = _bound(schema, "exclusiveMinimum", place), _bound(schema, "exclusiveMaximum", place)
    if whole:
        low = None if low is None else ceil(low)
        low = low if above is None else max(floor(above) + 1, floor(above) + 1 if low is None else low)
        high = None if high is None else floor(high)
        high = high if below is None else min(ceil(below) - 1, ceil(below) - 1 if high is None else high)
        value: float = low if low is not None else min(0, 0 if high is None else high)
    else:
        low = max((one for one in (low, above) if one is not None), default=None)
        high = min((one for one in (high, below) if one is not None), default=None)
        value = _between(low, high)
    if (high is not None and value > high) or value in (below, above):
        raise BadRequest(f"{place}: no number is within these bounds")
    return value


def _between(low: float | None, high: float | None) -> float:
    if low is None:
        return 0.0 if high is None else high - 1
    return low + 1 if high is None else low if low == high else (low + high) / 2


def _bound(schema: Mapping[str, Any], name: str, place: str) -> float | None:
    value = schema.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 2**53:
        raise BadRequest(f"{place}.{name}: expected a number")
    return value


def _count(schema: Mapping[str, Any], name: str, place: str, *, default: int) -> int:
    value = schema.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadRequest(f"{place}.{name}: expected a whole number")
    if value > MAX_TEXT and name.startswith("min"):
        raise BadRequest(f"{place}.{name}: too large to simulate")
    return value
