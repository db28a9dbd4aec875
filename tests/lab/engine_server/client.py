"""What tests of the simulated replica ask and read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

CHAT = "/v1/chat/completions"


def chat(text: str, *, max_tokens: int = 4, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **more}


async def post(session: aiohttp.ClientSession, route: str, body: object) -> dict[str, Any]:
    async with session.post(route, json=body) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


async def stream(session: aiohttp.ClientSession, route: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, without the [DONE] that it must end with."""
    async with session.post(route, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        raw = await response.read()
    events = raw.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


async def load(session: aiohttp.ClientSession) -> dict[str, Any]:
    async with session.get("/v1/loads") as response:
        entry: dict[str, Any] = (await response.json())["loads"][0]
        return entry


async def until_idle(session: aiohttp.ClientSession) -> dict[str, Any]:
    """Ask until nothing waits or runs; the test's time limit bounds it."""
    while True:
        entry = await load(session)
        if entry["num_running_reqs"] == entry["num_waiting_reqs"] == 0:
            return entry
        await asyncio.sleep(0)


async def metrics(session: aiohttp.ClientSession) -> str:
    async with session.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return await response.text()
