"""Fleet sources of a running proxy, Kubernetes among them: requests go where the source says, over real sockets."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gorgo.config.fleet import FleetSourceConfig, KubernetesApiConfig, SourceReplicaConfig
from gorgo.config.load import parse_config
from gorgo.errors import ConfigError
from gorgo.fleet_sources import list_watch
from gorgo.fleet_sources.fleet import FoundFleet, SourceState
from gorgo.fleet_sources.kubernetes import SERVICE_LABEL
from gorgo.live.fleet_sources import kubernetes, service
from gorgo.live.fleet_sources.kubernetes import KubernetesSource
from gorgo.live.fleet_sources.reports import Reports
from tests.fleet_sources.documents import endpoint, endpoint_slice, node, pod, pool
from tests.live.fleet_sources.api_server import NODES, PODS, POOLS, SLICES, ApiServer, api_server
from tests.proxy.authority import Authority, needs_openssl
from tests.proxy.conftest import Start, until
from tests.proxy.fakes import DONE, FakeReplica, chat, delta, hang, stream
from tests.proxy.followed import Followed, follow, regions

# --- Sources in Kubernetes against an API server on a real socket.


PODS_BY_LABEL: dict[str, Any] = {"kind": "pods", "selector": {"app": "qwen"}, "port": 30000}


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are many here, and each is followed by a pause."""
    monkeypatch.setattr(list_watch, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(list_watch, "LONGEST_PAUSE_S", 0.05)


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as found:
        yield found


@asynccontextmanager
async def following(
    server: ApiServer, environ: Mapping[str, str] | None = None, api: KubernetesApiConfig | None = None, **keys: Any
) -> AsyncIterator[SourceState]:
    """A source of `server`, until the end of the block."""
    config = FleetSourceConfig(
        name="pods",
        namespace="llm",
        api=api or KubernetesApiConfig(url=server.url),
        replica=SourceReplicaConfig(region="here"),
        **(keys or PODS_BY_LABEL),
    )
    fleet = FoundFleet([config])
    source = KubernetesSource(config, Reports("pods", fleet, lambda: 0.0), environ or {})
    task = asyncio.create_task(source.run())
    try:
        yield fleet.sources["pods"]
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def names(state: SourceState) -> dict[str, bool]:
    """Replicas of a source, with their drain mark."""
    return {name: entry.draining for name, entry in state.entries.items()}


@pytest.mark.usefixtures("short_pauses")
async def test_pods_of_a_selector_come_change_and_leave(server: ApiServer) -> None:
    server.put(PODS, pod("a", "10.0.0.1"), pod("other", labels={"app": "web"}))
    async with following(server) as state:
        await until(lambda: state.synced)
        assert names(state) == {"a": False}
        assert state.up
        server.put(PODS, pod("b", "10.0.0.2", ready=False))
        server.put(PODS, pod("c", "10.0.0.3"))
        await until(lambda: "c" in state.entries)
        assert names(state) == {"a": False, "c": False}
        server.put(PODS, pod("b", "10.0.0.2"), pod("a", "10.0.0.1", terminating=True))
        await until(lambda: names(state) == {"a": True, "b": False, "c": False})
        server.delete(PODS, "a")
        await until(lambda: names(state) == {"b": False, "c": False})
    assert server.lists(PODS) == 1


@pytest.mark.usefixtures("short_pauses")
async def test_long_list_comes_in_pages(server: ApiServer) -> None:
    server.put(PODS, *(pod(f"p{n}", f"10.0.{n // 200}.{n % 200}") for n in range(2 * list_watch.PAGE_OBJECTS + 1)))
    async with following(server) as state:
        await until(lambda: state.synced)
        assert len(state.entries) == 2 * list_watch.PAGE_OBJECTS + 1
    assert server.lists(PODS) == 3


@pytest.mark.usefixtures("short_pauses")
async def test_watch_that_is_cut_goes_on_where_it_was_without_a_new_list(server: ApiServer) -> None:
    server.put(PODS, pod("a", "10.0.0.1"))
    async with following(server) as state:
        await until(lambda: state.synced and server.watches)
        for number in range(5):
            assert server.cut() == 1
            name = f"b{number}"
            server.put(PODS, pod(name, f"10.0.1.{number}"))
            await until(partial(lambda name: name in state.entries and server.watches, name))
        await until(lambda: state.up)
    assert server.lists(PODS) == 1


@pytest.mark.usefixtures("short_pauses")
async def test_version_moves_with_bookmarks(server: ApiServer) -> None:
    async with following(server) as state:
        await until(lambda: state.synced and server.watches)
        server.put(NODES, node("elsewhere", None))
        server.bookmark(PODS)
        version = str(server.version)
        await until(lambda: (server.cut(), server.requests[-1][1].get("resourceVersion") == version)[1])
    assert server.lists(PODS) == 1


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("during", ["watch", "break"])
async def test_history_that_is_lost_is_listed_anew_and_the_fleet_stays(server: ApiServer, during: str) -> None:
    server.put(PODS, pod("a", "10.0.0.1"), pod("b", "10.0.0.2"))
    async with following(server) as state:
        await until(lambda: state.synced and server.watches)
        fewest = len(state.entries)

        def listed_anew() -> bool:
            nonlocal fewest
            fewest = min(fewest, len(state.entries))
            return names(state) == {"b": False, "c": False}

        if during == "break":
            server.broken = 503
            server.cut()
            await until(lambda: state.error is not None)
            assert state.error == "status 503: the test broke it"
        del server.objects[PODS]["a"]
        server.put(PODS, pod("c", "10.0.0.3"))
        server.forget()
        server.broken = None
        for changed in server.watches:
            changed.set()
        await until(listed_anew)
        assert fewest == 2
        await until(lambda: state.up)
    assert server.lists(PODS) == 2


@pytest.mark.usefixtures("short_pauses")
async def test_server_that_is_down_is_named_and_the_last_fleet_stays(server: ApiServer) -> None:
    server.put(PODS, pod("a", "10.0.0.1"))
    async with following(server) as state:
        await until(lambda: state.synced)
        server.broken = 500
        server.cut()
        requests = len(server.requests)
        await until(lambda: len(server.requests) > requests + 3)
        assert (state.up, names(state)) == (False, {"a": False})
        server.broken = None
        server.put(PODS, pod("b", "10.0.0.2"))
        await until(lambda: state.up and "b" in state.entries)


@pytest.mark.usefixtures("short_pauses")
async def test_server_that_cannot_be_reached_is_named(unused_tcp_port: int) -> None:
    server = ApiServer(port=unused_tcp_port)
    async with following(server) as state:
        await until(lambda: state.error is not None)
        assert "refused" in str(state.error)
        assert not state.synced


@pytest.mark.usefixtures("short_pauses")
async def test_list_that_is_no_list_is_a_failure_and_tried_again(server: ApiServer) -> None:
    server.wrong_body = b"<html>a portal</html>"
    server.put(PODS, pod("a", "10.0.0.1"))
    async with following(server) as state:
        await until(lambda: state.up)
        assert names(state) == {"a": False}
    assert server.lists(PODS) == 2


@pytest.mark.usefixtures("short_pauses")
async def test_event_that_comes_byte_by_byte_is_one(server: ApiServer) -> None:
    server.dribble = 1
    async with following(server) as state:
        await until(lambda: state.synced and server.watches)
        server.put(PODS, pod("a", "10.0.0.1"), pod("b", "10.0.0.2"))
        await until(lambda: names(state) == {"a": False, "b": False})


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("bound", ["MAX_PAGE_BYTES", "MAX_LINE_BYTES"])
async def test_answer_beyond_its_bound_is_a_failure(
    server: ApiServer, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, bound, 2000)
    if bound == "MAX_PAGE_BYTES":
        server.put(PODS, pod("a", annotations={"x": "y" * 3000}))
    async with following(server) as state:
        if bound == "MAX_LINE_BYTES":
            await until(lambda: state.synced and server.watches)
            server.put(PODS, pod("a", annotations={"x": "y" * 3000}))
        await until(lambda: state.error is not None)
        assert "more than 2000 bytes" in str(state.error)
        assert names(state) == {}


@pytest.mark.usefixtures("short_pauses")
async def test_region_is_the_nodes_label(server: ApiServer) -> None:
    server.put(PODS, pod("a", "10.0.0.1", node="n1"), pod("b", "10.0.0.2", node="n2"))
    server.put(NODES, node("n1", "eu-west-1"))
    async with following(server, **PODS_BY_LABEL, node_regions=True) as state:
        await until(lambda: state.synced)
        assert {name: entry.region for name, entry in state.entries.items()} == {"a": "eu-west-1", "b": "here"}
        server.put(NODES, node("n2", "us-east-1"))
        await until(lambda: state.entries["b"].region == "us-east-1")


@pytest.mark.usefixtures("short_pauses")
async def test_missing_right_on_one_collection_is_named(server: ApiServer) -> None:
    server.put(PODS, pod("a"))
    async with following(server, **PODS_BY_LABEL, node_regions=True) as state:
        await until(lambda: state.up)
        server.broken = 403
        server.cut()
        await until(lambda: state.error == "status 403: the test broke it")


@pytest.mark.usefixtures("short_pauses")
async def test_endpoints_of_a_service_are_replicas(server: ApiServer) -> None:
    first = endpoint_slice("qwen-1", [endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b", ready=False)])
    second = endpoint_slice("web-1", [endpoint("10.0.0.9", "w")])
    first["metadata"]["labels"] = {SERVICE_LABEL: "qwen"}
    second["metadata"]["labels"] = {SERVICE_LABEL: "web"}
    server.put(SLICES, first, second)
    async with following(server, kind="endpoint-slices", service="qwen") as state:
        await until(lambda: state.synced)
        assert names(state) == {"a": False}


@pytest.mark.usefixtures("short_pauses")
async def test_pool_selects_pods_and_ports_and_another_selector_selects_others(server: ApiServer) -> None:
    server.put(PODS, pod("a", "10.0.0.1"), pod("w", "10.0.0.9", labels={"app": "web"}))
    server.put(POOLS, pool({"app": "qwen"}, [8000]))
    async with following(server, kind="inference-pool", pool="qwen") as state:
        await until(lambda: state.synced)
        assert [entry.url for entry in state.entries.values()] == ["http://10.0.0.1:8000"]
        server.put(POOLS, pool({"app": "qwen"}, [8000, 8001]))
        await until(lambda: set(state.entries) == {"a-8000", "a-8001"})
        server.put(POOLS, pool({"app": "web"}, [8000]))
        await until(lambda: set(state.entries) == {"w"})
        server.put(PODS, pod("w2", "10.0.0.8", labels={"app": "web"}))
        await until(lambda: set(state.entries) == {"w", "w2"})


@pytest.mark.usefixtures("short_pauses")
async def test_pool_that_is_missing_is_a_problem_and_comes_later(server: ApiServer) -> None:
    server.put(PODS, pod("a", "10.0.0.1"))
    async with following(server, kind="inference-pool", pool="qwen") as state:
        await until(lambda: state.synced)
        assert state.rejected == {"qwen": "inferencepool llm/qwen is missing"}
        server.put(POOLS, pool({"app": "qwen"}, [8000]))
        await until(lambda: names(state) == {"a": False} and not state.rejected)
        server.delete(POOLS, "qwen")
        await until(lambda: names(state) == {} and state.rejected)


@pytest.mark.usefixtures("short_pauses")
async def test_pod_with_a_bad_annotation_is_named_and_one_in_use_stays(server: ApiServer) -> None:
    server.put(PODS, pod("a", "10.0.0.1"))
    async with following(server) as state:
        await until(lambda: state.synced)
        bad = {"gorgo-router/kv-tokens": "many"}
        server.put(PODS, pod("a", "10.0.0.1", annotations=bad), pod("b", "10.0.0.2", annotations=bad))
        await until(lambda: len(state.rejected) == 2)
        assert state.rejected["b"].startswith("pod llm/b: gorgo-router/kv-tokens: ")
        assert names(state) == {"a": False}


# -- tokens and authorities
@pytest.mark.usefixtures("short_pauses")
@needs_openssl
async def test_token_and_authorities_that_are_replaced_are_used(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.pair("api")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    token, ca = tmp_path / "token", tmp_path / "ca"
    token.write_text("first\n")
    ca.write_text(Path(authority.ca).read_text())
    async with api_server(tls) as server:
        server.tokens = {"first"}
        api = KubernetesApiConfig(url=server.url, token_file=str(token), ca_file=str(ca))
        async with following(server, api=api, **PODS_BY_LABEL) as state:
            await until(lambda: state.up and server.watches)
            server.tokens = {"second"}
            server.cut()
            await until(lambda: state.error == "status 401: Unauthorized")
            token.write_text("second\n")
            await until(lambda: state.up and server.watches)
            (tmp_path / "other").mkdir()
            ca.write_text(Path(Authority(tmp_path / "other").ca).read_text())
            server.cut()
            await until(lambda: state.error is not None and "certificate" in state.error)
            ca.write_text(Path(authority.ca).read_text())
            await until(lambda: state.up)
            ca.write_text("no certificates")
            server.cut()
            await until(lambda: state.error == f"{ca} holds no PEM certificates")
            token.unlink()
            await until(lambda: state.error is not None and "No such file" in state.error)
        assert set(server.authorizations) == {"Bearer first", "Bearer second"}


@pytest.mark.usefixtures("short_pauses")
async def test_token_is_never_sent_in_clear(server: ApiServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    api = KubernetesApiConfig(url=server.url, token_file=str(tmp_path / "token"))
    async with following(server, api=api, **PODS_BY_LABEL) as state:
        await until(lambda: state.synced)
    assert set(server.authorizations) == {None}


@pytest.mark.usefixtures("short_pauses")
def test_address_of_the_server_is_the_clusters() -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    assert kubernetes.api_url(KubernetesApiConfig(), environ) == "https://10.96.0.1:443"
    six = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT_HTTPS": "6443"}
    assert kubernetes.api_url(KubernetesApiConfig(), six) == "https://[fd00::1]:6443"
    assert kubernetes.api_url(KubernetesApiConfig(url="http://127.0.0.1:8001/"), {}) == "http://127.0.0.1:8001"
    with pytest.raises(ConfigError, match=r"KUBERNETES_SERVICE_HOST is not set; expected api\.url"):
        kubernetes.api_url(KubernetesApiConfig(), {})


@pytest.mark.usefixtures("short_pauses")
def test_namespace_is_the_pods(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("llm\n")
    assert kubernetes.own_namespace({}, tmp_path) == "llm"
    assert kubernetes.own_namespace({"POD_NAMESPACE": "other"}, tmp_path) == "other"
    with pytest.raises(ConfigError, match="expected namespace in the source"):
        kubernetes.own_namespace({}, tmp_path / "missing")


# --- Fleet sources of a running proxy: requests go where the source says, over real sockets.


CHAT = "/v1/chat/completions"
QUICK = stream(delta("x"), DONE)


@pytest.fixture
def short_pauses_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_watch, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(list_watch, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(service, "COLLECT_S", 0.001)


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


@pytest.mark.usefixtures("short_pauses_service")
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


@pytest.mark.usefixtures("short_pauses_service")
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


@pytest.mark.usefixtures("short_pauses_service")
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


@pytest.mark.usefixtures("short_pauses_service")
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


@pytest.mark.usefixtures("short_pauses_service")
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


@pytest.mark.usefixtures("short_pauses_service")
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


@pytest.mark.usefixtures("short_pauses_service")
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


@pytest.mark.usefixtures("short_pauses_service")
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


@pytest.mark.usefixtures("short_pauses_service")
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


@pytest.mark.usefixtures("short_pauses_service")
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


@pytest.mark.usefixtures("short_pauses_service")
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


@pytest.mark.usefixtures("short_pauses_service")
def test_source_without_the_keys_of_its_kind_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"fleet_sources\[0\].*expected port or port_name with kind: pods"):
        parse_config(regions({}, fleet_sources=[{"name": "p", "kind": "pods", "selector": {"app": "x"}}]))


@pytest.mark.usefixtures("short_pauses_service")
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
