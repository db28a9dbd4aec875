"""Runs in vLLM's own environment: one engine in this process, stepped by hand, and what each step computed.

    python vllm_steps.py CHECKPOINT MIX.json LOG.json

A mix has the limits of the engine and its requests; each is submitted before a step of a given number, or later, when
the request has ended whose prompt and answer it goes on with. The log has the prompts and answers in tokens, the cached
tokens of each, and per step the computed tokens by request in order, and the preempted requests.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def run(checkpoint: str, mix: dict[str, Any]) -> dict[str, Any]:
    vllm = import_module("vllm")
    engine = vllm.LLMEngine.from_engine_args(
        vllm.EngineArgs(
            model=checkpoint,
            max_model_len=mix["blocks"] * mix["block_tokens"],
            block_size=mix["block_tokens"],
            # One block is vLLM's own.
            num_gpu_blocks_override=mix["blocks"] + 1,
            max_num_batched_tokens=mix["budget"],
            max_num_seqs=mix["running"],
            async_scheduling=mix["async_scheduling"],
            enable_prefix_caching=mix["prefix_cache"],
            enforce_eager=True,
            disable_log_stats=False,
            seed=0,
        )
    )
    scheduler = engine.engine_core.engine_core.scheduler
    steps: list[dict[str, Any]] = []
    form = scheduler.schedule

    def schedule(*arguments: Any, **options: Any) -> Any:
        before = {name: request.num_preemptions for name, request in scheduler.requests.items()}
        output = form(*arguments, **options)
        if output.num_scheduled_tokens:
            preempted = [
                _own(name)
                for name, request in scheduler.requests.items()
                if request.num_preemptions > before.get(name, 0)
            ]
            computed = [(_own(name), tokens) for name, tokens in output.num_scheduled_tokens.items()]
            steps.append({"computed": computed, "preempted": preempted})
        return output

    scheduler.schedule = schedule
    open_requests = {str(place): request for place, request in enumerate(mix["requests"])}
    log: dict[str, dict[str, Any]] = {}
    ended: set[str] = set()
    while open_requests or engine.has_unfinished_requests():
        for name, request in list(open_requests.items()):
            after = request["after"]
            if len(steps) < request["before_step"] and engine.has_unfinished_requests():
                continue
            if after is not None and str(after) not in ended:
                continue
            tokens = list(request["prompt"])
            if after is not None:
                tokens = log[str(after)]["prompt"] + log[str(after)]["output"] + tokens
            sampling = vllm.SamplingParams(max_tokens=request["output_tokens"], temperature=0.0, ignore_eos=True)
            engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
            log[name] = {"before_step": len(steps), "prompt": tokens}
            del open_requests[name]
        for output in engine.step():
            if output.finished:
                ended.add(output.request_id)
                one = log[output.request_id]
                one["output"] = list(output.outputs[0].token_ids)
                one["cached_tokens"] = output.num_cached_tokens
    return {"requests": log, "steps": steps}


def _own(name: str) -> str:
    """Return the name of a request without what the engine adds to it."""
    return name.partition("-")[0]


if __name__ == "__main__":
    checkpoint, mix, log = sys.argv[1:]
    Path(log).write_text(json.dumps(run(checkpoint, json.loads(Path(mix).read_text()))))
