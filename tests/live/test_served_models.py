"""Names of models through the proxy: aliases, models that only the engine names, and adapters."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.config.model import ClientRuleConfig, ClientsConfig, Config, ModelConfig, ProxyConfig
from gorgo.live.http.errors import HttpError
from gorgo.live.parsing.json_body import with_model
from gorgo.live.served_models import FRESH_S, MAX_LISTS, MISS_INTERVAL_S, ModelLists
from gorgo.live.stored_responses import StoredResponses
from tests.proxy.conftest import QUIET, Running, Start, config_for, until, with_replica
from tests.proxy.fakes import FakeReplica, Script, answer, chat, stream
from tests.proxy.intruders.test_client_keys import KEY, OTHER, entry
from tests.proxy.test_requests import checked

CHAT = "/v1/chat/completions"


def listing(*names: str, owner: str = "vllm", **parents: str) -> dict[str, Any]:
    """An answer to `/v1/models`; keywords are adapters with their parents."""
    rows = [{"id": name, "owned_by": owner, "parent": None} for name in names]
    rows += [{"id": name, "owned_by": owner, "parent": parent} for name, parent in parents.items()]
    return {"object": "list", "data": rows}


async def fleet_of(
    start: Start, *listings: object, models: Sequence[Sequence[str]] = (), named: Sequence[ModelConfig] = ()
) -> Running:
    replicas = [await start.replica(answer(200)) for _ in listings]
    for replica, models_listed in zip(replicas, listings, strict=True):
        replica.models = models_listed
    config = replace(config_for(replicas), models=tuple(named))
    for number, names in enumerate(models):
        config = with_replica(config, number, models=tuple(names))
    return await start.proxy(config, replicas)


async def served_by(fleet: Running, model: str) -> set[str]:
    """Replicas of several requests, which round robin spreads over all that may serve them."""
    answers = [await fleet.client.post(CHAT, content=chat(model=model)) for _ in range(4)]
    assert {response.status_code for response in answers} == {200}
    return {response.headers["x-gorgo-replica"] for response in answers}


async def ids(fleet: Running) -> list[str]:
    return [row["id"] for row in (await fleet.client.get("/v1/models")).json()["data"]]


def models_sent(replica: FakeReplica) -> set[str]:
    return {json.loads(seen.body)["model"] for seen in replica.seen}


# -- found where they are served
async def test_a_model_that_no_file_names_goes_where_it_is_served(start: Start) -> None:
    fleet = await fleet_of(start, listing("a"), listing("b"))
    assert await served_by(fleet, "a") == {"r0"}
    assert await served_by(fleet, "b") == {"r1"}
    assert await ids(fleet) == ["a", "b"]


async def test_a_replica_whose_models_are_unknown_stays_a_candidate_for_every_name(start: Start) -> None:
    fleet = await fleet_of(start, listing("a"), None)
    assert await served_by(fleet, "a") == {"r0", "r1"}
    assert await served_by(fleet, "made-up") == {"r0", "r1"}


async def test_models_of_the_file_hold_and_others_are_found_beside_them(start: Start) -> None:
    fleet = await fleet_of(start, listing("a", "c"), listing("b"), models=(["a"], ["b"]))
    assert await served_by(fleet, "a") == {"r0"}
    assert await served_by(fleet, "c") == {"r0"}
    checked(await fleet.client.post(CHAT, content=chat(model="z")), 404, "model_not_found")
    assert await ids(fleet) == ["a", "b", "c"]


async def test_a_model_loaded_since_is_found_by_the_first_request_for_it(start: Start) -> None:
    fleet = await fleet_of(start, listing("a"), listing("b"), models=(["a"], ["b"]))
    fleet.replicas[1].models = listing("b", new="b")
    assert await served_by(fleet, "new") == {"r1"}


def strict(replica: FakeReplica) -> Script:
    """Answers requests for the models that the replica lists, and refuses others as vLLM does."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        listed = {row["id"] for row in replica.models["data"]} if isinstance(replica.models, dict) else set()
        known = json.loads(body)["model"].removeprefix("base:") in listed
        return web.json_response(
            {"choices": []} if known else {"message": "no such model"}, status=200 if known else 404
        )

    return script


