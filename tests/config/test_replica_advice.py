from __future__ import annotations

import pytest

from gorgo.config.fleet import KvEventsConfig, ReplicaConfig
from gorgo.config.model import Config, ModelConfig, ProxyConfig, RegionConfig
from gorgo.config.replica_advice import model_warnings, url_warnings, without_api_path
from gorgo.policies.registry import make_policy


def warnings_of(*urls: str) -> list[str]:
    return url_warnings([ReplicaConfig(name=f"r{n}", region="a", url=url) for n, url in enumerate(urls)])


def test_urls_without_a_path_have_no_warning() -> None:
    assert warnings_of("http://a", "http://a:30000/", "https://a", "http://[::1]:80", "http://v1", "http://b/") == []


@pytest.mark.parametrize("url", ["http://a:30000/v1", "http://a:30000/v1/", "http://a:30000//v1//"])
def test_a_url_that_ends_in_v1_is_shown_without_it(url: str) -> None:
    wanted = url.rstrip("/").removesuffix("/v1")
    assert warnings_of(url) == [
        f"replicas[0].url: {url} ends in /v1, which the proxy adds itself; write {without_api_path(url)}"
    ]
    assert without_api_path(url).rstrip("/") == wanted.rstrip("/")


def test_another_path_is_shown_with_what_is_sent() -> None:
    assert warnings_of("http://b", "http://a/openai/") == [
        "replicas[1].url: http://a/openai/ has the path /openai: requests go to http://a/openai/v1/...; remove it "
        "unless a reverse proxy needs it"
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("http://a:80", "http://A/"),
        ("https://a.:443", "https://a"),
        ("http://a:30000", "http://a:30000"),
    ],
)
def test_one_engine_twice_is_one_warning_however_it_is_written(first: str, second: str) -> None:
    (found,) = warnings_of(first, "http://other", second)
    assert found == f"replicas[2].url: {second} is that of replicas[0] (r0): one engine would count as two"


def test_a_url_with_v1_is_the_same_engine_as_the_one_without() -> None:
    assert [text.split(":", 1)[0] for text in warnings_of("http://a", "http://a/v1")] == ["replicas[1].url"] * 2


def test_ports_schemes_and_paths_make_different_engines() -> None:
    assert len(warnings_of("http://a:1", "http://a:2", "https://a:1", "http://a:1/x", "http://a:1/y")) == 2


def test_reports_of_a_replica_whose_listed_models_have_no_tokenizer_are_named() -> None:
    replicas = (
        ReplicaConfig(name="a", region="here", url="http://a", kv_events=KvEventsConfig()),
        ReplicaConfig(name="b", region="here", url="http://b", kv_events=KvEventsConfig()),
        ReplicaConfig(name="c", region="here", url="http://c"),
    )
    config = Config(
        proxy=ProxyConfig(region="here"),
        regions=(RegionConfig(name="here"),),
        replicas=replicas,
        models=(ModelConfig(name="m", aliases=("alias",), tokenizer="simulated"),),
    )
    listed = {"a": ["n", "o"], "b": ["alias"], "c": ["n"]}
    found = model_warnings(config, [make_policy("gorgo-ms")], listed)
    assert found == ["a: history: no tokenizer for n, o; set models[].tokenizer"]
    assert model_warnings(config, [make_policy("random")], listed) == [], "said of the file already"
