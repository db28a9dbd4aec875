"""Time and memory of the event index at a million blocks on 64 replicas, and of decoding its messages.

Prompts have 375 blocks of 16 tokens. The matched one begins with a history of 300 blocks, of which 16 replicas have
between a sixteenth and all.
"""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
from msgspec.msgpack import encode

from gorgo.core.messages.kv_events import BlocksStored, KvEventBatch, KvTier
from gorgo.core.prefix.kv_index import KvEventIndex
from gorgo.core.prefix.kv_source import chain_hashes, token_bytes
from gorgo.engines.kv_events import decode_message

REPLICAS = 64
BLOCKS = 1_000_000
BLOCK_TOKENS = 16
PROMPT_BLOCKS = 375
HISTORY_BLOCKS = 300
ROUNDS = 2000
MESSAGES = 200


def run() -> None:
    """Print bytes per block where 1 and 4 replicas have each, then times."""
    print(f"event index, {BLOCKS:,} blocks on {REPLICAS} replicas")
    print(f"{'replicas with a block':>21}  {'bytes per block of a replica':>28}  {'match p50 us':>12}  {'p99 us':>8}")
    for sharing in (1, 4):
        tracemalloc.start()
        try:
            index = _filled(sharing)
            size = tracemalloc.get_traced_memory()[0] / sum(index.blocks(slot) for slot in range(REPLICAS))
        finally:
            tracemalloc.stop()
        p50, p99 = _match_us(index)
        print(f"{sharing:>21}  {size:>28.0f}  {p50:>12.1f}  {p99:>8.1f}")
    decode, apply = _message_us()
    print(f"\nmessage of {PROMPT_BLOCKS} stored and as many removed blocks, us a block: ", end="")
    print(f"decode {decode:.2f}, apply {apply:.2f}")


def _filled(sharing: int) -> KvEventIndex:
    rng = np.random.default_rng(1)
    index = KvEventIndex(block_tokens=BLOCK_TOKENS, max_blocks_per_replica=BLOCKS)
    history = _tokens(HISTORY_BLOCKS)
    for slot in range(0, REPLICAS, 4):
        depth = (slot + 4) * HISTORY_BLOCKS // REPLICAS
        _store(index, slot, rng, token_bytes(history[: depth * BLOCK_TOKENS]))
    prompts = BLOCKS // PROMPT_BLOCKS // sharing
    for number in range(prompts):
        packed = rng.bytes(PROMPT_BLOCKS * BLOCK_TOKENS * 4)
        for copy in range(sharing):
            _store(index, (number * sharing + copy) % REPLICAS, rng, packed)
    return index


def _store(index: KvEventIndex, slot: int, rng: np.random.Generator, packed: bytes) -> None:
    hashes = tuple(_hashes(rng, len(packed) // 4 // BLOCK_TOKENS))
    event = BlocksStored(hashes, None, packed, BLOCK_TOKENS, KvTier.GPU)
    index.apply(slot, KvEventBatch(sent_s=None, rank=0, events=(event,)))


def _match_us(index: KvEventIndex) -> tuple[float, float]:
    """Return p50 and p99 of matching the whole history."""
    prompt = chain_hashes(token_bytes(_tokens(PROMPT_BLOCKS)), block_tokens=BLOCK_TOKENS)
    spent = []
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        index.match(prompt, REPLICAS)
        spent.append(time.perf_counter_ns() - start)
    p50, p99 = np.percentile(spent[ROUNDS // 10 :], [50, 99]) / 1e3
    return float(p50), float(p99)


def _message_us() -> tuple[float, float]:
    """Return the process's time per block of decoding a message, and of applying it."""
    rng = np.random.default_rng(2)
    messages = []
    for _ in range(MESSAGES):
        hashes, tokens = _hashes(rng, PROMPT_BLOCKS), rng.integers(150_000, size=PROMPT_BLOCKS * BLOCK_TOKENS).tolist()
        stored = {"type": "BlockStored", "block_hashes": hashes, "token_ids": tokens, "block_size": BLOCK_TOKENS}
        messages.append(encode([0.0, [stored, {"type": "BlockRemoved", "block_hashes": hashes}], 0]))
    index = KvEventIndex(block_tokens=BLOCK_TOKENS, max_blocks_per_replica=BLOCKS)
    start = time.process_time()
    batches = [decode_message(message) for message in messages]
    decoded = time.process_time()
    for batch in batches:
        index.apply(0, batch)
    applied = time.process_time()
    blocks = 2 * PROMPT_BLOCKS * MESSAGES / 1e6
    return (decoded - start) / blocks, (applied - decoded) / blocks


def _tokens(blocks: int) -> list[int]:
    """Return the first tokens of the history; all after it differs from prompt to prompt."""
    rng = np.random.default_rng(0)
    tokens: list[int] = rng.integers(150_000, size=PROMPT_BLOCKS * BLOCK_TOKENS)[: blocks * BLOCK_TOKENS].tolist()
    return tokens


def _hashes(rng: np.random.Generator, count: int) -> list[int]:
    hashes: list[int] = rng.integers(2**64 - 1, size=count, dtype=np.uint64).tolist()
    return hashes
