"""Fleet sources of a running proxy: requests go where the source says, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gorgo.config.load import parse_config
from gorgo.errors import ConfigError
from gorgo.fleet_sources import list_watch
from gorgo.live.fleet_sources import service
from gorgo.live.fleet_sources.kubernetes import KubernetesSource
from tests.fleet_sources.documents import pod
from tests.live.fleet_sources.api_server import PODS, ApiServer, api_server
from tests.proxy.conftest import Start, until
from tests.proxy.fakes import DONE, FakeReplica, chat, delta, hang, stream
from tests.proxy.followed import Followed, follow, regions

CHAT = "/v1/chat/completions"
QUICK = stream(delta("x"), DONE)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_watch, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(list_watch, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(service, "COLLECT_S", 0.001)


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as found:
        yield found


def source(server: ApiServer, name: str = "pods", **keys: Any) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "pods",
        "namespace": "llm",
        "selector": {"app": "qwen"},
        "port_name": "http",
        "local_addresses": True,
        "api": {"url": server.url},
        "replica": {"region": "here", "engine": "sglang"},
    } | keys


def engine(name: str, replica: FakeReplica, **changes: Any) -> dict[str, Any]:
    return pod(name, "127.0.0.1", ports={"http": replica.port}, **changes)


async def chosen(followed: Followed, count: int = 6) -> set[str]:
    answers = [await followed.fleet.client.post(CHAT, content=chat(stream=True)) for _ in range(count)]
    assert all(found.status_code == 200 for found in answers), [found.text for found in answers]
    return {found.headers["x-gorgo-replica"] for found in answers}


async def shown(followed: Followed) -> dict[str, Any]:
    found: dict[str, Any] = (await followed.fleet.admin.get("/admin/fleet")).json()
    return found


def fleet(followed: Followed) -> dict[str, bool]:
    """Replicas in the fleet, with their drain mark."""
    views = followed.state.routing.router.view.snapshots(now=followed.state.routing.clock())
    return {view.name: view.state == "draining" for view in views}


def gauge(followed: Followed, name: str) -> float | None:
    return followed.state.telemetry.metrics.registry.get_sample_value(f"gorgo_fleet_source_{name}", {"source": "pods"})


async def test_proxy_without_replicas_of_its_own_routes_over_those_of_a_source(
    start: Start, tmp_path: Path, server: ApiServer
) -> None:
    a, b = await start.replica(QUICK), await start.replica(QUICK)
    server.put(PODS, engine("a", a))
    followed = await follow(start, tmp_path, regions({}, fleet_sources=[source(server)]), [a, b])
    await until(lambda: fleet(followed) == {"a": False})
    assert await chosen(followed) == {"a"}
    server.put(PODS, engine("b", b))
    await until(lambda: fleet(followed) == {"a": False, "b": False})
    assert await chosen(followed) == {"a", "b"}
    assert b.pings > 0, "probed before it takes requests"
    document = await shown(followed)
    assert {row["name"]: row["fleet_source"] for row in document["replicas"]} == {"a": "pods", "b": "pods"}
    (row,) = document["fleet_sources"]
    assert (row["name"], row["kind"], row["up"], row["synced"], row["replicas"]) == ("pods", "pods", True, True, 2)
    (same,) = (await followed.fleet.admin.get("/admin/status")).json()["fleet_sources"]
    assert same | {"age_s": row["age_s"]} == row
    assert (gauge(followed, "up"), gauge(followed, "replicas"), gauge(followed, "problems")) == (1.0, 2.0, 0.0)


async def test_pod_that_terminates_drains_and_its_stream_ends_whole(
    start: Start, tmp_path: Path, server: ApiServer
) -> None:
    a, b = await start.replica(hang(delta("x"), rest=(delta("y"), DONE))), await start.replica(QUICK)
    server.put(PODS, engine("a", a))
    followed = await follow(start, tmp_path, regions({}, fleet_sources=[source(server)]), [a, b])
    await until(lambda: "a" in fleet(followed))
    body = chat(stream=True, logprobs=True)  # which no other replica can go on with
    async with followed.fleet.client.stream("POST", CHAT, content=body) as running:
        lines = running.aiter_lines()
        assert "x" in await anext(lines)
        server.put(PODS, engine("b", b), engine("a", a, terminating=True))
        await until(lambda: fleet(followed) == {"a": True, "b": False})
        assert await chosen(followed) == {"b"}
        server.delete(PODS, "a")
        await until(lambda: fleet(followed) == {"b": False})
        a.release.set()
        rest = [line async for line in lines]
        assert any("y" in line for line in rest)
        assert "data: [DONE]" in rest
    await followed.fleet.idle()


async def test_a_pod_that_terminates_gives_its_streams_to_others_while_it_is_there(
    start: Start, tmp_path: Path, server: ApiServer
) -> None:
    a, b = await start.replica(hang(delta("x"))), await start.replica(stream(delta("y"), DONE))
    server.put(PODS, engine("a", a))
    followed = await follow(start, tmp_path, regions({}, fleet_sources=[source(server)]), [a, b])
    await until(lambda: "a" in fleet(followed))
    async with followed.fleet.client.stream("POST", CHAT, content=chat(stream=True)) as running:
        lines = running.aiter_lines()
        assert "x" in await anext(lines)
        server.put(PODS, engine("b", b), engine("a", a, terminating=True))
        rest = [line async for line in lines]
        assert any('"y"' in line for line in rest)
        assert "data: [DONE]" in rest
        assert not any('"error"' in line for line in rest)
    assert fleet(followed) == {"a": True, "b": False}
    await followed.fleet.idle()


async def test_pod_that_is_not_ready_gets_nothing_until_it_is(start: Start, tmp_path: Path, server: ApiServer) -> None:
    a, b = await start.replica(QUICK), await start.replica(QUICK)
    server.put(PODS, engine("a", a), engine("b", b, ready=False))
    followed = await follow(start, tmp_path, regions({}, fleet_sources=[source(server)]), [a, b])
    await until(lambda: fleet(followed) == {"a": False})
    assert await chosen(followed) == {"a"}
    server.put(PODS, engine("b", b), engine("a", a, ready=False))
    await until(lambda: fleet(followed) == {"a": True, "b": False})
    assert await chosen(followed) == {"b"}
    server.put(PODS, engine("a", a))
    await until(lambda: fleet(followed) == {"a": False, "b": False})


async def test_server_that_is_down_leaves_the_fleet_and_is_shown(
    start: Start, tmp_path: Path, server: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="gorgo")
    a = await start.replica(QUICK)
    server.put(PODS, engine("a", a))
    followed = await follow(start, tmp_path, regions({}, fleet_sources=[source(server)]), [a])
    await until(lambda: "a" in fleet(followed) and server.watches)
    server.broken = 500
    server.cut()
    await until(lambda: gauge(followed, "up") == 0.0)
    assert await chosen(followed) == {"a"}
    (row,) = (await shown(followed))["fleet_sources"]
    assert (row["up"], row["error"], row["replicas"]) == (False, "status 500: the test broke it", 1)
    server.broken = None
    await until(lambda: gauge(followed, "up") == 1.0)
    events = [record.getMessage() for record in caplog.records if "fleet_source" in record.getMessage()]
    assert events == ["fleet_source_synced", "fleet_source_down", "fleet_source_up"]


async def test_ready_waits_for_the_first_result_and_not_for_ever(
    start: Start, tmp_path: Path, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await start.replica(QUICK)
    server.broken = 503
    followed = await follow(start, tmp_path, regions({"f": a}, fleet_sources=[source(server)]), [a])
    early = await followed.fleet.client.get("/ready")
    assert (early.status_code, early.json()["error"]["code"]) == (503, "fleet_source_pending")
    assert await chosen(followed, 1) == {"f"}, "a replica of the file serves meanwhile"
    monkeypatch.setattr("gorgo.fleet_sources.fleet.FIRST_SYNC_S", 0.0)
    assert (await followed.fleet.client.get("/ready")).status_code == 200
    monkeypatch.undo()
    server.broken = None
    await until(lambda: gauge(followed, "up") == 1.0)
    assert (await followed.fleet.client.get("/ready")).status_code == 200


async def test_reload_adds_changes_and_removes_sources_and_the_fleet_does_not_flap(
    start: Start, tmp_path: Path, server: ApiServer
) -> None:
    a, b, c = [await start.replica(QUICK) for _ in range(3)]
    server.put(PODS, engine("a", a), engine("b", b, labels={"app": "web"}))
    followed = await follow(start, tmp_path, regions({"c": c}), [a, b, c])
    assert await chosen(followed) == {"c"}
    await followed.rewrite(regions({"c": c}, fleet_sources=[source(server)]))
    assert followed.count("refused") == 0
    await until(lambda: set(fleet(followed)) == {"a", "c"})
    target = followed.state.replicas.targets["a"]
    await followed.rewrite(
        regions({"c": c}, fleet_sources=[source(server, replica={"region": "here", "models": ["m"]})])
    )
    assert set(fleet(followed)) == {"a", "c"}, "its last result counts until the next"
    await until(lambda: followed.view("a").models == ("m",))
    await followed.rewrite(regions({"c": c}, fleet_sources=[source(server, selector={"app": "web"})]))
    await until(lambda: set(fleet(followed)) == {"b", "c"})
    await followed.rewrite(regions({"c": c}))
    assert set(fleet(followed)) == {"c"}
    await until(lambda: not server.watches)
    assert target.name == "a"


async def test_file_goes_before_a_source_and_a_source_before_a_registration(
    start: Start, tmp_path: Path, server: ApiServer
) -> None:
    a, b = await start.replica(QUICK), await start.replica(QUICK)
    server.put(PODS, engine("a", a), engine("twin", b))
    followed = await follow(start, tmp_path, regions({"b": b}, fleet_sources=[source(server)]), [a, b])
    await until(lambda: set(fleet(followed)) == {"a", "b"})
    (row,) = (await shown(followed))["fleet_sources"]
    assert row["problems"] == [f"twin: {b.url} is the url of b"]
    entry = {"name": "a", "region": "here", "url": a.url}
    refused = await followed.fleet.admin.post("/admin/replicas", json=entry)
    assert refused.status_code == 409
    assert refused.json()["error"]["message"] == "the fleet source pods names 'a': change it there"
    removed = await followed.fleet.admin.delete("/admin/replicas/a")
    assert (removed.status_code, removed.json()["error"]["code"]) == (409, "replica_in_file")


async def test_operators_drain_mark_outlives_changes_of_the_pod(
    start: Start, tmp_path: Path, server: ApiServer
) -> None:
    a, b = await start.replica(QUICK), await start.replica(QUICK)
    server.put(PODS, engine("a", a))
    followed = await follow(start, tmp_path, regions({}, fleet_sources=[source(server)]), [a, b])
    await until(lambda: "a" in fleet(followed))
    assert (await followed.fleet.admin.post("/admin/replicas/a/drain", json={})).status_code == 200
    server.put(PODS, engine("a", a, annotations={"gorgo-router/models": "m"}), engine("b", b))
    await until(lambda: "b" in fleet(followed) and followed.view("a").models == ("m",))
    assert fleet(followed) == {"a": True, "b": False}


async def test_fault_of_one_source_ends_neither_the_proxy_nor_the_other(
    start: Start, tmp_path: Path, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await start.replica(QUICK)
    server.put(PODS, engine("a", a))
    run = KubernetesSource.run

    async def broken(self: KubernetesSource) -> None:
        if self._config.name == "bad":
            raise ZeroDivisionError
        await run(self)

    monkeypatch.setattr(KubernetesSource, "run", broken)
    text = regions({}, fleet_sources=[source(server, "bad"), source(server)])
    followed = await follow(start, tmp_path, text, [a])
    await until(lambda: "a" in fleet(followed))
    bad = (await shown(followed))["fleet_sources"][0]
    assert bad["error"] == "ZeroDivisionError; the log has the traceback"


async def test_change_that_fails_is_tried_again(
    start: Start, tmp_path: Path, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETRY_S", 0.01)
    a = await start.replica(QUICK)
    server.put(PODS, engine("a", a))
    environ = {"OTHER": "x"}
    row = source(server, replica={"region": "here", "api_key_env": "ENGINE_KEY"})
    followed = await follow(start, tmp_path, regions({}, fleet_sources=[row]), [a], environ=environ)
    await until(lambda: gauge(followed, "up") == 1.0)
    assert fleet(followed) == {}
    environ["ENGINE_KEY"] = "key"
    await until(lambda: fleet(followed) == {"a": False})


def test_source_without_the_keys_of_its_kind_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"fleet_sources\[0\].*expected port or port_name with kind: pods"):
        parse_config(regions({}, fleet_sources=[{"name": "p", "kind": "pods", "selector": {"app": "x"}}]))


async def test_replicas_of_a_source_push_with_its_token(start: Start, tmp_path: Path, server: ApiServer) -> None:
    a = await start.replica(QUICK)
    server.put(PODS, engine("a", a))
    row = source(server, replica={"region": "here", "push_token_env": "PUSH"})
    environ = {"PUSH": "token-of-these-engines"}
    followed = await follow(start, tmp_path, regions({}, fleet_sources=[row]), [a], environ=environ)
    await until(lambda: fleet(followed) == {"a": False})
    push = {"version": 1, "worker_id": "a", "model": None, "block_tokens": 16, "epoch": 1, "sequence": 1, "hashes": []}
    statuses = []
    for token in ("another-token-of-others", "token-of-these-engines"):
        headers = {"authorization": f"Bearer {token}"}
        statuses.append((await followed.fleet.admin.post("/internal/sync", json=push, headers=headers)).status_code)
    assert statuses == [401, 200]
