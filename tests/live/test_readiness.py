"""`/ready`: 503 with the reason whenever no request could be served."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gorgo.live.readiness import why_not_ready
from tests.live.admin.page.made import view
from tests.proxy.conftest import Start
from tests.proxy.fakes import answer, chat
from tests.proxy.followed import follow, regions
from tests.proxy.test_reload_process import served

SILENT = "without an answer to probes"
NOT_ALLOWED = "without a model that its region may serve"


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({}, None),
        ({"answers": False}, None),  # one lost ping after a recent round trip
        ({"answers": False, "rtt_ms": None, "failures_in_a_row": 0}, None),  # requests succeed
        ({"answers": None, "rtt_ms": None}, None),  # no probe yet
        ({"answers": False, "rtt_ms": None, "failures_in_a_row": 1}, SILENT),
        ({"state": "ejected", "ejected_by": "probes"}, SILENT),
        ({"state": "ejected", "ejected_by": "region"}, SILENT),
        ({"state": "ejected", "ejected_by": "attempts"}, "ejected after failed requests"),
        ({"state": "half_open", "ejected_by": "attempts", "answers": True}, None),
        ({"state": "half_open", "ejected_by": "probes", "answers": False}, SILENT),
        ({"state": "draining"}, "draining"),
        ({"models": ("m",)}, NOT_ALLOWED),
        ({"models": ("m", "free")}, None),
        ({"models": ("far only", "m")}, NOT_ALLOWED),
    ],
)
def test_replica_counts_only_if_it_could_serve_a_request(changes: dict[str, Any], obstacle: str | None) -> None:
    allowed = {"m": frozenset({"elsewhere"}), "far only": frozenset({"far"})}
    expected = None if obstacle is None else ("no_replica", f"no replica can serve a request: 1 {obstacle}")
    assert why_not_ready([view(**changes)], allowed) == expected


def test_reason_counts_the_replicas_of_each_kind_and_names_none() -> None:
    gone = [view("a", state="draining"), view("b", state="ejected", ejected_by="probes"), view("c", state="draining")]
    assert why_not_ready(gone, {}) == ("no_replica", f"no replica can serve a request: 2 draining, 1 {SILENT}")
    assert why_not_ready([*gone, view("d")], {}) is None


def test_replica_whose_pings_find_no_connection_does_not_count_before_its_probes_eject_it() -> None:
    expected = ("no_replica", "no replica can serve a request: 1 without a connection")
    assert why_not_ready([view("a")], {}, unreachable={"a"}) == expected
    assert why_not_ready([view("a"), view("b")], {}, unreachable={"a"}) is None


def test_empty_fleet_is_not_ready() -> None:
    assert why_not_ready([], {}) == ("no_replica", "no replica can serve a request: the fleet is empty")


async def test_fleet_that_is_ejected_by_failed_requests_is_not_ready_until_a_trial_may_start(start: Start) -> None:
    fleet = await start.fleet([answer(500)])
    for _ in range(3):
        await fleet.client.post("/v1/chat/completions", content=chat())
    refused = await fleet.client.get("/ready")
    assert refused.status_code == 503
    assert refused.json()["error"]["message"].endswith("1 ejected after failed requests")
    alerts = [row["text"] for row in (await fleet.admin.get("/admin/status")).json()["alerts"]]
    assert "No replica can serve a request: 1 ejected after failed requests" in alerts
    fleet.state.routing.router.handle_timer(now=fleet.state.routing.clock() + 60.0)
    assert (await fleet.client.get("/ready")).status_code == 200


async def test_replica_whose_region_may_serve_none_of_its_models_does_not_make_the_proxy_ready(
    start: Start, tmp_path: Path
) -> None:
    replica = await start.replica(answer(200))
    row = {"url": replica.url, "models": ["m"]}
    places = [{"name": "here"}, {"name": "far"}]
    rule = [{"name": "m", "allowed_regions": ["far"]}]
    followed = await follow(start, tmp_path, regions({"a": row}, regions=places, models=rule), [replica])
    client = followed.fleet.client
    assert NOT_ALLOWED in (await client.get("/ready")).json()["error"]["message"]
    assert (await client.post("/v1/chat/completions", content=chat())).status_code == 403
    await followed.rewrite(regions({"a": row}, regions=places, clients={"open": True}))
    assert (await client.get("/ready")).status_code == 200


@asynccontextmanager
async def engine(folder: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """`gorgo engine` on this port, killed at the end of the block."""
    words = ("engine", "--config", str(folder / "engine.yaml"), "--replica", "a", "--port", str(port))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gorgo", *words),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        assert b"listening on" in await asyncio.wait_for(process.stdout.readline(), 30)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ready_becomes(client: httpx.AsyncClient, status: int) -> httpx.Response:
    async with asyncio.timeout(30):
        while (response := await client.get("/ready")).status_code != status:
            await asyncio.sleep(0.05)
    return response


@pytest.mark.system
async def test_processes_that_die_and_return_turn_ready_off_and_on(tmp_path: Path, unused_tcp_port: int) -> None:
    row = {"url": f"http://127.0.0.1:{unused_tcp_port}"}
    text = regions({"a": row}, proxy={"probe_interval_s": 0.2}, simulation={"rtt_ms": {"here": 1}})
    (tmp_path / "engine.yaml").write_bytes(text)
    (tmp_path / "regions.yaml").write_bytes(text)
    async with served(tmp_path / "regions.yaml") as proxy:
        # Dead from the start: the first answer of the process says so.
        first = await proxy.client.get("/ready")
        assert (first.status_code, first.json()["error"]["code"]) == (503, "no_replica")
        assert first.json()["error"]["message"] == f"no replica can serve a request: 1 {SILENT}"
        assert (await proxy.client.get("/health")).status_code == 200
        for _ in range(2):  # comes up, dies
            async with engine(tmp_path, unused_tcp_port):
                await ready_becomes(proxy.client, 200)
                assert (await proxy.client.post("/v1/chat/completions", content=chat(max_tokens=2))).is_success
            await ready_becomes(proxy.client, 503)


@pytest.mark.system
async def test_death_shows_in_seconds_though_probes_are_half_a_minute_apart(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    row = {"url": f"http://127.0.0.1:{unused_tcp_port}"}
    text = regions({"a": row}, proxy={"probe_interval_s": 30.0}, simulation={"rtt_ms": {"here": 1}})
    (tmp_path / "engine.yaml").write_bytes(text)
    (tmp_path / "regions.yaml").write_bytes(text)
    async with engine(tmp_path, unused_tcp_port) as process, served(tmp_path / "regions.yaml") as proxy:
        assert (await proxy.client.get("/ready")).status_code == 200
        process.kill()
        died_s = time.monotonic()
        down = await ready_becomes(proxy.client, 503)
        assert time.monotonic() - died_s < 20.0  # two rounds of pings, 2 s apart, and room for a busy machine
        assert down.json()["error"]["message"] == "no replica can serve a request: 1 without a connection"
