"""`fleet_sources` in regions.yaml: each kind with its keys, and errors that say what a kind needs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gorgo.config.fleet import FleetSourceConfig
from gorgo.config.load import parse_config
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
