"""Time from an event of a real vLLM, by its own clock, to the event's entry in an index on the same machine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gorgo.config.fleet import KvEventsConfig
from gorgo.core.messages.actions import Action
from gorgo.core.messages.kv_events import BlocksRemoved, KvEventBatch
from gorgo.core.prefix.kv_index import KvEventIndex
from gorgo.live.extras import EVENTS, is_installed
from tests.live.kv_events.feeding import RecordingRouter, subscribed
from tests.system.conversations import Conversations
from tests.system.environments import Environment
from tests.system.event_engines import EventPorts
from tests.system.test_kv_events import BLOCK_TOKENS, BLOCKS
from tests.system.tiny_checkpoint import make_tiny_checkpoint
from tests.system.vllm_server import CACHED_TOKENS_FLAG, vllm_server, wait_until_ready

pytestmark = pytest.mark.skipif(not is_installed(EVENTS), reason="KV EVENTS SKIPPED: pyzmq is not installed")

REQUESTS = 300


class TimingRouter(RecordingRouter):
    """In the place of the Router: how late each batch with a removal is, s."""

    def __init__(self) -> None:
        super().__init__()
        self.index = KvEventIndex(block_tokens=BLOCK_TOKENS, max_blocks_per_replica=1_000_000)
        self.late_s: list[float] = []

    def on_kv_events(
        self, replica: str, batch: KvEventBatch, *, model: str | None, block_tokens: int, complete: bool, now: float
    ) -> list[Action]:
        self.index.apply(0, batch)
        assert batch.sent_s is not None
        if any(isinstance(event, BlocksRemoved) for event in batch.events):
            self.late_s.append(time.time() - batch.sent_s)
        return []


async def test_evictions_of_vllm_are_known_after_milliseconds(
    vllm: Environment, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    tiny, ports, router = make_tiny_checkpoint(tmp_path / "tiny"), EventPorts.free(), TimingRouter()
    endpoint, replay = f"tcp://127.0.0.1:{ports.events}", f"tcp://127.0.0.1:{ports.replays}"
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    events |= {"endpoint": f"tcp://*:{ports.events}", "replay_endpoint": f"tcp://*:{ports.replays}"}
    flags = (CACHED_TOKENS_FLAG, "--kv-events-config", json.dumps(events), "--num-gpu-blocks-override", str(BLOCKS))
    with vllm_server(vllm, tiny, *flags, "--max-model-len", "2048", port=ports.http) as server:
        await asyncio.to_thread(wait_until_ready, server)
        async with subscribed(KvEventsConfig(endpoint=endpoint, replay=replay), router=router) as feeding:
            await feeding.until("live")
            conversations = Conversations(server.url, model="tiny", block_tokens=BLOCK_TOKENS)
            await asyncio.to_thread(conversations.run, REQUESTS)
            await asyncio.sleep(0.1)
    late_ms = np.array(router.late_s) * 1e3
    quantiles = {f"p{each}_ms": round(float(np.percentile(late_ms, each)), 2) for each in (50, 95, 99)}
    record_property("evictions", len(late_ms))
    record_property("late", quantiles)
    assert len(late_ms) > REQUESTS / 4, "most prompts evict blocks"
    assert quantiles["p50_ms"] < 25.0
