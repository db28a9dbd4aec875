"""Greedy answers of two real vLLM behind `gorgo serve`, cut at a hundred places: each is the uncut one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.real.cutting import Bench, assert_cut_answers_are_whole, cut_engines
from tests.system.vllm_server import VllmServer

#: Cuts of the answers of each route.
PLACES = {"/v1/chat/completions": 100, "/v1/completions": 100}


@pytest.fixture
async def bench(tmp_path: Path, vllm_servers: tuple[VllmServer, VllmServer]) -> AsyncIterator[Bench]:
    async with cut_engines(tmp_path, "vllm", [each.url for each in vllm_servers]) as bench:
        yield bench


@pytest.mark.parametrize("route", PLACES)
async def test_a_greedy_answer_of_vllm_that_is_cut_anywhere_is_the_uncut_one(bench: Bench, route: str) -> None:
    await assert_cut_answers_are_whole(bench, route, count=PLACES[route])
