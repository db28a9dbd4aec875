"""Kinds of engines and their models, read from their own answers, and where they publish KV events."""

from __future__ import annotations

from typing import Any

import pytest

from gorgo.engines.discovery import (
    MAX_MODELS,
    MAX_NAME,
    FoundEngine,
    ServedModel,
    context_routes,
    identifying_routes,
    owner_of,
    read_context,
    read_models,
    recognise,
)
from gorgo.engines.kv_sources import MAX_RANKS, KvEventSource, read_sglang, read_vllm
from gorgo.engines.registry import DIALECTS

# --- Kinds of engines and their models, read from their own answers.


VLLM = {
    "object": "list",
    "data": [
        {
            "id": "meta-llama/Llama-3",
            "object": "model",
            "owned_by": "vllm",
            "root": "meta-llama/Llama-3",
            "parent": None,
        },
        {"id": "sql", "object": "model", "owned_by": "vllm", "root": "/loras/sql", "parent": "meta-llama/Llama-3"},
    ],
}


def test_adapters_are_told_from_base_models_by_their_parent() -> None:
    assert read_models(VLLM) == (ServedModel("meta-llama/Llama-3"), ServedModel("sql", "meta-llama/Llama-3"))
    assert read_models({"data": [{"id": "a", "parent": "a"}]}) == (ServedModel("a"),)
    assert read_models({"data": []}) == ()


@pytest.mark.parametrize("answer", [None, [], {}, {"data": None}, {"data": {}}, "text", 3])
def test_an_answer_that_is_no_list_says_nothing(answer: object) -> None:
    assert read_models(answer) is None
    assert owner_of(answer) is None


def test_names_are_bounded_in_number_length_and_characters() -> None:
    rows: list[Any] = [{"id": f"m{n}"} for n in range(MAX_MODELS + 5)]
    odd = [{"id": "x" * (MAX_NAME + 1)}, {"id": "a\nb"}, {"id": ""}, {"id": 3}, {}, "text", {"id": "m0"}]
    found = read_models({"data": [*odd, *rows]})
    assert found is not None
    assert len(found) == MAX_MODELS
    assert found[0] == ServedModel("m0")
    assert read_models({"data": [{"id": "a", "parent": "x" * 1000}]}) == (ServedModel("a"),)


def test_the_owner_of_the_models_names_the_engine_unless_owners_differ() -> None:
    assert owner_of(VLLM) == "vllm"
    assert owner_of({"data": [{"id": "a", "owned_by": "sglang"}, {"id": "b", "owned_by": "vllm"}]}) is None
    assert owner_of({"data": [{"id": "a", "owned_by": "openai"}]}) is None
    assert owner_of({"data": [{"id": "a", "owned_by": ["vllm"]}]}) is None


@pytest.mark.parametrize(
    ("path", "answer", "engine"),
    [
        ("/server_info", {"version": "0.5.9", "internal_states": []}, FoundEngine("sglang", "0.5.9")),
        ("/get_server_info", {"tokenizer_path": "t"}, FoundEngine("sglang")),
        ("/server_info", {"vllm_config": "..."}, None),
        ("/version", {"version": "0.33.0"}, FoundEngine("vllm", "0.33.0")),
        ("/version", {"major": "1", "gitVersion": "v1"}, None),
        ("/props", {"default_generation_settings": {}, "build_info": "b6000"}, FoundEngine("llamacpp", "b6000")),
        ("/props", {"error": "no"}, None),
        ("/version", ["0.33.0"], None),
        ("/version", {"version": "x" * 1000}, None),
    ],
)
def test_an_engine_is_recognised_by_its_own_route(path: str, answer: object, engine: FoundEngine | None) -> None:
    assert recognise(path, answer) == engine


def test_an_unknown_owner_is_asked_on_every_route_and_each_kind_has_a_dialect() -> None:
    routes = identifying_routes(None)
    assert len(routes) == 4
    assert all(set(identifying_routes(name)) <= set(routes) for name in ("sglang", "vllm", "llamacpp"))
    assert {"sglang", "vllm", "llamacpp", "openai"} == set(DIALECTS)


@pytest.mark.parametrize(
    ("row", "tokens"),
    [
        ({"max_model_len": 8192}, 8192),  # vLLM, SGLang
        ({"max_model_len": None, "context_length": 4096}, 4096),
        ({"meta": {"n_ctx_train": 131072}}, None),  # llama.cpp: what the model was trained for, not what is served
        ({"meta": {"n_ctx_train": 131072, "n_ctx": 2048}}, 2048),
        ({"max_model_len": True}, None),
        ({"max_model_len": -1}, None),
        ({"max_model_len": 1 << 40}, None),
        ({"max_model_len": "8192"}, None),
        ({"meta": []}, None),
    ],
)
def test_context_of_a_model_is_read_from_its_row(row: dict[str, Any], tokens: int | None) -> None:
    assert read_models({"data": [{"id": "m", **row}]}) == (ServedModel("m", None, tokens),)


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ({"default_generation_settings": {"n_ctx": 8192}, "build_info": "b1"}, 8192),
        ({"context_length": 32768, "max_req_input_len": 32762, "tokenizer_path": "x"}, 32768),
        ({"context_length": None, "max_req_input_len": 32762, "tokenizer_path": "x"}, 32762),
        ({}, None),
        (None, None),
        ([], None),
    ],
)
def test_context_of_an_engine_is_read_from_its_own_route(answer: object, tokens: int | None) -> None:
    assert read_context(answer) == tokens


