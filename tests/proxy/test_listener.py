"""Connections end with their clients."""

from __future__ import annotations

import json

from tests.proxy.conftest import Start
from tests.proxy.fakes import DONE, chat, delta, hang, stream
from tests.proxy.raw import connected

ROUTE = "/v1/chat/completions"


async def test_connection_ends_when_its_client_has_closed_it_between_requests(start: Start) -> None:
    fleet = await start.fleet([stream(delta("good"), DONE)])
    async with connected(fleet.addresses.data) as client:
        await client.post(ROUTE, chat(stream=True))
        await client.reader.readuntil(b"0\r\n\r\n")
        client.writer.write_eof()
        assert await client.rest() == b""
    await fleet.idle()


async def test_connection_ends_when_its_client_closes_it_during_an_answer(start: Start) -> None:
    fleet = await start.fleet([hang(delta("good"))])
    async with connected(fleet.addresses.data) as client:
        await client.post(ROUTE, chat(stream=True))
        await client.reader.readuntil(b"good")
        client.writer.write_eof()
        await client.rest()
    await fleet.replicas[0].dropped.wait()
    await fleet.idle()


async def test_connection_is_kept_for_the_next_request(start: Start) -> None:
    fleet = await start.fleet([stream(delta("good"), DONE)])
    async with connected(fleet.addresses.data) as client:
        for _ in range(3):
            await client.post(ROUTE, chat(stream=True))
            assert b"good" in await client.reader.readuntil(b"0\r\n\r\n")
    await fleet.idle()


async def test_request_that_follows_at_once_on_the_same_connection_is_answered(start: Start) -> None:
    fleet = await start.fleet([stream(delta("good"), DONE)])
    body = chat(stream=True)
    assert json.loads(body)["stream"]
    async with connected(fleet.addresses.data) as client:
        await client.post(ROUTE, body)
        await client.post(ROUTE, body)
        for _ in range(2):
            assert b"good" in await client.reader.readuntil(b"0\r\n\r\n")
    await fleet.idle()
