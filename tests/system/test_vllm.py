"""vLLM on the CPU behind `gorgo serve`, and the model of vLLM against vLLM itself: steps, caches, counts of tokens."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI

from gorgo.config.model import ModelConfig
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.engines.exposition import read_gauges
from gorgo.lab.prompt_text import prompt_text
from gorgo.lab.sim.engine.request import EngineRequest
from gorgo.lab.sim.engine.vllm import VllmModel
from gorgo.live.parsing.json_body import read_fields
from gorgo.live.prompt_tokens import PromptTokens
from gorgo.live.tokens import read_models
from tests.lab.sim.fleets import round_profile
from tests.live.tokens.files import conversation, needs_tokenizers
from tests.real.served import eventually, served
from tests.real.tiny_model import Shape
from tests.system.environments import Environment
from tests.system.processes import RouterProcess, router_process
from tests.system.tiny_checkpoint import make_tiny_checkpoint
from tests.system.vllm_server import ENGINE_ENVIRONMENT, MAX_MODEL_TOKENS, VllmServer, vllm_server, wait_until_ready

# --- Two real vLLM on the CPU behind `gorgo serve`, spoken to by the clients that people use.


Servers = tuple[VllmServer, VllmServer]


@pytest.fixture
def router(vllm_servers: Servers, tmp_path: Path) -> Iterator[RouterProcess]:
    replicas = {"left": vllm_servers[0].url, "right": vllm_servers[1].url}
    with router_process(tmp_path, replicas, engine="vllm") as router:
        yield router


def text_of(name: str, tokens: int) -> str:
    """A prompt that no other test sends."""
    return prompt_text([], tokens, rest=name).decode().rstrip()


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 8, **more}


def test_the_openai_client_streams_a_chat(router: RouterProcess) -> None:
    with OpenAI(base_url=f"{router.url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": text_of("stream", 300)}],
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) == 24
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.completion_tokens, usage.prompt_tokens > 300) == (24, True)
    assert router.in_flight() == 0


def test_the_anthropic_client_streams_messages(router: RouterProcess) -> None:
    anthropic = pytest.importorskip("anthropic", reason="ANTHROPIC CLIENT TEST SKIPPED: the package is not installed")
    with anthropic.Anthropic(base_url=router.url, api_key="none") as client:
        said = {"role": "user", "content": text_of("messages", 300)}
        with client.messages.stream(model="tiny", max_tokens=16, messages=[said]) as stream:
            words = list(stream.text_stream)
            message = stream.get_final_message()
    assert len(words) == message.usage.output_tokens == 16
    assert router.in_flight() == 0


def test_cached_tokens_grow_over_turns_that_stay_on_one_replica(router: RouterProcess) -> None:
    messages = [{"role": "user", "content": text_of("turns", 400)}]
    cached, prompts, replicas = [], [], set()
    for turn in range(4):
        answer = httpx.post(f"{router.url}/v1/chat/completions", json=chat("") | {"messages": messages}, timeout=60)
        usage = answer.json()["usage"]
        prompts.append(usage["prompt_tokens"])
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        replicas.add(answer.headers["x-gorgo-replica"])
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": text_of(f"turn {turn}", 100)})
    assert len(replicas) == 1
    assert cached[0] == 0
    # Whole blocks of 32 tokens are kept.
    assert all(found > before - 32 for found, before in zip(cached[1:], prompts, strict=False))
    sample = router.samples()[-1]
    assert sample["cached_tokens"] == cached[-1]
    assert sample["estimated_cached_tokens"] == pytest.approx(cached[-1], abs=128)


async def test_a_client_that_leaves_frees_the_engine_and_the_ledger(
    router: RouterProcess, vllm_servers: Servers
) -> None:
    def running() -> float:
        return sum(server.running() for server in vllm_servers)

    async with httpx.AsyncClient(timeout=60) as http:
        body = chat(text_of("leave", 100), max_tokens=8_000, stream=True)
        async with http.stream("POST", f"{router.url}/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            while '"content":" ' not in await anext(lines):
                pass
            await eventually(lambda: running() == 1)
            assert router.in_flight() == 1
    await eventually(lambda: running() == 0)
    assert router.in_flight() == 0


def test_an_over_long_prompt_gets_the_engines_own_400(router: RouterProcess, vllm_servers: Servers) -> None:
    body = chat(text_of("long", MAX_MODEL_TOKENS + 1))
    answer = httpx.post(f"{router.url}/v1/chat/completions", json=body, timeout=60)
    direct = httpx.post(f"{vllm_servers[0].url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == direct.status_code == 400
    assert answer.content == direct.content
    assert {row["state"] for row in router.admin("/admin/fleet")["replicas"]} == {"healthy"}
    assert router.in_flight() == 0


async def test_load_and_size_of_the_engine_are_read(vllm_servers: Servers) -> None:
    async with served({"left": vllm_servers[0].url}, engine="vllm") as proxy:
        (row,) = await proxy.fleet()
    assert (row["kv_capacity_tokens"], row["running_requests"], row["reports"]["metrics"]) == (32_000, 0, "reported")


async def test_an_engine_without_its_flag_is_told_apart_once_with_it(
    vllm: Environment, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with vllm_server(vllm, checkpoint) as silent:
        wait_until_ready(silent)
        async with served({"silent": silent.url}, engine="vllm") as proxy, httpx.AsyncClient(timeout=60) as http:
            for _ in range(10):
                answer = await http.post(f"{proxy.url}/v1/chat/completions", json=chat(text_of("silent", 300)))
                assert answer.status_code == 200
            (row,) = await proxy.fleet()
    assert row["reports"] == {"cached_tokens": "missing", "metrics": "reported"}
    (told,) = [vars(record)["fields"] for record in caplog.records if record.getMessage() == "report_missing"]
    assert told["advice"].endswith("start the engine with --enable-prompt-tokens-details")


# --- The model of vLLM against two vLLM servers: steps by their counters, cached tokens by their answers.
#
# Each request is sent when the one before it on its server has a given number of tokens. When it reached the engine is
# read from the answers, as the tokens that the one before had at its first token, and it arrives in the model at the
# same point. So no time is compared: a busy machine takes longer for the same steps.


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


# --- The model of vLLM against vLLM itself: what each step computes, what is found cached, who is preempted.


_SCRIPT = Path(__file__).parent / "vllm_steps.py"
#: What attention on the CPU allows at least.
_BLOCK_TOKENS = 32
_TOKENS = (10, 250)


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of which a step takes milliseconds: times are not compared."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("vllm-steps") / "tiny", shape=Shape())


def mix_of_vllm_model(
    seed: int, *, blocks: int, prefix_cache: bool = True, async_scheduling: bool = False
) -> dict[str, Any]:
    """Forty requests of three families with shared beginnings; some go on with the answer of one of the first."""
    rng = np.random.default_rng(seed)
    beginnings = [rng.integers(*_TOKENS, 150).tolist() for _ in range(3)]
    requests = []
    for place in range(40):
        beginning = beginnings[int(rng.integers(3))][: int(rng.integers(150))]
        turn = place > 10 and rng.random() < 0.4
        requests.append(
            {
                "before_step": int(rng.integers(0, 300)),
                "after": int(rng.integers(8)) if turn else None,
                "prompt": ([] if turn else beginning) + rng.integers(*_TOKENS, int(rng.integers(5, 200))).tolist(),
                "output_tokens": int(rng.integers(1, 90)),
            }
        )
    return {
        "blocks": blocks,
        "block_tokens": _BLOCK_TOKENS,
        "budget": 128,
        "running": 6,
        "async_scheduling": async_scheduling,
        "prefix_cache": prefix_cache,
        "requests": requests,
    }


def real_log(vllm: Environment, checkpoint: Path, folder: Path, mix: Mapping[str, Any]) -> dict[str, Any]:
    """Run a mix on vLLM in a process of its own."""
    given, log = folder / "mix.json", folder / "log.json"
    given.write_text(json.dumps(mix))
    done = subprocess.run(
        ["nice", "-n", "10", str(vllm.python), str(_SCRIPT), str(checkpoint), str(given), str(log)],
        env={**os.environ, **ENGINE_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(log.read_text())  # type: ignore[no-any-return]


def simulated_log(mix: Mapping[str, Any], real: Mapping[str, Any]) -> tuple[dict[str, Any], VllmModel[EngineRequest]]:
    """Submit the same prompts before the same steps to the model; what it generates is what vLLM generated."""
    profile = replace(
        round_profile(
            kv_tokens=mix["blocks"] * _BLOCK_TOKENS,
            chunk_tokens=mix["budget"],
            max_running_requests=mix["running"],
            context_tokens=mix["blocks"] * _BLOCK_TOKENS,
        ),
        scheduler="vllm",
        block_tokens=_BLOCK_TOKENS,
        prefix_cache=mix["prefix_cache"],
    )
    model: VllmModel[EngineRequest] = VllmModel(profile)
    due = list(real["requests"].items())
    requests: dict[str, EngineRequest] = {}
    names: dict[EngineRequest, str] = {}
    steps: list[dict[str, Any]] = []
    while due or not model.idle:
        while due and due[0][1]["before_step"] <= len(steps):
            name, one = due.pop(0)
            requests[name] = EngineRequest(
                _key(one["prompt"]),
                prompt_tokens=len(one["prompt"]),
                output_tokens=len(one["output"]),
                output_key=_key(one["output"]),
            )
            names[requests[name]] = name
            model.submit(requests[name], now=0.0)
        step = model.start_step(now=0.0)
        assert step is not None, "vLLM had a step here"
        sizes = step.chunks or (0,) * len(step.requests)
        steps.append(
            {
                "computed": [[names[each], size or 1] for each, size in zip(step.requests, sizes, strict=True)],
                "preempted": [names[each] for each in step.preempted],
            }
        )
        model.finish_step(step)
        model.check()
    cached = {name: request.cached_tokens for name, request in requests.items()}
    return {"steps": steps, "cached_tokens": cached}, model


def cached_tokens(real: Mapping[str, Any]) -> dict[str, int]:
    return {name: one["cached_tokens"] for name, one in real["requests"].items()}


@pytest.mark.parametrize(
    ("seed", "blocks", "prefix_cache"),
    [(1, 30, True), (2, 200, True), (3, 24, False)],
    ids=["full", "roomy", "uncached"],
)
def test_every_step_is_the_one_that_vllm_takes(
    vllm: Environment, small_checkpoint: Path, tmp_path: Path, seed: int, blocks: int, prefix_cache: bool
) -> None:
    mix = mix_of_vllm_model(seed, blocks=blocks, prefix_cache=prefix_cache)
    real = real_log(vllm, small_checkpoint, tmp_path, mix)
    simulated, model = simulated_log(mix, real)
    assert simulated["cached_tokens"] == cached_tokens(real)
    for number, (mine, theirs) in enumerate(zip(simulated["steps"], real["steps"], strict=True)):
        assert (number, mine["computed"]) == (number, theirs["computed"])
        assert (number, sorted(mine["preempted"])) == (number, sorted(theirs["preempted"]))
    assert bool(model.totals.preemptions) == (blocks < 100)
    assert bool(model.totals.cached_tokens) == prefix_cache


# --- What a proxy counts with a model's files is what vLLM reports for the same bodies.


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "The router sends each request to a replica. Grüße, naïve 東京\n\n\tand  blanks. "
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": conversation(TEXT)}),
    (CHAT, {"messages": conversation(TEXT, "", "Why? ", system="Be brief.\n")}),
    (CHAT, {"messages": conversation(*[TEXT * 5] * 9, system=TEXT)}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]}),
    (CHAT, {"messages": conversation("What does <|im_start|> or <|endoftext|> mean?"), "n": 2, "temperature": 0.5}),
    (COMPLETIONS, {"prompt": TEXT}),
    (COMPLETIONS, {"prompt": "\n"}),
    (COMPLETIONS, {"prompt": [5, 6, 7, 8, 9]}),
]


@needs_tokenizers
@pytest.mark.parametrize(("route", "body"), BODIES)
async def test_counted_tokens_are_those_that_vllm_reports(
    vllm_servers: tuple[VllmServer, VllmServer], checkpoint: Path, route: str, body: dict[str, Any]
) -> None:
    whole = {"model": "tiny", "max_tokens": 1, **body}
    models = read_models([ModelConfig(name="tiny", tokenizer=str(checkpoint / "tokenizer.json"))])
    prompts = PromptTokens(models, lambda _: (16,), lambda _: None)
    fields = read_fields(route, json.dumps(whole).encode(), Fingerprinter(key=1))
    exact = await prompts.exact_prompt(route, fields, model="tiny", base="tiny")
    answer = httpx.post(vllm_servers[0].url + route, json=whole, timeout=120)
    assert answer.status_code == 200, answer.text
    assert exact is not None
    assert exact.tokens == answer.json()["usage"]["prompt_tokens"]
