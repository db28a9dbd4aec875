"""Replicas given by URL become a regions.yaml."""

from __future__ import annotations

import pytest

from gorgo.config.from_urls import KEY_VARIABLE, config_text
from gorgo.config.load import parse_config
from gorgo.config.model import Config
from gorgo.errors import ConfigError


def made(*urls: str, environ: dict[str, str] | None = None, **proxy: str | None) -> Config:
    text = config_text(urls, engine="auto", proxy=proxy, environ=environ or {})
    return parse_config(text.encode(), environ={})


def test_a_name_before_the_url_is_a_region_and_the_others_are_local() -> None:
    config = made("http://a:30000", "eu=http://b:30000", "eu=https://b/x=y", "http://[::1]:1")
    assert config.proxy.region == "local"
    assert [region.name for region in config.regions] == ["local", "eu"]
    assert [(replica.name, replica.region, replica.url) for replica in config.replicas] == [
        ("local-0", "local", "http://a:30000"),
        ("eu-0", "eu", "http://b:30000"),
        ("eu-1", "eu", "https://b/x=y"),
        ("local-1", "local", "http://[::1]:1"),
    ]
    assert {replica.engine for replica in config.replicas} == {"auto"}


def test_a_url_as_clients_write_it_is_taken_without_v1() -> None:
    written = ("http://a/v1", "http://b/v1/", "http://c/x/v1", "http://d/", "http://v1")
    urls = [replica.url for replica in made(*written).replicas]
    assert urls == ["http://a", "http://b", "http://c/x", "http://d", "http://v1"]


def test_options_of_the_command_are_keys_of_the_file() -> None:
    proxy = made("http://a", policy="nearest", bind="127.0.0.1:1", admin_bind=None).proxy
    assert (proxy.policy, proxy.bind, proxy.admin_bind) == ("nearest", "127.0.0.1:1", "127.0.0.1:9090")


def test_the_key_of_the_replicas_is_named_and_never_written() -> None:
    environ = {KEY_VARIABLE: "canary"}
    assert "canary" not in config_text(["http://a"], engine="auto", proxy={}, environ=environ)
    assert made("http://a", environ=environ).replicas[0].api_key_env == KEY_VARIABLE
    assert made("http://a", environ={KEY_VARIABLE: ""}).replicas[0].api_key_env is None


def test_a_dollar_sign_in_a_url_is_no_reference() -> None:
    assert made("http://a/${HOME}$$").replicas[0].url == "http://a/${HOME}$$"


@pytest.mark.parametrize("text", ["", "a:30000", "eu=", "=http://a", "e u=http://a", "ftp://a", "eu=b=http://a"])
def test_a_url_that_is_none_is_an_error_that_says_what_is_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--replica: .*; expected URL or REGION=URL with an http://"):
        made(text)


def test_a_password_in_a_url_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="not shown") as raised:
        made("http://user:canary@a")
    assert "canary" not in str(raised.value)


def test_a_url_given_twice_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--replica http://a: given twice; expected each replica once"):
        made("http://a", "eu=http://a/")
