"""A real Kubernetes API server: the fleet sources, `gorgo check --live`, and the chart by a dry run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gorgo.config.fleet import FleetSourceConfig, KubernetesApiConfig, SourceReplicaConfig
from gorgo.fleet_sources import list_watch
from gorgo.fleet_sources.fleet import FoundFleet, SourceState
from gorgo.live.fleet_sources import kubernetes
from gorgo.live.fleet_sources.kubernetes import KubernetesSource
from gorgo.live.fleet_sources.reports import Reports
from tests.fleet_sources.documents import endpoint, endpoint_slice, pod, pool
from tests.packaging.chart import EXTENSIONS, OPERATORS, documents, render, with_values
from tests.packaging.test_chart import CASES
from tests.proxy.authority import needs_openssl
from tests.proxy.fakes import answer, running
from tests.system.environments import InstallError, kubernetes_environment
from tests.system.kube_apiserver import INFERENCE_POOLS, NAMED, NAMESPACE, SOURCE, Cluster, cluster, program

pytestmark = needs_openssl
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def short_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rights that are taken show at the end of a watch."""
    monkeypatch.setattr(kubernetes, "WATCH_S", 3)
    monkeypatch.setattr(list_watch, "LONGEST_PAUSE_S", 2.0)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        server = program()
    except InstallError as error:
        pytest.skip(f"API SERVER SKIPPED: {error}")
    with cluster(server, tmp_path_factory.mktemp("cluster")) as found:
        yield found


def source_config(api: Cluster, **keys: Any) -> FleetSourceConfig:
    token = api.folder / "token"
    token.write_text(SOURCE)
    where = KubernetesApiConfig(url=api.url, token_file=str(token), ca_file=api.ca)
    chosen: dict[str, Any] = keys or {"kind": "pods", "selector": {"app": "qwen"}, "port_name": "http"}
    return FleetSourceConfig(
        name="pods", namespace=NAMESPACE, api=where, replica=SourceReplicaConfig(region="here"), **chosen
    )


@asynccontextmanager
async def following(config: FleetSourceConfig) -> AsyncIterator[SourceState]:
    """A source of the cluster, until the end of the block."""
    fleet = FoundFleet([config])
    source = KubernetesSource(config, Reports("pods", fleet, asyncio.get_running_loop().time), {})
    task = asyncio.create_task(source.run())
    try:
        yield fleet.sources["pods"]
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(condition: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.05)


def replicas(state: SourceState) -> dict[str, tuple[str, bool]]:
    return {name: (entry.url, entry.draining) for name, entry in state.entries.items()}


def urls(state: SourceState) -> set[str]:
    return {entry.url for entry in state.entries.values()}


async def test_pods_join_drain_and_leave_as_the_server_says(api: Cluster) -> None:
    async with following(source_config(api)) as state:
        await until(lambda: state.synced)
        assert state.up
        await asyncio.to_thread(api.put_pod, pod("a", "10.1.0.1"))
        await asyncio.to_thread(api.put_pod, pod("other", "10.1.0.9", labels={"app": "web"}))
        await until(lambda: replicas(state) == {"a": ("http://10.1.0.1:30000", False)})
        await asyncio.to_thread(api.put_pod, pod("b", "10.1.0.2", ready=False))
        await asyncio.to_thread(api.put_pod, pod("a", "10.1.0.1", ready=False))
        await until(lambda: replicas(state) == {"a": ("http://10.1.0.1:30000", True)})
        await asyncio.to_thread(api.put_pod, pod("b", "10.1.0.2"))
        await until(lambda: "b" in state.entries)
        # An annotation with an unknown key is rejected, and the replica stays.
        await asyncio.to_thread(api.put_pod, pod("b", "10.1.0.2", annotations={"gorgo-router/modles": "m"}))
        await until(lambda: bool(state.rejected))
        assert replicas(state)["b"] == ("http://10.1.0.2:30000", False)
        await asyncio.to_thread(api.delete_pod, "b")
        await until(lambda: "b" not in state.entries and not state.rejected)
        await asyncio.to_thread(api.delete_pod, "a")
        await until(lambda: not state.entries)
        # The same address under another name.
        await asyncio.to_thread(api.put_pod, pod("c", "10.1.0.1"))
        await until(lambda: replicas(state) == {"c": ("http://10.1.0.1:30000", False)})
        await asyncio.to_thread(api.delete_pod, "c")
        await until(lambda: not state.entries)


