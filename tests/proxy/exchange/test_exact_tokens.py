"""Exact tokens in a running proxy: in decisions, beside events of an engine, and after a report that differs."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gorgo.config.model import ModelConfig
from gorgo.core.messages.kv_events import BlocksStored, KvEventBatch, KvTier
from gorgo.core.messages.request import RouteRequest
from gorgo.engines.discovery import ServedModel
from gorgo.formatting import cache_line
from gorgo.lab.request_log import read_logged_requests
from tests.proxy.conftest import QUIET, Running, Start, config_for, until
from tests.proxy.fakes import DONE, chat, delta, event, stream

CHAT = "/v1/chat/completions"
#: 64 tokens of a simulated engine, in blocks of 16.
TEXT = "abc " * 64
SIMULATED = ModelConfig(name="m", tokenizer="simulated")


async def served(
    start: Start,
    *,
    reported: int,
    policy: str = "gorgo-ms",
    request_log: Path | None = None,
    tokenizer: str | None = "simulated",
) -> Running:
    """Start a proxy beside a replica that reports so many tokens for each prompt; 0: none."""
    usage = event({"choices": [], "usage": {"prompt_tokens": reported, "completion_tokens": 2}})
    replica = await start.replica(stream(delta("a"), *([usage] if reported else []), DONE))
    proxy = replace(QUIET, policy=policy)
    config = replace(config_for([replica], proxy), models=(ModelConfig(name="m", tokenizer=tokenizer),))
    return await start.proxy(config, [replica], request_log=request_log)


async def post(fleet: Running, *texts: str, **body: object) -> dict[str, Any]:
    """Send a prompt of a message for each text; return its decision."""
    messages = [{"role": "user", "content": text} for text in texts or (TEXT,)]
    answer = await fleet.client.post(CHAT, content=chat(stream=True, model="m", messages=messages, **body))
    assert answer.status_code == 200, answer.text
    return await decision(fleet, answer)


async def decision(fleet: Running, answer: httpx.Response) -> dict[str, Any]:
    found = (await fleet.admin.get(f"/admin/decisions/{answer.headers['x-request-id']}")).json()
    row: dict[str, Any] = found["decisions"][0]
    return row


def stored(fleet: Running, text: str) -> None:
    """Report the blocks of a text as an engine that has cached them."""
    tokens = text.encode()
    blocks = BlocksStored(
        hashes=tuple(range(len(tokens) // 64)),
        parent=None,
        tokens=tokens,
        block_tokens=16,
        tier=KvTier.GPU,
    )
    batch = KvEventBatch(sent_s=None, rank=0, events=(blocks,))
    state = fleet.state
    state.routing.router.caches.on_kv_events(
        "r0", batch, model=None, block_tokens=16, complete=True, now=state.routing.clock()
    )


def counted(fleet: Running, result: str) -> float:
    value = fleet.state.telemetry.metrics.registry.get_sample_value("gorgo_exact_prompts_total", {"result": result})
    assert value is not None
    return value


async def test_events_of_an_engine_count_for_a_prompt_with_exact_tokens(start: Start) -> None:
    fleet = await served(start, reported=64)
    stored(fleet, TEXT[:128])
    row = await post(fleet)
    assert (row["prompt_tokens"], row["cache_source"], row["estimated_cached_tokens"]) == (64, "events", 32)
    stored(fleet, TEXT)
    row = await post(fleet)
    assert (row["cache_source"], row["estimated_cached_tokens"]) == ("events", 64)
    assert counted(fleet, "counted") == 2


def sources(fleet: Running) -> dict[str, float]:
    """The dispatches by the source of their estimated cached tokens."""
    registry = fleet.state.telemetry.metrics.registry
    labels = {"replica": "r0", "region": "here"}
    found = {
        source: registry.get_sample_value("gorgo_cache_source_total", labels | {"cache_source": source})
        for source in ("history", "events", "push")
    }
    return {source: value for source, value in found.items() if value}


async def shown_cache(fleet: Running) -> dict[str, Any]:
    (row,) = (await fleet.admin.get("/admin/status")).json()["replicas"]
    cache: dict[str, Any] = row["cache"]
    return cache


@pytest.mark.parametrize(
    ("policy", "tokenizer", "reason"),
    [
        ("gorgo-ms", None, "no tokenizer for m"),
        ("lodestar", "simulated", "policy lodestar reads no reports of caches"),
        ("round-robin", "simulated", "policy round-robin reads no reports of caches"),
    ],
)
async def test_reports_that_no_decision_uses_are_named_in_status_and_log_and_not_counted(
    start: Start, caplog: pytest.LogCaptureFixture, policy: str, tokenizer: str | None, reason: str
) -> None:
    fleet = await served(start, reported=64, policy=policy, tokenizer=tokenizer)
    state = fleet.state
    state.routing.models.set_list("r0", [ServedModel("m")], engine="sglang")
    stored(fleet, TEXT)
    for _ in range(5):
        assert (await post(fleet))["cache_source"] == "history"
    assert sources(fleet) == {"history": 5}
    cache = await shown_cache(fleet)
    assert (cache["unused"], cache["decisions"]["history"]) == (reason, 5)
    assert cache_line(cache).startswith(f"history: {reason}, events unused")
    for _ in range(2):
        state.log_unused(state.replicas.targets["r0"])
    lines = [record for record in caplog.records if record.getMessage() == "cache_reports_unused"]
    assert [line.fields["in_force"] for line in lines] == [f"history: {reason}"]  # type: ignore[attr-defined]


async def test_reports_that_decisions_use_are_counted_by_their_source(start: Start) -> None:
    fleet = await served(start, reported=64)
    await post(fleet)
    stored(fleet, TEXT)
    for _ in range(2):
        await post(fleet)
    assert sources(fleet) == {"history": 1, "events": 2}
    cache = await shown_cache(fleet)
    assert (cache["unused"], cache["decisions"]) == (None, {"history": 0, "events": 2, "push": 0})


async def test_a_tokenizer_that_counts_otherwise_is_named_as_why_reports_are_not_used(start: Start) -> None:
    fleet = await served(start, reported=65)
    fleet.state.routing.models.set_list("r0", [ServedModel("m")], engine="sglang")
    stored(fleet, TEXT)
    for _ in range(3):
        await post(fleet)
    await until(lambda: counted(fleet, "different"))
    assert (await shown_cache(fleet))["unused"] == "the tokenizer of m counts other tokens than the engine"


async def test_a_differing_report_is_logged_once_and_the_text_index_counts_again(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = await served(start, reported=65)
    stored(fleet, TEXT)
    first, *_ = [await post(fleet) for _ in range(3)]
    await until(lambda: counted(fleet, "different"))
    second = await post(fleet)
    assert (first["cache_source"], second["cache_source"]) == ("events", "history")
    await post(fleet)
    lines = [record for record in caplog.records if record.getMessage() == "prompt_tokens_differ"]
    assert [(line.levelno, line.fields["model"]) for line in lines] == [(logging.WARNING, "m")]  # type: ignore[attr-defined]
    assert (counted(fleet, "counted"), counted(fleet, "different")) == (3, 1)


async def test_one_lying_replica_ends_the_counting_for_no_other(start: Start) -> None:
    """The second replica reports no counts at all: the first one's word alone ends nothing."""
    usage = event({"choices": [], "usage": {"prompt_tokens": 6666, "completion_tokens": 2}})
    replicas = [await start.replica(stream(delta("a"), *lie, DONE)) for lie in ([usage], [])]
    config = replace(config_for(replicas, replace(QUIET, policy="round-robin")), models=(SIMULATED,))
    fleet = await start.proxy(config, replicas)
    for _ in range(20):
        await post(fleet)
    await fleet.idle()
    assert (counted(fleet, "counted"), counted(fleet, "different")) == (20, 1)