async def strict_fleet(start: Start, *listings: object) -> Running:
    fleet = await fleet_of(start, *listings)
    for replica in fleet.replicas:
        replica.scripts = [strict(replica)]
    return fleet


async def test_misspelt_model_is_refused_once_two_are_served(start: Start) -> None:
    """SGLang and llama.cpp answer any name, so that it was the answer of another model."""
    fleet = await fleet_of(start, listing("qwen3-8b"), listing("llama-3"))
    refused = await fleet.client.post(CHAT, content=chat(model="qwen3-8c"))
    checked(refused, 404, "model_not_found")
    assert refused.json()["error"]["message"] == (
        "no replica serves the model 'qwen3-8c' (did you mean 'qwen3-8b'?); there are: llama-3, qwen3-8b"
    )
    assert all(not replica.seen for replica in fleet.replicas)


async def test_any_name_is_answered_while_one_model_is_served(start: Start) -> None:
    fleet = await fleet_of(start, listing("llama"), listing("llama"))
    assert await served_by(fleet, "gpt-4") == {"r0", "r1"}


async def test_unknown_model_goes_to_the_replicas_that_have_not_listed_theirs(start: Start) -> None:
    fleet = await fleet_of(start, listing("a"), listing("b"), None)
    assert await served_by(fleet, "made-up") == {"r2"}


async def test_model_that_is_loaded_beside_others_is_found_though_it_was_refused_before(start: Start) -> None:
    fleet = await fleet_of(start, listing("a"), listing("b"))
    checked(await fleet.client.post(CHAT, content=chat(model="new")), 404, "model_not_found")
    fleet.replicas[1].models = listing("b", new="b")
    fleet.state.routing.models._read_s -= MISS_INTERVAL_S
    assert await served_by(fleet, "new") == {"r1"}


async def test_adapter_that_moves_is_found_by_the_first_request_that_is_refused(start: Start) -> None:
    """It was a 404 until the next periodic list, which is 30 s by default."""
    fleet = await strict_fleet(start, listing("base", sql="base"), listing("base"))
    assert await served_by(fleet, "sql") == {"r0"}
    fleet.replicas[0].models, fleet.replicas[1].models = listing("base"), listing("base", sql="base")
    assert await served_by(fleet, "sql") == {"r1"}
    assert [len(replica.seen) for replica in fleet.replicas] == [5, 4]


