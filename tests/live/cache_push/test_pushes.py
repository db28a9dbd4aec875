"""Pushes: bodies, right and wrong, and over sockets who may push and what a push changes."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, ModelConfig, RegionConfig
from gorgo.core.messages.kv_events import KvEventBatch
from gorgo.lab.engine_server import cache_reports as reporter
from gorgo.lab.engine_server import run_engine, server
from gorgo.lab.engine_server.cache_reports import PushReporter, PushTarget
from gorgo.live.cache_push import (
    BURST_HASHES,
    FIELDS,
    HASHES_PER_S,
    INLINE,
    KEYS,
    LEAST_HASHES,
    MAX_HASHES,
    MAX_PACKED_BYTES,
    PACKED,
    SILENT_S,
    CachePush,
    Order,
    PushSource,
    from_json,
    from_query,
    unpacked,
)
from gorgo.live.http.errors import HttpError
from tests.lab.engine_server.conftest import QUICK
from tests.ports import free_port
from tests.proxy.conftest import QUIET, TOKEN, Running, Start, config_for, until, with_replica
from tests.proxy.fakes import DONE, delta, stream
from tests.proxy.test_requests import checked

# --- Pushes over sockets: who may push, what a push changes, and what a wrong one gets.


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


# --- Bodies of pushes, right and wrong.


BODY: dict[str, Any] = {
    "worker_id": "r0",
    "model": "m",
    "block_tokens": 16,
    "epoch": 1,
    "sequence": 0,
    "hashes": [0, 1, 2**64 - 1],
}
QUERY = {key: str(value) for key, value in BODY.items() if key != "hashes"}


def refusal(body: dict[str, Any]) -> HttpError:
    with pytest.raises(HttpError) as refused:
        from_json(body)
    return refused.value


def test_hashes_of_64_bits_are_read_as_they_are() -> None:
    push = from_json(BODY)
    assert (push.replica, push.model, push.block_tokens, push.epoch, push.sequence) == ("r0", "m", 16, 1, 0)
    assert push.hashes.tolist() == BODY["hashes"]


def test_push_without_a_model_is_for_all_of_the_replica() -> None:
    assert from_json({**BODY, "model": None}).model is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"worker_id": None}, "worker_id"),
        ({"worker_id": ""}, "worker_id"),
        ({"worker_id": "a" * 257}, "worker_id"),
        ({"worker_id": "a\nb"}, "worker_id"),
        ({"worker_id": 7}, "worker_id"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"block_tokens": 65_537}, "block_tokens"),
        ({"block_tokens": True}, "block_tokens"),
        ({"block_tokens": 16.0}, "block_tokens"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": 2**63}, "epoch"),
        ({"sequence": "0"}, "sequence"),
        ({"sequence": None}, "sequence"),
        ({"hashes": None}, "hashes"),
        ({"hashes": {}}, "hashes"),
        ({"hashes": [-1]}, "hashes"),
        ({"hashes": [2**64]}, "hashes"),
        ({"hashes": [10**400]}, "hashes"),
        ({"hashes": [1.5]}, "hashes"),
        ({"hashes": [True]}, "hashes"),
        ({"hashes": ["7"]}, "hashes"),
        ({"hashes": [[1]]}, "hashes"),
        ({"evicted_hashes": []}, "evicted_hashes"),
    ],
)
def test_wrong_field_is_named(change: dict[str, Any], named: str) -> None:
    error = refusal(BODY | change)
    assert (error.status, error.code) == (400, "invalid_request")
    assert named in error.message


@pytest.mark.parametrize("version", [0, 2, "1", 1.5, None])
def test_another_version_is_refused_as_such(version: object) -> None:
    assert refusal(BODY | {"version": version}).code == "unsupported_version"
    assert from_json(BODY | {"version": 1}).replica == "r0"


@pytest.mark.parametrize("missing", [key for key in BODY if key != "model"])
def test_missing_field_is_named(missing: str) -> None:
    assert missing in refusal({key: value for key, value in BODY.items() if key != missing}).message


def test_query_describes_a_packed_push() -> None:
    push = from_query(QUERY.items())
    assert (push.replica, push.model, push.block_tokens, push.epoch, push.sequence) == ("r0", "m", 16, 1, 0)
    assert len(push.hashes) == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"epoch": "-1"}, "epoch"),
        ({"epoch": "1e3"}, "epoch"),
        ({"epoch": "9" * 4000}, "epoch"),
        ({"sequence": "\u0661"}, "sequence"),
        ({"block_tokens": ""}, "block_tokens"),
        ({"version": "2"}, "version"),
        ({"hashes": "1"}, "hashes"),
        ({"odd": "1"}, "odd"),
    ],
)
def test_wrong_field_of_a_query_is_named(change: dict[str, str], named: str) -> None:
    with pytest.raises(HttpError, match=named):
        from_query((QUERY | change).items())


def test_repeated_field_of_a_query_is_refused() -> None:
    with pytest.raises(HttpError, match="worker_id"):
        from_query([*QUERY.items(), ("worker_id", "r1")])


def test_packed_hashes_are_little_endian() -> None:
    assert unpacked(struct.pack("<3Q", 1, 2**63, 2**64 - 1)).tolist() == [1, 2**63, 2**64 - 1]
    assert unpacked(b"").tolist() == []


def test_packed_hash_that_is_cut_is_refused() -> None:
    with pytest.raises(HttpError, match="15 bytes"):
        unpacked(b"x" * 15)


def result(parse: Callable[[], CachePush]) -> CachePush | HttpError:
    try:
        return parse()
    except HttpError as refused:
        if refused.status != 400:
            raise
        return refused


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), json_values))
def test_any_json_object_is_a_push_or_a_refusal(body: dict[str, Any]) -> None:
    found = result(lambda: from_json(body))
    if isinstance(found, CachePush):
        assert found.hashes.dtype == np.uint64
    else:
        json.dumps(found.message)


@given(st.lists(st.tuples(st.sampled_from(FIELDS) | st.text(max_size=8), st.text(max_size=30)), max_size=8))
def test_any_query_is_a_push_or_a_refusal(query: list[tuple[str, str]]) -> None:
    result(lambda: from_query(query))


def test_pushes_in_order_are_next() -> None:
    source = PushSource()
    assert source.order(7, 0, now=0.0) is Order.NEW_RUN
    assert [source.order(7, place, now=0.0) for place in (1, 2)] == [Order.NEXT, Order.NEXT]
    assert source.stats.lost == 0


def test_overtaken_push_is_stale_also_when_it_is_repeated() -> None:
    source = PushSource()
    source.order(7, 5, now=0.0)
    assert [source.order(7, place, now=0.0) for place in (5, 4)] == [Order.STALE, Order.STALE]
    assert (source.sequence, source.stats.stale) == (5, 2)


def test_late_push_of_an_earlier_run_is_stale_and_leaves_the_run() -> None:
    source = PushSource()
    source.order(8, 0, now=0.0)
    assert source.order(7, 100, now=1.0) is Order.STALE
    assert (source.epoch, source.sequence) == (8, 0)


def test_skipped_places_are_lost_pushes_that_need_a_snapshot() -> None:
    source = PushSource()
    source.order(7, 0, now=0.0)
    source.snapshot_applied(now=0.0)
    assert not source.needs_snapshot
    assert source.order(7, 4, now=0.1) is Order.NEXT
    assert (source.stats.lost, source.needs_snapshot) == (3, True)


def test_new_run_needs_a_snapshot() -> None:
    source = PushSource()
    source.order(7, 0, now=0.0)
    source.snapshot_applied(now=0.0)
    assert source.order(8, 0, now=1.0) is Order.NEW_RUN
    assert source.needs_snapshot


def test_source_without_a_snapshot_for_long_is_silent_once() -> None:
    source = PushSource()
    assert not source.expire(now=1000.0), "it never pushed"
    source.order(7, 0, now=0.0)
    source.snapshot_applied(now=1.0)
    source.order(7, 1, now=10.0)  # evictions alone do not show that the rest is right
    assert not source.expire(now=1.0 + SILENT_S - 0.1)
    assert source.expire(now=1.0 + SILENT_S)
    assert not source.expire(now=100.0)
    assert source.stats.silences == 1


def test_run_that_never_synced_is_silent_too() -> None:
    source = PushSource()
    source.order(7, 0, now=5.0)
    assert not source.expire(now=5.0 + SILENT_S - 0.1)
    assert source.expire(now=5.0 + SILENT_S)


def test_engine_whose_clock_went_back_is_accepted_after_the_silence() -> None:
    source = PushSource()
    source.order(9, 3, now=0.0)
    assert source.order(5, 0, now=SILENT_S - 1) is Order.STALE
    source.expire(now=SILENT_S)
    assert source.order(5, 1, now=SILENT_S) is Order.NEW_RUN


def test_largest_snapshot_each_five_seconds_and_evictions_are_within_the_rate() -> None:
    source = PushSource()
    for tenth in range(600):
        now = tenth / 10
        assert source.charge(MAX_HASHES if tenth % 50 == 0 else 100, now=now) == 0.0, now
    assert source.stats.limited == 0


def test_push_beyond_the_rate_has_to_wait_and_costs_nothing() -> None:
    source = PushSource()
    assert [source.charge(MAX_HASHES, now=0.0) for _ in range(2)] == [0.0, 0.0]
    wait_s = source.charge(MAX_HASHES, now=0.0)
    assert wait_s == pytest.approx(MAX_HASHES / HASHES_PER_S)
    assert source.stats.limited == 1
    assert source.charge(MAX_HASHES, now=wait_s) == 0.0


def test_empty_pushes_are_bounded_too() -> None:
    source = PushSource()
    sent = sum(source.charge(0, now=0.0) == 0.0 for _ in range(10_000))
    assert sent == BURST_HASHES // LEAST_HASHES


# --- The four states of the published cache map, in one process, and over a restart of the router.


# --- The four states of the published cache map, with a simulated engine that pushes to a proxy over sockets.
#
# Cold start, stickiness beside a less loaded replica, eviction, recovery after lost reports. Intervals are short;
# those in use are 5 s for the whole cache and 0.1 s for evictions.


#: 128 blocks of 16 tokens.
SMALL = replace(QUICK, kv_tokens=2048, context_tokens=2048)
PROMPT_TOKENS = 512
SYNC_S = 0.25


@dataclass
class Answer:
    replica: str
    estimated: int
    reported: int
    source: str


@dataclass
class Fleet:
    """A proxy over two engines that push."""

    proxy: Running

    async def ask(self, prompt: str, *, output: int = 1) -> Answer:
        body = {"model": "gorgo-sim", "prompt": prompt, "max_tokens": output}
        answer = await self.proxy.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        decisions = self.proxy.state.routing.router.view.decisions(answer.headers["x-request-id"])
        details = answer.json()["usage"]["prompt_tokens_details"] or {}
        return Answer(
            decisions[-1].replica,
            decisions[-1].estimated_cached_tokens,
            details.get("cached_tokens", 0),
            decisions[-1].cache_source,
        )

    def blocks(self, replica: str) -> int:
        feed = self.proxy.state.routing.router.caches.pushed_feed(replica, "gorgo-sim", 16)
        return 0 if feed is None else feed.reported_blocks

    def stats(self, replica: str) -> Any:
        return self.proxy.state.replicas.targets[replica].pushes.stats

    async def synced(self, replica: str) -> None:
        """Wait for a whole push that began after now."""
        before = self.stats(replica).snapshots
        await until(lambda: self.stats(replica).snapshots >= before + 2)


def prompt(number: int) -> str:
    """Return a prompt of as many tokens, four bytes each."""
    return "".join(f"{number:02d}{place:02x}"[:4] for place in range(256)) * (PROMPT_TOKENS // 256)


@asynccontextmanager
async def running_engine(port: int, target: PushTarget) -> AsyncIterator[None]:
    stop, bound = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(
        run_engine(
            name=target.replica,
            profile=SMALL,
            rtt_ms=0.0,
            seed=0,
            host="127.0.0.1",
            port=port,
            ready=lambda *_: bound.set(),
            stop=stop,
            push=target,
            notify=lambda _: None,
        )
    )
    try:
        waiting = asyncio.create_task(bound.wait())
        await asyncio.wait((waiting, running), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if running.done():
            running.result()
        yield
    finally:
        stop.set()
        await running


@pytest.fixture
async def fleet(start: Start, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(server, "PushReporter", partial(PushReporter, sync_s=SYNC_S, batch_s=0.01))
    monkeypatch.setattr(reporter, "LEAST_SYNC_S", 0.05)
    ports = [free_port(), free_port()]
    rows = tuple(
        ReplicaConfig(
            name=f"r{n}", region="here", url=f"http://127.0.0.1:{port}", engine="sglang", push_token_env=f"PUSH_{n}"
        )
        for n, port in enumerate(ports)
    )
    config = Config(
        proxy=replace(QUIET, policy="sticky-least-loaded"),
        regions=(RegionConfig(name="here"),),
        replicas=rows,
        models=(ModelConfig(name="gorgo-sim", tokenizer="simulated"),),
    )
    proxy = await start.proxy(config, [], environ=TOKENS)
    async with AsyncExitStack() as engines:
        for n, port in enumerate(ports):
            target = PushTarget(
                url=proxy.addresses.admin_url, replica=f"r{n}", model="gorgo-sim", token=TOKENS[f"PUSH_{n}"]
            )
            await engines.enter_async_context(running_engine(port, target))
        found = Fleet(proxy)
        await until(lambda: all(found.stats(f"r{n}").snapshots for n in range(2)))
        yield found


async def test_cold_start_is_known_after_one_push(fleet: Fleet) -> None:
    first = await fleet.ask(prompt(1))
    assert (first.estimated, first.reported) == (0, 0)
    await until(lambda: fleet.blocks(first.replica) >= PROMPT_TOKENS // 16)
    second = await fleet.ask(prompt(1))
    assert (second.replica, second.source) == (first.replica, "push")
    assert second.estimated >= second.reported >= PROMPT_TOKENS - 16
    assert second.estimated - second.reported <= 16, "of a whole prompt the last block is computed"


async def test_holder_is_chosen_beside_a_less_loaded_replica(fleet: Fleet) -> None:
    holder = (await fleet.ask(prompt(1))).replica
    await until(lambda: fleet.blocks(holder) >= PROMPT_TOKENS // 16)
    busy = [asyncio.create_task(fleet.ask(prompt(1), output=400)) for _ in range(3)]
    await until(lambda: fleet.proxy.state.replicas.targets[holder].active == 3)
    assert (await fleet.ask(prompt(1))).replica == holder
    assert {answer.replica for answer in await asyncio.gather(*busy)} == {holder}


async def test_evicted_prompt_is_unknown_after_one_batch(fleet: Fleet) -> None:
    holder = (await fleet.ask(prompt(1))).replica
    await until(lambda: fleet.blocks(holder) >= PROMPT_TOKENS // 16)
    await fill(fleet, holder)
    answer = await fleet.ask(prompt(1))
    assert (answer.estimated, answer.reported) == (0, 0)
    assert fleet.stats(holder).evictions > 0


async def test_phantoms_of_lost_evictions_end_with_the_next_whole_push(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = (await fleet.ask(prompt(1))).replica
    await fleet.synced(holder)
    push = PushReporter._push

    async def losing(self: PushReporter, session: Any, route: str, hashes: Any) -> Any:
        if route == "eviction":
            self._sequence += 1
            return "done"
        return await push(self, session, route, hashes)

    monkeypatch.setattr(PushReporter, "_push", losing)
    await fill(fleet, holder, synced=False)
    await fleet.synced(holder)
    answer = await fleet.ask(prompt(1))
    assert (answer.estimated, answer.reported) == (0, 0)
    assert fleet.stats(holder).lost > 0, "the gap in the sequence is counted"


async def test_router_that_forgot_knows_again_after_one_whole_push(fleet: Fleet) -> None:
    holder = (await fleet.ask(prompt(1))).replica
    await fleet.synced(holder)
    fleet.proxy.state.routing.router.caches.flush(now=fleet.proxy.state.routing.clock())
    assert fleet.blocks(holder) == 0
    await until(lambda: fleet.blocks(holder) >= PROMPT_TOKENS // 16)
    assert (await fleet.ask(prompt(1))).replica == holder
    fleet.proxy.state.routing.router.check()


async def test_the_four_states_follow_one_another_on_one_fleet(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run as in the published benchmark: of each state, what is estimated against what the engine reports."""
    cold = await fleet.ask(prompt(1))
    assert (cold.estimated, cold.reported) == (0, 0)
    holder = cold.replica
    await until(lambda: fleet.blocks(holder) >= PROMPT_TOKENS // 16)

    busy = [asyncio.create_task(fleet.ask(prompt(1), output=400)) for _ in range(3)]
    await until(lambda: fleet.proxy.state.replicas.targets[holder].active == 3)
    sticky = await fleet.ask(prompt(1))
    for answer in (sticky, *await asyncio.gather(*busy)):
        assert (answer.replica, answer.source) == (holder, "push")
        assert 0 <= answer.estimated - answer.reported <= 16

    await fill(fleet, holder)
    evicted = await fleet.ask(prompt(1))
    assert (evicted.estimated, evicted.reported) == (0, 0)
    holder = evicted.replica
    await fleet.synced(holder)

    push = PushReporter._push

    async def losing(self: PushReporter, session: Any, route: str, hashes: Any) -> Any:
        self._sequence += 1
        return "done"

    with monkeypatch.context() as lost:
        lost.setattr(PushReporter, "_push", losing)
        await fill(fleet, holder, synced=False)
        assert fleet.blocks(holder) >= PROMPT_TOKENS // 16, "a phantom while reports are lost"
    assert PushReporter._push is push
    await fleet.synced(holder)
    recovered = await fleet.ask(prompt(1))
    assert (recovered.estimated, recovered.reported) == (0, 0)
    assert fleet.stats(holder).lost > 0

    fleet.proxy.state.routing.router.caches.flush(now=fleet.proxy.state.routing.clock())
    await until(lambda: fleet.blocks(recovered.replica) >= PROMPT_TOKENS // 16)
    again = await fleet.ask(prompt(1))
    assert (again.replica, again.source) == (recovered.replica, "push")
    assert 0 <= again.estimated - again.reported <= 16
    fleet.proxy.state.routing.router.check()


async def fill(fleet: Fleet, replica: str, *, synced: bool = True) -> None:
    """Fill the cache of a replica with other prompts, until the first one is evicted there."""
    target = fleet.proxy.state.replicas.targets[replica]
    for number in range(2, 8):
        body = {"model": "gorgo-sim", "prompt": prompt(number), "max_tokens": 1}
        url = f"{target.upstream._base}/v1/completions"
        answer = await fleet.proxy.client.post(url, json=body)
        assert answer.status_code == 200
    if synced:
        await until(lambda: fleet.stats(replica).evictions >= 1)
        await fleet.synced(replica)


# --- `gorgo serve` and `gorgo engine --push` as processes: a restarted router knows the cache again within 5 s.


ADMIN, PUSH = "token-of-an-operator", "token-of-an-engine"
#: Of a whole push, with the time that two processes take beside other tests.
LIMIT_S = 5.0 + 10.0


def regions(folder: Path, *, engine: int, data: int, admin: int) -> Path:
    document = {
        "proxy": {"region": "here", "bind": f"127.0.0.1:{data}", "admin_bind": f"127.0.0.1:{admin}"},
        "regions": [{"name": "here"}],
        "replicas": [
            {
                "name": "r0",
                "region": "here",
                "url": f"http://127.0.0.1:{engine}",
                "models": ["gorgo-sim"],
                "push_token_env": "PUSH",
            }
        ],
        "models": [{"name": "gorgo-sim", "tokenizer": "simulated"}],
        "simulation": {"rtt_ms": {"here": 0.0}},
    }
    path = folder / "regions.yaml"
    path.write_text(json.dumps(document))
    return path


@asynccontextmanager
async def gorgo(*words: str, environ: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gorgo", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
    )
    try:
        assert process.stdout is not None
        assert b"listening on" in await asyncio.wait_for(process.stdout.readline(), 60)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def until_processes(condition: Callable[[], Awaitable[bool]], limit_s: float = 60.0) -> float:
    """Poll; return the time that it took."""
    began_s = time.monotonic()
    async with asyncio.timeout(limit_s):
        while not await condition():
            await asyncio.sleep(0.05)
    return time.monotonic() - began_s


@pytest.mark.system
async def test_restarted_router_knows_the_cache_again_within_one_whole_push(tmp_path: Path) -> None:
    engine, data, admin = free_port(), free_port(), free_port()
    path = str(regions(tmp_path, engine=engine, data=data, admin=admin))
    headers = {"authorization": f"Bearer {ADMIN}"}
    router = {"GORGO_ADMIN_TOKEN": ADMIN, "PUSH": PUSH}
    push = ("engine", "--config", path, "--replica", "r0", "--push", f"http://127.0.0.1:{admin}")
    async with (
        gorgo(*push, environ={"PUSH": PUSH}),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin}", headers=headers, timeout=10) as operator,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{data}", timeout=30) as client,
    ):

        async def cache() -> Any:
            (row,) = (await operator.get("/admin/fleet")).json()["replicas"]
            return row["cache"]

        async def ask() -> httpx.Response:
            body = {"model": "gorgo-sim", "prompt": prompt(1), "max_tokens": 1}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer

        async def known() -> bool:
            found = await cache()
            return bool(found["source"] == "push" and found["blocks"] >= 30)

        async with gorgo("serve", "--config", path, environ=router):
            await ask()
            await until_processes(known)
            assert (await operator.get("/metrics", headers={"authorization": f"Bearer {PUSH}"})).status_code == 401
        async with gorgo("serve", "--config", path, environ=router):
            assert await until_processes(known, LIMIT_S) < LIMIT_S
            answer = await ask()
            assert int(answer.headers["x-gorgo-estimated-cached-tokens"]) >= 480, "from the push: it served none before"
