"""The fleet of regions.yaml as processes: three simulated engines with their round trips, and `gorgo serve`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from gorgo.lab.demo import Processes

ROOT_CONFIG = Path(__file__).parents[2] / "regions.yaml"
#: A run is a minute: the first round trips and rates have to be known soon, in live and simulated runs alike.
PROBE_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """A running one."""

    url: str
    processes: Processes

    async def held(self, http: httpx.AsyncClient) -> int:
        """Requests that wait at the proxy now."""
        text = (await http.get(f"{self.url}/metrics", timeout=10.0)).text
        return int(float(text.partition("\ngorgo_queue_requests ")[2].partition("\n")[0]))


def configuration(*, held: bool, slo_ttft_ms: float, urls: Mapping[str, str], **overload: Any) -> dict[str, Any]:
    """regions.yaml with short intervals, those addresses, and what `overload` says; sent at once unless `held`."""
    config: dict[str, Any] = yaml.safe_load(ROOT_CONFIG.read_text(encoding="utf-8"))
    config["proxy"] |= {
        "bind": "127.0.0.1:0",
        "admin_bind": "127.0.0.1:0",
        "probe_interval_s": PROBE_INTERVAL_S,
        "scrape_interval_s": PROBE_INTERVAL_S,
    }
    for replica in config["replicas"]:
        replica["url"] = urls.get(replica["name"], replica["url"])
    config["overload"] |= (
        {"slo_ttft_ms": slo_ttft_ms, **overload} if held else {"queue_enabled": False, "hedge_budget_ratio": 0.0}
    )
    return config


def write_configuration(path: Path, config: Mapping[str, Any]) -> Path:
    """Answers `path`."""
    path.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
    return path


@contextmanager
def running(folder: Path, *, held: bool, slo_ttft_ms: float, **overload: Any) -> Iterator[Fleet]:
    """Start everything afresh, with empty caches; stop it whatever happens."""
    folder.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, "GORGO_ADMIN_TOKEN": secrets.token_hex(16), "PYTHONUNBUFFERED": "1"}
    path = folder / "regions.yaml"

    def write(urls: Mapping[str, str]) -> list[str]:
        config = configuration(held=held, slo_ttft_ms=slo_ttft_ms, urls=urls, **overload)
        write_configuration(path, config)
        return [replica["name"] for replica in config["replicas"]]

    with Processes(folder, environ) as processes:
        names = write({})
        for name in names:
            processes.start(name, ["engine", "--replica", name, "--config", str(path), "--port", "0"])
        write({name: processes.wait_for_line(name, r"listening on (http://\S+)")[1] for name in names})
        processes.start("serve", ["serve", "--config", str(path), "--seed", "0"])
        url = processes.wait_for_line("serve", r"listening on (http://\S+)")[1]
        yield Fleet(url, processes)
