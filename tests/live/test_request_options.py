"""What a client may ask for beside its body, and what the configuration makes of it."""

from __future__ import annotations

import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import ClientRuleConfig, ClientsConfig, Config, ModelConfig, ProxyConfig, RegionConfig
from gorgo.config.router_settings import client_rules
from gorgo.core.limits import ClientLimits
from gorgo.live.http.errors import HttpError
from gorgo.live.request_options import ClientPolicies, RequestOptions


def config(clients: ClientsConfig | None = None, *models: ModelConfig) -> Config:
    return Config(
        proxy=ProxyConfig(region="a"),
        regions=(RegionConfig(name="a"), RegionConfig(name="b")),
        replicas=(ReplicaConfig(name="r", region="a", url="http://127.0.0.1:1"),),
        clients=clients or ClientsConfig(),
        models=models,
    )


def wishes(
    grants: ClientPolicies, client: str | None = None, model: str | None = None, **headers: str
) -> RequestOptions:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return grants.request_options(pairs, client=client, model=model)


def test_most_requests_wish_nothing() -> None:
    assert wishes(ClientPolicies(), accept="text/event-stream") == RequestOptions()


def test_the_more_specific_header_goes_first() -> None:
    assert wishes(ClientPolicies(), x_slo_ttft_ms="100", x_llm_d_slo_ttft_ms="250.5").slo_ttft_s == pytest.approx(
        0.2505
    )


def test_the_wanted_time_per_output_token_has_a_header_and_an_older_name() -> None:
    assert wishes(ClientPolicies(), x_slo_tpot_ms="20").slo_tpot_s == pytest.approx(0.02)
    both = wishes(ClientPolicies(), x_slo_tpot_ms="20", x_llm_d_slo_tpot_ms="35", x_slo_ttft_ms="900")
    assert both.slo_tpot_s == pytest.approx(0.035)
    assert both.slo_ttft_s == pytest.approx(0.9)


def test_a_client_with_a_rule_may_send_it_too() -> None:
    grants = ClientPolicies.for_client(config(ClientsConfig(rules=(ClientRuleConfig(name="acme"),))))
    assert wishes(grants, "acme", x_slo_tpot_ms="20").slo_tpot_s == pytest.approx(0.02)
    assert wishes(grants, "another", x_slo_tpot_ms="20").slo_tpot_s == pytest.approx(0.02)


@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "soon", "1_0", "3600001"])
def test_a_time_per_output_token_that_says_nothing_is_a_400(value: str) -> None:
    with pytest.raises(HttpError, match="x-slo-tpot-ms: expected a number of milliseconds") as refusal:
        wishes(ClientPolicies(), x_slo_tpot_ms=value)
    assert refusal.value.status == 400


@pytest.mark.parametrize("value", ["true", "false", "", "anything at all"])
def test_the_header_that_asked_for_predictions_is_taken_and_ignored(value: str) -> None:
    assert wishes(ClientPolicies(), x_prediction_based_scheduling=value) == RequestOptions()


@pytest.mark.parametrize(("word", "level"), [("high", 1), ("Normal", 0), ("low", -1), ("100", 100), ("-100", -100)])
def test_priorities_are_words_or_numbers(word: str, level: int) -> None:
    assert wishes(ClientPolicies(), x_gorgo_priority=word).priority == level


@pytest.mark.parametrize("word", ["", "\u0661", "1_0", "+1", "1e1", "9999"])
def test_what_is_no_priority_is_a_400(word: str) -> None:
    with pytest.raises(HttpError) as refusal:
        wishes(ClientPolicies(), x_gorgo_priority=word)
    assert refusal.value.status == 400


@pytest.mark.parametrize("client", [None, "batch"])
def test_a_request_says_by_how_many_tokens_its_prefix_is_known(client: str | None) -> None:
    grants = ClientPolicies.for_client(config(ClientsConfig(rules=(ClientRuleConfig(name="batch"),))))
    assert wishes(grants, client, x_gorgo_prefix_len="128").prefix_len == 128
    assert wishes(grants, client).prefix_len is None


