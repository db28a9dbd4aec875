"""Start, background loops, every way to stop, and a balancer before two proxies."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gorgo.config.values import WARM_CONNECTIONS
from gorgo.engines.sglang import SGLang
from gorgo.errors import ConfigError
from gorgo.live.monitor.replica_monitor import ReplicaMonitor
from gorgo.live.process import ProcessOptions
from gorgo.policies.registry import make_policy
from gorgo.proxy.server import serve
from tests.ports import free_port
from tests.proxy.conftest import QUIET, Running, Start, config_for, until, with_replica
from tests.proxy.fakes import DONE, FakeReplica, answer, chat, delta, event, hang, reset_after, stream
from tests.proxy.raw import connected

# --- Start, background loops, and every way to stop.


CHAT = "/v1/chat/completions"
METRICS = """# HELP sglang:num_running_reqs x
sglang:num_running_reqs{model_name="m",dp_rank="0"} 3.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:num_used_tokens{model_name="m"} 100
sglang:token_usage{model_name="m"} 0.1
"""


async def test_replicas_are_probed_and_scraped_before_it_is_ready(start: Start) -> None:
    replica = await start.replica(answer(200))
    replica.metrics = METRICS
    replica.loads = {"loads": [{"max_total_num_tokens": 5000, "max_running_requests": 8, "num_running_reqs": 9}]}
    fleet = await start.proxy(config_for([replica]), [replica])
    (view,) = fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())
    assert replica.pings == 2
    assert view.rtt_ms is not None
    assert (view.running_requests, view.queued_requests, view.used_tokens) == (3, 2, 100)
    assert (view.kv_capacity_tokens, view.max_running_requests) == (5000, 8)


async def test_dead_replica_does_not_keep_it_from_starting(start: Start) -> None:
    good = await start.replica(answer(200))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        config = with_replica(config_for([good, good]), 0, url=f"http://127.0.0.1:{unused.getsockname()[1]}")
        fleet = await start.proxy(config, [good])
    views = fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())
    assert views[0].rtt_ms is None
    assert views[1].rtt_ms is not None
    text = (await fleet.client.get("/metrics")).text
    assert 'gorgo_probe_failures_total{region="here",replica="r0"} 1.0' in text


@pytest.mark.parametrize("silent", ["/ping", "/metrics"])
async def test_silent_replica_does_not_keep_it_from_starting(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, silent: str
) -> None:
    """Until it has started nobody is answered, and no SIGTERM is heeded."""
    monkeypatch.setattr("gorgo.live.monitor.replica_monitor.FIRST_PROBE_TIMEOUT_S", 0.1)
    replica = await start.replica(answer(200))
    replica.silent = silent
    async with asyncio.timeout(4.0):  # a ping may take 5 s, a scrape 10
        fleet = await start.proxy(config_for([replica]), [replica])
    (view,) = fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())
    assert (view.rtt_ms is None) == (silent == "/ping")
    told = [record.getMessage() for record in caplog.records]
    assert told.count("replica_does_not_answer") == (silent == "/ping")


@pytest.mark.parametrize("key", ["bind", "admin_bind"])
async def test_port_that_is_taken_is_named(start: Start, key: str) -> None:
    replica = await start.replica(answer(200))
    taken = f"127.0.0.1:{replica.port}"
    config = config_for([replica])
    elsewhere: dict[str, Any] = {key: taken}
    with pytest.raises(ConfigError, match=rf"proxy\.{key}: cannot listen on {taken}: Address already in use"):
        await start.proxy(replace(config, proxy=replace(config.proxy, **elsewhere)), [replica])


async def test_loops_keep_asking_and_keep_connections_warm(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.live.monitor.replica_monitor.WARM_INTERVAL_S", 0.02)
    fleet = await start.fleet([answer(200)], proxy=replace(QUIET, probe_interval_s=0.02, scrape_interval_s=0.02))
    await until(lambda: fleet.replicas[0].pings > 20)
    assert fleet.state.replicas.targets["r0"].upstream.connections >= WARM_CONNECTIONS


async def test_what_a_replica_does_not_report_is_said_once_and_shown(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    replica = await start.replica(stream(delta("a"), event({"choices": [], "usage": {"prompt_tokens": 2}}), DONE))
    replica.loads = {"loads": []}
    fleet = await start.proxy(config_for([replica]), [replica])
    long = chat(stream=True, messages=[{"role": "user", "content": "x" * 4096}])
    for _ in range(12):
        await fleet.client.post(CHAT, content=long)
    shown = (await fleet.admin.get("/admin/fleet")).json()["replicas"][0]["reports"]
    assert shown == {"cached_tokens": "missing", "metrics": "missing"}
    told = [record.fields for record in caplog.records if record.getMessage() == "report_missing"]  # type: ignore[attr-defined]
    assert [fields["report"] for fields in told] == ["metrics", "cached_tokens"]
    assert "--enable-metrics" in told[0]["advice"]


async def test_probe_failures_are_logged_once_and_the_return_too(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "gorgo")
    fleet = await start.fleet([answer(500)])
    target = fleet.state.replicas.targets["r0"]
    monitor = ReplicaMonitor(fleet.state, replace(target, dialect=_Broken()), spread=lambda: 0.5)
    for _ in range(3):
        await monitor.probe()
    monkeypatch.setattr(_Broken, "probe_path", target.dialect.probe_path)
    await monitor.probe()
    told = [(record.levelname, record.getMessage()) for record in caplog.records if "answer" in record.getMessage()]
    assert told == [("WARNING", "replica_does_not_answer"), ("INFO", "replica_answers")]


async def test_a_replica_that_started_again_is_said_and_counted_and_believed_empty(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    replica = await start.replica(stream(delta("a"), DONE))
    fleet = await start.proxy(config_for([replica]), [replica])
    watcher = ReplicaMonitor(fleet.state, fleet.state.replicas.targets["r0"], spread=lambda: 0.5)
    await fleet.client.post(CHAT, content=chat(stream=True, messages=[{"role": "user", "content": "x" * 4096}]))
    counted = "sglang:prompt_tokens_total{} "
    for replica.metrics in (counted + "1030.0", counted + "1030.0", counted + "7.0", counted + "9.0"):
        (row,) = fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())
        assert (row.index_blocks > 0) == (replica.metrics != counted + "9.0")
        await watcher.scrape()
    assert [record.getMessage() for record in caplog.records].count("replica_restarted") == 1
    text = (await fleet.client.get("/metrics")).text
    assert 'gorgo_replica_restarts_total{region="here",replica="r0"} 1.0' in text


async def test_a_broken_connection_has_the_figures_read_soon_and_not_at_the_next_interval(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gorgo.live.monitor.replica_monitor.AFTER_BREAK_S", 0.01)
    replica = await start.replica(stream(delta("a"), DONE), reset_after(delta("a")))
    counted = "sglang:prompt_tokens_total "
    replica.metrics = counted + "1030"
    fleet = await start.proxy(config_for([replica]), [replica])
    long = chat(stream=True, messages=[{"role": "user", "content": "x" * 4096}])
    await fleet.client.post(CHAT, content=long)
    assert fleet.state.routing.router.view.snapshots(now=0.0)[0].restarts == 0
    replica.metrics = counted + "0"
    await fleet.client.post(CHAT, content=long)
    await until(lambda: fleet.state.routing.router.view.snapshots(now=0.0)[0].restarts == 1)
    (row,) = fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())
    assert row.index_blocks == 0


async def test_stats_of_a_replica_that_is_back_are_read_at_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = await start.replica(answer(200))
    replica.metrics = "sglang:num_running_reqs 3.0"
    fleet = await start.proxy(config_for([replica]), [replica])
    target = fleet.state.replicas.targets["r0"]
    monitor = ReplicaMonitor(fleet.state, replace(target, dialect=_Broken()), spread=lambda: 0.5)
    await monitor.probe()
    monkeypatch.setattr(_Broken, "probe_path", target.dialect.probe_path)
    await monitor.probe()
    (row,) = fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())
    assert row.running_requests == 3.0


class _Broken(SGLang):
    """A dialect whose ping is a route that fails."""

    probe_path = "/fails"


async def test_missing_key_is_a_configuration_error(start: Start) -> None:
    replica = await start.replica(answer(200))
    config = with_replica(config_for([replica]), 0, api_key_env="NOT_SET")
    with pytest.raises(ConfigError, match="NOT_SET"):
        await serve(config, ProcessOptions(policy=make_policy("random"), environ={}, key=1, seed=1))


async def test_stopping_lets_streams_finish_and_takes_nothing_new(start: Start) -> None:
    fleet = await start.fleet([hang(delta("a"), rest=[delta("b"), DONE])])
    async with fleet.client.stream("POST", CHAT, content=chat(stream=True)) as response:
        raw = response.aiter_raw()
        got = await anext(raw)
        fleet.shutdown.set()
        await until(lambda: fleet.state.stopping)
        assert (await fleet.client.get("/ready")).status_code == 503
        assert (await fleet.client.get("/health")).status_code == 200
        refused = await fleet.client.post(CHAT, content=chat(stream=True))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        fleet.replicas[0].release.set()
        got += b"".join([chunk async for chunk in raw])
    assert got == delta("a") + delta("b") + DONE
    await asyncio.wait_for(fleet.task, 10)
    fleet.check()


async def test_stream_that_outlives_the_grace_is_told_and_cut(start: Start) -> None:
    fleet = await start.fleet([hang(delta("a"))], shutdown_grace_s=0.1)
    async with fleet.client.stream("POST", CHAT, content=chat(stream=True)) as response:
        raw = response.aiter_raw()
        got = await anext(raw)
        fleet.shutdown.set()
        got += b"".join([chunk async for chunk in raw])
    assert got.startswith(delta("a"))
    assert b'"code": "stopping"' in got
    await asyncio.wait_for(fleet.task, 10)
    fleet.check()
    assert fleet.replicas[0].dropped.is_set()


async def test_client_that_does_not_read_does_not_keep_it_from_stopping(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gorgo.live.process.CLOSE_S", 0.1)  # sooner than the last words to it are given up
    flood = tuple(delta("x" * 60_000) for _ in range(400))
    fleet = await start.fleet([hang(*flood)], shutdown_grace_s=0.1)
    async with connected(fleet.addresses.data) as client:
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await client.post(CHAT, chat(stream=True))
        await fleet.replicas[0].arrived.wait()
        fleet.shutdown.set()
        await asyncio.wait_for(fleet.task, 10)
        client.reset()
    fleet.check()


async def test_request_that_waits_when_the_grace_ends_gets_a_503(start: Start) -> None:
    fleet = await start.fleet([hang()], shutdown_grace_s=0.1)
    request = asyncio.create_task(fleet.client.post(CHAT, content=chat(stream=True)))
    await fleet.replicas[0].arrived.wait()
    fleet.shutdown.set()
    response = await request
    assert (response.status_code, response.json()["error"]["code"]) == (503, "stopping")
    await asyncio.wait_for(fleet.task, 10)
    fleet.check()


async def test_idle_connections_do_not_hold_up_the_stop(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    async with connected(fleet.addresses.data) as idle:
        await fleet.client.get("/health")
        fleet.shutdown.set()
        await asyncio.wait_for(fleet.task, 10)
        assert await idle.rest() == b""


PROGRAM = """
import asyncio, sys
from gorgo.config.model import Config, LimitsConfig, ProxyConfig, RegionConfig, ReplicaConfig
from gorgo.policies.registry import make_policy
from gorgo.live.logs import set_up_logs
from gorgo.live.process import ProcessOptions
from gorgo.proxy.server import serve
config = Config(
    proxy=ProxyConfig(region="here", bind="127.0.0.1:0", admin_bind="127.0.0.1:0"),
    regions=(RegionConfig(name="here"),),
    replicas=(ReplicaConfig(name="r0", region="here", url=sys.argv[1], engine="sglang"),),
    limits=LimitsConfig(shutdown_grace_s=float(sys.argv[2])),
)
def ready(addresses):
    print(*addresses.data, flush=True)
