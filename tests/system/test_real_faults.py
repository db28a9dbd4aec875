"""Real engines killed in the middle of their streams: llama.cpp over 90 ms of real TCP, vLLM near and over that path.

What must hold is the same as for any fault: every stream ends once, whole or with an error that shows; who had no
content yet is served by the other engine; nothing stays reserved; the dead one is left out, and let in when it is back.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.real.faults import Death, survive
from tests.real.llama_server import llama_server, missing_reason
from tests.real.served import served
from tests.real.tiny_model import make_tiny_model
from tests.system.environments import Environment
from tests.system.long_path import long_path
from tests.system.vllm_server import vllm_server, wait_until_ready

RTT_MS = 90.0
LLAMA_SLOTS = 4
#: Few and short: on a busy machine one vLLM that serves what two were asked takes minutes.
VLLM_SLOTS = 2
VLLM_FLAGS = ("--max-num-seqs", str(VLLM_SLOTS))


async def test_killed_llama_cpp_over_a_long_path(iptables: None, tmp_path: Path) -> None:
    reason = missing_reason()
    if reason:
        pytest.skip(reason)
    model = make_tiny_model(tmp_path / "tiny.gguf")
    with ExitStack() as stack:
        victim, other = (stack.enter_context(llama_server(model, slots=LLAMA_SLOTS, context=4096)) for _ in range(2))
        stack.enter_context(long_path(victim.port, other.port, rtt_ms=RTT_MS))

        async def restart() -> None:
            stack.enter_context(llama_server(model, slots=LLAMA_SLOTS, context=4096, port=victim.port))

        death = Death(LLAMA_SLOTS, 600, kill=lambda: os.kill(victim.pid, signal.SIGKILL), restart=restart)
        urls = {"victim": victim.url, "other": other.url}
        async with served(urls, policy="round-robin", probe_interval_s=0.5) as proxy:
            assert min(row["rtt_ms"] for row in await proxy.fleet()) >= RTT_MS
            await survive(proxy, death)


async def test_killed_vllm_near_and_over_a_long_path(vllm: Environment, checkpoint: Path, iptables: None) -> None:
    with ExitStack() as stack:
        first, other = (stack.enter_context(vllm_server(vllm, checkpoint, *VLLM_FLAGS)) for _ in range(2))
        wait_until_ready(first, other)
        urls = {"victim": first.url, "other": other.url}
        victims = [first]

        async def restart() -> None:
            victims.append(stack.enter_context(vllm_server(vllm, checkpoint, *VLLM_FLAGS, port=first.port)))
            await asyncio.to_thread(wait_until_ready, victims[-1])

        death = Death(VLLM_SLOTS, 100, kill=lambda: victims[-1].kill(), restart=restart)
        async with served(urls, engine="vllm", policy="round-robin", probe_interval_s=0.5) as proxy:
            await survive(proxy, death)
        stack.enter_context(long_path(first.port, other.port, rtt_ms=RTT_MS))
        async with served(urls, engine="vllm", policy="round-robin", probe_interval_s=0.5) as proxy:
            assert min(row["rtt_ms"] for row in await proxy.fleet()) >= RTT_MS
            await survive(proxy, death)
