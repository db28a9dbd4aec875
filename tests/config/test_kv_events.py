"""`kv_events` of a replica in regions.yaml."""

from __future__ import annotations

import pytest

from gorgo.config.fleet import KvEventsConfig
from gorgo.config.load import parse_config
from gorgo.config.registered import entry_as_json, entry_from_json
from gorgo.errors import ConfigError


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
