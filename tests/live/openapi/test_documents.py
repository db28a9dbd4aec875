"""The published descriptions against the code, both ways, and against what is really answered."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from gorgo import __version__
from gorgo.live.admin.app import admin_app
from gorgo.live.openapi import admin_document, client_document
from gorgo.live.request.parse import INFERENCE_ROUTES
from gorgo.proxy.server import PUBLIC_ROUTES, data_app
from tests.proxy.conftest import Running, Start
from tests.proxy.fakes import DONE, answer, chat, delta, stream

# --- As much of JSON Schema as the descriptions use: anything else in them is an error here too.


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


CLIENT: dict[str, Any] = json.loads(client_document())
ADMIN: dict[str, Any] = json.loads(admin_document())
METHODS = {"get", "put", "post", "delete"}
both = pytest.mark.parametrize("document", [CLIENT, ADMIN], ids=["client", "admin"])


def operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert method in METHODS, (path, method)
            yield method, path, operation


def described(document: Mapping[str, Any]) -> set[str]:
    return {f"{method.upper()} {path}" for method, path, _ in operations(document)}


def test_every_route_for_clients_is_described_and_nothing_else() -> None:
    routes = data_app(cast(Any, None)).routes
    found = {f"{'POST' if route.path in INFERENCE_ROUTES else 'GET'} {route.path}" for route in routes}
    assert described(CLIENT) == {path.replace(":path}", "}") for path in found}


def test_every_route_for_operators_is_described_and_nothing_else() -> None:
    routes: list[Any] = admin_app(
        cast(Any, SimpleNamespace(routing=None, replicas=None)), cast(Any, None), "token", asyncio.Event()
    ).routes
    found = {f"{method} {route.path}" for route in routes for method in route.methods - {"HEAD"}}
    assert described(ADMIN) == {route.replace(":path}", "}") for route in found}


def test_routes_that_need_no_key_are_described_so() -> None:
    assert {path for _, path, operation in operations(CLIENT) if operation.get("security") == [{}]} == set(
        PUBLIC_ROUTES
    )


@both
def test_references_lead_somewhere_and_everything_is_named_once(document: dict[str, Any]) -> None:
    for reference in re.findall(r'"\$ref": "([^"]*)"', json.dumps(document)):
        assert resolve(document, {"$ref": reference}), reference
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(names) == len(set(names))
    assert document["info"]["version"] == __version__
    for kind, parts in document["components"].items():
        if kind != "securitySchemes":
            assert [p for p in parts if f"#/components/{kind}/{p}" not in json.dumps(document)] == []


def test_headers_that_answers_carry_and_requests_may_have_are_described() -> None:
    root = Path(__file__).parents[3] / "gorgo"
    sent = set(re.findall(r'b"(x-[a-z-]+)"', (root / "proxy/exchange/response.py").read_text()))
    assert set(CLIENT["components"]["responses"]["Completed"]["headers"]) == sent
    read = set(re.findall(r'b"(x-[a-z-]+)"', (root / "live/request_options.py").read_text()))
    named = {parameter["name"] for parameter in CLIENT["components"]["parameters"].values()}
    assert read <= named <= read | {"x-request-id", "x-session-id", "x-prediction-based-scheduling"}


def check(document: dict[str, Any], response: httpx.Response, path: str | None = None) -> None:
    """The answer is one of those that are described for its operation."""
    request = response.request
    responses = document["paths"][path or request.url.path][request.method.lower()]["responses"]
    status = str(response.status_code)
    found = resolve(document, responses.get(status) or responses[f"{status[0]}XX"])
    kind = response.headers.get("content-type", "").split(";")[0]
    if "content" in found:
        schema = (found["content"].get(kind) or found["content"]["*/*"])["schema"]
        value = response.json() if kind == "application/json" else response.text
        assert list(faults(document, schema, value)) == []


EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"system": "s", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    "/generate": {"input_ids": [1, 2]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/rerank": {"query": "a", "documents": ["b", "c"]},
    "/v1/score": {"text_1": "a", "text_2": ["b", "c"]},
    "/tokenize": {"prompt": "a"},
}


@pytest.fixture
async def fleet(start: Start) -> Running:
    return await start.fleet([answer(200)], max_body_bytes=1000)


@pytest.mark.parametrize("path", INFERENCE_ROUTES)
async def test_what_is_described_is_taken_and_what_is_answered_is_described(fleet: Running, path: str) -> None:
    body = EXAMPLES[path]
    schema = CLIENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert list(faults(CLIENT, schema, body)) == []
    given = await fleet.client.post(path, json=body)
    assert given.status_code == 200
    assert set(CLIENT["components"]["responses"]["Completed"]["headers"]) - set(given.headers) <= {
        "x-gorgo-predicted-ttft-ms"
    }
    wrong = [
        await fleet.client.post(path, content=b"[]"),
        await fleet.client.post(path, json=body | {"model": "m" * 1000}),
        await fleet.client.post(path, json=body, headers={"content-type": "text/plain"}),
        await fleet.client.post(path, json=body, headers={"x-gorgo-priority": "urgent"}),
    ]
    assert [response.status_code for response in wrong] == [400, 413, 415, 400]
    fleet.state.routing.router.replicas.drain("r0", now=fleet.state.routing.clock())
    fleet.state.stopping = True
    for response in [given, *wrong, await fleet.client.post(path, json=body)]:
        check(CLIENT, response)


async def test_streams_and_small_answers_are_described(start: Start) -> None:
    fleet = await start.fleet([stream(delta("a"), DONE), answer(200, b'{"object": "list", "data": []}')])
    check(CLIENT, await fleet.client.post("/v1/chat/completions", content=chat(stream=True)))
    for path in ("/v1/models", *PUBLIC_ROUTES):
        response = await fleet.client.get(path)
        assert response.status_code == 200
        check(CLIENT, response)
    assert (await fleet.client.get("/openapi.json")).json() == CLIENT


CALLS: list[tuple[str, str, str, dict[str, Any] | None, int]] = [
    ("GET", "/admin/fleet", "", None, 200),
    ("GET", "/admin/status", "", None, 200),
    ("GET", "/metrics", "", None, 200),
    ("GET", "/admin/weights", "", None, 200),
    ("PUT", "/admin/weights", "", {"weights": {"x": 1}}, 400),
    ("PUT", "/admin/weights", "", {"weights": {}, "expected_version": 9}, 409),
    ("PUT", "/admin/policy", "", {"policy": "gorgo", "reason": "a test"}, 200),
    ("PUT", "/admin/weights", "", {"weights": {"w_rtt": 0.4, "w_queue": 0.1}}, 200),
    ("PUT", "/admin/policy", "", {"policy": "none"}, 400),
    ("GET", "/admin/policy", "", None, 200),
    ("GET", "/admin/model", "", None, 200),
    ("POST", "/admin/freeze", "", {"by": "a test"}, 200),
    ("PUT", "/admin/weights", "", {"weights": {"w_rtt": 0.4}}, 409),
    ("POST", "/admin/unfreeze", "", None, 200),
    ("POST", "/admin/unfreeze", "", {"by": 3}, 400),
    ("GET", "/admin/samples", "?after=0&limit=3", None, 200),
    ("GET", "/admin/samples", "?after=x", None, 400),
    ("GET", "/admin/decisions", "?limit=2&replica=r0", None, 200),
    ("GET", "/admin/decisions", "?limit=all", None, 400),
    ("GET", "/admin/decisions/unknown", "", None, 404),
    ("GET", "/admin/decisions/asked", "", None, 200),
    ("POST", "/admin/replicas", "", {"name": "w", "region": "here", "url": "http://127.0.0.1:1"}, 201),
    ("POST", "/admin/replicas", "", {"name": "w", "region": "here", "url": "http://127.0.0.1:1"}, 200),
    ("POST", "/admin/replicas", "", {"name": "w"}, 400),
    ("POST", "/admin/replicas", "", {"name": "r0", "region": "here", "url": "http://127.0.0.1:1"}, 409),
    ("POST", "/admin/replicas/unknown/drain", "", {"drain": True}, 404),
    ("POST", "/admin/replicas/w/drain", "", {"drain": True, "move": True}, 200),
    ("DELETE", "/admin/replicas/unknown", "", None, 404),
    ("DELETE", "/admin/replicas/w", "", None, 202),
    ("POST", "/admin/flush", "", None, 200),
    ("POST", "/admin/reload", "", None, 409),
    ("POST", "/internal/sync", "", {}, 401),
    ("POST", "/internal/eviction", "", {}, 401),
    ("GET", "/admin/check", "", None, 404),
    ("GET", "/admin/openapi.json", "", None, 200),
    ("GET", "/", "", None, 303),
    ("GET", "/admin/page", "", None, 303),
    ("GET", "/admin/page/login", "", None, 200),
    ("POST", "/admin/page/login", "", {"token": "no"}, 403),
    ("POST", "/admin/page/logout", "", None, 303),
    ("GET", "/admin/page/page.css", "", None, 200),
    ("GET", "/admin/page/page.js", "", None, 200),
    ("GET", "/admin/page/icon.svg", "", None, 200),
]


def described_as(path: str) -> str:
    """The path of the document that has parameters in the place of names."""
    paths: list[str] = list(ADMIN["paths"])
    return next(each for each in paths if re.fullmatch(re.sub(r"{\w+}", "[^/]+", each), path))


async def test_admin_answers_are_described(fleet: Running) -> None:
    await fleet.client.post("/v1/chat/completions", content=chat(), headers={"x-request-id": "asked"})
    for method, path, query, body, status in CALLS:
        url, place = path + query, described_as(path)
        sent: dict[str, Any] = {"data": body} if "login" in path else {"json": body} if body is not None else {}
        response = await fleet.admin.request(method, url, **sent)
        assert response.status_code == status, (method, url, response.text)
        check(ADMIN, response, place)
        if status < 300 and "json" in sent:
            schema = ADMIN["paths"][place][method.lower()]["requestBody"]["content"]["application/json"]["schema"]
            assert set(sent["json"]) <= set(resolve(ADMIN, schema)["properties"]), "what is taken is described"
        if "/page" not in path and path != "/":
            refused = await fleet.admin.request(method, url, headers={"authorization": "Bearer no"})
            assert refused.status_code == 401, path
            check(ADMIN, refused, place)
    assert {described_as(path) for _, path, *_ in CALLS} == set(ADMIN["paths"]) - {"/admin/page/events"}
