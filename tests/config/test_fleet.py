"""`fleet_sources` in regions.yaml: each kind with its keys, and errors that say what a kind needs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gorgo.config.fleet import FleetSourceConfig, KvEventsConfig
from gorgo.config.load import parse_config
from gorgo.config.registered import entry_as_json, entry_from_json
from gorgo.errors import ConfigError

GOOD: dict[str, dict[str, Any]] = {
    "dns": {"host": "engines.llm", "port": 30000},
    "endpoint-slices": {"service": "engines"},
    "pods": {"selector": {"app": "qwen"}, "port_name": "http"},
    "inference-pool": {"pool": "qwen", "namespace": "llm"},
}


def text(*sources: dict[str, Any], **sections: Any) -> bytes:
    document = {"proxy": {"region": "us"}, "regions": [{"name": "us"}], "fleet_sources": list(sources)}
    return json.dumps(document | sections).encode()


def source(kind: str, **keys: Any) -> dict[str, Any]:
    return {"name": "s", "kind": kind, **GOOD[kind], **keys}


def errors(*sources: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_config(text(*sources, **sections))
    return str(raised.value)


@pytest.mark.parametrize("kind", GOOD)
def test_source_with_the_keys_of_its_kind_is_good_and_needs_no_replicas(kind: str) -> None:
    config = parse_config(text(source(kind)))
    assert (config.replicas, [each.kind for each in config.fleet_sources]) == ((), [kind])


@pytest.mark.parametrize("kind", GOOD)
def test_source_without_the_keys_of_its_kind_names_them(kind: str) -> None:
    found = errors({"name": "s", "kind": kind})
    assert "fleet_sources[0] (line 1): " in found
    assert f"with kind: {kind}" in found


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (source("dns", selector={"app": "x"}), "no selector with kind: dns"),
        (source("pods", host="x", pool="y"), "no host and no pool with kind: pods"),
        (source("endpoint-slices", interval_s=3.0), "no interval_s with kind: endpoint-slices"),
        (source("inference-pool", port=1), "no port with kind: inference-pool"),
        (source("endpoint-slices", port=1, port_name="http"), "port or port_name, not both"),
        (source("dns", replica={"ca_file": "x"}), "scheme: https for its replicas beside their TLS files"),
        (source("dns", replica={"scheme": "https", "client_cert": "x"}), "client_cert and client_key of its replicas"),
        (source("dns") | {"kind": "consul"}, "'dns', 'endpoint-slices', 'pods' or 'inference-pool'"),
        (source("dns", port=70000), "a number of at most 65535"),
        (source("dns", port=None), "port with kind: dns, or a host such as _http._tcp.engines.internal"),
        (source("dns", interval_s=0.5), "a number of at least 1"),
        (source("dns", replica={"region": "mars"}), '"mars" is not a region of this file'),
        (source("dns", replica={"engin": "vllm"}), "unknown key (did you mean 'engine'?)"),
    ],
)
def test_wrong_key_is_named_with_the_expectation(row: dict[str, Any], expected: str) -> None:
    assert expected in errors(row)


def test_name_of_srv_records_needs_no_port() -> None:
    (found,) = parse_config(text({"name": "s", "kind": "dns", "host": "_http._tcp.engines.llm"})).fleet_sources
    assert (found.host, found.port) == ("_http._tcp.engines.llm", None)


def test_names_of_sources_are_unique() -> None:
    assert '"s" is the name of fleet_sources[0].name' in errors(source("dns"), source("pods"))


def test_file_needs_replicas_or_a_source() -> None:
    assert "replicas: missing; expected this key with a list" in errors().replace(" (line 1)", "")
    assert "an empty list; expected at least one entry" in errors(replicas=[])


def test_required_replicas_may_come_from_a_source() -> None:
    found = parse_config(text(source("dns"), proxy={"region": "us", "min_ready_replicas": 5}))
    assert found.proxy.min_ready_replicas == 5


def test_only_dns_is_not_watched() -> None:
    configs = [FleetSourceConfig(name="s", kind=kind) for kind in GOOD]  # type: ignore[arg-type] # words of the kinds
    assert [config.kind for config in configs if not config.watches] == ["dns"]


# `kv_events` of a replica in regions.yaml.


def parsed(value: str) -> KvEventsConfig | None:
    text = f"""
proxy: {{region: a}}
regions: [{{name: a}}]
replicas: [{{name: r, region: a, url: "http://r", kv_events: {value}}}]
"""
    (replica,) = parse_config(text.encode()).replicas
    assert entry_from_json(entry_as_json(replica)) == replica
    return replica.kv_events


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("null", None),
        ("auto", KvEventsConfig()),
        ("{}", KvEventsConfig()),
        ("{topic: kv}", KvEventsConfig(topic="kv")),
        (
            '{endpoint: "tcp://10.0.0.5:5557", replay: "tcp://10.0.0.5:5558"}',
            KvEventsConfig(endpoint="tcp://10.0.0.5:5557", replay="tcp://10.0.0.5:5558"),
        ),
        ('{endpoint: "tcp://*:5557", mode: bind}', KvEventsConfig(endpoint="tcp://*:5557", mode="bind")),
        ('{endpoint: "tcp://[::1]:5557"}', KvEventsConfig(endpoint="tcp://[::1]:5557")),
        ('{endpoint: "ipc:///run/kv"}', KvEventsConfig(endpoint="ipc:///run/kv")),
    ],
)
def test_events_come_from_the_engine_or_the_address_given(value: str, expected: KvEventsConfig | None) -> None:
    assert parsed(value) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("on", "kv_events (line 4): 'on'; expected auto, or a mapping"),
        ("3", "kv_events (line 4): 3; expected auto, or a mapping"),
        ("true", "kv_events (line 4): true; expected auto, or a mapping"),
        ("[auto]", "kv_events (line 4): a list; expected auto, or a mapping"),
        ("{endpont: x}", "unknown key (did you mean 'endpoint'?); expected one of endpoint, replay, topic, mode"),
        ("{endpoint: 5557}", "kv_events.endpoint (line 4): 5557; expected text (put it in quotes)"),
        ('{endpoint: "http://r:5557"}', "expected tcp://host:port or ipc://path"),
        ('{endpoint: "tcp://r:0"}', "expected tcp://host:port or ipc://path"),
        ('{endpoint: "tcp://r"}', "expected tcp://host:port or ipc://path"),
        ('{endpoint: "tcp://10.0.0.999:5557"}', "expected tcp://host:port or ipc://path"),
        ('{endpoint: "ipc://relative"}', "expected tcp://host:port or ipc://path"),
        ('{endpoint: "tcp://*:5557"}', "expected an endpoint with the engine's host, or mode: bind"),
        ('{endpoint: "tcp://r:5557", replay: "tcp://*:5558"}', "expected a replay with the engine's host"),
        ("{mode: bind}", "expected an endpoint beside mode: bind"),
        ('{replay: "tcp://r:5558"}', "expected an endpoint beside replay"),
        ("{mode: listen}", "kv_events.mode (line 4): 'listen'; expected 'connect' or 'bind'"),
    ],
)
def test_an_error_names_place_and_expectation(value: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parsed(value)
    assert message in str(refused.value)
