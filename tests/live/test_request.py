"""What is known of a request: its record, what its client may ask for, and what is read of an engine's failure."""

from __future__ import annotations

import json
from dataclasses import fields
from email.utils import formatdate
from time import time
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import ClientRuleConfig, ClientsConfig, Config, ModelConfig, ProxyConfig, RegionConfig
from gorgo.config.router_settings import client_rules
from gorgo.core.limits import ClientLimits
from gorgo.live.http.errors import HttpError
from gorgo.live.request.parse import TEXT_CHARS, engine_text, exceeds_context, failure_of
from gorgo.live.request.record import RequestRecord
from gorgo.live.request_options import ClientPolicies, RequestOptions
from gorgo.live.state import Routing, Telemetry

# --- What is read of an engine's failure: Retry-After, in seconds or as a date, and its own text.


DATE = (b"Date", b"Wed, 21 Oct 2026 07:28:00 GMT")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"0", 0.0),
        (b"120", 120.0),
        (b"Wed, 21 Oct 2026 07:29:30 GMT", 90.0),
        (b"Wednesday, 21-Oct-26 07:28:01 GMT", 1.0),
        (b"Wed Oct 21 07:28:05 2026", 5.0),
        (b"Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        (b"soon", None),
        (b"-1", None),
        (b"1" * 10, None),
        (b"Wed, 99 Oct 2026 99:99:99 GMT", None),
        (b"Wed, 21 Oct 99999 07:28:00 GMT", None),
        (b"\xff" * 29, None),
        (b"Wed, 21 Oct 2026 07:29:30 GMT" * 100, None),
    ],
)
def test_retry_after_is_seconds_or_a_date_after_the_replicas_own(value: bytes, seconds: float | None) -> None:
    failure = failure_of(429, [DATE, (b"Retry-After", value)])
    assert failure is not None
    assert failure.retry_after_s == seconds


def test_a_date_of_a_replica_without_one_of_its_own_counts_from_this_clock() -> None:
    later = formatdate(time() + 60, usegmt=True).encode()
    failure = failure_of(503, [(b"retry-after", later)])
    assert failure is not None
    assert failure.retry_after_s is not None
    assert 50 < failure.retry_after_s <= 60


ASKED = json.dumps(
    {
        "model": "qwen",
        "messages": [
            {"role": "user", "content": "My PIN is 4711, and my name\nis Zoe"},
            {"role": "user", "content": "Zoe!"},
        ],
    }
).encode()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b'{"error": {"message": "CUDA out of memory", "code": 500}}', "CUDA out of memory"),
        (b'{"object": "error", "message": "EngineDeadError"}', "EngineDeadError"),
        (b'{"detail": "no worker"}', "no worker"),
        (b'{"error": "no worker"}', "no worker"),
        (b'data: {"error": {"message": "no worker"}}\n\ndata: [DONE]\n\n', "no worker"),
        (b"no worker\nTraceback: more", "no worker"),
        (b"no\tworker  here\x1b[2J\x00", "no worker here?[2J?"),
        (b'{"error": {"message": "bad\\u0007 bell"}}', "bad? bell"),
        (b'{"error": {"message": "cannot serve my pin is 4711 today"}}', "cannot serve [...] today"),
        (b'{"error": {"message": "failed: Zoe! is odd"}}', "failed: [...] is odd"),
        (
            b'{"error": {"message": "batch of [\'a prompt of another client that is long\'] failed"}}',
            "batch of [...] failed",
        ),
        (b'{"error": {"message": "\\"a prompt of another client that is long enough\\" failed"}}', "[...] failed"),
        (b"x" * 500, "x" * 237 + "..."),
        (b"<html>bad gateway</html>", None),
        (b'{"error": {"message": 3}}', None),
        (b'{"error": {"message": ""}}', None),
        (b'{"half": ', None),
        (b"\xff\xfe\x00", "???"),
        (b"", None),
        (b"[" * 16000, None),
    ],
)
def test_engine_s_own_text_is_bounded_cleaned_and_without_any_of_the_prompt(answer: bytes, text: str | None) -> None:
    found = engine_text(answer, ASKED)
    assert found == text or (found is not None and text == "???" and found.isprintable())
    assert found is None or (len(found) <= TEXT_CHARS and "4711" not in found and "Zoe" not in found)


@pytest.mark.parametrize("request_body", [b"", b"no JSON", b'{"messages": "' + b"x" * 300_000 + b'"}'])
def test_engine_s_text_is_not_shown_where_the_prompt_is_not_known(request_body: bytes) -> None:
    assert engine_text(b'{"error": {"message": "CUDA out of memory"}}', request_body) is None


@given(st.text(min_size=12, max_size=300), st.text(max_size=40), st.text(max_size=40))
def test_no_twelve_characters_of_a_prompt_come_back(prompt: str, before: str, after: str) -> None:
    asked = json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode()
    found = engine_text(json.dumps({"error": {"message": f"{before}{prompt}{after}"}}).encode(), asked) or ""
    assert not [n for n in range(len(prompt) - 11) if prompt[n : n + 12] in found and "[...]" not in prompt]


# --- The record of a request before anything is known of it.


def test_a_new_record_knows_only_when_its_request_was_received() -> None:
    record = RequestRecord(cast(Routing, None), cast(Telemetry, None), 7.0)
    found = {part.name: getattr(record, part.name) for part in fields(record)}
    assert found == {
        "routing": None,
        "telemetry": None,
        "received_s": 7.0,
        "replica": None,
        "status": 0,
        "attempts": 0,
        "ttft_s": None,
        "ttft_parts_s": None,
        "outcome": None,
        "code": None,
        "cause": None,
        "decision_s": 0.0,
        "request": None,
        "queued_s": None,
        "hedged": False,
        "continued": 0,
        "withdrawn": 0,
        "lacks_counts": False,
        "trace": None,
        "client": None,
        "ended_s": None,
    }


# --- What a client may ask for beside its body, and what the configuration makes of it.


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


# --- What engines say of a prompt that is longer than their context.


@pytest.mark.parametrize(
    "said",
    [
        "The decoder prompt (length 9000) is longer than the maximum model length of 8192.",
        "Requested token count exceeds the model's maximum context length of 8192 tokens.",
        '{"type": "exceed_context_size_error", "n_prompt_tokens": 9000, "n_ctx": 8192}',
        "`inputs` must have less than 4096 tokens. Given: 9000",
        "The sum of prompt length (9000) and max_tokens (10) should not exceed max_seq_len (8192)",
        "Prompt length (9000) exceeds maximum sequence length (8192)",
        "input token length 9000 exceeds max_input_len 8192",
        "Input prompt (9000 tokens) is too long and exceeds limit of 8192",
        "input message length exceed session_len",
        "Request prompt has 9000 tokens in total, larger than the model capacity 8192.",
    ],
)
def test_a_refusal_that_names_the_context_is_told_in_the_words_of_each_engine(said: str) -> None:
    assert exceeds_context(400, said.encode())
    assert not exceeds_context(404, said.encode()), "another refusal"


@pytest.mark.parametrize(
    "said",
    ["max_tokens must be at least 1, got 0", "messages: expected a list", "temperature is too high", "model not found"],
)
def test_any_other_bad_request_is_not(said: str) -> None:
    assert not exceeds_context(400, said.encode())
