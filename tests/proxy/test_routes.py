"""Routes that clients and platforms expect, routes beside generation, and the proxy's own errors in their forms."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from gorgo.config.model import ClientsConfig, CorsConfig
from gorgo.live.http.errors import Message
from gorgo.live.state import LiveState
from gorgo.proxy.exchange.response import TryWrite, direct_write, no_direct_write
from gorgo.proxy.server import GetEndpoint, health
from tests.proxy.conftest import QUIET, Running, Start, config_for, with_replica
from tests.proxy.fakes import DONE, answer, chat, delta, hang, stream
from tests.proxy.followed import follow, regions
from tests.proxy.test_requests import checked

# --- Routes that clients and platforms expect: one model, probes under their usual names, CORS, metrics of operators.


CHAT = "/v1/chat/completions"
PAGE = "https://chat.example.com"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}
OWN = "access-control-allow-origin"


# -- one model
@pytest.mark.parametrize("path", ["org/model-7b", "org%2Fmodel-7b", "gpt-4"])
async def test_model_is_found_by_its_id_with_slashes_encoded_or_not_and_by_its_alias(
    start: Start, tmp_path: Path, path: str
) -> None:
    replica = await start.replica(answer(200))
    row = {"url": replica.url, "models": ["org/model-7b", "other"]}
    text = regions({"a": row}, models=[{"name": "org/model-7b", "aliases": ["gpt-4"]}])
    followed = await follow(start, tmp_path, text, [replica])
    response = await followed.fleet.client.get(f"/v1/models/{path}")
    assert response.status_code == 200
    assert response.json() == {
        "id": path.replace("%2F", "/"), "object": "model", "created": 0, "owned_by": "gorgo"
    }  # fmt: skip
    assert response.json() in (await followed.fleet.client.get("/v1/models")).json()["data"]


async def test_unknown_model_is_a_404_that_names_the_models(start: Start) -> None:
    replica = await start.replica(answer(200))
    fleet = await start.proxy(with_replica(config_for([replica]), 0, models=("llama", "qwen")), [replica])
    for path in ("lama", "llama/", "..%2Fmodels%2Fllama", "x" * 500):
        error = checked(await fleet.client.get(f"/v1/models/{path}"), 404, "model_not_found")
        assert error["message"].endswith("there are: llama, qwen")
    assert "did you mean 'llama'?" in (await fleet.client.get("/v1/models/lama")).json()["error"]["message"]
    checked(await fleet.client.post("/v1/models/llama"), 405, "method_not_allowed")


async def test_model_of_a_fleet_without_names_is_looked_up_in_a_replicas_list(start: Start) -> None:
    listed = b'{"object": "list", "data": [{"id": "m", "owned_by": "sglang"}]}'
    fleet = await start.fleet([answer(200, listed)])
    assert (await fleet.client.get("/v1/models/m")).json() == {"id": "m", "owned_by": "sglang"}
    assert "there are: m" in checked(await fleet.client.get("/v1/models/n"), 404, "model_not_found")["message"]


# -- probes
async def test_probes_have_their_usual_names_and_need_no_key(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"me:{sha256(b'key').hexdigest()}\n")
    replica = await start.replica(answer(200))
    config = replace(config_for([replica]), clients=ClientsConfig(keys_file=str(keys)))
    fleet = await start.proxy(config, [replica])
    for path in ("/health", "/healthz", "/livez"):
        assert (await fleet.client.get(path)).json() == {"status": "ok"}
    for path in ("/ready", "/readyz"):
        assert (await fleet.client.get(path)).json() == {"status": "ready"}
    fleet.state.routing.router.replicas.drain("r0", now=fleet.state.routing.clock())
    for path in ("/ready", "/readyz"):
        checked(await fleet.client.get(path), 503, "no_replica")
    assert (await fleet.client.get("/v1/models/m")).status_code == 401


# -- CORS
async def with_origins(start: Start, *origins: str, **clients: Any) -> Running:
    replica = await start.replica(stream(delta("a"), delta("b"), DONE))
    proxy = replace(QUIET, cors=CorsConfig(allow_origins=origins))
    config = replace(config_for([replica], proxy), clients=ClientsConfig(**clients))
    return await start.proxy(config, [replica])


def cors(response: httpx.Response) -> Mapping[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


async def test_no_header_of_cors_is_sent_by_default(start: Start) -> None:
    fleet = await start.fleet([stream(delta("a"), DONE)])
    assert cors(await fleet.client.post(CHAT, content=chat(stream=True), headers={"origin": PAGE})) == {}
    refused = await fleet.client.options(CHAT, headers=PREFLIGHT)
    assert (refused.status_code, cors(refused)) == (405, {})


async def test_preflight_needs_no_key_and_the_request_after_it_does(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"me:{sha256(b'key').hexdigest()}\n")
    fleet = await with_origins(start, PAGE, keys_file=str(keys))
    allowed = await fleet.client.options(CHAT, headers=PREFLIGHT)
    assert allowed.status_code == 200
    assert allowed.headers[OWN] == PAGE
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    refused = await fleet.client.post(CHAT, content=chat(stream=True), headers={"origin": PAGE})
    assert (refused.status_code, refused.headers[OWN]) == (401, PAGE)  # a page can read why
    headers = {"origin": PAGE, "authorization": "Bearer key"}
    answered = await fleet.client.post(CHAT, content=chat(stream=True), headers=headers)
    assert (answered.status_code, answered.headers[OWN], answered.headers["vary"]) == (200, PAGE, "Origin")
    assert "x-gorgo-replica" in answered.headers["access-control-expose-headers"]
    assert answered.content == delta("a") + delta("b") + DONE


async def test_page_of_another_origin_is_not_allowed(start: Start) -> None:
    fleet = await with_origins(start, PAGE)
    elsewhere = {"origin": "https://evil.example.com"}
    refused = await fleet.client.options(CHAT, headers=PREFLIGHT | elsewhere)
    assert (refused.status_code, OWN in refused.headers) == (400, False)
    answered = await fleet.client.post(CHAT, content=chat(stream=True), headers=elsewhere)
    assert (cors(answered), answered.headers["vary"]) == ({}, "Origin")


async def test_any_origin_may_be_allowed(start: Start) -> None:
    fleet = await with_origins(start, "*")
    assert (await fleet.client.options(CHAT, headers=PREFLIGHT)).headers[OWN] == "*"
    assert (await fleet.client.get("/v1/nowhere", headers={"origin": PAGE})).headers[OWN] == "*"
    assert cors(await fleet.client.get("/health")) == {}


async def test_streams_to_pages_are_neither_buffered_nor_written_by_a_slower_way(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[TryWrite] = []
    written: list[bool] = []

    def observed(scope: Message) -> TryWrite:
        direct = direct_write(scope)

        def write(chunk: bytes) -> bool:
            written.append(direct(chunk))
            return written[-1]

        ways.append(direct)
        return write

    monkeypatch.setattr("gorgo.proxy.exchange.exchange.direct_write", observed)
    replica = await start.replica(hang(delta("a"), rest=[delta("b"), DONE]))
    proxy = replace(QUIET, cors=CorsConfig(allow_origins=(PAGE,)))
    fleet = await start.proxy(config_for([replica], proxy), [replica])
    async with fleet.client.stream("POST", CHAT, content=chat(stream=True), headers={"origin": PAGE}) as response:
        raw = response.aiter_raw()
        got = await anext(raw)
        assert got == delta("a")  # before the replica has sent the rest
        replica.release.set()
        got += b"".join([chunk async for chunk in raw])
    assert got == delta("a") + delta("b") + DONE
    assert len(ways) == 1
    assert ways[0] is not no_direct_write
    assert written == [True] * len(written) != []


async def test_origins_follow_the_file(start: Start, tmp_path: Path) -> None:
    replica = await start.replica(answer(200))
    followed = await follow(start, tmp_path, regions({"a": replica}), [replica])
    assert cors(await followed.fleet.client.get("/health", headers={"origin": PAGE})) == {}
    await followed.rewrite(regions({"a": replica}, proxy={"cors": {"allow_origins": [PAGE]}}))
    assert (await followed.fleet.client.get("/health", headers={"origin": PAGE})).headers[OWN] == PAGE


# -- metrics
async def test_metrics_can_be_for_operators_alone(start: Start, tmp_path: Path) -> None:
    replica = await start.replica(answer(200))
    followed = await follow(start, tmp_path, regions({"a": replica}), [replica])
    client, admin = followed.fleet.client, followed.fleet.admin
    assert (await client.get("/metrics")).status_code == 200
    await followed.rewrite(regions({"a": replica}, proxy={"metrics_listener": "admin"}))
    checked(await client.get("/metrics"), 404, "not_found")
    found = await admin.get("/metrics")
    assert (found.status_code, "gorgo_build_info" in found.text) == (200, True)
    assert found.headers["content-type"].startswith("text/plain; version=")
    async with httpx.AsyncClient(base_url=followed.fleet.addresses.admin_url) as stranger:
        assert (await stranger.get("/metrics")).status_code == 401


# --- Routes beside generation: passed to engines that have them, without a trace in what is estimated of caches.


MESSAGES = [{"role": "user", "content": "word " * 400}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages/count_tokens": {"model": "m", "messages": MESSAGES},
    "/tokenize": {"model": "m", "messages": MESSAGES},
    "/v1/rerank": {"model": "m", "query": "a", "documents": ["b " * 400, {"text": "c"}]},
    "/v1/score": {"model": "m", "text_1": "a", "text_2": ["b " * 400, "c"]},
}
#: Those that an engine answers without a prefill.
COUNTING = ("/v1/messages/count_tokens", "/tokenize")
ANSWER = b'{"input_tokens": 401, "tokens": [1, 2]}'


@pytest.mark.parametrize("path", BODIES)
async def test_body_and_answer_pass_unchanged(start: Start, path: str) -> None:
    fleet = await start.fleet([answer(200, ANSWER)])
    body = json.dumps(BODIES[path]).encode()
    for _ in range(5):  # as often as short answers of a chat would be suspected
        given = await fleet.client.post(path, content=body)
        assert (given.status_code, given.content) == (200, ANSWER)
    assert [(seen.path, seen.body) for seen in fleet.replicas[0].seen] == [(path, body)] * 5
    await fleet.idle()
    fleet.check()
    tokens = [sample.prompt_tokens for sample in fleet.state.routing.router.view.newest_decisions(9)]
    assert len(tokens) == 5
    assert all(count == 0 for count in tokens) == (path in COUNTING), "what is counted is not prefilled"


@pytest.mark.parametrize("path", COUNTING)
async def test_a_count_leaves_no_prefix_behind(start: Start, path: str) -> None:
    fleet = await start.fleet([answer(200, ANSWER)])
    await fleet.client.post(path, json=BODIES[path])
    given = await fleet.client.post("/v1/chat/completions", content=chat(messages=MESSAGES))
    assert given.headers["x-gorgo-estimated-cached-tokens"] == "0"


@pytest.mark.parametrize("path", BODIES)
async def test_an_engine_without_the_route_says_so_itself_and_goes_on_with_chats(start: Start, path: str) -> None:
    fleet = await start.fleet([answer(404, b'{"detail": "Not Found"}')] * 4 + [answer(200)])
    given = await fleet.client.post(path, json=BODIES[path])
    assert (given.status_code, given.content) == (404, b'{"detail": "Not Found"}')
    (view,) = fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())
    assert view.eligible


@pytest.mark.parametrize("body", [{}, {"query": [], "documents": None}])
async def test_pairs_without_a_text_are_refused_with_their_names(start: Start, body: dict[str, Any]) -> None:
    fleet = await start.fleet([answer(200)])
    for path in ("/v1/rerank", "/v1/score"):
        refused = await fleet.client.post(path, json=body)
        assert refused.status_code == 400
        assert "expected texts in one of query, queries, text_1" in refused.text
    assert fleet.replicas[0].seen == []


# --- Errors of the proxy's own over a socket: where a body is wrong, and in the form of the route's API.


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty; expected a JSON object"),
        (b" \n", "the body is empty; expected a JSON object"),
        (b'{"model": "m",\n "messages": [}', "the body is not JSON: line 2, column 15: Expecting value"),
        (b'{"a": "\xff"}', "the body is not JSON: byte 7 is not utf-8"),
        (b"[]", "expected a JSON object as the body"),
    ],
)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/admin/weights"])
async def test_a_body_that_is_not_json_is_told_where(start: Start, route: str, body: bytes, message: str) -> None:
    fleet = await start.fleet([answer(200)])
    if route.startswith("/admin"):
        response = await fleet.admin.put(route, content=body)
        if not body.strip():
            return  # an empty body is an empty object there
    else:
        response = await fleet.client.post(route, content=body)
    error = response.json()["error"]
    assert (response.status_code, error["message"], error["code"]) == (400, message, "invalid_json")


async def test_errors_of_messages_have_anthropics_form(start: Start) -> None:
    fleet = await start.fleet([answer(503)])
    responses = [
        await fleet.client.post("/v1/messages", content=b"{"),
        await fleet.client.get("/v1/messages"),
        await fleet.client.post("/v1/messages/unknown", content=b"{}"),
        await fleet.client.post("/v1/messages", json={"messages": [{"role": "user", "content": "a"}]}),
    ]
    assert [response.status_code for response in responses] == [400, 405, 404, 503]
    kinds = ["invalid_request_error", "invalid_request_error", "not_found_error", "overloaded_error"]
    assert [response.json()["error"]["type"] for response in responses] == kinds
    for response in responses:
        assert response.json().keys() == {"type", "error"}
        assert response.json()["type"] == "error"
        assert response.json()["error"].keys() == {"type", "message", "code"}
    other = await fleet.client.post("/v1/completions", content=b"{")
    assert other.json()["error"].keys() == {"message", "type", "param", "code"}


# --- Refusals of the proxy's own GET routes.


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_another_method_is_refused_while_its_body_is_discarded(method: str) -> None:
    received = 0
    sent: list[Message] = []

    async def receive() -> Message:
        nonlocal received
        await asyncio.sleep(0)
        received += 1
        if received == 3:
            enough.set()
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message: Message) -> None:
        async with asyncio.timeout(5.0):
            await enough.wait()
        sent.append(message)

    enough = asyncio.Event()
    endpoint = GetEndpoint(cast(LiveState, None), health)
    await endpoint({"method": method}, receive, send)
    assert [sent[0]["status"], (b"allow", b"GET, HEAD") in sent[0]["headers"]] == [405, True]
