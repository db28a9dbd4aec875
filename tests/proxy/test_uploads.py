"""Bodies that are on their way are open requests of their client."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from gorgo.config.model import ClientsConfig
from tests.proxy.conftest import Start, config_for, until
from tests.proxy.fakes import answer, chat
from tests.proxy.raw import connected

CHAT = "/v1/chat/completions"
KEYS = "\n".join(f"{name}:{sha256(name.encode()).hexdigest()}" for name in ("team-a", "team-b"))
A, B = "authorization: Bearer team-a", {"authorization": "Bearer team-b"}


async def test_slow_bodies_of_one_key_are_bounded_and_keep_nobody_else_out(start: Start, tmp_path: Path) -> None:
    replica = await start.replica(answer(200))
    path = tmp_path / "clients.keys"
    path.write_text(KEYS)
    clients = ClientsConfig(keys_file=str(path), max_in_flight=2)
    fleet = await start.proxy(replace(config_for([replica], max_in_flight=3), clients=clients), [replica])
    body = chat()
    async with AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(connected(fleet.addresses.data)) for _ in range(2)]
        for client in slow:
            await client.post(CHAT, body[:5], A, length=len(body))
        await until(lambda: len(fleet.state.routing.uploads) == 2)
        one_more = await stack.enter_async_context(connected(fleet.addresses.data))
        await one_more.post(CHAT, body[:5], A, length=len(body))
        assert b" 429 " in await one_more.head()
        assert b"client_concurrency" in await one_more.rest()
        assert (await fleet.client.post(CHAT, content=body, headers=B)).status_code == 200
        # One is completed, one leaves: both places are free again.
        slow[0].writer.write(body[5:])
        assert b" 200 " in await slow[0].head()
        slow[1].reset()
        await until(lambda: not fleet.state.exchanges)
        assert (await fleet.client.post(CHAT, content=body, headers={"x-api-key": "team-a"})).status_code == 200
    assert len(fleet.state.routing.uploads) == 0
    await fleet.idle()
