"""Greedy answers of two real vLLM behind `gorgo serve`, cut at a hundred places: each is the uncut one.

The engines compute with 32 bits. With 16, which is vLLM's choice for this model, whether a prompt was cached decides
which of two words is said where both are almost as likely, cut or not: 9 of 100 cut answers had another word far behind
their seam, all of them the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.real.cutting import Bench, assert_cut_answers_are_whole, cut_engines
from tests.system.environments import Environment
from tests.system.tiny_checkpoint import make_tiny_checkpoint
from tests.system.vllm_server import CACHED_TOKENS_FLAG, VllmServer, vllm_server, wait_until_ready

#: Cuts of the answers of each route.
PLACES = {"/v1/chat/completions": 100, "/v1/completions": 20}
#: An answer on a busy machine may have a third of the bytes.
MOST = 0.25


@pytest.fixture(scope="module")
def exact_servers(vllm: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmServer]]:
    checkpoint = make_tiny_checkpoint(tmp_path_factory.mktemp("exact") / "tiny")
    flags = (CACHED_TOKENS_FLAG, "--dtype", "float32")
    with ExitStack() as stack:
        servers = [stack.enter_context(vllm_server(vllm, checkpoint, *flags)) for _ in range(2)]
        wait_until_ready(*servers)
        yield servers


@pytest.fixture
async def bench(tmp_path: Path, exact_servers: list[VllmServer]) -> AsyncIterator[Bench]:
    async with cut_engines(tmp_path, "vllm", [each.url for each in exact_servers]) as bench:
        yield bench


@pytest.mark.parametrize("route", PLACES)
async def test_a_greedy_answer_of_vllm_that_is_cut_anywhere_is_the_uncut_one(bench: Bench, route: str) -> None:
    await assert_cut_answers_are_whole(bench, route, count=PLACES[route], most=MOST)
