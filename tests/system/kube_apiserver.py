"""A real Kubernetes API server with its store, on loopback: built once from the distribution's source package.

Owns the recipe and the processes. A program that GORGO_TEST_KUBE_APISERVER names is taken in the place of the recipe's:
Debian 12 has version 1.20, which knows neither EndpointSlices of v1 nor the rules in the CRD of InferencePools.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gorgo.lab.demo.run import Processes
from tests.picker.envoy.envoy import free_port
from tests.proxy.authority import OPENSSL, Authority
from tests.system.environments import InstallError, cache_folder

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
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise InstallError(f"needs root and apt-get, or a kube-apiserver that {NAMED} names")
    folder = cache_folder() / "kube-apiserver-1.20.2-1"
    made = folder / "kube-apiserver"
    with (cache_folder() / "kube-apiserver.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *_PACKAGES])
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
