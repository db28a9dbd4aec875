"""The prefix index against the authors' trie: matched tokens after any order of prompts and departures."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from gorgo.core.prefix.index import PrefixIndex
from tests.system.released.differences import INDEX
from tests.system.released.process import Released

HISTORIES, OPERATIONS, REPLICAS = 60, 200, 4


def blocks_of(tokens: list[int], block_tokens: int) -> bytes:
    """A hash per full block, each for the whole prefix up to its end."""
    chain, found = hashlib.blake2b(digest_size=8), []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        chain.update(repr(tokens[start : start + block_tokens]).encode())
        found.append(chain.digest())
    return b"".join(found)


def history(rng: np.random.Generator) -> list[list[Any]]:
    """Prompts that branch off earlier ones anywhere, a departure now and then, and a match after each."""
    prompts: list[list[int]] = [[]]
    names = [f"r{row}" for row in range(REPLICAS)]
    operations: list[list[Any]] = []
    for _ in range(OPERATIONS):
        trunk = prompts[int(rng.integers(len(prompts)))]
        tokens = trunk[: int(rng.integers(len(trunk) + 1))] + rng.integers(0, 3, int(rng.integers(0, 12))).tolist()
        prompts.append(tokens)
        operations.append(["match", tokens, names])
        if rng.random() < 0.03:
            operations.append(["remove_endpoint", names[int(rng.integers(REPLICAS))]])
        operations.append(["insert", tokens, names[int(rng.integers(REPLICAS))]])
    return operations


@pytest.mark.parametrize("block_tokens", [1, 4])
def test_matches_are_theirs_to_the_token_or_to_the_block(block_tokens: int, authors: Released) -> None:
    rng = np.random.default_rng(block_tokens)
    histories = [history(rng) for _ in range(HISTORIES)]
    compared = cut = 0
    for operations, theirs in zip(histories, authors("tries", histories), strict=True):
        index, answers = PrefixIndex(max_blocks=1_000_000, bounded=False), iter(theirs)
        for slot in range(REPLICAS):
            index.add_replica(slot)
        for name, *values in operations:
            if name == "insert":
                index.insert(blocks_of(values[0], block_tokens), int(values[1][1:]))
            elif name == "remove_endpoint":
                index.flush(int(values[0][1:]))
            else:
                ours = (index.match(blocks_of(values[0], block_tokens), REPLICAS) * block_tokens).tolist()
                exact = [tokens for _, tokens in sorted(next(answers).items())]
                assert ours == [tokens // block_tokens * block_tokens for tokens in exact]
                compared, cut = compared + 1, cut + (ours != exact)
    assert compared == HISTORIES * OPERATIONS
    assert (cut > 0) == (block_tokens > 1)
    assert set(INDEX) == {"blocks"}
