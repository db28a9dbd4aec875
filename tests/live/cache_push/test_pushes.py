"""Pushes over sockets: who may push, what a push changes, and what a wrong one gets."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from gorgo.core.messages.kv_events import KvEventBatch
from gorgo.live.cache_push import INLINE, MAX_PACKED_BYTES, PACKED, SILENT_S
from tests.proxy.conftest import TOKEN, Running, Start, config_for, until, with_replica
from tests.proxy.fakes import DONE, delta, stream
from tests.proxy.test_requests import checked

TOKENS = {"PUSH_0": "token-of-replica-0", "PUSH_1": "token-of-replica-1"}


@dataclass
class Engine:
    """The pushes of one engine."""

    proxy: Running
    token: str = TOKENS["PUSH_0"]
    name: str = "r0"
    epoch: int = 1
    sequence: int = field(default=-1)

    async def sync(self, hashes: Sequence[int], **changes: Any) -> httpx.Response:
        return await self.push("sync", hashes, **changes)

    async def evict(self, hashes: Sequence[int], **changes: Any) -> httpx.Response:
        return await self.push("eviction", hashes, **changes)

    async def push(self, route: str, hashes: Sequence[int], **changes: Any) -> httpx.Response:
        body = {**self._fields(), "hashes": list(hashes), **changes}
        return await self.proxy.admin.post(f"/internal/{route}", json=body, headers=self.headers)

    async def packed(self, route: str, body: bytes, **changes: Any) -> httpx.Response:
        headers = {**self.headers, "content-type": PACKED}
        query = {**self._fields(), **changes}
        return await self.proxy.admin.post(f"/internal/{route}", content=body, params=query, headers=headers)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}

    def _fields(self) -> dict[str, Any]:
        self.sequence += 1
        return {
            "worker_id": self.name,
            "block_tokens": 16,
            "epoch": self.epoch,
            "sequence": self.sequence,
        }

    def blocks(self) -> int | None:
        """Return the blocks that the Router counts of this engine's snapshot; `None` without one."""
        feed = self.proxy.state.routing.router.caches.pushed_feed(self.name, None, 16)
        return None if feed is None else feed.reported_blocks


@pytest.fixture
async def proxy(start: Start) -> Running:
    replicas = [await start.replica(stream(delta("a"), DONE)) for _ in range(2)]
    config = config_for(replicas)
    for number, variable in enumerate(TOKENS):
        config = with_replica(config, number, push_token_env=variable)
    return await start.proxy(config, replicas, environ=TOKENS)


@pytest.fixture
def engine(proxy: Running) -> Engine:
    return Engine(proxy)


async def test_snapshot_replaces_the_last_one(engine: Engine) -> None:
    answer = await engine.sync([1, 2, 3])
    assert (answer.status_code, answer.json()) == (200, {"worker_id": "r0", "sync_needed": False})
    assert engine.blocks() == 3
    await engine.sync([3, 4])
    assert engine.blocks() == 2
    source = engine.proxy.state.routing.router.caches.sources(now=engine.proxy.state.routing.clock())["r0"]
    assert (source.source, source.block_tokens, source.blocks) == ("push", 16, 2)
    engine.proxy.state.routing.router.check()


async def test_evictions_remove_blocks_until_a_snapshot_has_them(engine: Engine) -> None:
    await engine.sync([1, 2, 3])
    assert (await engine.evict([2, 99])).json()["sync_needed"] is False
    assert engine.blocks() == 2
    await engine.sync([1, 2, 3])
    assert engine.blocks() == 3, "the block is cached again"


async def test_evictions_without_a_snapshot_ask_for_one(engine: Engine) -> None:
    assert (await engine.evict([1])).json()["sync_needed"] is True
    assert engine.blocks() is None


async def test_lost_push_asks_for_a_snapshot(engine: Engine) -> None:
    await engine.sync([1, 2])
    engine.sequence += 1
    assert (await engine.evict([1])).json()["sync_needed"] is True
    assert engine.proxy.state.replicas.targets["r0"].pushes.stats.lost == 1


@pytest.mark.parametrize("route", ["sync", "eviction"])
async def test_late_push_of_an_earlier_run_changes_nothing(engine: Engine, route: str) -> None:
    await engine.sync([1, 2], epoch=2)
    error = checked(await engine.push(route, [1, 7], epoch=1, sequence=50), 409, "stale_push", "epoch", "sequence")
    assert (error["epoch"], error["sequence"]) == (2, 0)
    assert engine.blocks() == 2


async def test_overtaken_snapshot_changes_nothing(engine: Engine) -> None:
    await engine.sync([1, 2], sequence=5)
    checked(await engine.sync([9], sequence=4), 409, "stale_push", "epoch", "sequence")
    checked(await engine.sync([9], sequence=5), 409, "stale_push", "epoch", "sequence")
    assert engine.blocks() == 2


