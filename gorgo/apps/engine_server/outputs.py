"""What a body requests of the answer: words, JSON of a format, or a call of a tool.

Owns `tools`, `tool_choice` and the formats of all routes, and refuses by name what is not simulated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gorgo.apps.engine_server.schema import value_of
from gorgo.errors import BadRequest

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
        place = f"tools[{number}]"
        _expect(isinstance(tool, Mapping), f"{place}: expected an object")
        _expect(tool.get("type", "custom") == "custom", f"{place}.type: only tools of the client are simulated")
        tools.append(_Tool(_name(tool, place), tool.get("input_schema"), f"{place}.input_schema"))
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
    found: _Tool | None = None
    if isinstance(wanted, _Named):
        found = next((tool for tool in tools if tool.name == wanted.name), None)
        _expect(found is not None, f"tool_choice: no tool is named {str(wanted.name)[:80]!r}")
    elif wanted == "required":
        _expect(bool(tools), "tool_choice: a call is required, but there are no tools")
        found = next((tool for tool in tools if tool.name in last_text), tools[0])
    elif wanted != "none":
        found = next((tool for tool in tools if tool.name in last_text), None)
    if found is None:
        return None
    schema = {"type": "object"} if found.schema is None else found.schema
    return RequestedOutput(_dump(value_of(schema, found.place)), found.name)


def _formatted(form: object, place: str, *, nested: str | None) -> RequestedOutput:
    """Return text in a response format. Its schema is within `nested`, or beside its type."""
    if form is None:
        return WORDS
    _expect(isinstance(form, Mapping), f"{place}: expected an object")
    assert isinstance(form, Mapping)
    kind = form.get("type")
    if kind == "text":
        return WORDS
    if kind == "json_object":
        return RequestedOutput(_dump(_OBJECT))
    _expect(kind == "json_schema", f"{place}.type: expected text, json_object or json_schema")
    holder, place = (form, place) if nested is None else (_field(form, nested, place), f"{place}.{nested}")
    _expect(holder.get("schema") is not None, f"{place}.schema: expected a JSON schema")
    return RequestedOutput(_dump(value_of(holder["schema"], f"{place}.schema")))


def _tools(body: Mapping[str, Any]) -> list[Any]:
    tools = body.get("tools")
    _expect(tools is None or isinstance(tools, list), "tools: expected a list")
    _expect(len(tools or []) <= MAX_TOOLS, f"tools: expected at most {MAX_TOOLS}")
    return tools or []


def _openai_tool(tool: Any, place: str, nested: str | None) -> _Tool:
    _expect(isinstance(tool, Mapping), f"{place}: expected an object")
    _expect(tool.get("type") == "function", f"{place}.type: only function is simulated")
    holder, place = (tool, place) if nested is None else (_field(tool, nested, place), f"{place}.{nested}")
    return _Tool(_name(holder, place), holder.get("parameters"), f"{place}.parameters")


def _name(holder: Mapping[str, Any], place: str) -> str:
    name = holder.get("name")
    _expect(isinstance(name, str) and name != "", f"{place}.name: expected a name")
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


def _field(holder: Mapping[str, Any], name: str, place: str) -> Mapping[str, Any]:
    value = holder.get(name)
    if not isinstance(value, Mapping):
        raise BadRequest(f"{name if place == 'body' else f'{place}.{name}'}: expected an object")
    return value


def _expect(fact: bool, message: str) -> None:
    if not fact:
        raise BadRequest(message)


def _dump(value: object) -> bytes:
    """Return JSON in ASCII, which tokens of four bytes do not cut within a character."""
    return json.dumps(value).encode("ascii")