async def test_rights_that_are_taken_and_a_server_that_restarts_cost_no_replica(api: Cluster) -> None:
    await asyncio.to_thread(api.put_pod, pod("a", "10.1.0.1"))
    async with following(source_config(api)) as state:
        await until(lambda: state.synced and "a" in state.entries)
        await asyncio.to_thread(lambda: api.allow(pods=False))
        await until(lambda: state.error is not None)
        assert "403" in str(state.error)
        assert replicas(state) == {"a": ("http://10.1.0.1:30000", False)}
        await asyncio.to_thread(lambda: api.allow(pods=True))
        await until(lambda: state.error is None)
        await asyncio.to_thread(api.kill)
        await until(lambda: state.error is not None)
        assert set(state.entries) == {"a"}
        await asyncio.to_thread(api.start)
        await asyncio.to_thread(api.put_pod, pod("b", "10.1.0.2"))
        await until(lambda: state.error is None and set(state.entries) == {"a", "b"})
    for name in ("a", "b"):
        api.delete_pod(name)


async def test_pods_of_a_pool_follow_its_ports_and_come_back_with_it(api: Cluster) -> None:
    pools = f"/apis/inference.networking.k8s.io/v1/namespaces/{NAMESPACE}/inferencepools"
    if not api.serves(pools):
        await asyncio.to_thread(
            api.call, "POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", INFERENCE_POOLS
        )
        await until(lambda: api.serves(pools))
    document = {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        **pool({"app": "qwen"}, [8000]),
    }
    del document["metadata"]["resourceVersion"]
    document["spec"]["endpointPickerRef"] = {"name": "gorgo", "port": {"number": 9002}}
    await asyncio.to_thread(api.call, "POST", pools, document)
    async with following(source_config(api, kind="inference-pool", pool="qwen")) as state:
        await until(lambda: state.synced)
        await asyncio.to_thread(api.put_pod, pod("a", "10.1.0.1"))
        await asyncio.to_thread(api.put_pod, pod("other", "10.1.0.9", labels={"app": "web"}))
        await until(lambda: urls(state) == {"http://10.1.0.1:8000"})
        ports = [{"number": 8000}, {"number": 8001}]
        headers = {"content-type": "application/merge-patch+json"}
        change = {"spec": {"targetPorts": ports}}
        await asyncio.to_thread(lambda: api.call("PATCH", f"{pools}/qwen", change, headers=headers))
        await until(lambda: urls(state) == {"http://10.1.0.1:8000", "http://10.1.0.1:8001"})
        # The pool is deleted, which is said, and comes back.
        await asyncio.to_thread(api.call, "DELETE", f"{pools}/qwen")
        await until(lambda: "qwen" in state.rejected)
        await asyncio.to_thread(api.call, "POST", pools, document)
        await until(lambda: not state.rejected and ("http://10.1.0.1:8000", False) in replicas(state).values())
    await asyncio.to_thread(api.call, "DELETE", f"{pools}/qwen")
    for name in ("a", "other"):
        api.delete_pod(name)


