"""From the bytes of a chat body of about 100 kB to its fingerprint, step by step.

Parsing is shown beside the rest because every design that looks into the body pays it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np

from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.core.prompt.parse import read_prompt

ROUTE = "/v1/chat/completions"
BODY_BYTES = 100_000
ROUNDS = 2000


def run() -> None:
    """Print p50 and p99 in microseconds of each step, for few long messages and for many short ones."""
    print(f"fingerprint of a {BODY_BYTES:,}-byte chat body, us; {ROUNDS:,} rounds")
    print(f"{'messages':>8}  {'step':<12}  {'p50':>8}  {'p99':>8}")
    for messages in (1, 30, 1000):
        for step, work in _steps(messages).items():
            p50, p99 = _measure(work)
            print(f"{messages:>8}  {step:<12}  {p50:>8.1f}  {p99:>8.1f}")


def _steps(messages: int) -> dict[str, Callable[[], object]]:
    raw = _chat(messages)
    body = json.loads(raw)
    prompt = read_prompt(ROUTE, body)
    fingerprinter = Fingerprinter(key=1)
    return {
        "json.loads": lambda: json.loads(raw),
        "read_prompt": lambda: read_prompt(ROUTE, body),
        "fingerprint": lambda: fingerprinter(prompt),
        "all": lambda: fingerprinter(read_prompt(ROUTE, json.loads(raw))),
    }


def _chat(messages: int) -> bytes:
    """A body of `BODY_BYTES`, or a little less."""
    room = BODY_BYTES // messages - len('{"role": "assistant", "content": ""}, ')
    words = "some words of a conversation, nothing special. " * (room // 40 + 1)
    turns = [{"role": ("user", "assistant")[turn % 2], "content": words[:room]} for turn in range(messages)]
    return json.dumps({"messages": turns}).encode()


def _measure(work: Callable[[], object]) -> tuple[float, float]:
    """p50 and p99, us, after a tenth of the rounds as warm-up."""
    spent = []
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        work()
        spent.append(time.perf_counter_ns() - start)
    p50, p99 = np.percentile(spent[ROUNDS // 10 :], [50, 99]) / 1e3
    return float(p50), float(p99)
