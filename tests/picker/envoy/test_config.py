"""The printed configuration of Envoy: Envoy accepts it, and its bounds are those of regions.yaml."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

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
from gorgo.picker.envoy.config import RETRIES, envoy_config, envoy_yaml
from gorgo.picker.transport.services import DECIDING
from tests.picker.envoy.envoy import PROGRAM, needs_envoy
from tests.proxy.authority import Authority, needs_openssl

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
