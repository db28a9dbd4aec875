"""`gorgo check`: what it says of settings that are rarely meant so, and with `--live` of replicas and sources."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from gorgo.cli import app, connectivity
from gorgo.cli.app import app as program
from gorgo.cli.connectivity import find_all, reach_all
from gorgo.config.fleet import FleetSourceConfig, KubernetesApiConfig, ReplicaConfig, SourceReplicaConfig
from gorgo.config.model import Config, ProxyConfig, RegionConfig
from gorgo.engines.base import is_well
from tests.answering import answering
from tests.fleet_sources.documents import pod
from tests.live.fleet_sources.api_server import PODS, api_server

# --- `gorgo check --live`: what it says of a key that no header can hold, of each answer of a replica, and of sources.


@pytest.mark.parametrize("key", ["CAN\r\nARY", "CAN\x00ARY", "CANAR\u00dd", "CAN\u20ac", " "])
def test_key_that_no_header_can_hold_is_named_by_its_variable_and_not_shown(key: str) -> None:
    replica = ReplicaConfig(name="r", region="a", url="http://127.0.0.1:9", api_key_env="K")
    (found,) = reach_all([replica], environ={"K": key}, timeout_s=1.0)
    assert found.error is not None
    assert "the environment variable K " in found.error
    assert "expected it to hold the replica's API key" in found.error
    assert "CAN" not in found.error


def test_name_that_cannot_be_looked_up_is_a_replica_that_is_not_reached() -> None:
    (found,) = reach_all([ReplicaConfig(name="r", region="a", url="http://xn--:9")], environ={}, timeout_s=1.0)
    assert found.error is not None


async def error_of(status: int, *, path: str = "", key: str | None = None) -> str | None:
    # Below `/v1` it has no such route.
    async with answering(lambda path: 404 if path.startswith("/v1/") else status) as url:
        replica = ReplicaConfig(name="r", region="a", url=url + path, engine="sglang", api_key_env=key)
        (found,) = await asyncio.to_thread(reach_all, [replica], environ={"K": "secret"}, timeout_s=5.0)
        return None if found.error is None else found.error.replace(url, "URL")


@pytest.mark.parametrize("status", [200, 204, 302, 401, 403, 404, 405, 429, 500, 503])
async def test_only_2xx_is_the_answer_of_a_replica_that_is_well(status: int) -> None:
    error = await error_of(status)
    assert (error is None) == is_well(status) == (status < 300)


async def test_a_refusal_comes_with_what_to_change() -> None:
    no_key = "answered 401: set api_key_env to the environment variable that holds its API key"
    assert await error_of(401) == no_key
    assert await error_of(403, key="K") == "answered 403: it refuses the API key in K"
    assert await error_of(200, path="/v1/") == "answered 404: write its url without /v1: URL"
    assert await error_of(405) == "answered 405: check its url and engine: it has no such route"
    assert await error_of(503) == "answered 503"


@pytest.mark.parametrize(("configured", "shown"), [("auto", "vllm 0.33.0"), ("sglang", "sglang")])
async def test_an_engine_says_its_kind_and_its_models(configured: str, shown: str) -> None:
    listed = {"data": [{"id": "base", "owned_by": "vllm"}, {"id": "sql", "owned_by": "vllm", "parent": "base"}]}
    answers = {"/v1/models": listed, "/version": {"version": "0.33.0"}, "/ping": {}, "/health": {}}

    async def answer(request: web.Request) -> web.Response:
        found = answers.get(request.path)
        return web.Response(status=404) if found is None else web.json_response(found)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        replica = ReplicaConfig(name="r", region="a", url=url, engine=configured)
        (found,) = await asyncio.to_thread(reach_all, [replica], environ={}, timeout_s=5.0)
    finally:
        await runner.cleanup()
    assert (found.error, found.engine, found.models) == (None, shown, ("base", "sql"))


async def test_name_with_several_addresses_is_warned_of_and_one_of_each_family_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def resolve(host: object, *_: object, **__: object) -> list[tuple[Any, ...]]:
        name = host.decode() if isinstance(host, bytes) else str(host)
        found = {"pods": ("127.0.0.1", "127.0.0.2"), "one": ("127.0.0.1",)}[name.partition(".")[0]]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, int(port))) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    async with answering(lambda _: 200) as url:
        port = url.rpartition(":")[2]
        file = tmp_path / "regions.yaml"
        replicas = [
            {"name": name, "region": "a", "url": f"http://{name}.test:{port}", "engine": "openai"}
            for name in ("pods", "one")
        ]
        file.write_text(json.dumps({"proxy": {"region": "a"}, "regions": [{"name": "a"}], "replicas": replicas}))
        words = ["check", "--config", str(file), "--live"]
        result = await asyncio.to_thread(CliRunner().invoke, app, words)
    assert result.exit_code == 0, result.output
    warned = [line for line in result.stdout.splitlines() if "addresses" in line]
    assert warned == [
        "  warning: replica pods: its name has 2 addresses (127.0.0.1, 127.0.0.2): requests go to one of them; "
        "fleet_sources make a replica of each"
    ]


def source(name: str, **keys: Any) -> FleetSourceConfig:
    return FleetSourceConfig(name=name, replica=SourceReplicaConfig(region="here"), **keys)


def config(*sources: FleetSourceConfig) -> Config:
    return Config(proxy=ProxyConfig(region="here"), regions=(RegionConfig(name="here"),), fleet_sources=sources)


async def test_first_result_of_each_fleet_source_has_its_replicas_and_its_wrong_objects() -> None:
    async with api_server() as server:
        api = KubernetesApiConfig(url=server.url)
        server.put(PODS, pod("a", "10.0.0.1"), pod("b", "10.0.0.2", annotations={"gorgo-router/engine": "none"}))
        pods = source("pods", kind="pods", namespace="llm", selector={"app": "qwen"}, port=30000, api=api)
        pool = source("pool", kind="inference-pool", namespace="llm", pool="qwen", api=api)
        dns = source("dns", kind="dns", host="localhost", port=1)
        outside = source("outside", kind="pods", selector={"app": "qwen"}, port=1)
        checked = config(pods, pool, dns, outside)
        found = await asyncio.to_thread(find_all, checked, environ={})
    merged = found.merged(checked)
    assert "http://10.0.0.1:30000" in {replica.url for replica in merged.replicas}
    rows = {row["name"]: row for row in found.as_rows(0.0)}
    assert (rows["pods"]["up"], rows["pods"]["replicas"], rows["pods"]["problem_count"]) == (True, 1, 1)
    assert "b: gorgo-router/engine: " in rows["pods"]["problems"][0]
    assert rows["pool"]["problems"] == ["qwen: inferencepool llm/qwen is missing"]
    assert rows["dns"]["up"]
    assert "KUBERNETES_SERVICE_HOST is not set" in rows["outside"]["error"]


async def test_source_without_a_result_in_time_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectivity, "FIRST_RESULT_S", 0.2)
    ended = asyncio.Event()

    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    async with await asyncio.start_server(stay_silent, "127.0.0.1", 0) as server:
        api = KubernetesApiConfig(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        silent = source("pods", kind="pods", namespace="llm", selector={"app": "qwen"}, port=1, api=api)
        found = await asyncio.to_thread(find_all, config(silent), environ={})
        await ended.wait()
    assert found.sources["pods"].error == "no result within 0.2 s"


def test_check_reaches_the_replicas_of_sources_and_fails_if_a_source_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = """
proxy: {region: here}
regions: [{name: here}]
limits: {connect_timeout_s: 1}
fleet_sources:
  - {name: near, kind: dns, host: 127.0.0.1, port: 1, local_addresses: true, replica: {region: here}}
  - {name: pods, kind: pods, namespace: llm, selector: {a: b}, port: 1, api: {url: "http://127.0.0.1:1"}}
