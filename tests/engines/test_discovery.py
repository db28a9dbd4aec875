"""Kinds of engines and their models, read from their own answers."""

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
from gorgo.engines.registry import DIALECTS

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
