"""A real Kubernetes API server: the fleet sources, `gorgo check --live`, and the chart by a dry run."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import ssl
import subprocess
import sys
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gorgo.config.fleet import FleetSourceConfig, KubernetesApiConfig, SourceReplicaConfig
from gorgo.fleet_sources import list_watch
from gorgo.fleet_sources.fleet import FoundFleet, SourceState
from gorgo.lab.demo import Processes
from gorgo.live.fleet_sources import kubernetes
from gorgo.live.fleet_sources.kubernetes import KubernetesSource
from gorgo.live.fleet_sources.reports import Reports
from tests.fleet_sources.documents import endpoint, endpoint_slice, pod, pool
from tests.packaging.chart import EXTENSIONS, OPERATORS, documents, render, with_values
from tests.packaging.test_chart import CASES
from tests.ports import free_port
from tests.proxy.authority import OPENSSL, Authority, needs_openssl
from tests.proxy.fakes import answer, running
from tests.system.environments import InstallError, apt_install, cache_folder, kubernetes_environment

# --- A real Kubernetes API server with its store, on loopback: built once from the distribution's source package.
#
# Owns the recipe and the processes. A program that GORGO_TEST_KUBE_APISERVER names is taken in the place of the
# recipe's: Debian 12 has version 1.20, which knows neither EndpointSlices of v1 nor the rules in the CRD of
# InferencePools.


NAMED = "GORGO_TEST_KUBE_APISERVER"
NAMESPACE = "llm"
ADMIN, SOURCE = "token-of-the-cluster-s-admin", "token-of-the-fleet-source"
#: What fleet sources list and watch, by group.
SOURCES = {"": "pods", "discovery.k8s.io": "endpointslices", "inference.networking.k8s.io": "inferencepools"}
#: The pool's kind with as much of a schema as every server takes: that of the extension has rules which 1.20 refuses.
INFERENCE_POOLS: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "inferencepools.inference.networking.k8s.io",
        "annotations": {
            "api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/gateway-api-inference-extension"
        },
    },
    "spec": {
        "group": "inference.networking.k8s.io",
        "scope": "Namespaced",
        "names": {
            "kind": "InferencePool",
            "listKind": "InferencePoolList",
            "plural": "inferencepools",
            "singular": "inferencepool",
        },
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}
_START_S = 90.0
#: The vendored `reflect2` of 1.20 walks maps as Go did before 1.18: a custom resource then crashes the server.
_REFLECT = "golang-github-modern-go-reflect2-dev"
_PACKAGES = ("etcd-server", "golang-1.19-go", "rsync", "dpkg-dev", "make", "gcc", _REFLECT)
#: `apt-get source` needs a list of sources, which the machine's own file may not have.
_BUILD = """
set -eu
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
lists=$PWD/lists
mkdir -p "$lists"
sed -e 's/^Types: deb$/Types: deb-src/' /etc/apt/sources.list.d/debian.sources > "$lists/src.sources"
places="-o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=$lists -o Dir::State::lists=$PWD/state"
mkdir -p state/partial
apt-get update -qq $places
apt-get source -qq $places kubernetes
cd kubernetes-*/
rm vendor/github.com/modern-go/reflect2/*.go
cp /usr/share/gocode/src/github.com/modern-go/reflect2/*.go vendor/github.com/modern-go/reflect2/
export PATH=/usr/lib/go-1.19/bin:$PATH GOFLAGS=-mod=vendor GO111MODULE=auto GOTOOLCHAIN=local
export KUBE_GIT_VERSION=v1.20.2 KUBE_GIT_COMMIT=debian KUBE_GIT_TREE_STATE=clean KUBE_GIT_MAJOR=1 KUBE_GIT_MINOR=20
make WHAT=cmd/kube-apiserver
cp _output/local/bin/linux/amd64/kube-apiserver ../kube-apiserver
"""


def program() -> Path:
    """Return the API server, built if it is not there yet: minutes on idle cores. Raises `InstallError`."""
    named = os.environ.get(NAMED)
    if named:
        return Path(named)
    folder = cache_folder() / "kube-apiserver-1.20.2-1"
    made = folder / "kube-apiserver"
    with (cache_folder() / "kube-apiserver.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            apt_install(*_PACKAGES)
        except InstallError as error:
            raise InstallError(f"{error}; or name a kube-apiserver by {NAMED}") from error
        if not made.is_file():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            _run(["bash", "-c", _BUILD], folder)
            for left in folder.glob("kubernetes*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return made


def _run(command: list[str], folder: Path | None = None) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    done = subprocess.run(
        ["nice", "-n", "19", *command], capture_output=True, text=True, cwd=folder, check=False, env=environment
    )
    if done.returncode:
        raise InstallError(f"{command[0]} ended with {done.returncode}: {(done.stderr or done.stdout)[-1500:]}")


@dataclass
class Cluster:
    """The running API server, and what a test does with it."""

    folder: Path
    url: str
    ca: str
    processes: Processes
    command: list[str] = field(default_factory=list)

    def client(self, token: str = ADMIN) -> httpx.Client:
        context = ssl.create_default_context(cafile=self.ca)
        headers = {"authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, verify=context, headers=headers, timeout=20, trust_env=False)

    def call(self, method: str, path: str, body: object = None, **options: Any) -> Any:
        """Call the server, and return the answer's document."""
        with self.client() as client:
            answer = client.request(method, path, json=body, **options)
        assert answer.status_code < 300, (method, path, answer.status_code, answer.text[:500])
        return answer.json()

    def start(self) -> None:
        """Start the server, again after `kill`, and wait until it answers."""
        self.processes.start_command("kube-apiserver", self.command)
        deadline_s = time.monotonic() + _START_S
        while True:
            try:
                with self.client() as client:
                    if client.get("/readyz").status_code == 200:
                        return
            except httpx.TransportError:
                pass
            self.processes.check_alive()
            assert time.monotonic() < deadline_s, (self.folder / "kube-apiserver.log").read_text()[-2000:]
            time.sleep(0.2)

    def kill(self) -> None:
        """Stop the server; its store stays."""
        self.processes.finish("kube-apiserver")

    # -- objects

    def put_pod(self, document: dict[str, Any]) -> None:
        """Create a pod, or change its labels, annotations and status."""
        name, path = document["metadata"]["name"], f"/api/v1/namespaces/{NAMESPACE}/pods"
        metadata = {key: value for key, value in document["metadata"].items() if key != "resourceVersion"}
        containers = [{**each, "image": "engine"} for each in document["spec"]["containers"]]
        spec = {"nodeName": document["spec"]["nodeName"], "containers": containers}
        with self.client() as client:
            is_new = client.get(f"{path}/{name}").status_code == 404
        if is_new:
            self.call("POST", path, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        else:
            described = {key: metadata[key] for key in ("labels", "annotations")}
            self._patch(f"{path}/{name}", {"metadata": described})
        self._patch(f"{path}/{name}/status", {"status": document["status"]})

    def serves(self, path: str) -> bool:
        """Return whether the server has a resource at a path."""
        with self.client() as client:
            return client.get(path).status_code == 200

    def delete_pod(self, name: str, *, grace_s: int = 0) -> None:
        self.call("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}", params={"gracePeriodSeconds": grace_s})

    def allow(self, *, pods: bool) -> None:
        """Let the fleet source list and watch pods, or take that right away."""
        rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
        if not pods:
            self.call("DELETE", f"{rbac}/rolebindings/source")
            return
        subject = {"kind": "User", "name": "source", "apiGroup": "rbac.authorization.k8s.io"}
        self.call(
            "POST",
            f"{rbac}/rolebindings",
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "RoleBinding",
                "metadata": {"name": "source", "namespace": NAMESPACE},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "source"},
                "subjects": [subject],
            },
        )

    def _patch(self, path: str, body: object) -> None:
        self.call("PATCH", path, body, headers={"content-type": "application/strategic-merge-patch+json"})


@contextmanager
def cluster(server: Path, folder: Path) -> Iterator[Cluster]:
    """Run etcd and the API server until the end of the block, with one namespace and the rights of a fleet source."""
    authority = Authority(folder)
    cert, key = authority.pair("apiserver")
    account = folder / "account.key"
    assert OPENSSL is not None
    subprocess.run([OPENSSL, "genrsa", "-out", str(account), "2048"], check=True, capture_output=True)
    tokens = folder / "tokens.csv"
    tokens.write_text(f'{ADMIN},admin,1,"system:masters"\n{SOURCE},source,2\n')
    store, peer, port = free_port(), free_port(), free_port()
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(folder, {"PATH": os.environ["PATH"]}, stop_timeout_s=20.0))
        processes.start_command(
            "etcd",
            [
                *("etcd", "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"),
                *("--listen-client-urls", f"http://127.0.0.1:{store}"),
                *("--advertise-client-urls", f"http://127.0.0.1:{store}"),
                *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
                *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
                *("--initial-cluster", f"default=http://127.0.0.1:{peer}"),
            ],
        )
        found = Cluster(folder, f"https://127.0.0.1:{port}", authority.ca, processes)
        found.command = [
            *(str(server), "--etcd-servers", f"http://127.0.0.1:{store}"),
            *("--bind-address", "127.0.0.1", "--secure-port", str(port), "--service-cluster-ip-range", "10.0.0.0/24"),
            *("--tls-cert-file", cert, "--tls-private-key-file", key, "--token-auth-file", str(tokens)),
            *("--authorization-mode", "RBAC", "--disable-admission-plugins", "ServiceAccount"),
            *("--service-account-issuer", "https://cluster.local", "--service-account-key-file", str(account)),
            *("--service-account-signing-key-file", str(account), "--min-request-timeout", "3"),
        ]
        found.start()
        found.call(
            "POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        )
        role = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": "source", "namespace": NAMESPACE},
            "rules": [
                {"apiGroups": [group], "resources": [resource], "verbs": ["list", "watch"]}
                for group, resource in SOURCES.items()
            ],
        }
        found.call("POST", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles", role)
        found.allow(pods=True)
        yield found


LIMIT_S = 60.0


@pytest.fixture
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


@needs_openssl
@pytest.mark.usefixtures("short_watches")
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


@needs_openssl
@pytest.mark.usefixtures("short_watches")
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


@needs_openssl
@pytest.mark.usefixtures("short_watches")
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


@needs_openssl
@pytest.mark.usefixtures("short_watches")
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


@needs_openssl
@pytest.mark.usefixtures("short_watches")
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


@needs_openssl
@pytest.mark.usefixtures("short_watches")
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
