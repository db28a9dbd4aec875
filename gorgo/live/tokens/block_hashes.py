"""Own hashes of a prompt's token blocks, cached by page, so that a longer prompt costs its new part.

Owns the cache. The hashes are those of `core.prefix.kv_chain`.

Theory of operation. A page is a run of blocks. Its key is a digest of its tokens, the block size and the hash before
it, which stands for the whole prefix; its value is the hash of each of its blocks. A prompt takes one lookup per page
and hashes the blocks after the last full page each time. Neither text nor token ids are stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from hashlib import sha256

import numpy as np

from gorgo.core.prefix.kv_chain import TOKEN_BYTES, chain_hashes

#: Most tokens and blocks of a page: a lookup costs as much as two to four blocks, and half a page is hashed anew for
#: each prompt.
PAGE_TOKENS, PAGE_BLOCKS = 1024, 256
#: Pages in memory: 33 million tokens in blocks of 16 (25 MiB), 8 million in blocks of 1 (75 MiB).
MAX_PAGES = 32_768


class BlockHashes:
    """The cache of one proxy, for all models, block sizes, adapters and salts.

    Example
    -------
    >>> from gorgo.core.prefix.kv_chain import token_bytes
    >>> hashes, prompt = BlockHashes(), token_bytes(range(40))
    >>> hashes.get(prompt, block_tokens=16) == chain_hashes(prompt, block_tokens=16)
    True
    """

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self._max_pages = max_pages
        self._pages: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def get(self, tokens: bytes, *, block_tokens: int, root: int = 0) -> list[int]:
        """Return the hash of each full block, all in one go."""
        steps = self.steps(tokens, block_tokens=block_tokens, root=root)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                hashes: list[int] = end.value
                return hashes

    def steps(self, tokens: bytes, *, block_tokens: int, root: int = 0) -> Generator[None, None, list[int]]:
        """Return the hash of each full block; yield after each page that is hashed, 100 us of work in blocks of 16."""
        page_bytes = page_blocks(block_tokens) * block_tokens * TOKEN_BYTES
        found: list[bytes] = []
        size = block_tokens.to_bytes(4, "little")
        end = 0
        while end + page_bytes <= len(tokens):
            page = tokens[end : end + page_bytes]
            # Processors compute SHA-256 in half the time of BLAKE2.
            key = sha256(page).digest() + root.to_bytes(8, "little") + size
            hashes = self._pages.get(key)
            if hashes is None:
                hashes = _packed(chain_hashes(page, block_tokens=block_tokens, root=root))
                self._pages[key] = hashes
                if len(self._pages) > self._max_pages:
                    self._pages.popitem(last=False)
                yield
            else:
                self._pages.move_to_end(key)
            found.append(hashes)
            root = int.from_bytes(hashes[-8:], "little")
            end += page_bytes
        rest = chain_hashes(tokens[end:], block_tokens=block_tokens, root=root)
        known: list[int] = np.frombuffer(b"".join(found), dtype="<u8").tolist()
        return known + rest


def page_blocks(block_tokens: int) -> int:
    """Return the blocks of a page."""
    return min(max(1, PAGE_TOKENS // block_tokens), PAGE_BLOCKS)


def _packed(hashes: list[int]) -> bytes:
    return np.array(hashes, dtype="<u8").tobytes()