set_up_logs()
options = ProcessOptions(policy=make_policy("gorgo"), environ={}, key=1, seed=1)
asyncio.run(serve(config, options, ready=ready))
"""


async def spawned(replica: FakeReplica, grace_s: float) -> tuple[asyncio.subprocess.Process, tuple[str, int]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        replica.url,
        str(grace_s),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert process.stdout is not None
    host, port = (await asyncio.wait_for(process.stdout.readline(), 30)).split()
    return process, (host.decode(), int(port))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_ends_the_process_cleanly_after_its_streams(start: Start, number: signal.Signals) -> None:
    replica = await start.replica(hang(delta("a"), rest=[DONE]))
    process, address = await spawned(replica, 30)
    async with connected(address) as client:
        await client.post(CHAT, chat(stream=True), "connection: close")
        await client.head()
        process.send_signal(number)
        async with connected(address) as other:
            await until_ready_is_503(other)
        replica.release.set()
        assert DONE in await client.rest()
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0
    lines = [json.loads(line) for line in stderr.splitlines()]
    events = [line["event"] for line in lines]
    assert "ready" in events
    assert "stopping" in events
    (request,) = [line for line in lines if line["event"] == "request"]
    assert request["replica"] == "r0"
    assert request["status"] == 200
    assert request["ttft_ms"] > 0


async def until_ready_is_503(client) -> None:  # type: ignore[no-untyped-def]
    for _ in range(1000):
        client.writer.write(b"GET /ready HTTP/1.1\r\nhost: gorgo\r\n\r\n")
        head = await client.head()
        await client.reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        if head.startswith(b"HTTP/1.1 503"):
            return
    raise AssertionError("still ready")


async def test_second_signal_ends_the_grace(start: Start) -> None:
    replica = await start.replica(hang(delta("a")))
    process, address = await spawned(replica, 1000)
    async with connected(address) as client:
        await client.post(CHAT, chat(stream=True), "connection: close")
        await client.head()
        process.send_signal(signal.SIGTERM)
        async with connected(address) as other:
            await until_ready_is_503(other)
        process.send_signal(signal.SIGTERM)
        assert b'"code": "stopping"' in await client.rest()
    await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0


# --- nginx of packaging/compose.two.yaml before two proxies: one that stops or dies costs no request.


CONFIGURATION = (Path(__file__).parents[2] / "packaging/balancer.conf").read_text()
NGINX = shutil.which("nginx")

needs_nginx = pytest.mark.skipif(NGINX is None, reason="needs nginx")


@asynccontextmanager
async def balanced(proxies: list[Running], folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """nginx with the file, its names and folders replaced by those of the test."""
    port = free_port()
    first, second = (proxy.addresses.data_url.removeprefix("http://") for proxy in proxies)
    text = CONFIGURATION.replace("listen 8080;", f"listen 127.0.0.1:{port};").replace("/tmp/", f"{folder}/")
    text = text.replace("server proxy:8080", f"server {first}").replace("server proxy-2:8080", f"server {second}")
    assert len(re.findall(r"server 127\.0\.0\.1:\d+ ", text)) == 2
    (folder / "nginx.conf").write_text(text.replace("worker_processes auto;", "worker_processes 1;"))
    user = "user root;" if os.geteuid() == 0 else ""
    command = (str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", f"daemon off; {user}")
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stderr=log)
    try:
        await until(lambda: _listens(port) or process.returncode is not None)
        assert process.returncode is None, (folder / "log").read_text()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client:
            yield client
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_no_prompt_and_no_answer_is_written_to_a_file() -> None:
    found = dict(re.findall(r"^ +(\w+) (\S+);", CONFIGURATION, re.MULTILINE))
    assert found["client_body_buffer_size"] == found["client_max_body_size"]
    assert (found["proxy_buffering"], found["proxy_max_temp_file_size"]) == ("off", "0")


@needs_nginx
async def test_large_prompt_leaves_no_temporary_file_of_nginx(start: Start, tmp_path: Path) -> None:
    replica = await start.replica(stream(delta("x"), DONE))
    proxies = [await start.proxy(config_for([replica]), [replica]) for _ in range(2)]
    async with balanced(proxies, tmp_path) as client:
        answer = await client.post(CHAT, content=chat(stream=True, user="x" * 4_000_000))
    assert answer.status_code == 200
    assert "buffered to a temporary file" not in (tmp_path / "log").read_text()


@needs_nginx
async def test_proxy_that_stops_costs_no_request_and_its_streams_end_whole(start: Start, tmp_path: Path) -> None:
    # Each has one stream, so that further requests go to both in turn.
    slow = await start.replica(hang(delta("x"), rest=(delta("y"), DONE)))
    quick = await start.replica(hang(delta("x"), rest=(delta("y"), DONE)), stream(DONE))
    stopping = await start.proxy(config_for([slow]), [slow])
    other = await start.proxy(config_for([quick]), [quick])
    async with balanced([stopping, other], tmp_path) as client:
        streams = [asyncio.create_task(client.post(CHAT, content=chat(stream=True))) for _ in range(2)]
        await until(lambda: len(stopping.state.exchanges) == len(other.state.exchanges) == 1)
        stopping.shutdown.set()
        await until(lambda: stopping.state.stopping)
        answers = [await client.post(CHAT, content=chat(stream=True)) for _ in range(8)]
        assert {answer.status_code for answer in answers} == {200}
        assert stopping.state.telemetry.metrics.registry.get_sample_value("gorgo_rejects_total", {"reason": "stopping"})
        slow.release.set()
        quick.release.set()
        ended = await asyncio.gather(*streams)
        assert [answer.status_code for answer in ended] == [200, 200]
        assert all(answer.text.endswith("data: [DONE]\n\n") for answer in ended)


@needs_nginx
async def test_proxy_that_is_not_there_costs_no_request(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(stream(delta("a"), DONE)), await start.replica(stream(delta("b"), DONE))
    first, second = await start.proxy(config_for([a]), [a]), await start.proxy(config_for([b]), [b])
    async with balanced([first, second], tmp_path) as client:
        await first.stop()
        answers = [await client.post(CHAT, content=chat(stream=True)) for _ in range(6)]
        assert {answer.status_code for answer in answers} == {200}
        assert all('"b"' in answer.text for answer in answers)


@needs_nginx
async def test_events_of_a_stream_come_one_by_one(start: Start, tmp_path: Path) -> None:
    slow = await start.replica(hang(delta("first"), rest=(DONE,)))
    proxies = [await start.proxy(config_for([slow]), [slow]) for _ in range(2)]
    async with (
        balanced(proxies, tmp_path) as client,
        client.stream("POST", CHAT, content=chat(stream=True)) as running,
    ):
        lines = running.aiter_lines()
        async with asyncio.timeout(5):
            assert "first" in await anext(lines)
        slow.release.set()
        assert "data: [DONE]" in [line async for line in lines]
