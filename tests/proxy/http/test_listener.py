"""Connections end with their clients."""

from __future__ import annotations

import asyncio
import json

import pytest

from gorgo.proxy.http.listener import _LingerTimeout
from tests.proxy.conftest import Start, until
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


class Taking(asyncio.WriteTransport):
    """A client that has left so much at each look."""

    def __init__(self, *left: int) -> None:
        super().__init__()
        self._left = list(left)
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self._left.pop(0)

    def abort(self) -> None:
        self.aborted = True


async def test_who_takes_some_of_what_is_left_is_waited_for_and_who_takes_none_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gorgo.proxy.http.listener.LINGER_S", 0.0)
    client = Taking(400, 300, 200, 100, 100, 0)
    _LingerTimeout(asyncio.get_running_loop(), client)
    await until(lambda: client.aborted)
    assert client._left == [0]


async def test_patience_that_is_over_cuts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.proxy.http.listener.LINGER_S", 0.0)
    client = Taking(400, 400)
    _LingerTimeout(asyncio.get_running_loop(), client).expired()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (client.aborted, client._left) == (False, [400])
