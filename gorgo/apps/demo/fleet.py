"""A fresh fleet for one policy: three simulated engines and the proxy in front of them, each its own process."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from gorgo.apps.demo.processes import POLL_S, Processes
from gorgo.config.atomic import write_atomically
from gorgo.errors import FleetError
from gorgo.live.training_status import model_line

#: The fleet that is fitted to the paper is beyond its capacity at the nine requests a second of the demo.
PROFILE = "2xL40S-Qwen3.5-35B-A3B-FP8-estimate"
#: Region of each replica and its mean round trip from the proxy, which is in the first.
ROUND_TRIP_MS = {"us-ashburn": 2, "eu-frankfurt": 95, "ap-seoul": 180}
REPLICAS = {"ashburn-0": "us-ashburn", "frankfurt-0": "eu-frankfurt", "seoul-0": "ap-seoul"}
MODEL = "gorgo-sim"
#: The paper probes and scrapes every 30 s; a run here is shorter than that.
PROBE_INTERVAL_S = 2.0
#: For policies that learn: models of some tens of requests, since a run has about two hundred. Short of a finding.
LEARNING = {"first_samples": 40, "round_samples": 40, "epochs": 300}
#: For the first probe of each replica to come back.
PROBED_TIMEOUT_S = 20.0
#: Replaced as soon as the engines say where they listen.
UNKNOWN_URL = "http://127.0.0.1:1"


@dataclass(frozen=True, slots=True)
class DemoFleet:
    """A running fleet: addresses of its proxy, and its processes."""

    url: str
    admin_url: str
    token: str
    processes: Processes

    def weights(self) -> dict[str, float]:
        """Return the weights in force."""
        weights = self._admin("/admin/weights")["weights"]
        return {name: float(value) for name, value in weights.items()}

    def learned(self) -> str | None:
        """Return what the policy has learned, in words; `None` for one that does not learn."""
        return model_line(self._admin("/admin/model"))

    def wait_until_probed(self) -> None:
        """Wait until the proxy knows the round trip to every replica; raises `FleetError` after a timeout."""
        deadline_s = time.monotonic() + PROBED_TIMEOUT_S
        while any(replica["rtt_ms"] is None for replica in self._admin("/admin/fleet")["replicas"]):
            self.processes.check_alive()
            if time.monotonic() > deadline_s:
                raise FleetError(f"the proxy did not reach every replica within {PROBED_TIMEOUT_S:g} s")
            time.sleep(POLL_S)

    def _admin(self, path: str) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self.token}"}
        try:
            response = httpx.get(self.admin_url + path, headers=headers, timeout=5.0, trust_env=False)
            answer: dict[str, Any] = response.raise_for_status().json()
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise FleetError(f"GET {path} of the proxy: {error}") from None
        return answer


@contextmanager
def running_fleet(policy: str, *, folder: Path, seed: int) -> Iterator[DemoFleet]:
    """Start all processes, wait until they are ready, and stop them in any case."""
    token = secrets.token_urlsafe(24)
    environ = {**os.environ, "GORGO_ADMIN_TOKEN": token, "PYTHONUNBUFFERED": "1"}
    config = folder / "regions.yaml"
    _write_config(config, policy, seed, dict.fromkeys(REPLICAS, UNKNOWN_URL))
    with Processes(folder, environ) as processes:
        for name in REPLICAS:
            processes.start(name, ["engine", "--replica", name, "--config", str(config), "--port", "0"])
        urls = {name: _url_of(processes, name) for name in REPLICAS}
        _write_config(config, policy, seed, urls)
        processes.start("serve", ["serve", "--config", str(config), "--seed", str(seed)])
        ready = processes.wait_for_line("serve", r"listening on (http://\S+) \(admin (http://[^\s)]+)\)")
        fleet = DemoFleet(ready[1], ready[2], token, processes)
        fleet.wait_until_probed()
        yield fleet


def _url_of(processes: Processes, name: str) -> str:
    return processes.wait_for_line(name, r"listening on (http://\S+)")[1]


def _write_config(path: Path, policy: str, seed: int, urls: Mapping[str, str]) -> None:
    config = {
        "proxy": {
            "region": "us-ashburn",
            "policy": policy,
            "bind": "127.0.0.1:0",
            "admin_bind": "127.0.0.1:0",
            "probe_interval_s": PROBE_INTERVAL_S,
            "scrape_interval_s": PROBE_INTERVAL_S,
            "learning": LEARNING,
        },
        "regions": [{"name": region} for region in ROUND_TRIP_MS],
        "replicas": [
            {"name": name, "region": region, "url": urls[name], "models": [MODEL]} for name, region in REPLICAS.items()
        ],
        "simulation": {"rtt_ms": ROUND_TRIP_MS, "seed": seed, "profile": PROFILE},
    }
    write_atomically(path, yaml.safe_dump(config, sort_keys=False).encode())
