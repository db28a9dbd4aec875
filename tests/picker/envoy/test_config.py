"""The printed configuration of Envoy: it is accepted, a stop of the picker is not noticed, and stored requests go
once.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from gorgo.config.fleet import FleetSourceConfig, ReplicaConfig
from gorgo.config.model import (
    ClientsConfig,
    Config,
    ModelConfig,
    PickerConfig,
    PickerTlsConfig,
    ProxyConfig,
    RegionConfig,
    TlsConfig,
)
from gorgo.errors import ConfigError
from gorgo.picker.envoy import RETRIES, envoy_config, envoy_yaml
from gorgo.picker.transport.services import DECIDING
from tests.picker.envoy.envoy import PROGRAM, needs_envoy
from tests.picker.envoy.rig import CHAT, Rig, rig
from tests.proxy.authority import Authority, needs_openssl
from tests.proxy.fakes import DONE, USAGE, answer, delta, reset_after, stream

# --- The printed configuration of Envoy: Envoy accepts it, and its bounds are those of regions.yaml.


CONFIG = Config(
    proxy=ProxyConfig(region="here", bind="127.0.0.1:8080"),
    regions=(RegionConfig(name="here"),),
    replicas=(
        ReplicaConfig(name="a", region="here", url="http://127.0.0.1:30000"),
        ReplicaConfig(name="b", region="here", url="http://replica-b.internal:30000"),
        ReplicaConfig(name="c", region="here", url="http://[::1]:30000"),
    ),
)
FOUND = replace(CONFIG, replicas=(), fleet_sources=(FleetSourceConfig(name="pods", kind="dns", host="r.internal"),))


def validate(config: Config, folder: Path) -> str:
    """Return what Envoy says of the configuration."""
    file = folder / "envoy.yaml"
    file.write_text(envoy_yaml(config))
    command = [str(PROGRAM), "--mode", "validate", "-c", str(file), "--concurrency", "1", "-l", "warning"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_stalled_picker_is_left_before_its_calls_time_out() -> None:
    _, picker = envoy_config(CONFIG)["static_resources"]["clusters"]
    (check,) = picker["health_checks"]
    assert check["grpc_health_check"] == {"service_name": DECIDING}
    assert check["no_traffic_interval"] == check["interval"] == "1s"
    # Envoy chooses by itself then: what waits is given up within 2.5 s, and nothing is asked after that.
    options = next(iter(picker["typed_extension_protocol_options"].values()))
    keepalive = options["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]
    times = [keepalive["interval"], keepalive["timeout"], check["interval"], check["timeout"]]
    given_up, left = (sum(float(each.removesuffix("s")) for each in pair) for pair in (times[:2], times[2:]))
    assert (given_up, left, check["unhealthy_threshold"]) == (2.5, 2.5, 1)
    # In panic Envoy would call an unhealthy picker, for there is no other.
    assert picker["common_lb_config"] == {"healthy_panic_threshold": {"value": 0.0}}


def test_a_picker_of_a_found_fleet_is_borne_with_longer_for_what_is_given_up_is_a_503() -> None:
    _, picker = envoy_config(FOUND)["static_resources"]["clusters"]
    (check,) = picker["health_checks"]
    options = next(iter(picker["typed_extension_protocol_options"].values()))
    keepalive = options["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]
    assert (check["timeout"], check["unhealthy_threshold"], keepalive) == ("2s", 2, {"interval": "6s", "timeout": "3s"})


def test_a_silent_replica_is_left_for_another_before_the_stream_ends() -> None:
    (listener,) = envoy_config(CONFIG)["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    route = manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
    tries_s = (1 + RETRIES) * float(route["retry_policy"]["per_try_idle_timeout"].removesuffix("s"))
    assert float(route["idle_timeout"].removesuffix("s")) == CONFIG.picker.hold_s + tries_s


WITH_KEYS = replace(CONFIG, clients=ClientsConfig(keys_file="keys"))
CLOSED = {
    "client keys": WITH_KEYS,
    "a model of one region": replace(CONFIG, models=(ModelConfig(name="m", allowed_regions=("here",)),)),
    "an engine's key": replace(CONFIG, replicas=(replace(CONFIG.replicas[0], api_key_env="KEY"), *CONFIG.replicas[1:])),
}


@pytest.mark.parametrize("name", CLOSED)
def test_envoy_has_no_choice_of_its_own_where_the_picker_s_is_more_than_a_good_one(name: str) -> None:
    def fallback(config: Config) -> str:
        cluster, _ = envoy_config(config)["static_resources"]["clusters"]
        (override,) = cluster["load_balancing_policy"]["policies"]
        (found,) = override["typed_extension_config"]["typed_config"]["fallback_policy"]["policies"]
        return str(found["typed_extension_config"]["name"].rpartition(".")[2])

    assert (fallback(CONFIG), fallback(CLOSED[name])) == ("least_request", "subset")
    assert "without a choice of the picker: 503" in envoy_yaml(CLOSED[name])


@needs_envoy
@pytest.mark.parametrize("config", [CONFIG, FOUND, WITH_KEYS], ids=["listed", "found", "with keys"])
def test_envoy_accepts_the_printed_configuration(config: Config, tmp_path: Path) -> None:
    assert "OK" in validate(config, tmp_path)


@needs_envoy
@needs_openssl
def test_envoy_accepts_it_with_tls_on_every_side(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.pair("server")
    files = TlsConfig(cert=cert, key=key)
    secure = ReplicaConfig(name="d", region="here", url="https://replica-d.internal", ca_file=str(authority.ca))
    config = replace(
        CONFIG,
        proxy=replace(CONFIG.proxy, tls=files),
        picker=PickerConfig(
            tls=PickerTlsConfig(cert=cert, key=key, client_ca=authority.ca, client_cert=cert, client_key=key)
        ),
        replicas=(*CONFIG.replicas, secure),
    )
    assert "OK" in validate(config, tmp_path)


def test_envoy_shows_the_picker_the_certificate_that_the_configuration_names() -> None:
    files = PickerTlsConfig(
        cert="p.crt", key="p.key", client_ca="ca.crt", client_cert="envoy.crt", client_key="envoy.key"
    )
    _, picker = envoy_config(replace(CONFIG, picker=PickerConfig(tls=files)))["static_resources"]["clusters"]
    common = picker["transport_socket"]["typed_config"]["common_tls_context"]
    assert common["tls_certificates"] == [
        {"certificate_chain": {"filename": "envoy.crt"}, "private_key": {"filename": "envoy.key"}}
    ]
    without = PickerConfig(tls=replace(files, client_cert=None, client_key=None))
    with pytest.raises(
        ConfigError, match=r"picker\.tls: client_ca without a certificate of Envoy; expected client_cert"
    ):
        envoy_config(replace(CONFIG, picker=without))


# --- The picker stops behind a real Envoy, under load: no client hears of it.


CLIENTS = 6
#: Of each client, after the picker has ended.
LATER = 10
BODY = {"messages": [{"role": "user", "content": "hello"}], "stream": True}


@needs_envoy
@pytest.mark.parametrize("front", ["own"])
async def test_no_request_is_lost_while_the_picker_stops(front: str, tmp_path: Path) -> None:
    async with rig(tmp_path, with_keys=False) as running:
        running.script(stream(*([delta("a")] * 20), USAGE, DONE))
        found: Counter[int | str] = Counter()
        clients = [asyncio.create_task(_send(running, front, found)) for _ in range(CLIENTS)]
        async with asyncio.timeout(20):
            while sum(found.values()) < 10 * CLIENTS:
                await asyncio.sleep(0)
        running.shutdown.set()
        await asyncio.wait_for(asyncio.gather(*clients), 20)
    assert set(found) == {200}


@needs_envoy
async def test_with_client_keys_no_request_passes_without_the_picker(tmp_path: Path) -> None:
    """Envoy checks no key, no quota and no region: neither a known key nor a wrong one gets to an engine."""
    async with rig(tmp_path) as running:
        running.script(stream(delta("a"), USAGE, DONE))
        async with running.client() as client:
            assert (await client.post(CHAT, json=BODY)).status_code == 200
            running.shutdown.set()
            await asyncio.wait_for(asyncio.shield(running.task), 20)
            running.script(stream(delta("a"), USAGE, DONE))
            for headers in ({}, {"authorization": "Bearer wrong"}):
                for _ in range(5):
                    assert (await client.post(CHAT, json=BODY, headers=headers)).status_code == 503
            assert [replica.seen for replica in running.replicas] == [[], []]


async def _send(running: Rig, front: str, found: Counter[int | str]) -> None:
    """Send one request after another, until the picker has ended and some more."""
    later = 0
    async with running.client(front) as client:
        while later < LATER:
            later += running.task.done()
            answered = await client.post(
                CHAT, json={"messages": [{"role": "user", "content": "hello"}], "stream": True}
            )
            found[answered.status_code] += 1


@needs_envoy
@needs_openssl
async def test_envoy_reaches_a_picker_with_client_ca_by_its_certificate(tmp_path: Path) -> None:
    for name in ("servers", "clients"):
        (tmp_path / name).mkdir()
    servers, clients = Authority(tmp_path / "servers"), Authority(tmp_path / "clients")
    cert, key = servers.pair("picker")
    client_cert, client_key = clients.pair("envoy")
    # Envoy trusts the file of `cert`: there the certificate of the authority follows.
    Path(cert).write_text(Path(cert).read_text() + Path(servers.ca).read_text())
    files = PickerTlsConfig(cert=cert, key=key, client_ca=clients.ca, client_cert=client_cert, client_key=client_key)
    async with rig(tmp_path, tls=files) as running:
        running.script(stream(delta("a"), USAGE, DONE))
        async with running.client() as client:
            assert (await client.post(CHAT, json=BODY)).status_code == 200
        assert sum(len(replica.seen) for replica in running.replicas) == 1


# --- Requests of which an engine stores something, behind a real Envoy: none is sent again once it may have begun.


@pytest_asyncio.fixture
async def running(tmp_path: Path) -> AsyncIterator[Rig]:
    """One for each test: a failure of a replica counts in the next one."""
    async with rig(tmp_path) as found:
        yield found


STORED = {
    "responses": ("/v1/responses", {"model": "m", "input": "hello"}),
    "chat": (CHAT, {"model": "m", "store": True, "messages": [{"role": "user", "content": "hello"}]}),
}


@needs_envoy
@pytest.mark.parametrize("route", STORED)
@pytest.mark.parametrize("status", [404, 503])
async def test_what_an_engine_stores_goes_elsewhere_if_it_was_not_begun(running: Rig, route: str, status: int) -> None:
    first, second = running.replicas
    running.script(answer(200, b'{"id": "resp_1", "object": "response", "output": []}'))
    first.scripts = [answer(status)]
    path, body = STORED[route]
    async with running.client() as client:
        responses = [await client.post(path, json=body) for _ in range(2)]
    assert [response.status_code for response in responses] == [200, 200]
    assert len(first.seen) >= 1
    assert len(second.seen) == 2
    await running.idle()


@needs_envoy
@pytest.mark.parametrize("route", STORED)
@pytest.mark.parametrize("failing", [reset_after(), answer(500)], ids=["reset", "500"])
async def test_what_an_engine_stores_and_may_have_begun_is_not_sent_twice(
    running: Rig, route: str, failing: object
) -> None:
    running.script(failing)
    path, body = STORED[route]
    async with running.client() as client:
        response = await client.post(path, json=body, headers={"x-envoy-retry-on": "5xx,reset"})
    assert response.status_code >= 500
    assert sum(len(replica.seen) for replica in running.replicas) == 1
    await running.idle()
