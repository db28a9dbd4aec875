"""Pushes: bodies, right and wrong, and over sockets who may push and what a push changes."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.messages.kv_events import KvEventBatch
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
from tests.proxy.conftest import TOKEN, Running, Start, config_for, until, with_replica
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
