"""Values of JSON schemas are valid by the schema, or the schema is refused with its place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.apps.engine_server.schema import value_of
from gorgo.errors import BadRequest

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NODE = {
    "$defs": {"node": {"type": "object", "properties": {"left": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}}}},
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({}, "simulated"),
        (True, "simulated"),
        (CITY, {"city": "simulated"}),
        ({"type": ["null", "integer"], "minimum": 3.5}, 4),
        ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5}, 4),
        ({"type": "integer", "minimum": 9, "exclusiveMinimum": 3}, 9),
        ({"type": "integer", "maximum": -2}, -2),
        ({"type": "integer", "exclusiveMaximum": 0}, -1),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, 0.25),
        ({"type": "number", "exclusiveMaximum": 0}, -1),
        ({"minimum": 2}, 3),
        ({"type": "array", "items": CITY, "minItems": 2}, [{"city": "simulated"}] * 2),
        ({"items": {"type": "boolean"}}, [True]),
        ({"type": "array", "maxItems": 0}, []),
        ({"prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False}, [None, True]),
        ({"enum": ["b", 1]}, "b"),
        ({"const": None}, None),
        ({"anyOf": [{"type": "null"}, CITY]}, None),
        (
            {"allOf": [CITY, {"properties": {"n": {"type": "integer"}}, "required": ["n"]}]},
            {"city": "simulated", "n": 0},
        ),
        ({"$defs": {"c": CITY}, "allOf": [{"$ref": "#/$defs/c"}]}, {"city": "simulated"}),
        ({"$defs": {"a/b": CITY}, "properties": {"x": {"$ref": "#/$defs/a~1b"}}}, {"x": {"city": "simulated"}}),
        ({"type": "string", "minLength": 12}, "simulatedsim"),
        ({"type": "string", "maxLength": 3}, "sim"),
        ({"type": "string", "format": "ipv4"}, "192.0.2.1"),
        ({"type": "string", "format": "color"}, "simulated"),
        ({"type": "object", "required": ["x"]}, {"x": "simulated"}),
        ({"required": ["x"], "additionalProperties": {"type": "integer"}}, {"x": 0}),
    ],
    ids=str,
)
def test_a_schema_has_a_value_that_it_accepts(schema: Any, value: Any) -> None:
    assert value_of(schema, "schema") == value


def test_a_schema_that_refers_to_itself_ends_at_its_optional_properties() -> None:
    value = value_of(NODE, "schema")
    depth = 0
    while "left" in value:
        value, depth = value["left"], depth + 1
    assert 1 < depth < 16


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a": {"pattern": "^x"}}}, "s.properties.a.pattern: not simulated; leave it out"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "s: no number is within these bounds"),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, "s: no number is within these bounds"),
        ({"type": "string", "minLength": 10**9}, "s.minLength: too large to simulate"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "s: no text of these lengths is simulated"),
        ({"type": "array", "minItems": 60_000, "items": {}}, "s.items: nested too deeply or too large to simulate"),
        ({"type": "array", "minItems": 2, "uniqueItems": True}, "s: no list of these items is simulated"),
        ({"type": "array", "minItems": "2"}, "s.minItems: expected a whole number"),
        ({"type": "integer", "minimum": "2"}, "s.minimum: expected a number"),
        ({"type": "float"}, "s.type: expected a type of JSON, got 'float'"),
        ({"$ref": "#"}, "s: nested too deeply or too large to simulate"),
        ({"$ref": "#/$defs/x"}, "s.$ref: nothing is at #/$defs/x"),
        ({"$ref": "https://example.com/"}, "s.$ref: expected a reference within the schema, as #/$defs/name"),
        ({"allOf": [3]}, "s.allOf: expected a list of JSON schemas"),
        ({"allOf": [{"$ref": "#/allOf/0"}]}, "s: nested too deeply or too large to simulate"),
        ({"properties": [1]}, "s: expected properties as an object and required as a list"),
        ({"required": ["x"], "additionalProperties": False}, "s.required: 'x' is no property"),
        ([], "s: expected a JSON schema, an object"),
        (False, "s: expected a JSON schema, an object"),
    ],
)
def test_a_schema_without_a_simulated_value_is_refused_with_its_place(schema: Any, said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        value_of(schema, "s")
    assert str(caught.value) == said


_LEAVES = st.one_of(
    st.builds(lambda n: {"type": "integer", "minimum": n}, st.integers(-5, 5)),
    st.just({"type": "string"}),
    st.just({"type": "boolean"}),
    st.just({"type": ["number", "null"]}),
)
_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(
            lambda properties, required: {
                "type": "object",
                "properties": properties,
                "required": [*properties] if required else [],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.booleans(),
        ),
        st.builds(lambda items, least: {"type": "array", "items": items, "minItems": least}, inner, st.integers(0, 2)),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    ),
    max_leaves=8,
)


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """A naive reading of the keywords that `_SCHEMAS` has."""
    if "anyOf" in schema:
        return any(accepts(one, value) for one in schema["anyOf"])
    kind = schema["type"]
    if kind == "object":
        known = schema["properties"]
        return set(schema["required"]) <= set(value) <= set(known) and all(accepts(known[k], value[k]) for k in value)
    if kind == "array":
        return len(value) >= schema["minItems"] and all(accepts(schema["items"], one) for one in value)
    if kind == "integer":
        return type(value) is int and value >= schema["minimum"]
    return {"string": str, "boolean": bool}.get(str(kind), float | int) is type(value) or type(value) in (int, float)


@settings(max_examples=60, deadline=None)
@given(_SCHEMAS)
def test_values_of_nested_schemas_are_valid(schema: dict[str, Any]) -> None:
    assert accepts(schema, value_of(schema, "schema"))