async def test_new_run_voids_what_the_earlier_one_pushed(engine: Engine) -> None:
    await engine.sync([1, 2, 3])
    assert (await engine.evict([], epoch=2)).json()["sync_needed"] is True
    assert engine.blocks() is None


async def test_packed_snapshot_has_the_effect_of_one_in_json(engine: Engine) -> None:
    answer = await engine.packed("sync", struct.pack("<3Q", 1, 2, 2**64 - 1))
    assert answer.status_code == 200, answer.text
    assert engine.blocks() == 3
    await engine.packed("eviction", struct.pack("<Q", 2**64 - 1))
    assert engine.blocks() == 2


async def test_large_snapshots_are_compared_with_the_last_one(engine: Engine) -> None:
    """Beyond what is compared in the event loop, and in several slices."""
    count = 2 * INLINE
    await engine.packed("sync", struct.pack(f"<{count}Q", *range(count)))
    assert engine.blocks() == count
    await engine.evict(range(100))
    await engine.packed("sync", struct.pack(f"<{count}Q", *range(50, count + 50)))
    assert engine.blocks() == count
    await engine.packed("sync", struct.pack("<2Q", 60, count + 49))
    assert engine.blocks() == 2
    engine.proxy.state.routing.router.check()


async def test_snapshots_beyond_the_bound_are_compared_too_until_one_fits(engine: Engine) -> None:
    bound = 1000
    engine.proxy.state.routing.router._feeds.set_max_blocks(bound * len(engine.proxy.state.replicas.targets))
    for first in (0, 100):
        await engine.packed("sync", struct.pack(f"<{3 * bound}Q", *range(first, first + 3 * bound)))
        assert engine.blocks() == bound
    await engine.packed("sync", struct.pack("<500Q", *range(2000, 2500)))
    assert engine.blocks() == 500, "those left out before too"
    engine.proxy.state.routing.router.check()


async def test_snapshot_after_a_flush_is_applied_whole(engine: Engine) -> None:
    await engine.sync([1, 2, 3])
    engine.proxy.state.routing.router.caches.flush("r0", now=engine.proxy.state.routing.clock())
    assert (await engine.evict([1])).json()["sync_needed"] is True
    await engine.sync([2, 3, 4])
    assert engine.blocks() == 3


async def test_pushes_of_a_replica_with_events_are_refused(engine: Engine) -> None:
    router, now = engine.proxy.state.routing.router, engine.proxy.state.routing.clock()
    router.caches.on_kv_events("r0", KvEventBatch(None, 0, ()), model=None, block_tokens=16, complete=True, now=now)
    checked(await engine.sync([1]), 409, "events_in_use")
    router.caches.on_kv_lost("r0", now=now)
    assert (await engine.sync([1])).status_code == 200