"""
    (tmp_path / "regions.yaml").write_text(text)
    words = ["check", "--live", "--config", str(tmp_path / "regions.yaml")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[1:3] == [
        "source near (dns): up, 1 replica, last answer 0 s ago",
        "source pods (pods): down: connection refused, 0 replicas, no answer yet",
    ]
    assert lines[4].split()[:3] == ["near-127.0.0.1-1", "here", "http://127.0.0.1:1"]
    assert "1 of 2 fleet sources has no result; 1 of 1 replica cannot be reached" in result.stderr
    body = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert [row["up"] for row in body["fleet_sources"]] == [True, False]
    assert capfd.readouterr() == ("", "")


# --- What `gorgo check` says of valid settings that are rarely meant so: unused reports, and scrapes that are too
# slow.


CONFIG = """\
proxy: {{region: here, bind: "127.0.0.1:0", admin_bind: "127.0.0.1:0"{proxy}}}
regions: [{{name: here}}]
replicas: [{{name: a, region: here, url: "http://127.0.0.1:1"{replica}}}]
models: [{models}]
"""


def warnings(tmp_path: Path, *, proxy: str = "", replica: str = "", models: str = "") -> list[str]:
    config = tmp_path / "regions.yaml"
    config.write_text(CONFIG.format(proxy=proxy, replica=replica, models=models))
    result = CliRunner().invoke(program, ["check", "--config", str(config), "--no-files", "--json"])
    assert result.exit_code == 0, result.output
    found: list[str] = json.loads(result.output)["warnings"]
    return found


@pytest.mark.parametrize("reports", ["kv_events: auto", "push_token_env: PUSH"])
@pytest.mark.parametrize(
    ("proxy", "replica", "models", "said"),
    [
        ("", "", "", "history: no tokenizer for any model; set models[].tokenizer"),
        ("", ", models: [m]", "", "history: no tokenizer for m; set models[].tokenizer"),
        ("", ", models: [m]", "{name: n, tokenizer: simulated}", "history: no tokenizer for m; set models[].tokenizer"),
        (
            ", policy: lodestar",
            "",
            "{name: m, tokenizer: simulated}",
            "history: policy lodestar reads no reports of caches",
        ),
        (", policy: round-robin", "", "", "history: policy round-robin reads no reports of caches"),
    ],
)
def test_reports_of_caches_that_no_decision_uses_are_named(
    tmp_path: Path, reports: str, proxy: str, replica: str, models: str, said: str
) -> None:
    key = reports.partition(":")[0]
    found = warnings(tmp_path, proxy=proxy, replica=f"{replica}, {reports}", models=models)
    assert f"replicas[0].{key}: {said}" in found


@pytest.mark.parametrize(
    ("replica", "models"),
    [
        (", kv_events: auto, models: [m]", "{name: m, tokenizer: simulated}"),
        (", kv_events: auto, models: [alias]", "{name: m, aliases: [alias], tokenizer: simulated}"),
        (", kv_events: auto", "{name: m, tokenizer: simulated}"),
        ("", ""),
    ],
)
def test_reports_that_decisions_can_use_are_no_matter_for_a_warning(tmp_path: Path, replica: str, models: str) -> None:
    assert warnings(tmp_path, replica=replica, models=models) == []


@pytest.mark.parametrize(
    ("policy", "interval", "said"),
    [
        ("policy: predicted-latency", "30", "predicted-latency needs queued_requests, used_tokens at most 1 s old"),
        ("shadow_policy: predicted-latency, policy: least-load", "5", "predicted-latency needs queued_requests"),
    ],
)
def test_a_scrape_interval_that_is_too_slow_for_the_policy_is_named(
    tmp_path: Path, policy: str, interval: str, said: str
) -> None:
    (found,) = warnings(tmp_path, proxy=f", {policy}, scrape_interval_s: {interval}")
    assert found.startswith(f"proxy.scrape_interval_s: {interval} s is too slow: {said}")


@pytest.mark.parametrize("proxy", [", policy: predicted-latency", ", scrape_interval_s: 600"])
def test_the_default_interval_suits_every_policy_and_others_need_none(tmp_path: Path, proxy: str) -> None:
    assert warnings(tmp_path, proxy=proxy) == []