async def test_the_bytes_per_token_are_learned_beside_exact_tokens(start: Start) -> None:
    fleet = await served(start, reported=64)
    ratios = fleet.state.routing.router.token_ratios
    ratios.learn("m", text_bytes=80_000, prompt_tokens=40_000)
    before = ratios.ratio("m")
    await post(fleet)
    await fleet.idle()
    assert ratios.ratio("m") > before, "towards the four of this engine"


async def test_the_request_log_has_the_ends_of_messages_in_reported_tokens(start: Start, tmp_path: Path) -> None:
    fleet = await served(start, reported=60, request_log=tmp_path / "log")
    messages = [{"role": role, "content": text} for role, text in (("system", "a" * 40), ("user", "b" * 80))]
    body = json.dumps({"model": "another", "messages": messages, "stream": True})
    assert (await fleet.client.post(CHAT, content=body)).status_code == 200
    await until(lambda: len((tmp_path / "log").read_text().splitlines()) == 2)
    [request] = read_logged_requests(tmp_path / "log")
    assert (request.input_tokens, request.boundaries) == (60, (20, 60))


async def test_multi_depth_has_routes_of_16_tokens_where_tokens_are_exact(start: Start) -> None:
    fleet = await served(start, reported=0, policy="multi-depth")
    await post(fleet, "a" * 40, "b" * 80)
    await fleet.idle()
    again = await post(fleet, "a" * 40, "c" * 80)
    other = await post(fleet, "d" * 40, "b" * 80)
    assert (again["fallback"], other["fallback"]) == ("no_match", "no_match"), "ten tokens are no block"
    await post(fleet, "a" * 80, "b" * 80)
    await fleet.idle()
    branch = await post(fleet, "a" * 80, "c" * 80)
    assert branch["fallback"] is None
    assert branch["candidates"][0]["terms"]["route_tokens"] == 16.0


async def test_boundaries_of_messages_reach_the_router(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = await served(start, reported=30)
    asked: list[RouteRequest] = []
    submit = fleet.state.routing.router.submit

    def recorded(request: RouteRequest, *, now: float) -> Any:
        asked.append(request)
        return submit(request, now=now)

    monkeypatch.setattr(fleet.state.routing.router, "submit", recorded)
    messages = [{"role": role, "content": text} for role, text in (("system", "a" * 40), ("user", "b" * 80))]
    for model in ("m", "another"):
        body = json.dumps({"model": model, "messages": messages, "stream": True})
        assert (await fleet.client.post(CHAT, content=body)).status_code == 200
    assert [tuple(request.boundaries) for request in asked] == [(10, 30), (10, 30)]
    assert [request.prompt_tokens for request in asked] == [30, 30]
