"""Prompts by the texts that they are made of, and the blocks of each: equal where all texts up to their end are.

Owns the hashes of blocks. A prompt is a value, so that conversations can branch from any of their turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from gorgo.core.prefix.residency import BLOCK_HASH_BYTES

#: Bytes that name one token of one text.
_TOKEN_BYTES = 8
#: Bits of a token's place in its text.
_PLACE_BITS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChain:
    """A prompt as a sequence of texts.

    Parameters
    ----------
    block_tokens:
        Tokens of a block.
    tokens, blocks:
        Length, and the hash of each full block.
    tail:
        What follows the last full block.
    boundaries:
        Tokens at the end of each text.

    Example
    -------
    >>> start = TextChain(block_tokens=16).followed_by(1, 40)
    >>> one, other = start.followed_by(2, 40), start.followed_by(3, 40)
    >>> one.tokens, one.boundaries, len(one.blocks) // 8
    (80, (40, 80), 5)
    >>> one.blocks[:16] == other.blocks[:16], one.blocks == other.blocks
    (True, False)
    """

    block_tokens: int
    tokens: int = 0
    blocks: bytes = b""
    tail: bytes = b""
    boundaries: tuple[int, ...] = ()

    def followed_by(self, text: int, tokens: int) -> TextChain:
        """Return the prompt with the first `tokens` of a text behind it."""
        places = np.arange(tokens, dtype=np.uint64) | np.uint64(text << _PLACE_BITS)
        rest = self.tail + places.astype("<u8").tobytes()
        size = self.block_tokens * _TOKEN_BYTES
        parent, found = self.blocks[-BLOCK_HASH_BYTES:], [self.blocks]
        for end in range(size, len(rest) + 1, size):
            parent = blake2b(parent + rest[end - size : end], digest_size=BLOCK_HASH_BYTES).digest()
            found.append(parent)
        total = self.tokens + tokens
        return TextChain(
            block_tokens=self.block_tokens,
            tokens=total,
            blocks=b"".join(found),
            tail=rest[len(rest) // size * size :],
            boundaries=(*self.boundaries, total),
        )
