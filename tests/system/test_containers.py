"""The image and the compose file with a real container engine: built, run read-only, and one request answered.

No registry is needed: the base image is a minimal system of the distribution under the base's name.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from gorgo import __version__
from tests.packaging.conftest import ROOT
from tests.system.environments import Environment, InstallError, apt_install, cache_folder, compose_environment

PACKAGING = ROOT / "packaging"
BASE = "docker.io/library/python:3.11.13-slim-bookworm"
#: As the compose file names it.
TAG = f"gorgo:{__version__}"
#: The engine's other runtime does not start where the control groups of two versions are mixed.
RUNTIME = "/usr/bin/runc"
LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096")
_PACKAGES = ("podman", "runc", "netavark", "aardvark-dns", "iptables", "debootstrap")
_BUILD_S, _START_S = 1800, 180.0
#: Of others, from a registry.
FOREIGN = ("prometheus", "grafana")


@dataclass(frozen=True, slots=True)
class Engine:
    """podman, and the image that it has built."""

    digest: str

    def run(self, *words: str, timeout_s: float = 120.0, check: bool = True) -> str:
        done = subprocess.run(["podman", *words], capture_output=True, text=True, check=False, timeout=timeout_s)
        assert not check or done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout.strip()


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The image, built from the working tree. Its base is made once."""
    try:
        apt_install(*_PACKAGES)
    except InstallError as error:
        pytest.skip(f"CONTAINERS SKIPPED: {error}")
    engine = Engine(_base_digest())
    engine.run(
        *("build", "--format", "docker", "--network", "host", "--runtime", RUNTIME, *LIMITS),
        *("--file", str(PACKAGING / "Containerfile"), "--build-arg", f"BASE_DIGEST={engine.digest}"),
        *("--tag", TAG, str(ROOT)),
        timeout_s=_BUILD_S,
    )
    return engine


def _base_digest() -> str:
    """Return the digest of the base image, made if it is not there."""
    inspect = ["podman", "image", "inspect", "--format", "{{.Digest}}", BASE]
    known = subprocess.run(inspect, capture_output=True, text=True, check=False)
    if known.returncode == 0:
        return known.stdout.strip()
    folder = cache_folder() / "bookworm"
    shutil.rmtree(folder, ignore_errors=True)
    words = "python3,python3-venv,python-is-python3,ca-certificates"
    mirror = next(
        line.split(": ", 1)[1]
        for line in Path("/etc/apt/sources.list.d/debian.sources").read_text().splitlines()
        if line.startswith("URIs: ")
    )
    make = ["nice", "debootstrap", "--variant=minbase", f"--include={words}", "bookworm", str(folder), mirror]
    done = subprocess.run(make, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"CONTAINERS SKIPPED: debootstrap failed: {done.stdout[-500:]}")
    # The package index may be certified by an authority of this machine's own.
    authorities = "etc/ssl/certs/ca-certificates.crt"
    shutil.copy(f"/{authorities}", folder / authorities)
    with subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE) as packed:
        change = ["--change", f"ENV=PIP_CERT=/{authorities}"]
        subprocess.run(["podman", "import", *change, "-", BASE], stdin=packed.stdout, check=True, capture_output=True)
    shutil.rmtree(folder)
    return subprocess.run(inspect, capture_output=True, text=True, check=True).stdout.strip()


def test_image_has_the_health_check_the_user_and_the_labels_of_its_file(engine: Engine) -> None:
    (found,) = json.loads(engine.run("image", "inspect", TAG))
    assert found["Config"]["User"] == "10001:10001"
    assert found["Config"]["Entrypoint"] == ["gorgo"]
    assert "healthcheck.py" in " ".join(found["Healthcheck"]["Test"]), "only the format `docker` has it"


def test_container_serves_read_only_as_its_user_and_is_healthy(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "regions.yaml").write_text(
        "proxy: {region: here}\nregions: [{name: here}]\n"
        "replicas: [{name: a, region: here, url: 'http://127.0.0.1:30000'}]\n"
    )
    tmp_path.chmod(0o755)
    name = f"gorgo-test-{os.getpid()}"
    engine.run(
        *("run", "--detach", "--rm", "--name", name, "--runtime", RUNTIME, *LIMITS),
        *("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--volume", f"{tmp_path}:/etc/gorgo:ro", "--publish", "127.0.0.1::8080", TAG),
    )
    try:
        host, _, port = engine.run("port", name, "8080/tcp").rpartition(":")
        _until_status(f"http://{host}:{port}/health", 200)
        assert engine.run("exec", name, "python", "-c", "import os; print(os.getuid())") == "10001"
        assert engine.run("healthcheck", "run", name) == ""
        with httpx.Client(trust_env=False) as client:
            assert client.get(f"http://{host}:{port}/ready").status_code == 503, "its replica is nowhere"
    finally:
        engine.run("stop", "--time", "45", name)


@pytest.fixture
def compose(engine: Engine, tmp_path: Path) -> Iterator[Path]:
    """The folder `packaging` with secrets, and the compose file without the images of others."""
    try:
        environment = compose_environment()
    except InstallError as error:
        pytest.skip(f"COMPOSE SKIPPED: {error}")
    folder = tmp_path / "packaging"
    shutil.copytree(PACKAGING, folder, ignore=shutil.ignore_patterns("kubernetes", "site"))
    document = yaml.safe_load((folder / "compose.yaml").read_text())
    for name in FOREIGN:
        del document["services"][name]
    for service in document["services"].values():
        service.pop("build", None)
        # `service_healthy` is ignored by this version of podman, and would be refused by compose.
        service["ulimits"] = {"nofile": 1024, "nproc": 4096}
    (folder / "compose.yaml").write_text(yaml.safe_dump(document))
    secrets = folder / "secrets"
    secrets.mkdir(mode=0o700)
    for secret in ("admin-token", "grafana-password"):
        (secrets / secret).write_text("0" * 64 + "\n")
    words = ("--podman-run-args", f"--runtime {RUNTIME}", "--project-name", f"gorgo-test-{os.getpid()}")
    _compose(environment, folder, *words, "up", "--detach", "--no-build")
    try:
        yield folder
    finally:
        _compose(environment, folder, *words, "down", "--volumes", "--timeout", "60")


@pytest.mark.filterwarnings("default:NOT RUN")
def test_composed_fleet_answers_a_request_and_its_tuner_sees_it(compose: Path) -> None:
    _until_status("http://127.0.0.1:8080/ready", 200)
    body = {"model": "gorgo-sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    with httpx.Client(trust_env=False, timeout=60) as client:
        answer = client.post("http://127.0.0.1:8080/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
        admin = client.get("http://127.0.0.1:9090/admin/fleet", headers={"authorization": "Bearer " + "0" * 64})
        assert len(admin.json()["replicas"]) == 3
    warnings.warn(f"NOT RUN: {', '.join(FOREIGN)} of compose.yaml, whose images are in registries", stacklevel=1)


def _compose(environment: Environment, folder: Path, *words: str) -> None:
    program = str(environment.folder / "bin/podman-compose")
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False, cwd=folder, timeout=600)
    assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])


def _until_status(url: str, status: int) -> None:
    deadline_s = time.monotonic() + _START_S
    found: object = None
    while time.monotonic() < deadline_s:
        try:
            found = httpx.get(url, trust_env=False, timeout=5).status_code
        except httpx.TransportError as error:
            found = error
        if found == status:
            return
        time.sleep(0.5)
    raise AssertionError(f"{url}: {found!r}; expected {status}")