def test_engines_whose_list_lacks_the_context_have_a_route_for_it() -> None:
    assert context_routes("llamacpp") == ("/props",)
    assert context_routes("sglang") == ("/server_info", "/get_server_info")
    assert context_routes("vllm") == context_routes("openai") == ()


# --- Where engines say that they publish KV events.


HOST = "10.0.0.5"
SGLANG: dict[str, Any] = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "kv",
    "dp_size": 2,
}
VLLM_KV_SOURCES: dict[str, Any] = {
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://*:5558",
    "topic": "kv",
}


def test_each_rank_of_sglang_has_the_next_ports() -> None:
    answer = {"kv_events": SGLANG | {"replay_endpoint_port_base": 5657, "block_size": 16}}
    assert read_sglang(answer, host=HOST) == (
        KvEventSource("tcp://10.0.0.5:5557", "tcp://10.0.0.5:5657", "kv", rank=0, block_tokens=16),
        KvEventSource("tcp://10.0.0.5:5558", "tcp://10.0.0.5:5658", "kv", rank=1, block_tokens=16),
    )


def test_each_rank_of_vllm_has_its_entry() -> None:
    answer = {"1": VLLM_KV_SOURCES | {"endpoint": "tcp://*:5567", "replay_endpoint": None}, "0": VLLM_KV_SOURCES}
    assert read_vllm(answer, host=HOST) == (
        KvEventSource("tcp://10.0.0.5:5557", "tcp://10.0.0.5:5558", "kv", rank=0),
        KvEventSource("tcp://10.0.0.5:5567", None, "kv", rank=1),
    )


def test_the_host_is_the_replicas_whatever_the_engine_answers() -> None:
    (source,) = read_vllm({"0": VLLM_KV_SOURCES | {"endpoint": "tcp://169.254.169.254:80"}}, host="::1") or ()
    assert source.endpoint == "tcp://[::1]:80"
    (first, _) = read_sglang({"kv_events": SGLANG | {"endpoint_host": "evil"}}, host=HOST) or ()
    assert first.endpoint == "tcp://10.0.0.5:5557"


@pytest.mark.parametrize(
    "events",
    [
        None,
        {},
        [],
        "zmq",
        SGLANG | {"publisher": "null"},
        SGLANG | {"endpoint_port_base": 0},
        SGLANG | {"endpoint_port_base": True},
        SGLANG | {"endpoint_port_base": "5557"},
    ],
)
def test_sglang_without_events_has_no_source(events: object) -> None:
    assert read_sglang({"kv_events": events}, host=HOST) == ()


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        VLLM_KV_SOURCES | {"publisher": "null"},
        VLLM_KV_SOURCES | {"endpoint": None},
        VLLM_KV_SOURCES | {"endpoint": "ipc:///tmp/x"},
        VLLM_KV_SOURCES | {"endpoint": "tcp://*:99999"},
        VLLM_KV_SOURCES | {"endpoint": "tcp://*:" + "9" * 5000},
        VLLM_KV_SOURCES | {"endpoint": "tcp://*:٣"},
    ],
)
def test_vllm_without_events_has_no_source(config: object) -> None:
    assert read_vllm({"0": config}, host=HOST) == ()


@pytest.mark.parametrize("answer", [None, [], "x", 3])
def test_another_answer_is_none(answer: object) -> None:
    assert read_sglang(answer, host=HOST) is None
    assert read_vllm(answer, host=HOST) is None


def test_ranks_ports_and_topics_are_bounded() -> None:
    assert len(read_sglang({"kv_events": SGLANG | {"dp_size": 10**9}}, host=HOST) or ()) == MAX_RANKS
    last = read_sglang({"kv_events": SGLANG | {"endpoint_port_base": 65535, "topic": "x" * 300}}, host=HOST)
    assert last == (KvEventSource("tcp://10.0.0.5:65535", rank=0),)
    ranks = {str(rank): VLLM_KV_SOURCES for rank in range(200)} | {
        "-1": VLLM_KV_SOURCES,
        "9" * 5000: VLLM_KV_SOURCES,
        "x": VLLM_KV_SOURCES,
    }
    assert len(read_vllm(ranks, host=HOST) or ()) == MAX_RANKS
