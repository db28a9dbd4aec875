"""KV events of two real vLLM with few blocks: what the proxy estimates is what the engines find."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gorgo.live.extras import EVENTS, is_installed
from tests.real.served import eventually
from tests.system.conversations import Conversations
from tests.system.environments import Environment
from tests.system.router_process import RouterProcess, router_process
from tests.system.tiny_checkpoint import make_tiny_checkpoint
from tests.system.vllm_server import CACHED_TOKENS_FLAG, VllmServer, vllm_server, wait_until_ready

pytestmark = pytest.mark.skipif(not is_installed(EVENTS), reason="KV EVENTS SKIPPED: pyzmq is not installed")

BLOCK_TOKENS = 32
#: Blocks of one engine: a tenth of what the conversations have.
BLOCKS = 128
REQUESTS = 1000
PUBLISHER = (
    '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}'
)
FLAGS = (
    CACHED_TOKENS_FLAG,
    "--kv-events-config",
    PUBLISHER,
    "--num-gpu-blocks-override",
    str(BLOCKS),
    "--max-model-len",
    "2048",
)
MODELS = """
models: [{{name: tiny, tokenizer: '{tokenizer}'}}]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "tiny")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_estimates_by_events_are_what_vllm_finds(
    vllm: Environment, tiny: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with ExitStack() as running:
        ports = [free_port(), free_port()]
        stacks = [running.enter_context(ExitStack()) for _ in ports]
        servers = [
            stack.enter_context(vllm_server(vllm, tiny, *FLAGS, port=port))
            for stack, port in zip(stacks, ports, strict=True)
        ]
        wait_until_ready(*servers)
        router = running.enter_context(routed(tmp_path, tiny, servers))
        conversations = Conversations(router.url, model="tiny", block_tokens=BLOCK_TOKENS)
        share = await asyncio.to_thread(conversations.run, REQUESTS)
        record_property("share within one block", share)
        record_property("cached tokens", sum(conversations.cached))
        assert share >= 0.99, conversations.wrong
        assert sum(conversations.cached) > REQUESTS * BLOCK_TOKENS, "the cache was of use"

        # An engine is killed and comes back at other ports for its events, with an empty cache.
        servers[0].kill()
        stacks[0].close()
        stacks[0].enter_context(vllm_server(vllm, tiny, *FLAGS, port=ports[0]))
        wait_until_ready(servers[0])
        await eventually(lambda: states(router) == {"left": 1, "right": 1}, within_s=120)
        share = await asyncio.to_thread(conversations.run, 100)
        record_property("share after a kill", share)
        assert share >= 0.99, conversations.wrong

        # Another router learns both caches from the replays.
        second = running.enter_context(routed(tmp_path / "second", tiny, servers))
        await eventually(lambda: states(second) == {"left": 1, "right": 1}, within_s=30)
        conversations.url = second.url
        share = await asyncio.to_thread(conversations.run, 100)
        record_property("share of a new router", share)
        assert share >= 0.99, conversations.wrong


def routed(folder: Path, checkpoint: Path, servers: list[VllmServer]) -> Any:
    folder.mkdir(exist_ok=True)
    replicas = {"left": servers[0].url, "right": servers[1].url}
    more = MODELS.format(tokenizer=checkpoint / "tokenizer.json")
    return router_process(folder, replicas, engine="vllm, kv_events: auto", more=more)


def states(router: RouterProcess) -> dict[str, int]:
    """Whether the log says of each replica that its feed is live now."""
    found: dict[str, int] = {}
    for line in (router.folder / "router.log").read_text().splitlines():
        if '"kv_events_state"' in line:
            name = "left" if '"left"' in line else "right"
            found[name] = int('"state": "live"' in line or '"state":"live"' in line)
    return found
