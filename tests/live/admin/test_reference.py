"""The bodies of the admin API as the reference lists them, against the routes: every key, both ways."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx

from gorgo.config.fleet import FleetSourceConfig
from gorgo.fleet_sources.fleet import FoundFleet
from gorgo.live.admin.app import Admin
from tests.documents import DOCS, code, rows_of, section
from tests.proxy.conftest import Start
from tests.proxy.fakes import DONE, USAGE, chat, delta, stream
from tests.proxy.followed import Followed, follow, regions

SECTION = section((DOCS / "reference.md").read_text(), "### Bodies of the admin listener")
ROUTES = {code(row[0])[0]: (code(row[1]), code(row[2])) for row in rows_of(SECTION, "route", "request", "answer")}
#: Answers that are no JSON of their own, or for tests alone.
LEFT_OUT = {"GET /", "GET /metrics", "GET /admin/check", "GET /admin/openapi.json"}
ENTRY = {"name": "w", "region": "here", "url": "http://127.0.0.1:1"}

PUSH: dict[str, Any] = {"worker_id": "a", "block_tokens": 16, "epoch": 1, "sequence": 0, "hashes": [1]}
PUSH_TOKEN = "token-of-a-replica"

#: Route, path and body of a call that succeeds, in order.
CALLS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET /admin/fleet", "/admin/fleet", None),
    ("GET /admin/status", "/admin/status", None),
    ("GET /admin/weights", "/admin/weights", None),
    ("PUT /admin/weights", "/admin/weights", {"weights": {}}),
    ("GET /admin/policy", "/admin/policy", None),
    ("PUT /admin/policy", "/admin/policy", {"policy": "gorgo-ms"}),
    ("GET /admin/model", "/admin/model", None),
    ("POST /admin/freeze", "/admin/freeze", {}),
    ("POST /admin/unfreeze", "/admin/unfreeze", {}),
    ("GET /admin/samples", "/admin/samples", None),
    ("GET /admin/decisions", "/admin/decisions", None),
    ("GET /admin/decisions/{request_id}", "/admin/decisions/one", None),
    ("POST /admin/replicas", "/admin/replicas", ENTRY),
    ("POST /admin/replicas/{name}/drain", "/admin/replicas/a/drain", {"drain": False}),
    ("DELETE /admin/replicas/{name}", "/admin/replicas/w", {}),
    ("POST /admin/flush", "/admin/flush", {}),
    ("POST /admin/reload", "/admin/reload", {}),
    ("POST /internal/sync", "/internal/sync", PUSH),
    ("POST /internal/eviction", "/internal/eviction", PUSH | {"sequence": 1}),
]


async def followed(start: Start, folder: Path) -> Followed:
    replica = await start.replica(stream(delta("x"), USAGE, DONE))
    text = regions({"a": {"url": replica.url, "push_token_env": "PUSH"}}, proxy={"policy": "gorgo-ms"})
    fleet = await follow(start, folder, text, [replica], environ={"PUSH": PUSH_TOKEN})
    await fleet.fleet.client.post("/v1/chat/completions", content=chat(stream=True), headers={"x-request-id": "one"})
    await fleet.fleet.idle()
    return fleet


def test_every_route_with_a_body_has_a_row() -> None:
    routes = Admin(
        cast(Any, SimpleNamespace(routing=None, replicas=None)), cast(Any, None), None, cast(Any, None)
    ).routes()
    found = {f"{method} {route.path}" for route in routes for method in (route.methods or set()) - {"HEAD"}}
    found = {route.replace(":path", "") for route in found if "/page" not in route} - LEFT_OUT
    assert set(ROUTES) == found == {route for route, *_ in CALLS}


async def test_answers_have_the_keys_of_the_reference(start: Start, tmp_path: Path) -> None:
    proxy = await followed(start, tmp_path)
    for route, path, body in CALLS:
        response = await _call(proxy, route, path, body)
        assert response.is_success, (route, response.text)
        shown = response.json()
        documented = ROUTES[route][1]
        assert list(shown) == documented, f"{route}: expected the answer {', '.join(f'`{key}`' for key in shown)}"


async def test_requests_have_the_keys_of_the_reference_and_no_others(start: Start, tmp_path: Path) -> None:
    """Every reader of a body names its keys in the error of an unknown one."""
    proxy = await followed(start, tmp_path)
    for route, path, body in CALLS:
        documented = ROUTES[route][0]
        if body is None:
            assert documented == [], route
            continue
        refused = await _call(proxy, route, path, {"odd": 1})
        assert refused.status_code == 400, (route, refused.text)
        message = refused.json()["error"]["message"]
        known = re.search(r"unknown key; expected (?:one of )?([\w, ]*)", message)
        assert known is not None, message
        assert known[1].split(", ") == (documented or ["none"]), route


async def test_rows_have_the_keys_of_the_reference(start: Start, tmp_path: Path) -> None:
    proxy = await followed(start, tmp_path)
    rows = {code(row[0])[0]: code(row[1]) for row in rows_of(SECTION, "row of", "keys")}
    found = {
        "fleet_sources": FoundFleet([FleetSourceConfig(name="dns", kind="dns")]).as_rows(0.0)[0],
        "replicas": (await _call(proxy, "GET", "/admin/fleet", None)).json()["replicas"][0],
        "decisions": (await _call(proxy, "GET", "/admin/decisions", None)).json()["decisions"][0],
        "samples": (await _call(proxy, "GET", "/admin/samples", None)).json()["samples"][0],
        "history": (await _call(proxy, "GET", "/admin/weights", None)).json()["history"][0],
    }
    for name, row in found.items():
        assert list(row) == rows[name], f"{name}: expected {', '.join(f'`{key}`' for key in row)}"
    assert set(rows) == set(found)


async def _call(proxy: Followed, route: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
    more: dict[str, Any] = {} if body is None else {"json": body}
    if "/internal/" in route:
        more["headers"] = {"authorization": f"Bearer {PUSH_TOKEN}"}
    return await proxy.fleet.admin.request(route.split()[0], path, **more)
