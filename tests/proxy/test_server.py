"""Refusals of the proxy's own GET routes."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from gorgo.live.http.errors import Message
from gorgo.live.state import LiveState
from gorgo.proxy.server import GetEndpoint, health


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
