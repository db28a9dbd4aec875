"""Greedy answers of two real vLLM behind `gorgo serve`, cut at a hundred places: each is the uncut one.

The engines compute with 32 bits. With 16, which is vLLM's choice for this model, whether a prompt was cached decides
which of two words is said where both are almost as likely, cut or not: 9 of 100 cut answers had another word far behind
their seam, all of them the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from gorgo.engines.base import read_tokens, template_body, tokenize_body
from tests.real.cutting import Bench, assert_cut_answers_are_whole, cut_engines
from tests.real.tiny_model import CHAT_TEMPLATE
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
    template = checkpoint.parent / "trims.jinja"
    template.write_text(CHAT_TEMPLATE.replace("message['content']", "message['content'].rstrip()"))
    with ExitStack() as stack:
        servers = [
            stack.enter_context(vllm_server(vllm, checkpoint, *flags, *more))
            for more in ((), ("--chat-template", str(template)))
        ]
        wait_until_ready(*servers)
        yield servers


@pytest.fixture
async def bench(tmp_path: Path, exact_servers: list[VllmServer]) -> AsyncIterator[Bench]:
    async with cut_engines(tmp_path, "vllm", [each.url for each in exact_servers]) as bench:
        yield bench


@pytest.mark.parametrize("route", PLACES)
async def test_a_greedy_answer_of_vllm_that_is_cut_anywhere_is_the_uncut_one(bench: Bench, route: str) -> None:
    await assert_cut_answers_are_whole(bench, route, count=PLACES[route], most=MOST)


async def test_vllm_counts_tokens_and_tells_whether_its_template_trims(exact_servers: list[VllmServer]) -> None:
    """The second server's does; both count the tokens of a text alike."""

    async def tokens(url: str, body: bytes) -> list[int]:
        answer = await http.post(f"{url}/tokenize", content=body, headers={"content-type": "application/json"})
        found = read_tokens(answer.status_code, answer.content)
        assert found is not None
        return found

    trims = []
    async with httpx.AsyncClient(timeout=30) as http:
        for server in exact_servers:
            assert len(await tokens(server.url, tokenize_body("tiny", " ban des"))) == 2
            spaced, bare = [await tokens(server.url, template_body("tiny", space)) for space in (" \n", "")]
            trims.append(spaced == bare)
    assert trims == [False, True]
