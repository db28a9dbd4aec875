"""`gorgo check --live`: what it says of a key that no header can hold, and of each answer of a replica."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from gorgo.cli.connectivity import reach_all
from gorgo.config.model import ReplicaConfig
from gorgo.engines.probe import is_well
from tests.answering import answering


@pytest.mark.parametrize("key", ["CAN\r\nARY", "CAN\x00ARY", "CANAR\u00dd", "CAN\u20ac", " "])
def test_key_that_no_header_can_hold_is_named_by_its_variable_and_not_shown(key: str) -> None:
    replica = ReplicaConfig(name="r", region="a", url="http://127.0.0.1:9", api_key_env="K")
    (found,) = reach_all([replica], environ={"K": key}, timeout_s=1.0)
    assert found.error is not None
    assert "the environment variable K " in found.error
    assert "expected it to hold the replica's API key" in found.error
    assert "CAN" not in found.error


def test_name_that_cannot_be_looked_up_is_a_replica_that_is_not_reached() -> None:
    (found,) = reach_all([ReplicaConfig(name="r", region="a", url="http://xn--:9")], environ={}, timeout_s=1.0)
    assert found.error is not None


async def error_of(status: int, *, path: str = "", key: str | None = None) -> str | None:
    # Below `/v1` it has no such route.
    async with answering(lambda path: 404 if path.startswith("/v1/") else status) as url:
        replica = ReplicaConfig(name="r", region="a", url=url + path, api_key_env=key)
        (found,) = await asyncio.to_thread(reach_all, [replica], environ={"K": "secret"}, timeout_s=5.0)
        return None if found.error is None else found.error.replace(url, "URL")


@pytest.mark.parametrize("status", [200, 204, 302, 401, 403, 404, 405, 429, 500, 503])
async def test_only_2xx_is_the_answer_of_a_replica_that_is_well(status: int) -> None:
    error = await error_of(status)
    assert (error is None) == is_well(status) == (status < 300)


async def test_a_refusal_comes_with_what_to_change() -> None:
    no_key = "answered 401: set api_key_env to the environment variable that holds its API key"
    assert await error_of(401) == no_key
    assert await error_of(403, key="K") == "answered 403: it refuses the API key in K"
    assert await error_of(200, path="/v1/") == "answered 404: write its url without /v1: URL"
    assert await error_of(405) == "answered 405: check its url and engine: it has no such route"
    assert await error_of(503) == "answered 503"


@pytest.mark.parametrize(("configured", "shown"), [("auto", "vllm 0.33.0"), ("sglang", "sglang")])
async def test_an_engine_says_its_kind_and_its_models(configured: str, shown: str) -> None:
    listed = {"data": [{"id": "base", "owned_by": "vllm"}, {"id": "sql", "owned_by": "vllm", "parent": "base"}]}
    answers = {"/v1/models": listed, "/version": {"version": "0.33.0"}, "/ping": {}, "/health": {}}

    async def answer(request: web.Request) -> web.Response:
        found = answers.get(request.path)
        return web.Response(status=404) if found is None else web.json_response(found)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        replica = ReplicaConfig(name="r", region="a", url=url, engine=configured)
        (found,) = await asyncio.to_thread(reach_all, [replica], environ={}, timeout_s=5.0)
    finally:
        await runner.cleanup()
    assert (found.error, found.engine, found.models) == (None, shown, ("base", "sql"))
