"""Sources in Kubernetes against an API server on a real socket."""

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
from gorgo.errors import ConfigError
from gorgo.fleet_sources import list_watch
from gorgo.fleet_sources.fleet import FoundFleet, SourceState
from gorgo.fleet_sources.kubernetes import SERVICE_LABEL
from gorgo.live.fleet_sources import api_client
from gorgo.live.fleet_sources.kubernetes import KubernetesSource
from gorgo.live.fleet_sources.reports import Reports
from tests.fleet_sources.documents import endpoint, endpoint_slice, node, pod, pool
from tests.live.fleet_sources.api_server import NODES, PODS, POOLS, SLICES, ApiServer, api_server
from tests.proxy.authority import Authority, needs_openssl
from tests.proxy.conftest import until

PODS_BY_LABEL: dict[str, Any] = {"kind": "pods", "selector": {"app": "qwen"}, "port": 30000}


@pytest.fixture(autouse=True)
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


async def test_long_list_comes_in_pages(server: ApiServer) -> None:
    server.put(PODS, *(pod(f"p{n}", f"10.0.{n // 200}.{n % 200}") for n in range(2 * list_watch.PAGE_OBJECTS + 1)))
    async with following(server) as state:
        await until(lambda: state.synced)
        assert len(state.entries) == 2 * list_watch.PAGE_OBJECTS + 1
    assert server.lists(PODS) == 3


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


async def test_version_moves_with_bookmarks(server: ApiServer) -> None:
    async with following(server) as state:
        await until(lambda: state.synced and server.watches)
        server.put(NODES, node("elsewhere", None))
        server.bookmark(PODS)
        version = str(server.version)
        await until(lambda: (server.cut(), server.requests[-1][1].get("resourceVersion") == version)[1])
    assert server.lists(PODS) == 1


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


async def test_server_that_cannot_be_reached_is_named(unused_tcp_port: int) -> None:
    server = ApiServer(port=unused_tcp_port)
    async with following(server) as state:
        await until(lambda: state.error is not None)
        assert "refused" in str(state.error)
        assert not state.synced


async def test_list_that_is_no_list_is_a_failure_and_tried_again(server: ApiServer) -> None:
    server.wrong_body = b"<html>a portal</html>"
    server.put(PODS, pod("a", "10.0.0.1"))
    async with following(server) as state:
        await until(lambda: state.up)
        assert names(state) == {"a": False}
    assert server.lists(PODS) == 2


async def test_event_that_comes_byte_by_byte_is_one(server: ApiServer) -> None:
    server.dribble = 1
    async with following(server) as state:
        await until(lambda: state.synced and server.watches)
        server.put(PODS, pod("a", "10.0.0.1"), pod("b", "10.0.0.2"))
        await until(lambda: names(state) == {"a": False, "b": False})


@pytest.mark.parametrize("bound", ["MAX_PAGE_BYTES", "MAX_LINE_BYTES"])
async def test_answer_beyond_its_bound_is_a_failure(
    server: ApiServer, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_client, bound, 2000)
    if bound == "MAX_PAGE_BYTES":
        server.put(PODS, pod("a", annotations={"x": "y" * 3000}))
    async with following(server) as state:
        if bound == "MAX_LINE_BYTES":
            await until(lambda: state.synced and server.watches)
            server.put(PODS, pod("a", annotations={"x": "y" * 3000}))
        await until(lambda: state.error is not None)
        assert "more than 2000 bytes" in str(state.error)
        assert names(state) == {}


async def test_region_is_the_nodes_label(server: ApiServer) -> None:
    server.put(PODS, pod("a", "10.0.0.1", node="n1"), pod("b", "10.0.0.2", node="n2"))
    server.put(NODES, node("n1", "eu-west-1"))
    async with following(server, **PODS_BY_LABEL, node_regions=True) as state:
        await until(lambda: state.synced)
        assert {name: entry.region for name, entry in state.entries.items()} == {"a": "eu-west-1", "b": "here"}
        server.put(NODES, node("n2", "us-east-1"))
        await until(lambda: state.entries["b"].region == "us-east-1")


async def test_missing_right_on_one_collection_is_named(server: ApiServer) -> None:
    server.put(PODS, pod("a"))
    async with following(server, **PODS_BY_LABEL, node_regions=True) as state:
        await until(lambda: state.up)
        server.broken = 403
        server.cut()
        await until(lambda: state.error == "status 403: the test broke it")


async def test_endpoints_of_a_service_are_replicas(server: ApiServer) -> None:
    first = endpoint_slice("qwen-1", [endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b", ready=False)])
    second = endpoint_slice("web-1", [endpoint("10.0.0.9", "w")])
    first["metadata"]["labels"] = {SERVICE_LABEL: "qwen"}
    second["metadata"]["labels"] = {SERVICE_LABEL: "web"}
    server.put(SLICES, first, second)
    async with following(server, kind="endpoint-slices", service="qwen") as state:
        await until(lambda: state.synced)
        assert names(state) == {"a": False}


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


async def test_pool_that_is_missing_is_a_problem_and_comes_later(server: ApiServer) -> None:
    server.put(PODS, pod("a", "10.0.0.1"))
    async with following(server, kind="inference-pool", pool="qwen") as state:
        await until(lambda: state.synced)
        assert state.rejected == {"qwen": "inferencepool llm/qwen is missing"}
        server.put(POOLS, pool({"app": "qwen"}, [8000]))
        await until(lambda: names(state) == {"a": False} and not state.rejected)
        server.delete(POOLS, "qwen")
        await until(lambda: names(state) == {} and state.rejected)


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


async def test_token_is_never_sent_in_clear(server: ApiServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    api = KubernetesApiConfig(url=server.url, token_file=str(tmp_path / "token"))
    async with following(server, api=api, **PODS_BY_LABEL) as state:
        await until(lambda: state.synced)
    assert set(server.authorizations) == {None}


def test_address_of_the_server_is_the_clusters() -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    assert api_client.api_url(KubernetesApiConfig(), environ) == "https://10.96.0.1:443"
    six = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT_HTTPS": "6443"}
    assert api_client.api_url(KubernetesApiConfig(), six) == "https://[fd00::1]:6443"
    assert api_client.api_url(KubernetesApiConfig(url="http://127.0.0.1:8001/"), {}) == "http://127.0.0.1:8001"
    with pytest.raises(ConfigError, match=r"KUBERNETES_SERVICE_HOST is not set; expected api\.url"):
        api_client.api_url(KubernetesApiConfig(), {})


def test_namespace_is_the_pods(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("llm\n")
    assert api_client.own_namespace({}, tmp_path) == "llm"
    assert api_client.own_namespace({"POD_NAMESPACE": "other"}, tmp_path) == "other"
    with pytest.raises(ConfigError, match="expected namespace in the source"):
        api_client.own_namespace({}, tmp_path / "missing")
