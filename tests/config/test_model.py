"""`shared` in regions.yaml, and errors that say what it needs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gorgo.config.load import parse_config
from gorgo.config.model import SharedConfig
from gorgo.config.values import BUILT_IN, checked_engine, engine_names
from gorgo.errors import ConfigError

GOOD = {"url": "redis://store:6379/0", "group": "qwen", "key_env": "GROUP_KEY"}


def shared(section: Any) -> SharedConfig | None:
    document = {"proxy": {"region": "us"}, "regions": [{"name": "us"}], "shared": section}
    document["replicas"] = [{"name": "a", "region": "us", "url": "http://a"}]
    return parse_config(json.dumps(document).encode()).shared


def test_router_without_the_section_shares_nothing() -> None:
    assert shared(None) is None


@pytest.mark.parametrize("url", ["redis://store", "redis://10.0.0.9:6380/3", "rediss://[::1]:6379/"])
def test_section_needs_address_group_and_key(url: str) -> None:
    assert shared(GOOD | {"url": url}) == SharedConfig(url=url, group="qwen", key_env="GROUP_KEY")


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
def test_wrong_key_is_named_with_the_expectation(keys: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        shared(GOOD | keys)
    assert expected in str(raised.value)


def test_password_in_the_address_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as raised:
        shared(GOOD | {"url": "rediss://gorgo:hunter2@store:6379"})
    assert "without user, password or options" in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("key", ["url", "group", "key_env"])
def test_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"shared.{key} .*: missing; expected this key with text"):
        shared({name: value for name, value in GOOD.items() if name != key})


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