async def test_endpoints_of_a_service_join_and_leave_as_the_server_says(api: Cluster) -> None:
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
    if not api.serves(slices):
        pytest.skip(f"ENDPOINTSLICES SKIPPED: this API server is older than their v1; {NAMED} may name a newer one")
    services = f"/api/v1/namespaces/{NAMESPACE}/services"
    service = {"metadata": {"name": "qwen"}, "spec": {"ports": [{"port": 30000}]}}
    await asyncio.to_thread(api.call, "POST", services, service)
    document = endpoint_slice("qwen-1", [endpoint("10.1.0.1", ready=True)])
    del document["metadata"]["resourceVersion"]
    document["metadata"]["labels"] = {"kubernetes.io/service-name": "qwen"}
    await asyncio.to_thread(api.call, "POST", slices, document)
    async with following(source_config(api, kind="endpoint-slices", service="qwen", port=30000)) as state:
        await until(lambda: urls(state) == {"http://10.1.0.1:30000"})
        headers = {"content-type": "application/merge-patch+json"}
        change = {"endpoints": [endpoint("10.1.0.1", ready=True), endpoint("10.1.0.2", ready=True)]}
        await asyncio.to_thread(lambda: api.call("PATCH", f"{slices}/qwen-1", change, headers=headers))
        await until(lambda: urls(state) == {"http://10.1.0.1:30000", "http://10.1.0.2:30000"})
        await asyncio.to_thread(api.call, "DELETE", f"{slices}/qwen-1")
        await until(lambda: not state.entries)
    await asyncio.to_thread(api.call, "DELETE", f"{services}/qwen")


async def test_check_reaches_replicas_that_the_cluster_names(api: Cluster, tmp_path: Path) -> None:
    async with running(answer(200)) as engine:
        await asyncio.to_thread(api.put_pod, pod("a", "127.0.0.1", ports={"http": engine.port}))
        where = source_config(api).api
        document = {
            "proxy": {"region": "here"},
            "regions": [{"name": "here"}],
            "fleet_sources": [
                {
                    "name": "pods",
                    "kind": "pods",
                    "selector": {"app": "qwen"},
                    "port_name": "http",
                    "namespace": NAMESPACE,
                    "local_addresses": True,
                    "api": {"url": where.url, "token_file": where.token_file, "ca_file": where.ca_file},
                    "replica": {"region": "here"},
                }
            ],
        }
        file = tmp_path / "regions.yaml"
        file.write_text(json.dumps(document))
        command = [sys.executable, "-m", "gorgo", "check", "--live", "--config", str(file)]
        done = await asyncio.to_thread(
            lambda: subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "pods" in done.stdout
        assert f"127.0.0.1:{engine.port}" in done.stdout + done.stderr
    api.delete_pod("a")


@pytest.mark.filterwarnings("default:NOT RUN")
@pytest.mark.parametrize("name", ["defaults", "everything", "picker"])
def test_server_takes_every_object_of_the_chart_by_a_dry_run(api: Cluster, name: str) -> None:
    try:
        helm = kubernetes_environment()
    except InstallError as error:
        pytest.skip(f"CHART SKIPPED: {error}")
    taken, unknown = 0, set()
    for document in documents(*render(helm, with_values(CASES[name])).values()):
        group, _, version = document["apiVersion"].rpartition("/")
        base = f"/apis/{group}/{version}" if group else f"/api/{version}"
        with api.client() as client:
            listed = client.get(base)
        rows = listed.json().get("resources", []) if listed.status_code == 200 else []
        row = next((row for row in rows if row["kind"] == document["kind"] and "/" not in row["name"]), None)
        if row is None:
            unknown.add(f"{document['kind']} {document['apiVersion']}")
            continue
        place = f"/namespaces/{document['metadata'].get('namespace')}" if row["namespaced"] else ""
        if place == "/namespaces/engines":
            continue  # a namespace of somebody else's engines
        path = f"{base}{place}/{row['name']}"
        api.call("POST", path, document, params={"dryRun": "All", "fieldValidation": "Strict"})
        taken += 1
    assert taken >= 6
    extensions = {each for each in unknown if each.split()[0] in (*EXTENSIONS, *OPERATORS)}
    if unknown - extensions:
        warnings.warn(f"NOT RUN: this API server does not know {', '.join(sorted(unknown))}", stacklevel=1)
    # Version 1.20 has these as beta versions alone.
    assert {each.split()[0] for each in unknown - extensions} <= {"PodDisruptionBudget", "HorizontalPodAutoscaler"}