def bounded(tokens: int) -> Script:
    """Refuses prompts of more characters than `tokens`, in vLLM's words."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        if len(json.loads(body)["messages"][0]["content"]) <= tokens:
            return web.json_response({"choices": []})
        message = (
            f"This model's maximum context length is {tokens} tokens. However, your request has more input tokens."
        )
        return web.json_response({"error": {"message": message, "code": 400}}, status=400)

    return script


def with_context(tokens: int | None, *names: str) -> dict[str, Any]:
    return {"data": [{**row, "max_model_len": tokens} for row in listing(*names)["data"]]}


async def test_prompt_goes_where_the_context_is_long_enough(start: Start) -> None:
    """The estimate is four characters a token; here every character is one, so that it is too low."""
    fleet = await fleet_of(start, with_context(1000, "m"), with_context(8000, "m"))
    short, long = fleet.replicas
    short.scripts, long.scripts = [bounded(1000)], [bounded(8000)]
    for size in range(200, 8000, 200):
        messages = [{"role": "user", "content": "x" * size}]
        answered = await fleet.client.post(CHAT, content=chat(model="m", messages=messages))
        assert answered.status_code == 200, size
    assert 0 < len(short.seen) < len(long.seen)
    views = fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())
    assert [(view.state, view.failures) for view in views] == [("healthy", 0)] * 2
    too_long = await fleet.client.post(
        CHAT, content=chat(model="m", messages=[{"role": "user", "content": "x" * 9000}])
    )
    assert too_long.status_code == 400
    assert "maximum context length is" in too_long.json()["error"]["message"]
    (row,) = (await fleet.client.get("/v1/models")).json()["data"]
    assert (row["id"], row["max_model_len"]) == ("m", 8000)


@pytest.mark.parametrize(
    ("engine", "path", "info"),
    [
        ("sglang", "/server_info", {"context_length": None, "max_req_input_len": 4090, "tokenizer_path": "t"}),
        ("sglang", "/get_server_info", {"context_length": 4090, "tokenizer_path": "t"}),
        ("llamacpp", "/props", {"default_generation_settings": {"n_ctx": 4090}}),
    ],
)
async def test_context_that_no_list_has_is_read_from_the_engine(
    start: Start, engine: str, path: str, info: dict[str, Any]
) -> None:
    replica = await start.replica(answer(200))
    replica.models, replica.described = listing("m"), {path: info}
    fleet = await start.proxy(with_replica(config_for([replica]), 0, engine=engine), [replica])
    assert fleet.state.routing.models.contexts("r0") == {"m": 4090}


async def test_404s_of_a_listed_model_have_the_lists_read_once_in_a_while(start: Start) -> None:
    fleet = await strict_fleet(start, listing("base", sql="base"))
    (replica,) = fleet.replicas
    replica.scripts = [answer(404)]
    replica.monitored.clear()
    for _ in range(5):
        assert (await fleet.client.post(CHAT, content=chat(model="sql"))).status_code == 404
    assert replica.monitored.count("/v1/models") == 1


async def test_made_up_names_are_looked_for_once_and_not_often(start: Start) -> None:
    fleet = await fleet_of(start, listing("a"), models=(["a"],))
    asked = 0
    read_all = fleet.state.routing.models.read_all
    assert read_all is not None

    async def counted() -> None:
        nonlocal asked
        asked += 1
        await read_all()

    fleet.state.routing.models.read_all = counted
    for name in ("x", "x", "y", "z"):
        checked(await fleet.client.post(CHAT, content=chat(model=name)), 404, "model_not_found")
    assert asked == 1


async def test_a_list_is_read_again_at_the_interval_of_scrapes(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gorgo")
    replica = await start.replica(answer(200))
    replica.models = listing("a")
    fleet = await start.proxy(config_for([replica], replace(QUIET, scrape_interval_s=0.05)), [replica])
    assert await ids(fleet) == ["a"]
    replica.models = listing("b")
    await until(lambda: not fleet.state.routing.router.view.lists("a"))
    assert await ids(fleet) == ["b"]
    said = [getattr(record, "fields", {}) for record in caplog.records if record.getMessage() == "models_found"]
    assert said[-1] == {"replica": "r0", "added": ["b"], "removed": ["a"]}


async def test_an_engine_that_cannot_list_keeps_its_last_list(start: Start) -> None:
    fleet = await fleet_of(start, listing("a"))
    fleet.replicas[0].models = None
    assert fleet.state.routing.models.read_all is not None
    await fleet.state.routing.models.read_all()
    assert await ids(fleet) == ["a"]


# -- aliases
async def test_an_alias_reaches_the_replicas_of_its_model_under_the_name_that_they_know(start: Start) -> None:
    named = [ModelConfig(name="llama", aliases=("gpt-4", "llama-3"))]
    fleet = await fleet_of(start, listing("llama"), listing("llama-3"), listing("other"), named=named)
    for name in ("gpt-4", "llama", "llama-3"):
        assert await served_by(fleet, name) == {"r0", "r1"}
    assert [models_sent(replica) for replica in fleet.replicas] == [{"llama"}, {"llama-3"}, set()]
    assert await ids(fleet) == ["llama", "other", "gpt-4", "llama-3"]


async def test_an_alias_in_the_file_of_a_replica_is_the_name_that_it_knows(start: Start) -> None:
    named = [ModelConfig(name="llama", aliases=("llama-3",))]
    fleet = await fleet_of(start, None, None, models=(["llama"], ["llama-3"]), named=named)
    assert await served_by(fleet, "llama") == {"r0", "r1"}
    assert [models_sent(replica) for replica in fleet.replicas] == [{"llama"}, {"llama-3"}]


async def test_404_of_a_model_lists_aliases_too(start: Start) -> None:
    replica = await start.replica(answer(200))
    config = with_replica(config_for([replica]), 0, models=("llama",))
    fleet = await start.proxy(replace(config, models=(ModelConfig(name="llama", aliases=("gpt-4",)),)), [replica])
    refused = await fleet.client.post(CHAT, content=chat(model="gpt-4o"))
    assert refused.json()["error"]["message"] == (
        "no replica serves the model 'gpt-4o' (did you mean 'gpt-4'?); there are: gpt-4, llama"
    )


async def test_regions_of_a_model_hold_for_its_aliases(start: Start) -> None:
    named = [ModelConfig(name="llama", aliases=("gpt-4",), allowed_regions=("there",))]
    replica = await start.replica(answer(200))
    config: Config = replace(config_for([replica]), models=tuple(named))
    config = replace(config, regions=(*config.regions, replace(config.regions[0], name="there")))
    fleet = await start.proxy(with_replica(config, 0, models=("llama",)), [replica])
    checked(await fleet.client.post(CHAT, content=chat(model="gpt-4")), 403, "region_not_allowed")


async def test_an_answer_is_passed_as_it_is_whatever_name_the_engine_gives(start: Start) -> None:
    chunks = (b'data: {"model": "llama", "choices": [{"delta": {"content": "x"}}]}\n\n', b"data: [DONE]\n\n")
    replica = await start.replica(stream(*chunks))
    config = replace(config_for([replica]), models=(ModelConfig(name="llama", aliases=("gpt-4",)),))
    fleet = await start.proxy(with_replica(config, 0, models=("llama",)), [replica])
    response = await fleet.client.post(CHAT, content=chat(model="gpt-4", stream=True))
    assert response.content == b"".join(chunks)


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (b'{"model":"x","a":1e400}', b'{"model":"llama","a":1e400}'),
        (b' { "a" : [ {"model": "x"} ] , "model" : "x" } ', b' { "a" : [ {"model": "x"} ] , "model" : "llama" } '),
        (b'{"model": null, "b": "\\ud800 \xc3\xa9", "model": "x"}',
         b'{"model": "llama", "b": "\\ud800 \xc3\xa9", "model": "llama"}'),
        ('{"model": "x"}'.encode("utf-16"), '{"model": "llama"}'.encode("utf-16")),
        (b'{"mod\\u0065l": "x"}', b'{"mod\\u0065l": "llama"}'),
        (b"{}", b"{}"),
    ],
)  # fmt: skip
def test_only_the_model_of_a_body_changes(body: bytes, sent: bytes) -> None:
    assert with_model(body, "llama") == sent


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["model", "a", '"']), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["model", "messages", 'mo"del', "\\"]), VALUES),
    st.sampled_from([None, 0, 3]),
    st.booleans(),
    st.sampled_from(["utf-8", "utf-16-le", "utf-32"]),
)
def test_any_object_is_the_same_but_for_its_model(
    body: dict[str, Any], indent: int | None, ascii_only: bool, encoding: str
) -> None:
    raw = json.dumps(body, indent=indent, ensure_ascii=ascii_only).encode(encoding)
    expected = body | ({"model": "llama\n\u00e9"} if "model" in body else {})
    assert with_model(raw, "llama\n\u00e9") == json.dumps(expected, indent=indent, ensure_ascii=ascii_only).replace(
        json.dumps("llama\n\u00e9", ensure_ascii=ascii_only), json.dumps("llama\n\u00e9")
    ).encode(encoding)


def test_a_body_that_is_parsed_at_the_edge_of_its_depth_is_the_clients_fault() -> None:
    with pytest.raises(HttpError) as raised:
        with_model(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b', "model": "x"}', "llama")
    assert (raised.value.status, raised.value.code) == (400, "invalid_json")


# -- adapters
async def test_an_adapter_goes_where_it_is_loaded_under_the_name_that_the_engine_knows(start: Start) -> None:
    fleet = await fleet_of(
        start, listing("base", sql="base"), listing("base", owner="sglang", sql="base"), listing("base")
    )
    fleet.state.replicas.targets["r0"].dialect = fleet.state.replicas.targets["r1"].dialect.__class__()
    assert await served_by(fleet, "base") == {"r0", "r1", "r2"}
    for replica in fleet.replicas:
        replica.seen.clear()
    assert await served_by(fleet, "sql") == {"r0", "r1"}
    assert await served_by(fleet, "base:sql") == {"r0", "r1"}
    assert [models_sent(replica) for replica in fleet.replicas] == [{"base:sql"}, {"base:sql"}, set()]
    rows = (await fleet.client.get("/v1/models")).json()["data"]
    assert [(row["id"], row.get("parent")) for row in rows] == [("base", None), ("sql", "base")]


async def test_an_adapter_named_by_the_field_of_sglang_goes_where_it_is_loaded(start: Start) -> None:
    fleet = await fleet_of(start, listing("base", owner="sglang", sql="base"), listing("base", owner="sglang"))
    for _ in range(2):
        response = await fleet.client.post(CHAT, content=chat(model="base", lora_path="sql"))
        assert response.headers["x-gorgo-replica"] == "r0"
        response = await fleet.client.post("/generate", json={"text": "hello", "lora_path": "sql"})
        assert response.headers["x-gorgo-replica"] == "r0"
    others = [await fleet.client.post(CHAT, content=chat(model="base", lora_path=name)) for name in ("x", ["sql"])]
    assert {response.headers["x-gorgo-replica"] for response in others} == {"r0", "r1"}


async def test_an_adapter_shares_no_cached_prefix_with_its_base_or_with_another(start: Start) -> None:
    fleet = await fleet_of(start, listing("base", a="base", b="base"))
    text = "a prompt of several blocks " * 100

    async def estimated(model: str) -> int:
        content = chat(model=model, messages=[{"role": "user", "content": text}])
        response = await fleet.client.post(CHAT, content=content)
        return int(response.headers["x-gorgo-estimated-cached-tokens"])

    assert [await estimated(model) for model in ("base", "a", "b")] == [0, 0, 0]
    assert all([await estimated(model) > 0 for model in ("base", "a", "b")])


async def test_the_regions_of_a_model_hold_for_its_adapters_unless_they_have_their_own(start: Start) -> None:
    named = [ModelConfig(name="base", allowed_regions=("there",)), ModelConfig(name="b", allowed_regions=("here",))]
    replica = await start.replica(answer(200))
    replica.models = listing("base", a="base", b="base")
    config: Config = replace(config_for([replica]), models=tuple(named))
    config = replace(config, regions=(*config.regions, replace(config.regions[0], name="there")))
    fleet = await start.proxy(config, [replica])
    for name in ("base", "a"):
        checked(await fleet.client.post(CHAT, content=chat(model=name)), 403, "region_not_allowed")
    assert await served_by(fleet, "b") == {"r0"}


async def test_a_model_whose_own_name_looks_like_an_adapter_is_itself(start: Start) -> None:
    fleet = await fleet_of(start, listing("base", a="base"), listing("base:a"))
    assert await served_by(fleet, "base:a") == {"r1"}
    assert await served_by(fleet, "a") == {"r0"}


# -- the kind of engine
async def auto(start: Start, replica: FakeReplica, proxy: ProxyConfig = QUIET) -> Running:
    replica.described = None
    config = with_replica(config_for([replica], proxy), 0, engine="auto")
    return await start.proxy(config, [replica])


async def engine_of(fleet: Running) -> dict[str, Any]:
    found: dict[str, Any] = (await fleet.admin.get("/admin/status")).json()["replicas"][0]["engine"]
    return found


def by_path(**answers: object) -> Any:
    """A script with a JSON answer per path, its slashes left out; 404 for every other."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        found = answers.get(request.path.strip("/").replace("/", "_"))
        return web.Response(status=404) if found is None else web.json_response(found)

    return script


