"""Time and memory of the prefix index: match and insert of a 24k-token prompt, small and full.

Prompts share a history of 30 turns at whose ends others went on in another way, so that a match walks one node per
turn. Garbage collection stays on, as in the proxy.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from gorgo.core.prefix.index import PrefixIndex

REPLICAS = (3, 64, 512)
INDEXED_BLOCKS = (0, 1_000_000)
ROUNDS = 2000
PROMPT_BLOCKS = 375
TURNS = 30
TURN_BLOCKS = 10


def run() -> None:
    """Print p50 and p99 in microseconds, then what a million blocks weigh."""
    print(f"prefix index, prompts of {PROMPT_BLOCKS} blocks, us; {ROUNDS:,} rounds")
    print(f"{'replicas':>8}  {'indexed blocks':>14}  {'step':<13}  {'p50':>8}  {'p99':>8}")
    for replicas in REPLICAS:
        for blocks in INDEXED_BLOCKS:
            for step, work in _steps(replicas, blocks).items():
                p50, p99 = _measure(work)
                print(f"{replicas:>8}  {blocks:>14,}  {step:<13}  {p50:>8.1f}  {p99:>8.1f}")
    print(f"\n{'blocks a prompt':>15}  {'bytes per 1 M blocks':>20}")
    for length in (PROMPT_BLOCKS, 30, 1):
        print(f"{length:>15}  {_weight(length):>20,}")


def _steps(replicas: int, blocks: int) -> dict[str, Callable[[], object]]:
    """Each step works on an index of its own size; `insert, full` evicts as much as it adds."""
    rng = np.random.default_rng(0)
    shared = rng.bytes(TURNS * TURN_BLOCKS * 8)
    index = _filled(replicas, blocks, shared, max_blocks=blocks + 2 * ROUNDS * PROMPT_BLOCKS)
    steps: dict[str, Callable[[], object]] = {
        "match": lambda: index.match(_prompt(shared, rng), replicas),
        "insert": lambda: index.insert(_prompt(shared, rng), int(rng.integers(replicas))),
    }
    if blocks:
        full = _filled(replicas, blocks, shared, max_blocks=blocks)
        steps["insert, full"] = lambda: full.insert(_prompt(shared, rng), int(rng.integers(replicas)))
    return steps


def _filled(replicas: int, blocks: int, shared: bytes, *, max_blocks: int) -> PrefixIndex:
    """An index with `blocks` random blocks, behind the turns of a history that one replica in four holds."""
    rng = np.random.default_rng(1)
    index = PrefixIndex(max_blocks=max_blocks, bounded=True)
    for slot in range(replicas):
        index.add_replica(slot)
    while index.stored_blocks + PROMPT_BLOCKS < blocks:
        start = shared[: int(rng.integers(TURNS)) * TURN_BLOCKS * 8]
        index.confirm(start + rng.bytes(PROMPT_BLOCKS * 8 - len(start)), int(rng.integers(replicas)))
    for slot in range(0, replicas, 4):
        for turn in range(TURNS):
            index.confirm(shared[: (turn + 1) * TURN_BLOCKS * 8], slot)
    return index


def _prompt(shared: bytes, rng: np.random.Generator) -> bytes:
    """All of the history and an end of its own (drawing it is under 1 us of what is measured)."""
    return shared + rng.bytes(PROMPT_BLOCKS * 8 - len(shared))


def _measure(work: Callable[[], object]) -> tuple[float, float]:
    """p50 and p99, us, after a tenth of the rounds as warm-up."""
    spent = []
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        work()
        spent.append(time.perf_counter_ns() - start)
    p50, p99 = np.percentile(spent[ROUNDS // 10 :], [50, 99]) / 1e3
    return float(p50), float(p99)


def _weight(length: int) -> int:
    """Bytes per million blocks of unique prompts of `length` blocks, measured on fewer."""
    blocks = 100_000
    rng = np.random.default_rng(2)
    tracemalloc.start()
    try:
        index = PrefixIndex(max_blocks=blocks, bounded=False)
        for slot in range(3):
            index.add_replica(slot)
        for number in range(blocks // length):
            index.insert(rng.bytes(length * 8), number % 3)
        return round(tracemalloc.get_traced_memory()[0] / index.stored_blocks * 1_000_000)
    finally:
        tracemalloc.stop()
