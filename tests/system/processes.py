"""`gorgo engine` and `gorgo serve` as their users start them."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

# --- `gorgo engine` as its users start it: a process that imitates one replica.


_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 20.0
_LISTENING = re.compile(r"gorgo engine \S+ listening on (?P<url>\S+)")

_REGIONS = """
proxy: {region: here}
regions: [{name: here}]
replicas: [{name: engine, region: here, url: "http://127.0.0.1:1"}]
simulation: {rtt_ms: {here: 1}}
"""


@contextmanager
def engine_process(folder: Path) -> Iterator[str]:
    """Its URL; stopped by SIGTERM at the end, its log is in `folder`."""
    config = folder / "engine.yaml"
    config.write_text(_REGIONS)
    with engine_of_file(config, "engine", "--port", "0") as url:
        yield url


@contextmanager
def engine_of_file(config: Path, name: str, *more: str) -> Iterator[str]:
    """The URL of a replica of a regions.yaml; its log is beside the file."""
    command = [sys.executable, "-m", "gorgo", "engine", "--replica", name, "--config", str(config), *more]
    path = config.with_name(f"{name}.log")
    with path.open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], _START_TIMEOUT_S)
        found = _LISTENING.search(process.stdout.readline()) if readable else None
        if found is None:
            raise RuntimeError("gorgo engine did not start: " + path.read_text()[-2000:])
        yield found["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_STOP_TIMEOUT_S)
        process.stdout.close()


# --- `gorgo serve` as its users start it: a process with a regions.yaml.


#: Two cores may be shared with a dozen other processes that start.
_ROUTER_START_TIMEOUT_S = 120.0
_ROUTER_STOP_TIMEOUT_S = 40.0
TOKEN = "token-of-the-tests"
_ROUTER_LISTENING = re.compile(r"gorgo (?:serve|picker) listening on (?P<data>\S+) \(admin (?P<admin>\S+)\)")

_ROUTER_REGIONS = """
proxy: {{region: here, bind: "127.0.0.1:0", admin_bind: "127.0.0.1:0", policy: {policy}}}
regions: [{{name: here}}]
replicas:
{replicas}
"""


@dataclass(frozen=True, slots=True)
class RouterProcess:
    """A running router."""

    url: str
    admin_url: str
    #: Where its `regions.yaml` and its `router.log` are.
    folder: Path

    def admin(self, path: str) -> Any:
        answer = httpx.get(f"{self.admin_url}{path}", headers={"authorization": f"Bearer {TOKEN}"}, timeout=10)
        answer.raise_for_status()
        return answer.json()

    def in_flight(self) -> int:
        return sum(row["in_flight_requests"] for row in self.admin("/admin/fleet")["replicas"])

    def samples(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.admin("/admin/samples")["samples"]
        return rows


@contextmanager
def router_process(
    folder: Path,
    replicas: Mapping[str, str],
    *,
    engine: str,
    policy: str = "gorgo-ms",
    more: str = "",
    fields: Mapping[str, str] = {},
) -> Iterator[RouterProcess]:
    """`gorgo serve` before `replicas` (name to URL), stopped by SIGTERM; its log is in `folder`.

    `more` is added to regions.yaml, and `fields` to the entries of replicas by name.
    """
    rows = []
    for name, url in replicas.items():
        entry = [f"name: {name}", "region: here", f"url: '{url}'", f"engine: {engine}"]
        entry += [fields[name]] if name in fields else []
        rows.append(f"  - {{{', '.join(entry)}}}")
    config = folder / "regions.yaml"
    config.write_text(_ROUTER_REGIONS.format(policy=policy, replicas="\n".join(rows)) + more)
    with router_of_file(config) as router:
        yield router


@contextmanager
def router_of_file(config: Path) -> Iterator[RouterProcess]:
    """`gorgo serve` with a regions.yaml; its log is beside the file."""
    folder = config.parent
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gorgo", "serve", "--config", str(config)],
            env={**os.environ, "GORGO_ADMIN_TOKEN": TOKEN},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield _announced(process, folder)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_ROUTER_STOP_TIMEOUT_S)
        assert process.stdout is not None
        process.stdout.close()


def _announced(process: subprocess.Popen[str], folder: Path) -> RouterProcess:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], _ROUTER_START_TIMEOUT_S)
    found = _ROUTER_LISTENING.search(process.stdout.readline()) if readable else None
    if found is None:
        raise RuntimeError("gorgo serve did not start: " + (folder / "router.log").read_text()[-2000:])
    return RouterProcess(found["data"], found["admin"], folder)
