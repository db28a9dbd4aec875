"""Request bodies of the engine, read leniently as SGLang does: unknown fields are ignored.

Owns the request side of the wire: the generating routes, the fields of prompt, length and options of each, what a body
requests of the answer (`RequestedOutput`), and a value that a JSON schema accepts (`value_of`). Raises `BadRequest`
with a message that is safe to send back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from typing import Any

from gorgo.core.prompt.parse import read_prompt
from gorgo.errors import BadRequest

# A value that a JSON schema accepts, for tool calls and structured answers.
#
# The same schema has the same value. A keyword whose values cannot be constructed is refused.


#: Depth at which a schema that refers to itself is refused; optional properties end at half of it.
MAX_DEPTH = 16
#: Values in one answer: more than fit into the context of an engine.
MAX_VALUES = 4_096
#: Characters of one text.
MAX_TEXT = 65_536

_REFUSED_KEYWORDS = (
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


def value_of(schema: object, path: str) -> Any:
    """Return a value that `schema` accepts.

    Raises `BadRequest` that names the place in the body, such as `tools[0].function.parameters.properties.city`.

    Example
    -------
    >>> value_of({"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}}, "schema")
    {'n': 3}
    """
    return _SchemaReader(schema).value(schema, path, 0)


class _SchemaReader:
    """Reads one schema, to whose root references lead."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._left = MAX_VALUES

    def value(self, schema: object, path: str, depth: int) -> Any:
        self._left -= 1
        if depth > MAX_DEPTH or self._left < 0:
            raise BadRequest(f"{path}: nested too deeply or too large to simulate")
        if schema is True:
            return _WORD
        if not isinstance(schema, Mapping):
            raise BadRequest(f"{path}: expected a JSON schema, an object")
        for name in _REFUSED_KEYWORDS:
            if name in schema:
                raise BadRequest(f"{path}.{name}: not simulated; leave it out")
        if "const" in schema:
            return schema["const"]
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return schema["enum"][0]
        if "$ref" in schema:
            return self.value(self._referred(schema["$ref"], path), path, depth + 1)
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list) and schema[name]:
                return self.value(schema[name][0], f"{path}.{name}[0]", depth + 1)
        if isinstance(schema.get("allOf"), list) and schema["allOf"]:
            return self.value(self._merged(schema, path), path, depth + 1)
        return self._typed(schema, path, depth)

    def _typed(self, schema: Mapping[str, Any], path: str, depth: int) -> Any:
        kind = _type_of(schema)
        if kind == "object":
            return self._object(schema, path, depth)
        if kind == "array":
            return self._array(schema, path, depth)
        if kind == "string":
            return _text(schema, path)
        if kind in ("integer", "number"):
            return _number(schema, path, whole=kind == "integer")
        if kind == "boolean":
            return True
        if kind == "null":
            return None
        raise BadRequest(f"{path}.type: expected a type of JSON, got {str(kind)[:40]!r}")

    def _object(self, schema: Mapping[str, Any], path: str, depth: int) -> dict[str, Any]:
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise BadRequest(f"{path}: expected properties as an object and required as a list")
        names = [name for name in properties if name in required or depth < MAX_DEPTH // 2]
        made = {name: self.value(properties[name], f"{path}.properties.{name}", depth + 1) for name in names}
        others = schema.get("additionalProperties", True)
        for name in required:
            if name not in made:
                if others is False or not isinstance(name, str):
                    raise BadRequest(f"{path}.required: {name!r} is no property")
                made[name] = self.value(others, f"{path}.additionalProperties", depth + 1)
        return made

    def _array(self, schema: Mapping[str, Any], path: str, depth: int) -> list[Any]:
        first = schema.get("prefixItems") or []
        most = _count(schema, "maxItems", path, default=MAX_TEXT)
        count = max(_count(schema, "minItems", path, default=0), min(1, most), min(len(first), most))
        if count > most or (schema.get("uniqueItems") and count > 1):
            raise BadRequest(f"{path}: no list of these items is simulated")
        rest = schema.get("items", True)
        if count > len(first) and rest is False:
            count = len(first)
        return [self.value(first[n] if n < len(first) else rest, f"{path}.items", depth + 1) for n in range(count)]

    def _referred(self, reference: object, path: str) -> object:
        target: object = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise BadRequest(f"{path}.$ref: expected a reference within the schema, as #/$defs/name")
        for part in reference.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            elif isinstance(target, Mapping) and name in target:
                target = target[name]
            else:
                raise BadRequest(f"{path}.$ref: nothing is at {reference[:80]}")
        return target

    def _merged(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return `allOf` and its siblings as one schema: properties and required names together."""
        merged: dict[str, Any] = {}
        for part in ({name: schema[name] for name in schema if name != "allOf"}, *schema["allOf"]):
            while isinstance(part, Mapping) and "$ref" in part:
                self._left -= 1
                if self._left < 0:
                    raise BadRequest(f"{path}: nested too deeply or too large to simulate")
                part = self._referred(part["$ref"], path)
            if not isinstance(part, Mapping):
                raise BadRequest(f"{path}.allOf: expected a list of JSON schemas")
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


def _text(schema: Mapping[str, Any], path: str) -> str:
    text = _FORMATS.get(str(schema.get("format")), _WORD)
    least = _count(schema, "minLength", path, default=0)
    most = _count(schema, "maxLength", path, default=MAX_TEXT)
    if least > most or (schema.get("format") in _FORMATS and not least <= len(text) <= most):
        raise BadRequest(f"{path}: no text of these lengths is simulated")
    return (text * (least // len(text) + 1))[: max(least, min(len(text), most))]


def _number(schema: Mapping[str, Any], path: str, *, whole: bool) -> float:
    low, high = _bound(schema, "minimum", path), _bound(schema, "maximum", path)
    above, below = _bound(schema, "exclusiveMinimum", path), _bound(schema, "exclusiveMaximum", path)
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
        raise BadRequest(f"{path}: no number is within these bounds")
    return value


def _between(low: float | None, high: float | None) -> float:
    if low is None:
        return 0.0 if high is None else high - 1
    return low + 1 if high is None else low if low == high else (low + high) / 2


def _bound(schema: Mapping[str, Any], name: str, path: str) -> float | None:
    value = schema.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 2**53:
        raise BadRequest(f"{path}.{name}: expected a number")
    return value


def _count(schema: Mapping[str, Any], name: str, path: str, *, default: int) -> int:
    value = schema.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadRequest(f"{path}.{name}: expected a whole number")
    if value > MAX_TEXT and name.startswith("min"):
        raise BadRequest(f"{path}.{name}: too large to simulate")
    return value


# What a body requests of the answer: words, JSON of a format, or a call of a tool.
#
# `tools`, `tool_choice` and the formats of all routes are read here, and what is not simulated is refused by name.


#: Tools of one request, as in OpenAI's API.
MAX_TOOLS = 128
#: The answer in the format `json_object`, which has no schema.
_OBJECT = {"answer": "simulated"}


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """The JSON of an answer, None for words; the name of the tool whose arguments it is, None for text."""

    json: bytes | None = None
    tool: str | None = None


@dataclass(frozen=True, slots=True)
class _Tool:
    name: str
    schema: object
    place: str


WORDS = RequestedOutput()


def chat_output(body: Mapping[str, Any]) -> RequestedOutput:
    """Return the output of a body of /v1/chat/completions; raises `BadRequest` with the field."""
    tools = [_openai_tool(tool, f"tools[{n}]", "function") for n, tool in enumerate(_tools(body))]
    choice = body.get("tool_choice")
    wanted = choice
    if isinstance(choice, Mapping):
        _expect(choice.get("type") == "function", "tool_choice.type: expected function")
        wanted = _Named(_field(choice, "function", "tool_choice").get("name"))
    elif choice not in (None, "none", "auto", "required"):
        raise BadRequest("tool_choice: expected none, auto, required or a function's name")
    return _call(tools, wanted, _last_text(body.get("messages"))) or _formatted(
        body.get("response_format"), "response_format", nested="json_schema"
    )


def responses_output(body: Mapping[str, Any]) -> RequestedOutput:
    """Return the output of a body of /v1/responses; raises `BadRequest` with the field."""
    tools = [_openai_tool(tool, f"tools[{n}]", None) for n, tool in enumerate(_tools(body))]
    choice = body.get("tool_choice")
    wanted = choice
    if isinstance(choice, Mapping):
        _expect(choice.get("type") == "function", "tool_choice.type: expected function")
        wanted = _Named(choice.get("name"))
    elif choice not in (None, "none", "auto", "required"):
        raise BadRequest("tool_choice: expected none, auto, required or a function's name")
    given = body.get("input")
    text = given if isinstance(given, str) else _last_text(given)
    form = _field(body, "text", "body").get("format") if body.get("text") is not None else None
    return _call(tools, wanted, text) or _formatted(form, "text.format", nested=None)


def messages_output(body: Mapping[str, Any]) -> RequestedOutput:
    """Return the output of a body of /v1/messages; raises `BadRequest` with the field."""
    tools = []
    for number, tool in enumerate(_tools(body)):
        path = f"tools[{number}]"
        _expect(isinstance(tool, Mapping), f"{path}: expected an object")
        _expect(tool.get("type", "custom") == "custom", f"{path}.type: only tools of the client are simulated")
        tools.append(_Tool(_name(tool, path), tool.get("input_schema"), f"{path}.input_schema"))
    choice = body.get("tool_choice")
    wanted: object = None
    if choice is not None:
        kinds = {"none": "none", "auto": "auto", "any": "required"}
        kind = choice.get("type") if isinstance(choice, Mapping) else None
        _expect(kind == "tool" or kind in kinds, "tool_choice.type: expected none, auto, any or tool")
        wanted = _Named(choice.get("name")) if kind == "tool" else kinds[str(kind)]
    config = body.get("output_config") or {}
    _expect(isinstance(config, Mapping), "output_config: expected an object")
    text = _last_text(body.get("messages"))
    return _call(tools, wanted, text) or _formatted(config.get("format"), "output_config.format", nested=None)


def refuse(body: Mapping[str, Any], fields: Mapping[str, Callable[[Any], object]]) -> None:
    """Raise `BadRequest` for the first of `fields` whose value requests what is not simulated."""
    for name, is_requested in fields.items():
        if name in body and is_requested(body[name]):
            raise BadRequest(f"{name}: not simulated; leave it out")


@dataclass(frozen=True, slots=True)
class _Named:
    name: object


def _call(tools: Sequence[_Tool], wanted: object, last_text: str) -> RequestedOutput | None:
    """Return the call that is requested, if any. With `auto` it is that of a tool which the last user message names."""
    chosen: _Tool | None = None
    if isinstance(wanted, _Named):
        chosen = next((tool for tool in tools if tool.name == wanted.name), None)
        _expect(chosen is not None, f"tool_choice: no tool is named {str(wanted.name)[:80]!r}")
    elif wanted == "required":
        _expect(bool(tools), "tool_choice: a call is required, but there are no tools")
        chosen = next((tool for tool in tools if tool.name in last_text), tools[0])
    elif wanted != "none":
        chosen = next((tool for tool in tools if tool.name in last_text), None)
    if chosen is None:
        return None
    schema = {"type": "object"} if chosen.schema is None else chosen.schema
    return RequestedOutput(_dump(value_of(schema, chosen.place)), chosen.name)


def _formatted(form: object, path: str, *, nested: str | None) -> RequestedOutput:
    """Return text in a response format. Its schema is within `nested`, or beside its type."""
    if form is None:
        return WORDS
    _expect(isinstance(form, Mapping), f"{path}: expected an object")
    assert isinstance(form, Mapping)
    kind = form.get("type")
    if kind == "text":
        return WORDS
    if kind == "json_object":
        return RequestedOutput(_dump(_OBJECT))
    _expect(kind == "json_schema", f"{path}.type: expected text, json_object or json_schema")
    holder, path = (form, path) if nested is None else (_field(form, nested, path), f"{path}.{nested}")
    _expect(holder.get("schema") is not None, f"{path}.schema: expected a JSON schema")
    return RequestedOutput(_dump(value_of(holder["schema"], f"{path}.schema")))


def _tools(body: Mapping[str, Any]) -> list[Any]:
    tools = body.get("tools")
    _expect(tools is None or isinstance(tools, list), "tools: expected a list")
    _expect(len(tools or []) <= MAX_TOOLS, f"tools: expected at most {MAX_TOOLS}")
    return tools or []


def _openai_tool(tool: Any, path: str, nested: str | None) -> _Tool:
    _expect(isinstance(tool, Mapping), f"{path}: expected an object")
    _expect(tool.get("type") == "function", f"{path}.type: only function is simulated")
    holder, path = (tool, path) if nested is None else (_field(tool, nested, path), f"{path}.{nested}")
    return _Tool(_name(holder, path), holder.get("parameters"), f"{path}.parameters")


def _name(holder: Mapping[str, Any], path: str) -> str:
    name = holder.get("name")
    _expect(isinstance(name, str) and name != "", f"{path}.name: expected a name")
    return str(name)


def _last_text(messages: object) -> str:
    """Return the text of the last message if it is of the user; empty otherwise."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, Mapping) or last.get("role") != "user":
        return ""
    content = last.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part["text"]) for part in parts if isinstance(part, Mapping) and part.get("text"))


def _field(holder: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    value = holder.get(name)
    if not isinstance(value, Mapping):
        raise BadRequest(f"{name if path == 'body' else f'{path}.{name}'}: expected an object")
    return value


def _expect(fact: bool, message: str) -> None:
    if not fact:
        raise BadRequest(message)


def _dump(value: object) -> bytes:
    """Return JSON in ASCII, which tokens of four bytes do not cut within a character."""
    return json.dumps(value).encode("ascii")


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

#: Output length when the body names none. (A real engine would go on to its own end of text.)
_DEFAULT_TOKENS = {CHAT: 128, COMPLETIONS: 16, GENERATE: 128, EMBEDDINGS: 1, RESPONSES: 128, MESSAGES: 128}
#: Names of the output length, the first one that is given counts.
_LENGTHS = {RESPONSES: ("max_output_tokens",), MESSAGES: ("max_tokens",)}
_LENGTHS_OF_OTHERS = ("max_completion_tokens", "max_tokens", "max_new_tokens")
#: Answers of one request: OpenAI's bound on `n`.
MAX_ANSWERS = 128
#: Routes that take several prompts, and the field of them.
_PROMPTS = {COMPLETIONS: "prompt", EMBEDDINGS: "input", GENERATE: "text"}


def _is_on(value: Any) -> bool:
    return bool(value)


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _has_audio(value: Any) -> bool:
    return isinstance(value, list) and "audio" in value


def _thinks(value: Any) -> bool:
    return not isinstance(value, dict) or value.get("type") != "disabled"


_REFUSED: dict[str, dict[str, Callable[[Any], object]]] = {
    CHAT: {"functions": _is_on, "function_call": _is_on, "logprobs": _is_on, "audio": _is_on, "modalities": _has_audio},
    COMPLETIONS: {
        "best_of": _above_one,
        "echo": _is_on,
        "suffix": _is_on,
        "logprobs": _is_on,
        "response_format": _is_on,
    },
    RESPONSES: {"background": _is_on, "conversation": _is_on, "prompt": _is_on},
    MESSAGES: {"thinking": _thinks, "mcp_servers": _is_on, "container": _is_on},
    GENERATE: {"return_logprob": _is_on},
    EMBEDDINGS: {},
}
_REFUSED_SAMPLING: dict[str, Callable[[Any], object]] = {
    "n": _above_one, "json_schema": _is_on, "regex": _is_on, "ebnf": _is_on, "structural_tag": _is_on,
}  # fmt: skip
_OUTPUTS = {CHAT: chat_output, RESPONSES: responses_output, MESSAGES: messages_output}


@dataclass(frozen=True, slots=True)
class Job:
    """One request: the text of its prompts, and its options.

    Parameters
    ----------
    text, prompts:
        The only prompt, or the first of `prompts`.
    samples:
        Answers to each prompt.
    is_limited:
        Whether the body gives the output length.
    is_list:
        Whether the prompt was a list of prompts.
    body:
        For the fields that an answer repeats.
    """

    route: str
    text: bytes
    output_tokens: int
    stream: bool
    include_usage: bool
    rid: str | None
    prompts: tuple[bytes, ...] = ()
    samples: int = 1
    is_limited: bool = False
    is_list: bool = False
    output: RequestedOutput = WORDS
    body: Mapping[str, Any] = field(default_factory=dict)
    #: The LoRA adapter that answers: its cached prefixes are its own.
    adapter: str | None = None


def read_job(route: str, raw: bytes, text_of: Callable[[str], bytes | None] = lambda _: None) -> Job:
    """Read the body of a generating route. `text_of` gives the text of a stored response by its id."""
    body = _read_json(raw)
    prompts = _prompts(route, body, text_of)
    samples = _samples(route, body)
    if len(prompts) * samples > MAX_ANSWERS:
        name = "n" if samples > 1 else _PROMPTS[route]
        raise BadRequest(f"{name}: expected at most {MAX_ANSWERS} answers, got {len(prompts) * samples}")
    refuse(body, _REFUSED[route])
    if route == GENERATE:
        refuse(_mapping(body, "sampling_params"), _REFUSED_SAMPLING)
    options = _mapping(body, "stream_options")
    output = _OUTPUTS[route](body) if route in _OUTPUTS else WORDS
    limit = _limit(route, body)
    rid = body.get("rid")
    return Job(
        route=route,
        text=prompts[0],
        output_tokens=limit or _DEFAULT_TOKENS[route],
        stream=route != EMBEDDINGS and body.get("stream") is True,
        include_usage=options.get("include_usage") is True,
        rid=rid if isinstance(rid, str) and rid else None,
        prompts=prompts,
        samples=samples,
        is_limited=limit is not None,
        is_list=route in _PROMPTS and _is_list(body.get(_PROMPTS[route])),
        output=output,
        body=body,
    )


def _prompts(route: str, body: Mapping[str, Any], text_of: Callable[[str], bytes | None]) -> tuple[bytes, ...]:
    """Return the text of each prompt; that of a previous response goes before the new input."""
    several = body.get(_PROMPTS[route]) if route in _PROMPTS else None
    if _is_list(several):
        assert isinstance(several, list)
        if not 0 < len(several) <= MAX_ANSWERS:
            raise BadRequest(f"{_PROMPTS[route]}: expected 1 to {MAX_ANSWERS} prompts, got {len(several)}")
        read_prompt(route, body)  # an error names the place within the list
        return tuple(read_prompt(route, {**body, _PROMPTS[route]: one}).text for one in several)
    text = read_prompt(route, body).text
    previous = body.get("previous_response_id") if route == RESPONSES else None
    if previous is None:
        return (text,)
    stored = text_of(previous) if isinstance(previous, str) else None
    if stored is None:
        raise BadRequest(f"previous_response_id: no response {str(previous)[:80]!r} is stored here")
    return (stored + text,)


def _is_list(value: object) -> bool:
    """Whether it is a list of prompts; a list of numbers is one prompt in token ids."""
    return isinstance(value, list) and bool(value) and not isinstance(value[0], int | float)


def _samples(route: str, body: Mapping[str, Any]) -> int:
    value = body.get("n")
    if value is None or route not in (CHAT, COMPLETIONS):
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_ANSWERS:
        raise BadRequest(f"n: expected a whole number from 1 to {MAX_ANSWERS}")
    return value


def _read_json(raw: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    return body


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"{name} is not an object")
    return value


def _limit(route: str, body: Mapping[str, Any]) -> int | None:
    """Return the output length that the body gives; Anthropic's API requires one."""
    if route == EMBEDDINGS:
        return None
    if route == GENERATE:
        body = _mapping(body, "sampling_params")
    for name in _LENGTHS.get(route, _LENGTHS_OF_OTHERS):
        value = body.get(name)
        if value is None and route != MESSAGES:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRequest(f"{name} must be a whole number of at least 1")
        return value
    return None
