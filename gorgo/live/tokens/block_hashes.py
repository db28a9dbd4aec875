"""Own hashes of a prompt's token blocks, cached by part, so that a longer prompt costs its new part.

Owns the cache. The hashes are those of `core.prefix.kv_chain`.

Theory of operation. A section is what a part adds to the prompt before it: the hashes of the blocks that end in it.
Each section has a number, and its key is the number of the section before it and the key of the part. So a number
stands for a whole prefix, and a prompt takes one lookup per part; its ids are not read. A section whose predecessor was
evicted is not found again, and is evicted in its turn. Neither text nor token ids are stored.
"""

from __future__ import annotations

from collections.abc import Generator

from gorgo.core.lru import Lru
from gorgo.core.prefix.kv_chain import HASH_BYTES, TOKEN_BYTES, packed_chain, unpacked
from gorgo.live.tokens.encoded import UNCACHED, EncodedPrompt

#: Most blocks hashed in one step.
STEP_BLOCKS = 64
#: Memory: 30 million tokens in messages of 400 and blocks of 16, 4 million in blocks of 1.
MAX_BYTES = 32 << 20
#: Memory of a section beside its hashes.
_SECTION_BYTES = 400


class BlockHashes:
    """The cache of one proxy, for all models, block sizes, adapters and salts.

    Example
    -------
    >>> from gorgo.core.prefix.kv_chain import chain_hashes, token_bytes
    >>> hashes, prompt = BlockHashes(), token_bytes(range(40))
    >>> hashes.get(EncodedPrompt.of_ids(prompt), block_tokens=16) == chain_hashes(prompt, block_tokens=16)
    True
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._numbers = 0
        #: Number and packed hashes of each section.
        self._sections = Lru[tuple[int, bytes], tuple[int, bytes]](max_bytes, weigh=_memory)

    def __len__(self) -> int:
        return len(self._sections)

    def get(self, prompt: EncodedPrompt, *, block_tokens: int, root: int = 0) -> list[int]:
        """Return the hash of each full block, all in one go."""
        steps = self.steps(prompt, block_tokens=block_tokens, root=root)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                hashes: list[int] = end.value
                return hashes

    def steps(self, prompt: EncodedPrompt, *, block_tokens: int, root: int = 0) -> Generator[int, None, list[int]]:
        """Return the hash of each full block; yield after each step with the blocks that it has hashed."""
        block_bytes = block_tokens * TOKEN_BYTES
        # Of another length than any key of a part.
        number, _ = self._stored((root, b"root" + block_tokens.to_bytes(4, "little") + prompt.origin), b"")
        found: list[bytes] = []
        tokens = b""
        hashed = end = 0
        for part, key in zip(prompt.parts, prompt.keys, strict=True):
            end += len(part)
            section = self._sections.use((number, key))
            if section is None:
                tokens = tokens or b"".join(prompt.parts)
                before = next((int.from_bytes(each[-HASH_BYTES:], "little") for each in reversed(found) if each), root)
                added: list[bytes] = []
                for start in range(hashed, end // block_bytes * block_bytes, STEP_BLOCKS * block_bytes):
                    step = tokens[start : min(start + STEP_BLOCKS * block_bytes, end)]
                    added.append(packed_chain(step, block_tokens=block_tokens, root=before))
                    before = int.from_bytes(added[-1][-HASH_BYTES:], "little")
                    yield len(added[-1]) // HASH_BYTES
                hashes = b"".join(added)
                section = (number, hashes) if key == UNCACHED else self._stored((number, key), hashes)
            number, hashes = section
            found.append(hashes)
            hashed += len(hashes) // HASH_BYTES * block_bytes
        return unpacked(b"".join(found))

    def check(self) -> None:
        """Assert the bound."""
        self._sections.check()

    def _stored(self, key: tuple[int, bytes], hashes: bytes) -> tuple[int, bytes]:
        """Return the section of this key, stored if it is missing."""
        section = self._sections.use(key)
        if section is None:
            self._numbers += 1
            section = (self._numbers, hashes)
            self._sections.put(key, section)
        return section


def _memory(section: tuple[int, bytes]) -> int:
    return len(section[1]) + _SECTION_BYTES