async def test_silent_engine_returns_to_the_history(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    await engine.sync([1, 2])
    state = engine.proxy.state
    sources = state.replicas.push_sources()
    synced_s = sources["r0"].synced_s
    monkeypatch.setattr(state.replicas.pushes, "_clock", lambda: synced_s + SILENT_S - 0.1)
    await state.replicas.pushes.expire(sources)
    assert engine.blocks() == 2
    monkeypatch.setattr(state.replicas.pushes, "_clock", lambda: synced_s + SILENT_S)
    await state.replicas.pushes.expire(sources)
    assert engine.blocks() is None
    assert state.routing.router.caches.sources(now=state.routing.clock())["r0"].source == "history"


async def test_silence_is_noticed_while_the_proxy_runs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.live.cache_push.SILENT_S", 0.01)
    await engine.sync([1, 2])
    await until(lambda: engine.blocks() is None)


# -- who may push


async def test_token_speaks_for_its_own_replica_alone(proxy: Running) -> None:
    intruder = Engine(proxy, name="r1")
    for route in ("sync", "eviction"):
        checked(await intruder.push(route, [1]), 403, "other_replica")
        checked(await intruder.packed(route, struct.pack("<Q", 1)), 403, "other_replica")
    assert intruder.blocks() is None
    assert (await Engine(proxy, TOKENS["PUSH_1"], "r1").sync([1])).status_code == 200


async def test_unknown_worker_is_named_in_a_404(engine: Engine) -> None:
    error = checked(await engine.sync([1], worker_id="r00"), 404, "replica_not_found")
    assert "r00" in error["message"]
    assert "r0" in error["message"].replace("r00", "")


async def test_push_token_is_good_for_no_admin_route_and_the_admin_token_for_no_push(engine: Engine) -> None:
    for path in ("/admin/fleet", "/metrics", "/admin/weights"):
        checked(await engine.proxy.admin.get(path, headers=engine.headers), 401, "unauthorized")
    engine.token = TOKEN
    checked(await engine.sync([1]), 401, "unauthorized")
    assert engine.blocks() is None


@pytest.mark.parametrize("header", [None, "Basic abc", "Bearer", "Bearer wrong", "Bearer \xfc"])
async def test_push_without_the_token_is_refused(engine: Engine, header: str | None) -> None:
    headers = [] if header is None else [(b"authorization", header.encode("latin-1"))]
    async with httpx.AsyncClient(base_url=engine.proxy.addresses.admin_url) as client:
        answer = await client.post("/internal/sync", json={}, headers=headers)
    checked(answer, 401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_wrong_push_tokens_are_counted_as_wrong_admin_tokens_are(engine: Engine) -> None:
    engine.token = "wrong"
    await engine.sync([1])
    metrics = (await engine.proxy.admin.get("/metrics")).text
    assert "gorgo_admin_refused_total 1.0" in metrics


async def test_pushes_are_off_without_a_token_in_the_configuration(start: Start) -> None:
    fleet = await start.fleet([stream(DONE)])
    error = checked(await Engine(fleet).sync([1]), 401, "push_off")
    assert "push_token_env" in error["message"]


# -- bounds


async def test_model_that_the_replica_does_not_serve_is_refused(engine: Engine) -> None:
    assert (await engine.sync([1], model="any")).status_code == 200, "nothing is known of its models"
    state = engine.proxy.state
    listed = state.routing.models.listed

    def known(replica: str) -> tuple[str, ...]:
        return ("m",) if replica == "r0" else listed(replica)

    state.routing.models.listed = known  # type: ignore[method-assign]
    checked(await engine.sync([1], model="n"), 404, "model_not_found")
    assert (await engine.sync([1], model="m")).status_code == 200


async def test_engine_beyond_its_rate_has_to_wait(engine: Engine) -> None:
    empty = [await engine.evict([]) for _ in range(3)]
    assert all(answer.is_success for answer in empty)
    engine.proxy.state.replicas.targets["r0"].pushes._allowance = 0.0
    answer = await engine.packed("sync", b"\0" * MAX_PACKED_BYTES)
    checked(answer, 429, "push_rate")
    assert 1 <= int(answer.headers["retry-after"]) <= 5
    assert engine.proxy.state.replicas.targets["r0"].pushes.stats.limited == 1


async def test_gigabytes_that_are_announced_are_refused_before_they_come(engine: Engine) -> None:
    query = "worker_id=r0&block_tokens=16&epoch=1&sequence=0"
    for size, status in ((10**12, "413"), (MAX_PACKED_BYTES + 8, "413"), (10**18, "413")):
        head = (
            f"POST /internal/sync?{query} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {engine.token}\r\n"
            f"content-type: {PACKED}\r\ncontent-length: {size}\r\n\r\n"
        )
        assert (await raw(engine.proxy, head.encode())).split()[1].decode() == status


async def test_packed_body_of_unknown_length_is_refused(engine: Engine) -> None:
    head = (
        "POST /internal/sync?worker_id=r0&block_tokens=16&epoch=1&sequence=0 HTTP/1.1\r\nhost: x\r\n"
        f"authorization: Bearer {engine.token}\r\ncontent-type: {PACKED}\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    assert (await raw(engine.proxy, head.encode())).split()[1] == b"411"


async def test_json_push_has_the_bound_of_an_admin_body(engine: Engine) -> None:
    checked(await engine.sync([2**63] * 4000), 413, "request_too_large")


async def test_bodies_that_are_read_at_once_are_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.live.admin.routes.MAX_READ_BYTES", 7)
    checked(await engine.packed("sync", b"\0" * 8), 503, "buffers_full")
    monkeypatch.setattr("gorgo.live.admin.routes.MAX_READ_BYTES", 8)
    assert (await engine.packed("sync", b"\0" * 8)).status_code == 200
    assert (await engine.packed("sync", b"\0" * 8)).status_code == 200, "the first one has been released"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"nul", b"\xff\xfe", b'{"hashes": [' + b"[" * 9999, b"1" * 9999])
async def test_body_that_is_no_push_is_refused(engine: Engine, body: bytes) -> None:
    answer = await engine.proxy.admin.post("/internal/sync", content=body, headers=engine.headers)
    assert answer.status_code == 400, answer.text
    assert json.loads(answer.content)["error"]["code"] in {"invalid_json", "invalid_request"}


async def raw(proxy: Running, sent: bytes) -> bytes:
    """Return the first line of the answer."""
    host, port = proxy.addresses.admin_url.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        return await asyncio.wait_for(reader.readline(), 10)
    finally:
        writer.close()