@pytest.mark.parametrize(
    ("owner", "answers", "engine"),
    [
        ("vllm", {"version": {"version": "0.33.0"}}, ("vllm", "0.33.0")),
        ("sglang", {"server_info": {"version": "0.5.9", "internal_states": []}}, ("sglang", "0.5.9")),
        ("sglang", {"get_server_info": {"version": "0.4.1", "tokenizer_path": "t"}}, ("sglang", "0.4.1")),
        ("llamacpp", {"props": {"default_generation_settings": {}, "build_info": "b1"}}, ("llamacpp", "b1")),
        ("somebody", {"props": {"default_generation_settings": {}, "build_info": "b1"}}, ("llamacpp", "b1")),
        ("vllm", {}, ("vllm", None)),
        ("somebody", {}, ("openai", None)),
    ],
)
async def test_the_kind_of_engine_is_found_at_the_start(
    start: Start, owner: str, answers: dict[str, object], engine: tuple[str, str | None]
) -> None:
    replica = await start.replica(by_path(**answers))
    replica.models = listing("m", owner=owner)
    fleet = await auto(start, replica)
    found = await engine_of(fleet)
    assert (found["name"], found["version"], found["found"]) == (*engine, True)
    assert fleet.state.replicas.targets["r0"].dialect.name == engine[0]
    assert await ids(fleet) == ["m"]


