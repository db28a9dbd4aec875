"""What a body asks of the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.errors import BadRequest
from gorgo.lab.engine_server.job import CHAT, COMPLETIONS, EMBEDDINGS, GENERATE, Job, read_job, value_of


def read(route: str, **body: Any) -> Job:
    return read_job(route, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("route", "body", "job"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}, Job(CHAT, b"hi", 128, False, False, None)),
        (COMPLETIONS, {"prompt": "hi"}, Job(COMPLETIONS, b"hi", 16, False, False, None)),
        (GENERATE, {"text": "hi"}, Job(GENERATE, b"hi", 128, False, False, None)),
        (EMBEDDINGS, {"input": "hi", "stream": True, "max_tokens": 9}, Job(EMBEDDINGS, b"hi", 1, False, False, None)),
        (
            COMPLETIONS,
            {"prompt": "hi", "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}, "rid": "r"},
            Job(COMPLETIONS, b"hi", 1, True, True, "r"),
        ),
        (
            GENERATE,
            {"text": "hi", "sampling_params": {"max_new_tokens": 5}},
            Job(GENERATE, b"hi", 5, False, False, None),
        ),
        # What `/generate` reads of its own parameters is read nowhere else.
        (GENERATE, {"text": "hi", "max_tokens": 5}, Job(GENERATE, b"hi", 128, False, False, None)),
        # The newer name goes first; null is no number.
        (
            COMPLETIONS,
            {"prompt": "", "max_tokens": 9, "max_completion_tokens": 5},
            Job(COMPLETIONS, b"", 5, False, False, None),
        ),
        (COMPLETIONS, {"prompt": "", "max_tokens": None}, Job(COMPLETIONS, b"", 16, False, False, None)),
        (COMPLETIONS, {"prompt": "", "stream": 1, "rid": ""}, Job(COMPLETIONS, b"", 16, False, False, None)),
        (COMPLETIONS, {"prompt": "", "rid": 7, "stream_options": None}, Job(COMPLETIONS, b"", 16, False, False, None)),
    ],
)
def test_a_body_is_read_as_sglang_reads_it(route: str, body: dict[str, Any], job: Job) -> None:
    found = read(route, **body)
    assert (found.route, found.output_tokens, found.stream) == (job.route, job.output_tokens, job.stream)
    assert (found.include_usage, found.rid) == (job.include_usage, job.rid)
    assert job.text in found.text


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens must be a whole number"),
        ({"stream_options": []}, "stream_options is not an object"),
    ],
)
def test_a_wrong_amount_is_named(body: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        read(COMPLETIONS, prompt="hi", **body)


@pytest.mark.parametrize(("raw", "said"), [(b"[]", "not a JSON object"), (b"{", "not JSON"), (b"\xff", "not JSON")])
def test_a_body_that_is_no_object_is_refused(raw: bytes, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        read_job(CHAT, raw)


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
