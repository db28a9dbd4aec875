"""The model of vLLM against two vLLM servers: steps by their counters, cached tokens by their answers.

Each request is sent when the one before it on its server has a given number of tokens. When it reached the engine is
read from the answers, as the tokens that the one before had at its first token, and it arrives in the model at the same
point. So no time is compared: a busy machine takes longer for the same steps.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np
import pytest

from gorgo.engines.exposition import read_gauges
from gorgo.lab.sim.engine.request import EngineRequest
from gorgo.lab.sim.engine.vllm.model import VllmModel
from tests.lab.sim.profiles import round_profile
from tests.system.vllm_server import VllmServer

_STEPS, _PREEMPTIONS = "vllm:iteration_tokens_total_count", "vllm:num_preemptions_total"
#: As `vllm_server` starts it; the budget is vLLM's default for a server on the CPU.
_PROFILE = replace(
    round_profile(kv_tokens=999 * 32, chunk_tokens=2048, max_running_requests=8, context_tokens=8192),
    scheduler="vllm",
    block_tokens=32,
)


@dataclass(eq=False)
class Planned:
    """One request: it is sent when the one before has `after_tokens`, and goes on with the answer of `turn_of`."""

    prompt: list[int]
    output_tokens: int
    after_tokens: int
    turn_of: int | None
    output: list[int] = field(default_factory=list)
    cached_tokens: int = -1
    #: Tokens of the one before at its own first token.
    arrived_at: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def mix_of(seed: int, beginnings: Sequence[list[int]]) -> list[Planned]:
    """Twelve requests, each some tokens behind the one before; three of them are next turns."""
    rng = np.random.default_rng(seed)
    mix: list[Planned] = []
    for place in range(12):
        turn = place >= 6 and place % 2 == 0
        beginning = beginnings[int(rng.integers(len(beginnings)))][: int(rng.integers(0, 600))]
        mix.append(
            Planned(
                ([] if turn else beginning) + rng.integers(10, 250, int(rng.integers(20, 400))).tolist(),
                int(rng.integers(120, 180)),
                int(rng.integers(10, 60)),
                int(rng.integers(3)) if turn else None,
            )
        )
    return mix


async def serve(http: httpx.AsyncClient, server: VllmServer, mix: Sequence[Planned]) -> None:
    async with asyncio.TaskGroup() as group:
        for place, request in enumerate(mix):
            group.create_task(_send(http, server, mix, place, request))


async def _send(
    http: httpx.AsyncClient, server: VllmServer, mix: Sequence[Planned], place: int, request: Planned
) -> None:
    if place:
        await mix[place - 1].reached.wait()
    if request.turn_of is not None:
        before = mix[request.turn_of]
        await before.ended.wait()
        request.prompt = before.prompt + before.output + request.prompt
    body = {
        "model": "tiny",
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    following = mix[place + 1].after_tokens if place + 1 < len(mix) else request.output_tokens
    async with http.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                if place and not request.output:
                    request.arrived_at = len(mix[place - 1].output)
                request.output += choice["token_ids"]
            if len(request.output) >= following:
                request.reached.set()
            if event.get("usage"):
                request.cached_tokens = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    request.ended.set()


def simulate(mix: Sequence[Planned]) -> tuple[VllmModel[EngineRequest], list[int]]:
    """Play the same mix, its prompts and answers in tokens, through the model."""
    model: VllmModel[EngineRequest] = VllmModel(_PROFILE)
    sent: list[EngineRequest] = []
    while len(sent) < len(mix) or not model.idle:
        while len(sent) < len(mix) and _is_due(mix, sent):
            one = mix[len(sent)]
            request = EngineRequest(
                _key(one.prompt),
                prompt_tokens=len(one.prompt),
                output_tokens=one.output_tokens,
                output_key=_key(one.output),
            )
            model.submit(request, now=0.0)
            sent.append(request)
        step = model.start_step(now=0.0)
        assert step is not None, "the next request arrives while the one before runs"
        model.finish_step(step)
    return model, [request.cached_tokens for request in sent]


def _is_due(mix: Sequence[Planned], sent: Sequence[EngineRequest]) -> bool:
    """Whether the next request is part of the step that follows, with which it gets its first token."""
    return not sent or sent[-1].finished or sent[-1].emitted >= mix[len(sent)].arrived_at - 1


def _key(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


async def counters(http: httpx.AsyncClient, server: VllmServer) -> tuple[float, float]:
    """Steps and preemptions since the start."""
    text = (await http.get(f"{server.url}/metrics")).text
    found = read_gauges(text, {_STEPS, _PREEMPTIONS})
    return found[_STEPS], found[_PREEMPTIONS]


async def test_two_servers_take_the_steps_and_find_the_tokens_that_the_model_does(
    vllm_servers: tuple[VllmServer, VllmServer],
) -> None:
    rng = np.random.default_rng(99)
    beginnings = [rng.integers(10, 250, 600).tolist() for _ in range(3)]
    mixes = [mix_of(seed, beginnings) for seed in (1, 2)]
    async with httpx.AsyncClient(timeout=300) as http:
        before = [await counters(http, server) for server in vllm_servers]
        async with asyncio.TaskGroup() as group:
            for server, mix in zip(vllm_servers, mixes, strict=True):
                group.create_task(serve(http, server, mix))
        after = [await counters(http, server) for server in vllm_servers]
    for mix, (steps, preempted), (steps_after, preempted_after) in zip(mixes, before, after, strict=True):
        model, cached = simulate(mix)
        assert cached == [request.cached_tokens for request in mix]
        assert sum(cached) > 1000
        assert model.totals.steps == pytest.approx(steps_after - steps, rel=0.05)
        assert model.totals.preemptions == preempted_after - preempted