async def test_an_engine_that_was_down_at_the_start_is_found_when_it_answers(start: Start) -> None:
    replica = await start.replica(answer(503))
    fleet = await auto(start, replica, replace(QUIET, scrape_interval_s=0.05))
    assert await engine_of(fleet) == {"name": None, "version": None, "found": True}
    replica.scripts[:] = [by_path(version={"version": "0.33.0"})]
    replica.models = listing("m")
    await until(lambda: fleet.state.replicas.targets["r0"].found_engine is not None)
    assert (await engine_of(fleet))["name"] == "vllm"


async def test_an_engine_that_answers_after_silence_may_be_another_kind(start: Start) -> None:
    replica = await start.replica(by_path(version={"version": "0.33.0"}))
    replica.models = listing("m")
    fleet = await auto(start, replica, replace(QUIET, probe_interval_s=0.05))
    replica.scripts[:] = [answer(500)]
    await until(lambda: fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())[0].failures_in_a_row)
    replica.scripts[:] = [by_path(server_info={"version": "0.5.9", "internal_states": []}, health={})]
    replica.models = listing("m", owner="sglang")
    await until(lambda: fleet.state.replicas.targets["r0"].dialect.name == "sglang")
    assert (await engine_of(fleet))["version"] == "0.5.9"


async def test_another_kind_of_engine_in_its_place_is_found_without_a_silence(start: Start) -> None:
    replica = await start.replica(by_path(version={"version": "0.33.0"}))
    replica.models = listing("m")
    fleet = await auto(start, replica, replace(QUIET, scrape_interval_s=0.05))
    assert (await engine_of(fleet))["name"] == "vllm"
    replica.scripts[:] = [by_path(server_info={"version": "0.5.9", "internal_states": []})]
    replica.models = listing("m", owner="sglang")
    await until(lambda: fleet.state.replicas.targets["r0"].dialect.name == "sglang")


