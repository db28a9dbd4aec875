"""LoRA adapters of the simulated engine: listed, named as SGLang's clients name them, each with a cache of its own."""

from __future__ import annotations

from typing import Any

from tests.lab.engine_server.client import CHAT, chat, post
from tests.lab.engine_server.conftest import Start

TEXT = "a prompt of some length " * 40


async def test_adapters_are_listed_with_their_base(start: Start) -> None:
    session = await start(adapters=["sql"])
    async with session.get("/v1/models") as response:
        rows = (await response.json())["data"]
    assert [(row["id"], row["parent"]) for row in rows] == [("gorgo-sim", None), ("sql", "gorgo-sim")]


async def test_each_adapter_has_a_cache_of_its_own(start: Start) -> None:
    session = await start(adapters=["sql", "python"])
    ways: list[dict[str, Any]] = [
        {},
        {"model": "gorgo-sim:sql"},
        {"lora_path": "python"},
        {"lora_path": "sql"},
        {"model": "gorgo-sim"},
    ]
    cached = []
    for way in ways:
        usage = (await post(session, CHAT, chat(TEXT, **way)))["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == [False, False, False, True, True]


async def test_an_adapter_that_is_not_loaded_is_a_400_that_names_the_others(start: Start) -> None:
    session = await start(adapters=["sql"])
    async with session.post(CHAT, json=chat(TEXT, lora_path="x")) as response:
        assert response.status == 400
        assert "lora_path: expected a loaded adapter, one of sql" in await response.text()
