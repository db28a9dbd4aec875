"""The model of vLLM against vLLM itself: what each step computes, what is found cached, who is preempted."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gorgo.lab.sim.engine.request import EngineRequest
from gorgo.lab.sim.engine.vllm.model import VllmModel
from tests.lab.sim.profiles import round_profile
from tests.real.tiny_weights import Shape
from tests.system.environments import Environment
from tests.system.tiny_checkpoint import make_tiny_checkpoint
from tests.system.vllm_server import ENGINE_ENVIRONMENT

_SCRIPT = Path(__file__).parent / "vllm_steps.py"
#: What attention on the CPU allows at least.
_BLOCK_TOKENS = 32
_TOKENS = (10, 250)


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of which a step takes milliseconds: times are not compared."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("vllm-steps") / "tiny", shape=Shape())


def mix_of(seed: int, *, blocks: int, prefix_cache: bool = True, async_scheduling: bool = False) -> dict[str, Any]:
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


def _key(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


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
    mix = mix_of(seed, blocks=blocks, prefix_cache=prefix_cache)
    real = real_log(vllm, small_checkpoint, tmp_path, mix)
    simulated, model = simulated_log(mix, real)
    assert simulated["cached_tokens"] == cached_tokens(real)
    for number, (mine, theirs) in enumerate(zip(simulated["steps"], real["steps"], strict=True)):
        assert (number, mine["computed"]) == (number, theirs["computed"])
        assert (number, sorted(mine["preempted"])) == (number, sorted(theirs["preempted"]))
    assert bool(model.totals.preemptions) == (blocks < 100)
    assert bool(model.totals.cached_tokens) == prefix_cache
