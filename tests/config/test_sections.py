"""Parts of regions.yaml: fleet sources, `shared`, addresses and settings of the Router, with errors that say what
each needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gorgo.config.fleet import FleetSourceConfig, KvEventsConfig
from gorgo.config.load import parse_config
from gorgo.config.model import LimitsConfig, SharedConfig
from gorgo.config.registered import entry_as_json, entry_from_json
from gorgo.config.router_settings import max_buffered_bytes, memory_bytes, router_limits
from gorgo.config.values import BUILT_IN, checked_bind, checked_engine, checked_url, engine_names, split_bind
from gorgo.errors import ConfigError

# --- `fleet_sources` in regions.yaml: each kind with its keys, and errors that say what a kind needs.


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


# --- `shared` in regions.yaml, and errors that say what it needs.


GOOD_SHARED = {"url": "redis://store:6379/0", "group": "qwen", "key_env": "GROUP_KEY"}


def shared(section: Any) -> SharedConfig | None:
    document = {"proxy": {"region": "us"}, "regions": [{"name": "us"}], "shared": section}
    document["replicas"] = [{"name": "a", "region": "us", "url": "http://a"}]
    return parse_config(json.dumps(document).encode()).shared


def test_router_without_the_section_shares_nothing() -> None:
    assert shared(None) is None


@pytest.mark.parametrize("url", ["redis://store", "redis://10.0.0.9:6380/3", "rediss://[::1]:6379/"])
def test_section_needs_address_group_and_key(url: str) -> None:
    assert shared(GOOD_SHARED | {"url": url}) == SharedConfig(url=url, group="qwen", key_env="GROUP_KEY")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"url": "http://store"}, "'http://store'; expected redis://host:port/db or rediss://host:port/db (TLS)"),
        ({"url": "redis://store/one"}, "expected redis://"),
        ({"url": "redis://store?timeout=9"}, "expected redis://"),
        ({"url": "redis://store:0"}, "expected redis://"),
        ({"group": "a b"}, "shared.group (line 1): 'a b'; expected letters"),
        ({"key_env": "no name"}, "shared.key_env (line 1): a value that is not shown; expected the name of an envi"),
        ({"password_env": "p w"}, "shared.password_env (line 1): a value that is not shown"),
        ({"password": "x"}, "shared.password (line 1): unknown key (did you mean 'password_env'?)"),
        ({"username": "gorgo"}, "expected password_env beside username"),
        ({"ca_file": "ca.pem"}, "expected a rediss:// url beside ca_file"),
    ],
)
def test_wrong_key_of_shared_is_named_with_the_expectation(keys: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        shared(GOOD_SHARED | keys)
    assert expected in str(raised.value)


def test_password_in_the_address_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as raised:
        shared(GOOD_SHARED | {"url": "rediss://gorgo:hunter2@store:6379"})
    assert "without user, password or options" in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("key", ["url", "group", "key_env"])
def test_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"shared.{key} .*: missing; expected this key with text"):
        shared({name: value for name, value in GOOD_SHARED.items() if name != key})


# Which engines regions.yaml may name.
def test_names_of_this_package_come_first() -> None:
    assert tuple(engine_names()[: len(BUILT_IN)]) == BUILT_IN
    assert [checked_engine(name) for name in BUILT_IN] == list(BUILT_IN)


def test_another_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"^'sglang', 'vllm', .* or '\w+'$"):
        checked_engine("triton")


PICKER_TLS = {"cert": "c.pem", "key": "k.pem"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"client_ca": "ca.pem"}, "cert and key beside client_ca"),
        (PICKER_TLS | {"client_ca": "ca.pem", "client_cert": "e.pem"}, "client_cert and client_key, both or neither"),
        (PICKER_TLS | {"client_cert": "e.pem", "client_key": "e.key"}, "client_ca beside client_cert"),
        ({"cert": "c.pem"}, "cert and key, both or neither"),
    ],
)
def test_picker_demands_certificates_with_tls_of_its_own_and_whole_pairs(files: Any, expected: str) -> None:
    document = {"proxy": {"region": "us"}, "regions": [{"name": "us"}], "picker": {"tls": files}}
    document["replicas"] = [{"name": "a", "region": "us", "url": "http://a"}]
    with pytest.raises(ConfigError) as raised:
        parse_config(json.dumps(document).encode())
    assert f"picker.tls (line 1): a mapping; expected {expected}" in str(raised.value)


# --- What counts as a replica's URL and as an address to listen on.


@pytest.mark.parametrize(
    "text",
    [
        "http://a",
        "https://a.b-c:1/base/",
        "http://[::1]:30000",
        "http://127.0.0.1:65535",
        "HTTP://a",
        "http://a.",
        "http://1a.2",
    ],
)
def test_base_url_is_taken_as_it_stands(text: str) -> None:
    assert checked_url(text) == text


OTHER_URLS = (
    *("", "a:1", "//a", "http://", "http:///x", "http://:80", "ftp://a", "http://a:0", "http://a:65536", "http://a:x"),
    *(
        "http://u@a",
        "http://u:p@a",
        "http://a?q",
        "http://a#f",
        "http://a/?",
        "http://a b",
        "http://a\n",
        "http://[::1",
    ),
    *("http://\u00e9", "http://a\\b", "http://a%20b", "http://10.0.0.999", "http://10.0.0", "http://a..b", "http://.a"),
    *(f"http://{'a' * 64}.b", "http://[1:2]"),
)
OTHER_BINDS = ("", "8080", ":8080", "a:", "a:-1", "a:65536", "a:1 ", "::1:80", "a:\u0661", "a b:1")


def refused(check: Callable[[str], object], text: str, expected: str) -> bool:
    try:
        check(text)
    except ValueError as error:
        return expected in str(error)
    return False


def test_other_text_is_no_base_url() -> None:
    assert [text for text in OTHER_URLS if not refused(checked_url, text, "an http://")] == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [("127.0.0.1:8080", ("127.0.0.1", 8080)), ("localhost:0", ("localhost", 0)), ("[::]:65535", ("::", 65535))],
)
def test_bind_is_split_into_host_and_port(text: str, parts: tuple[str, int]) -> None:
    assert checked_bind(text) == text
    assert split_bind(text) == parts


def test_other_text_is_no_bind() -> None:
    assert [text for text in OTHER_BINDS if not refused(split_bind, text, "host:port")] == []


# --- Settings of the Router from regions.yaml; the memory of a machine or a container, from the files of Linux.


GIB = 2**30


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc__meminfo": f"MemTotal: {8 * GIB // 1024} kB\nMemFree: 1 kB\n"}


def test_bounds_of_routes_are_those_of_multi_depth() -> None:
    text = b"""
    proxy: {region: a, policy: multi-depth, multi_depth: {max_routes: 500, ttl_s: 60}}
    regions: [{name: a}]
    replicas: [{name: r, region: a, url: "http://127.0.0.1:1"}]
    """
    limits = router_limits(parse_config(text))
    assert (limits.max_routes, limits.route_ttl_s) == (500, 60.0)
    usual = router_limits(parse_config(text.replace(b", multi_depth: {max_routes: 500, ttl_s: 60}", b"")))
    assert (usual.max_routes, usual.route_ttl_s) == (100_000, 3600.0)


def test_machine_without_groups_has_its_own_memory(tmp_path: Path) -> None:
    assert memory_bytes(tree(tmp_path, **MACHINE)) == 8 * GIB


def test_tightest_group_of_version_2_counts(tmp_path: Path) -> None:
    files = {
        "proc__self__cgroup": "0::/pod/app\n",
        "sys__fs__cgroup__pod__app__memory.max": "max\n",
        "sys__fs__cgroup__pod__memory.max": f"{2 * GIB}\n",
    }
    assert memory_bytes(tree(tmp_path, **MACHINE, **files)) == 2 * GIB


def test_container_of_version_2_sees_its_own_group_as_the_outermost(tmp_path: Path) -> None:
    files = {"proc__self__cgroup": "0::/\n", "sys__fs__cgroup__memory.max": f"{GIB}\n"}
    assert memory_bytes(tree(tmp_path, **MACHINE, **files)) == GIB


@pytest.mark.parametrize("folder", ["sys__fs__cgroup__memory__docker__x__", "sys__fs__cgroup__memory__"])
def test_group_of_version_1_counts_and_no_limit_is_none(tmp_path: Path, folder: str) -> None:
    files = {"proc__self__cgroup": "9:cpu:/other\n4:memory:/docker/x\n", f"{folder}memory.limit_in_bytes": f"{GIB}\n"}
    assert memory_bytes(tree(tmp_path, **MACHINE, **files)) == GIB
    unlimited = {f"{folder}memory.limit_in_bytes": "9223372036854771712\n"}
    assert memory_bytes(tree(tmp_path, **unlimited)) == 8 * GIB


def test_unknown_memory_is_none(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) is None


def test_default_is_a_quarter_and_the_file_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.config.router_settings.memory_bytes", lambda: GIB)
    assert max_buffered_bytes(LimitsConfig()) == GIB // 4
    assert max_buffered_bytes(LimitsConfig(max_buffered_bytes=7)) == 7
    monkeypatch.setattr("gorgo.config.router_settings.memory_bytes", lambda: None)
    assert max_buffered_bytes(LimitsConfig()) == GIB // 2