async def test_an_engine_that_hangs_delays_the_start_for_a_time_only_and_serves_meanwhile(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gorgo.live.monitor.discovery.DISCOVERY_TIMEOUT_S", 0.05)
    monkeypatch.setattr("gorgo.live.monitor.replica_monitor.FIRST_PROBE_TIMEOUT_S", 0.2)
    replica = await start.replica(answer(200))
    replica.silent, replica.models = "/v1/models", listing("m")
    fleet = await auto(start, replica, replace(QUIET, scrape_interval_s=0.05))
    assert (await engine_of(fleet))["name"] is None
    assert await served_by(fleet, "anything") == {"r0"}
    replica.silent = None
    await until(lambda: fleet.state.routing.router.view.lists("m"))
    assert (await engine_of(fleet))["name"] == "vllm"


class Lists:
    """Lists at a time that the test sets, with a fetch that waits for the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fetched = 0
        self.open = asyncio.Event()
        self.lists = ModelLists(lambda: self.now)

    async def fetch(self) -> bytes:
        self.fetched += 1
        number = self.fetched
        await self.open.wait()
        return b"%d" % number

    def get(self, key: bytes = b"k") -> asyncio.Task[bytes]:
        return asyncio.ensure_future(self.lists.get([(b"accept", b"a"), (b"authorization", key)], self.fetch))


async def test_many_at_once_share_one_fetch_and_the_next_ones_its_answer() -> None:
    lists = Lists()
    waiting = [lists.get() for _ in range(300)]
    await asyncio.sleep(0)
    lists.open.set()
    assert set(await asyncio.gather(*waiting)) == {b"1"}
    lists.now = FRESH_S - 0.1
    assert await lists.get() == b"1"
    lists.now = FRESH_S
    assert await lists.get() == b"2"


async def test_another_key_has_another_answer_and_their_number_is_bounded() -> None:
    lists = Lists()
    lists.open.set()
    for number in range(MAX_LISTS + 1):
        assert await lists.get(b"%d" % number) == b"%d" % (number + 1)
    assert await lists.get(b"1") == b"2"  # still there
    assert await lists.get(b"0") == b"%d" % (MAX_LISTS + 2)


async def test_a_client_that_leaves_ends_no_fetch_of_others_and_a_failure_is_not_an_answer() -> None:
    lists = Lists()
    first, second = lists.get(), lists.get()
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    lists.open.set()
    assert await second == b"1"

    async def fail() -> bytes:
        raise OSError("no replica")

    with pytest.raises(OSError, match="no replica"):
        await lists.lists.get([(b"authorization", b"new")], fail)
    assert await lists.get(b"new") == b"2"


async def test_three_hundred_calls_reach_the_replica_once_and_count_for_their_client(
    start: Start, tmp_path: Path
) -> None:
    replica = await start.replica(answer(200, b'{"object": "list", "data": []}'))
    path = tmp_path / "clients.keys"
    path.write_text(f"{entry('alice', KEY)}\n{entry('bob', OTHER)}\n")
    rule = ClientRuleConfig(name="alice", requests_per_minute=6.0)
    config = replace(config_for([replica]), clients=ClientsConfig(keys_file=str(path), rules=(rule,)))
    fleet = await start.proxy(config, [replica])

    async def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return (await fleet.client.get("/v1/models", headers=headers)).status_code

    assert [await status(KEY) for _ in range(3)] == [200, 429, 429]
    assert await asyncio.gather(*(status(OTHER) for _ in range(300))) == [200] * 300
    assert len([seen for seen in replica.seen if seen.path == "/v1/models"]) == 1


def head(number: int) -> bytes:
    return b'{"object":"response", "id" : "resp_%d"}' % number


def test_the_least_recently_used_is_forgotten_first() -> None:
    homes = StoredResponses(limit=2)
    homes.record(head(1), "a", client=None)
    homes.record(head(2), "b", client=None)
    assert homes.find("resp_1", client=None) == "a"
    homes.record(head(3), "c", client=None)
    assert (
        homes.find("resp_1", client=None),
        homes.find("resp_2", client=None),
        homes.find("resp_3", client=None),
    ) == ("a", None, "c")
    assert len(homes) == 2


def test_only_the_id_of_a_response_counts() -> None:
    homes = StoredResponses()
    homes.record(b'{"id":"msg_1"} {"id":"resp_' + b"x" * 200 + b'"}', "a", client=None)
    assert len(homes) == 0