@pytest.mark.parametrize("word", ["", "0", "-1", "1.5", "1_0", "1000001", "9" * 40, "\u0661"])
def test_what_is_no_length_of_a_prefix_is_a_400(word: str) -> None:
    with pytest.raises(HttpError, match="x-gorgo-prefix-len: expected a whole number of tokens from 1 to 1000000"):
        wishes(ClientPolicies(), x_gorgo_prefix_len=word)


@pytest.mark.parametrize("word", ["", "0", "-1", "inf", "nan", "0x10", "2s", "1_000", "3600001", "\u0661"])
def test_what_is_no_deadline_is_a_400(word: str) -> None:
    with pytest.raises(HttpError) as refusal:
        wishes(ClientPolicies(), x_slo_ttft_ms=word)
    assert refusal.value.status == 400


def test_a_client_cannot_ask_for_more_than_its_rule_grants() -> None:
    grants = ClientPolicies.for_client(config(ClientsConfig(rules=(ClientRuleConfig(name="batch", priority=-1),))))
    assert wishes(grants, "batch").priority == -1
    assert wishes(grants, "batch", x_gorgo_priority="high").priority == -1
    assert wishes(grants, "batch", x_gorgo_priority="-5").priority == -5


def test_a_key_without_a_rule_outranks_none_with_a_rule() -> None:
    grants = ClientPolicies.for_client(config(ClientsConfig(rules=(ClientRuleConfig(name="batch"),))))
    assert wishes(grants, "other", x_gorgo_priority="100").priority == 0
    assert wishes(grants, "other", x_gorgo_priority="-3").priority == -3
    assert wishes(grants, None, x_gorgo_priority="100").priority == 100  # without keys everybody is trusted


def test_regions_of_client_and_model_both_hold() -> None:
    both = ClientRuleConfig(name="both", allowed_regions=("a", "b"))
    rule = ClientRuleConfig(name="a-only", allowed_regions=("a",))
    grants = ClientPolicies.for_client(
        config(
            ClientsConfig(rules=(both, rule)), ModelConfig(name="m", allowed_regions=("b",)), ModelConfig(name="free")
        )
    )
    assert wishes(grants, None, "m").regions == frozenset({"b"})
    assert wishes(grants, "both", "m").regions == frozenset({"b"})
    assert wishes(grants, "a-only", "m").regions == frozenset()
    assert wishes(grants, "a-only", "free").regions == frozenset({"a"})
    assert wishes(grants, None, "free").regions is None
    every = frozenset({"a", "b"})
    usable = [
        (client, model)
        for client in (None, "both", "a-only")
        for model in ("m", "free")
        if grants.may_use(client=client, model=model, regions=every)
    ]
    assert usable == [(None, "m"), (None, "free"), ("both", "m"), ("both", "free"), ("a-only", "free")]
    assert not grants.may_use(client="a-only", model="free", regions=frozenset({"b"}))


def test_limits_of_a_rule_go_before_those_of_all() -> None:
    rules: tuple[ClientRuleConfig, ...] = (ClientRuleConfig(name="batch", max_in_flight=50),)
    rules += (ClientRuleConfig(name="small", tokens_per_minute=60.0),)
    clients = ClientsConfig(max_in_flight=5, requests_per_minute=120.0, tokens_per_minute=600.0, rules=rules)
    found = client_rules(config(clients))
    assert found.for_client("anyone") == ClientLimits(5, 2.0, tokens_per_s=10.0)
    assert found.for_client("batch") == ClientLimits(50, 2.0, tokens_per_s=10.0)
    assert found.for_client("small") == ClientLimits(5, 2.0, tokens_per_s=1.0)


def test_without_limits_nothing_is_counted() -> None:
    assert not client_rules(config()).has_limits
