"""How a proxy is wired from its configuration."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, OverloadConfig, ProxyConfig, RegionConfig
from gorgo.config.router_settings import router_limits
from gorgo.live.build import build_live
from gorgo.live.state import LiveState, why_not_ready
from gorgo.policies.registry import make_policy
from tests.live.admin.page.made import view
from tests.proxy.conftest import QUIET, Start, system_tls
from tests.proxy.fakes import answer, chat
from tests.proxy.followed import follow, regions
from tests.proxy.test_reload_process import served

CONFIG = Config(
    proxy=QUIET,
    regions=(RegionConfig(name="here"),),
    replicas=(ReplicaConfig(name="a", region="here", url="https://127.0.0.1:1"),),
)


async def built(config: Config = CONFIG, **options: Any) -> LiveState:
    state = build_live(config, policy=make_policy("round-robin"), weights=None, environ={}, key=1, seed=1, **options)
    await state.aclose()
    return state


async def test_replicas_must_show_a_certificate_of_the_system_s_authorities_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    monkeypatch.setattr(ssl, "create_default_context", lambda: made)
    assert (await built()).replicas.tls() is made


async def test_a_context_that_is_given_is_the_one_of_replicas_without_files() -> None:
    assert (await built(tls=system_tls())).replicas.tls() is system_tls()


@pytest.mark.parametrize(("variable", "internal"), [({}, False), ({"GORGO_INTERNAL_ROUTES": "1"}, True)])
async def test_internal_routes_are_there_for_those_who_ask(variable: dict[str, str], internal: bool) -> None:
    policy = make_policy("round-robin")
    state = build_live(CONFIG, policy=policy, weights=None, environ=variable, key=1, seed=1, tls=system_tls())
    await state.aclose()
    assert state.internal_routes is internal


@pytest.mark.parametrize(
    ("proxy", "stale_after_s"),
    [
        ({"probe_interval_s": 5.0, "scrape_interval_s": 30.0}, 90.0),
        ({"probe_interval_s": 40.0, "scrape_interval_s": 30.0}, 120.0),
    ],
)
def test_what_is_known_is_stale_after_three_of_the_longer_interval(
    proxy: dict[str, float], stale_after_s: float
) -> None:
    limits = router_limits(Config(proxy=ProxyConfig(region="here", **proxy), regions=CONFIG.regions, replicas=()))  # type: ignore[arg-type]
    assert limits.stale_after_s == stale_after_s
    assert limits.region_window_s == proxy["probe_interval_s"]


def test_milliseconds_of_the_file_are_seconds_of_the_router() -> None:
    file = OverloadConfig(
        max_backlog_ms=1500.0,
        slo_ttft_ms=2000.0,
        slo_e2e_ms=9000.0,
        no_replica_wait_s=4.0,
        queue_max_requests=17,
    )
    limits = router_limits(Config(proxy=QUIET, regions=CONFIG.regions, replicas=(), overload=file))
    found = limits.overload
    assert (found.max_backlog_s, found.slo_ttft_s, found.slo_e2e_s) == (1.5, 2.0, 9.0)
    assert (found.no_replica_wait_s, found.queue_max_requests) == (4.0, 17)
    unset = router_limits(CONFIG).overload
    assert (unset.slo_ttft_s, unset.slo_e2e_s) == (None, None)


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
