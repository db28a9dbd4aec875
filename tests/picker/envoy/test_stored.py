"""Requests of which an engine stores something, behind a real Envoy: none is sent again once it may have begun."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.picker.envoy.envoy import needs_envoy
from tests.picker.envoy.rig import CHAT, Rig, rig
from tests.proxy.fakes import answer, reset_after

pytestmark = [needs_envoy]


@pytest_asyncio.fixture
async def running(tmp_path: Path) -> AsyncIterator[Rig]:
    """One for each test: a failure of a replica counts in the next one."""
    async with rig(tmp_path) as found:
        yield found


STORED = {
    "responses": ("/v1/responses", {"model": "m", "input": "hello"}),
    "chat": (CHAT, {"model": "m", "store": True, "messages": [{"role": "user", "content": "hello"}]}),
}


@pytest.mark.parametrize("route", STORED)
@pytest.mark.parametrize("status", [404, 503])
async def test_what_an_engine_stores_goes_elsewhere_if_it_was_not_begun(running: Rig, route: str, status: int) -> None:
    first, second = running.replicas
    running.script(answer(200, b'{"id": "resp_1", "object": "response", "output": []}'))
    first.scripts = [answer(status)]
    path, body = STORED[route]
    async with running.client() as client:
        responses = [await client.post(path, json=body) for _ in range(2)]
    assert [response.status_code for response in responses] == [200, 200]
    assert len(first.seen) >= 1
    assert len(second.seen) == 2
    await running.idle()


@pytest.mark.parametrize("route", STORED)
@pytest.mark.parametrize("failing", [reset_after(), answer(500)], ids=["reset", "500"])
async def test_what_an_engine_stores_and_may_have_begun_is_not_sent_twice(
    running: Rig, route: str, failing: object
) -> None:
    running.script(failing)
    path, body = STORED[route]
    async with running.client() as client:
        response = await client.post(path, json=body, headers={"x-envoy-retry-on": "5xx,reset"})
    assert response.status_code >= 500
    assert sum(len(replica.seen) for replica in running.replicas) == 1
    await running.idle()
