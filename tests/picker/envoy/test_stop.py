"""The picker stops behind a real Envoy, under load: no client hears of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from gorgo.config.model import PickerTlsConfig
from tests.picker.envoy.envoy import needs_envoy
from tests.picker.envoy.rig import CHAT, Rig, rig
from tests.proxy.authority import Authority, needs_openssl
from tests.proxy.fakes import DONE, USAGE, delta, stream

pytestmark = needs_envoy
CLIENTS = 6
#: Of each client, after the picker has ended.
LATER = 10
BODY = {"messages": [{"role": "user", "content": "hello"}], "stream": True}


@pytest.mark.parametrize("front", ["own"])
async def test_no_request_is_lost_while_the_picker_stops(front: str, tmp_path: Path) -> None:
    async with rig(tmp_path, with_keys=False) as running:
        running.script(stream(*([delta("a")] * 20), USAGE, DONE))
        found: Counter[int | str] = Counter()
        clients = [asyncio.create_task(_send(running, front, found)) for _ in range(CLIENTS)]
        async with asyncio.timeout(20):
            while sum(found.values()) < 10 * CLIENTS:
                await asyncio.sleep(0)
        running.shutdown.set()
        await asyncio.wait_for(asyncio.gather(*clients), 20)
    assert set(found) == {200}


async def test_with_client_keys_no_request_passes_without_the_picker(tmp_path: Path) -> None:
    """Envoy checks no key, no quota and no region: neither a known key nor a wrong one gets to an engine."""
    async with rig(tmp_path) as running:
        running.script(stream(delta("a"), USAGE, DONE))
        async with running.client() as client:
            assert (await client.post(CHAT, json=BODY)).status_code == 200
            running.shutdown.set()
            await asyncio.wait_for(asyncio.shield(running.task), 20)
            running.script(stream(delta("a"), USAGE, DONE))
            for headers in ({}, {"authorization": "Bearer wrong"}):
                for _ in range(5):
                    assert (await client.post(CHAT, json=BODY, headers=headers)).status_code == 503
            assert [replica.seen for replica in running.replicas] == [[], []]


async def _send(running: Rig, front: str, found: Counter[int | str]) -> None:
    """Send one request after another, until the picker has ended and some more."""
    later = 0
    async with running.client(front) as client:
        while later < LATER:
            later += running.task.done()
            answered = await client.post(
                CHAT, json={"messages": [{"role": "user", "content": "hello"}], "stream": True}
            )
            found[answered.status_code] += 1


@needs_openssl
async def test_envoy_reaches_a_picker_with_client_ca_by_its_certificate(tmp_path: Path) -> None:
    for name in ("servers", "clients"):
        (tmp_path / name).mkdir()
    servers, clients = Authority(tmp_path / "servers"), Authority(tmp_path / "clients")
    cert, key = servers.pair("picker")
    client_cert, client_key = clients.pair("envoy")
    # Envoy trusts the file of `cert`: there the certificate of the authority follows.
    Path(cert).write_text(Path(cert).read_text() + Path(servers.ca).read_text())
    files = PickerTlsConfig(cert=cert, key=key, client_ca=clients.ca, client_cert=client_cert, client_key=client_key)
    async with rig(tmp_path, tls=files) as running:
        running.script(stream(delta("a"), USAGE, DONE))
        async with running.client() as client:
            assert (await client.post(CHAT, json=BODY)).status_code == 200
        assert sum(len(replica.seen) for replica in running.replicas) == 1
