"""Bodies and queries of the admin API, and their list in the reference, both ways."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.requests import Request

from gorgo.config.fleet import FleetSourceConfig
from gorgo.core.scaling import Group, GroupEvidence, ScalingLimits, ScalingSignal
from gorgo.fleet_sources.fleet import FoundFleet
from gorgo.live.admin.app import Admin
from gorgo.live.admin.calls import (
    BODY_S,
    MAX_BODY_BYTES,
    MAX_TEXT,
    BoundedBodies,
    Check,
    count_of,
    is_count,
    is_flag,
    is_text,
    is_weights,
    json_response,
    parse_body,
    read_body,
)
from gorgo.live.http.errors import HttpError, Message
from gorgo.live.workers.link import WorkerRow
from tests.documents import DOCS, code, rows_of, section
from tests.lab.sim.live_shell import VirtualLoop
from tests.proxy.conftest import Start
from tests.proxy.fakes import DONE, USAGE, chat, delta, stream
from tests.proxy.followed import Followed, follow, regions

# --- What a call of the admin API may hold in its body and its query.


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (is_count, [0, 1, 2**60], [-1, 1.0, "1", True, None, []]),
        (is_flag, [True, False], [0, 1, "true", None]),
        (
            is_text,
            ["", "x" * MAX_TEXT, "ü", "\U0001f408"],
            ["x" * (MAX_TEXT + 1), "\ud800", "a\udfffb", 1, None, ["a"]],
        ),
        (is_weights, [{}, {"a": 1, "b": 0.5}], [[1.0], {"a": "1"}, {"a": True}, {"a": float("nan")}, 1, "a", None]),
    ],
)
def test_value_is_of_its_kind(check: Check, good: list[object], bad: list[object]) -> None:
    assert [value for value in good if not check(value)] == []
    assert [value for value in bad if check(value)] == []


KEYS: dict[str, tuple[Check, str]] = {"draining": (is_flag, "true or false"), "by": (is_text, "a name")}


@pytest.mark.parametrize("body", [{}, {"draining": True}, {"draining": None, "by": "me"}])
def test_body_with_known_keys_is_taken(body: dict[str, Any]) -> None:
    parse_body(body, KEYS)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"drain": True}, "'drain': unknown key; expected draining, by"),
        ({"draining": 1}, "draining: expected true or false"),
        ({"by": "me", "draining": "no"}, "draining: expected true or false"),
        ({"x" * 100: 1}, f"{'x' * 60!r}: unknown key; expected draining, by"),
    ],
)
def test_body_with_another_key_or_value_is_a_400_that_says_what_was_expected(
    body: dict[str, Any], message: str
) -> None:
    with pytest.raises(HttpError) as refusal:
        parse_body(body, KEYS)
    assert (refusal.value.status, refusal.value.code, refusal.value.message) == (400, "invalid_request", message)


def request_of(*pieces: bytes, query: bytes = b"") -> Request:
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Message:
        return messages.pop(0)

    return Request({"type": "http", "method": "POST", "headers": [], "query_string": query, "path": "/"}, receive)


@pytest.mark.parametrize(
    ("pieces", "parsed"),
    [((), {}), ((b" ", b"\n"), {}), ((b"{}",), {}), ((b'{"a"', b": 1}"), {"a": 1}), ((b" " * MAX_BODY_BYTES,), {})],
)
async def test_empty_body_is_an_empty_object(pieces: tuple[bytes, ...], parsed: dict[str, Any]) -> None:
    assert await read_body(request_of(*pieces)) == parsed


@pytest.mark.parametrize(
    ("pieces", "status", "code"),
    [
        ((b"[]",), 400, "invalid_json"),
        ((b"null",), 400, "invalid_json"),
        ((b"{",), 400, "invalid_json"),
        ((b"[" * 60_000,), 400, "invalid_json"),
        ((b" " * MAX_BODY_BYTES, b" "), 413, "request_too_large"),
    ],
)
async def test_body_that_is_no_object_or_too_large_is_refused(
    pieces: tuple[bytes, ...], status: int, code: str
) -> None:
    with pytest.raises(HttpError) as refusal:
        await read_body(request_of(*pieces))
    assert (refusal.value.status, refusal.value.code) == (status, code)


@pytest.mark.parametrize(("query", "count"), [(b"", 7), (b"n=0", 0), (b"n=" + b"9" * 18, 10**18 - 1)])
def test_number_in_the_query_is_whole(query: bytes, count: int) -> None:
    assert count_of(request_of(query=query), "n", 7) == count


@pytest.mark.parametrize("query", [b"n=", b"n=-1", b"n=1.0", b"n=%D9%A1", b"n=" + b"9" * 19, b"n=a"])
def test_other_numbers_in_the_query_are_a_400(query: bytes) -> None:
    with pytest.raises(HttpError) as refusal:
        count_of(request_of(query=query), "n", 7)
    assert (refusal.value.status, refusal.value.message) == (400, "n: expected a whole number")


def test_answer_is_json_with_its_status() -> None:
    response = json_response({"a": 1}, 201)
    assert (response.status_code, response.body, response.media_type) == (201, b'{"a": 1}', "application/json")


LENGTH = [(b"content-length", b"9")]


def bounded(headers: list[tuple[bytes, bytes]], pieces: list[float | bytes], *, reads: bool) -> tuple[float, int, int]:
    """When an app behind the bound ends, with which status (408 where it is out of time), and what is left unread."""

    async def run() -> tuple[float, int, int]:
        loop, messages = asyncio.get_running_loop(), asyncio.Queue[Message]()
        status = 0

        async def arrive() -> None:
            for step in pieces:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    messages.put_nowait({"type": "http.request", "body": step, "more_body": step != b"end"})

        async def app(_: Message, receive: Any, send: Any) -> None:
            while reads and (await receive())["more_body"]:
                pass
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await asyncio.sleep(1.0)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)

        arriving = asyncio.create_task(arrive())
        try:
            await BoundedBodies(app)({"type": "http", "headers": headers}, messages.get, send)
        except HttpError as refusal:
            status = refusal.status
        arriving.cancel()
        await asyncio.sleep(0)
        return round(loop.time(), 6), status, messages.qsize()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


def test_body_has_its_time_in_all_however_it_comes() -> None:
    assert BODY_S == 10.0
    assert bounded(LENGTH, [b"a", 9.0, b"end"], reads=True) == (10.0, 200, 0)
    assert bounded(LENGTH, [b"a", 9.0, b"b", 9.0, b"end"], reads=True) == (10.0, 408, 0)
    assert bounded([(b"transfer-encoding", b"chunked")], [1000.0], reads=True) == (10.0, 408, 0)


def test_body_that_is_not_read_is_dropped_while_the_answer_goes_out() -> None:
    assert bounded(LENGTH, [b"a", b"b", b"end"], reads=False) == (1.0, 200, 0)


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"0")]])
def test_request_without_a_body_is_the_apps_alone(headers: list[tuple[bytes, bytes]]) -> None:
    assert bounded(headers, [b"a", b"end"], reads=False) == (1.0, 200, 2)


# --- The bodies of the admin API as the reference lists them, against the routes: every key, both ways.


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
    signal = ScalingSignal(ScalingLimits(ttft_s=2.0))
    found = {
        "fleet_sources": FoundFleet([FleetSourceConfig(name="dns", kind="dns")]).as_rows(0.0)[0],
        "replicas": (await _call(proxy, "GET", "/admin/fleet", None)).json()["replicas"][0],
        "decisions": (await _call(proxy, "GET", "/admin/decisions", None)).json()["decisions"][0],
        "samples": (await _call(proxy, "GET", "/admin/samples", None)).json()["samples"][0],
        "history": (await _call(proxy, "GET", "/admin/weights", None)).json()["history"][0],
        "workers": WorkerRow(number=0, pid=1, state="ready").as_dict(),
        "scaling": signal.decide({Group("here", None): GroupEvidence(replicas=1)}, {}, now=0.0)[
            Group("here", None)
        ].as_dict(),
    }
    for name, row in found.items():
        assert list(row) == rows[name], f"{name}: expected {', '.join(f'`{key}`' for key in row)}"
    assert set(rows) == set(found)


async def _call(proxy: Followed, route: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
    more: dict[str, Any] = {} if body is None else {"json": body}
    if "/internal/" in route:
        more["headers"] = {"authorization": f"Bearer {PUSH_TOKEN}"}
    return await proxy.fleet.admin.request(route.split()[0], path, **more)
