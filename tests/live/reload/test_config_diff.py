"""What differs between two files, and what does not count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gorgo.config.model import (
    CapacityConfig,
    ClientsConfig,
    Config,
    KvEventsConfig,
    LimitsConfig,
    OverloadConfig,
    PickerConfig,
    ProxyConfig,
    RegionConfig,
    ReplicaConfig,
    SharedConfig,
    TlsConfig,
    TracingConfig,
)
from gorgo.live.reload.config_diff import ConfigDiff, diff, keep_restart_only

OLD = Config(
    proxy=ProxyConfig(region="here", weights={"w_rtt": 0.5}),
    regions=(RegionConfig(name="here"), RegionConfig(name="there")),
    replicas=(
        ReplicaConfig(name="a", region="here", url="http://a:1"),
        ReplicaConfig(name="b", region="here", url="http://b:1", draining=True),
    ),
)


def with_a(**changes: Any) -> Config:
    return replace(OLD, replicas=(replace(OLD.replicas[0], **changes), OLD.replicas[1]))


def with_proxy(**changes: Any) -> Config:
    return replace(OLD, proxy=replace(OLD.proxy, **changes))


def test_same_file_asks_for_nothing() -> None:
    changes = diff(OLD, replace(OLD, replicas=OLD.replicas[::-1]))
    assert changes == ConfigDiff()
    assert not changes.fleet
    assert changes.as_log() == {}


def test_replica_comes_and_another_goes() -> None:
    new = ReplicaConfig(name="c", region="there", url="http://c:1", draining=True)
    changes = diff(OLD, replace(OLD, replicas=(OLD.replicas[0], new)))
    assert changes == ConfigDiff(added=(new,), removed=("b",), drains={"c": True})
    assert changes.as_log() == {"added": ["c"], "removed": ["b"], "drains": {"c": True}}


@pytest.mark.parametrize("change", [{"url": "http://a:2"}, {"engine": "vllm"}])
def test_another_url_or_engine_is_another_process(change: dict[str, Any]) -> None:
    new = with_a(**change)
    assert diff(OLD, new) == ConfigDiff(replaced=(new.replicas[0],))


def test_slash_at_the_end_of_a_url_is_no_other_process() -> None:
    assert not diff(OLD, with_a(url="http://a:1/")).replaced


@pytest.mark.parametrize(
    "change",
    [
        {"models": ("m",)},
        {"region": "there"},
        {"capacity": CapacityConfig(kv_tokens=5)},
        {"api_key_env": "KEY"},
        {"request_usage": True},
        {"kv_events": KvEventsConfig()},
    ],
)
def test_other_words_about_a_replica_leave_it_the_same_process(change: dict[str, Any]) -> None:
    new = with_a(**change)
    assert diff(OLD, new) == ConfigDiff(updated=(new.replicas[0],))


def test_only_a_changed_drain_mark_is_one() -> None:
    assert diff(OLD, with_a(draining=True)) == ConfigDiff(drains={"a": True})
    back = replace(OLD, replicas=(OLD.replicas[0], replace(OLD.replicas[1], draining=False)))
    assert diff(OLD, back) == ConfigDiff(drains={"b": False})
    assert diff(OLD, with_a(models=("m",))).drains == {}


def test_policy_and_weights_count_when_the_file_changed_them() -> None:
    changes = diff(OLD, with_proxy(policy="random", weights={}))
    assert (changes.policy, changes.weights) == (True, True)
    assert diff(OLD, with_proxy(weights={"w_rtt": 0.5})) == ConfigDiff()


def test_settings_are_named_and_intervals_told_apart() -> None:
    new = replace(with_proxy(probe_interval_s=1.0, min_ready_replicas=2), limits=LimitsConfig(max_attempts=2))
    expected = ("proxy.probe_interval_s", "proxy.min_ready_replicas", "limits.max_attempts")
    assert diff(OLD, new) == ConfigDiff(intervals=True, settings=expected)


def test_tls_turned_on_or_off_needs_a_new_start_and_another_certificate_does_not() -> None:
    encrypted = with_proxy(tls=TlsConfig(cert="a.crt", key="a.key"))
    for running, new in ((OLD, encrypted), (encrypted, OLD)):
        assert diff(running, new) == ConfigDiff(restart=("proxy.tls",))
        assert keep_restart_only(running, new).proxy.tls == running.proxy.tls
    renewed = with_proxy(tls=TlsConfig(cert="b.crt", key="b.key"))
    assert diff(encrypted, renewed) == ConfigDiff(settings=("proxy.tls",))
    assert keep_restart_only(encrypted, renewed) == renewed


def test_addresses_need_a_new_start_and_are_named_each_time() -> None:
    new = with_proxy(bind="127.0.0.1:1", admin_bind="127.0.0.1:2")
    for running in (OLD, keep_restart_only(OLD, new)):
        assert diff(running, new) == ConfigDiff(restart=("proxy.bind", "proxy.admin_bind"))
    assert keep_restart_only(OLD, replace(new, replicas=())).replicas == ()


@pytest.mark.parametrize("name", ["ca_file", "client_cert", "client_key"])
def test_other_files_of_tls_are_another_process(name: str) -> None:
    new = with_a(**{name: "a.pem"})
    changes = diff(OLD, new)
    assert changes == ConfigDiff(replaced=(new.replicas[0],))
    assert changes.fleet


@pytest.mark.parametrize("name", ["probe_interval_s", "scrape_interval_s"])
def test_each_interval_counts(name: str) -> None:
    assert diff(OLD, with_proxy(**{name: 1.5})) == ConfigDiff(intervals=True, settings=(f"proxy.{name}",))


def test_shadow_and_settings_of_every_section_are_named() -> None:
    assert diff(OLD, with_proxy(shadow_policy="random")) == ConfigDiff(shadow=True, settings=("proxy.shadow_policy",))
    assert diff(OLD, replace(OLD, clients=ClientsConfig(keys_file="KEYS"))).settings == ("clients.keys_file",)
    assert diff(OLD, replace(OLD, overload=OverloadConfig(queue_max_requests=7))).settings == (
        "overload.queue_max_requests",
    )
    assert diff(OLD, replace(OLD, regions=OLD.regions[:1])).settings == ("regions",)


def test_where_spans_go_needs_a_new_start() -> None:
    new = with_proxy(tracing=TracingConfig(endpoint="http://127.0.0.1:4318/v1/traces"))
    assert diff(OLD, new) == ConfigDiff(restart=("proxy.tracing",))
    assert diff(OLD, new).as_log() == {"restart_needed": ["proxy.tracing"]}
    assert keep_restart_only(OLD, new) == OLD


@pytest.mark.parametrize(
    ("change", "fleet"),
    [
        (replace(OLD, replicas=OLD.replicas[:1]), True),
        (replace(OLD, replicas=(*OLD.replicas, ReplicaConfig(name="c", region="here", url="http://c:1"))), True),
        (with_a(models=("m",)), True),
        (with_a(draining=True), False),
        (with_proxy(policy="random"), False),
    ],
)
def test_fleet_differs_when_a_replica_comes_goes_or_is_another(change: Config, fleet: bool) -> None:
    assert diff(OLD, change).fleet is fleet


def test_another_store_needs_a_restart() -> None:
    assert diff(OLD, replace(OLD, picker=PickerConfig(hold_s=5.0))) == ConfigDiff(restart=("picker",))
    new = replace(OLD, shared=SharedConfig(url="redis://s", group="g", key_env="KEY"))
    assert diff(OLD, new) == ConfigDiff(restart=("shared",))
    assert keep_restart_only(OLD, new) == OLD
