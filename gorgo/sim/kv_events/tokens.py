"""Token ids and own hashes of simulated prompts, whose cache items stand for many tokens.

Owns the expansion of an item to tokens. Requests and events use the same one, so their own hashes are equal where
their items are, as those of a served engine are where tokens are equal.
"""

from __future__ import annotations

from gorgo.core.prefix.kv_chain import TOKEN_BYTES, next_hash

#: Hashes in memory, about 200 bytes each: more than the distinct blocks of a run.
_MAX_HASHES = 1_000_000


class BlockTokens:
    """Tokens of blocks: an item's bytes again and again, four for each of its tokens.

    Parameters
    ----------
    item_bytes, item_tokens:
        Of one cache item.
    block_tokens:
        Tokens of a block, a whole number of items.

    Example
    -------
    >>> from gorgo.core.prefix.kv_chain import chain_hashes
    >>> tokens = BlockTokens(item_bytes=8, item_tokens=512, block_tokens=512)
    >>> expanded = tokens.expand(b"item---1item---2")
    >>> len(expanded), tokens.hashes(b"item---1item---2") == chain_hashes(expanded, block_tokens=512)
    (4096, True)
    """

    def __init__(self, *, item_bytes: int, item_tokens: int, block_tokens: int) -> None:
        assert block_tokens % item_tokens == 0, "a block has whole items"
        self.block_tokens = block_tokens
        self._item_bytes = item_bytes
        self._token_bytes = item_tokens * TOKEN_BYTES
        self._repeats = -(-self._token_bytes // item_bytes)
        self._block_bytes = block_tokens // item_tokens * item_bytes
        #: (own hash of the block before, items) -> own hash.
        self._hashes: dict[tuple[int, bytes], int] = {}

    def expand(self, items: bytes) -> bytes:
        """Return the packed token ids of whole items."""
        size = self._item_bytes
        pieces = (items[start : start + size] for start in range(0, len(items), size))
        return b"".join([(piece * self._repeats)[: self._token_bytes] for piece in pieces])

    def hashes(self, items: bytes, root: int = 0) -> list[int]:
        """Return the own hash of each full block behind `root`."""
        size, found = self._block_bytes, []
        for end in range(size, len(items) + 1, size):
            piece = items[end - size : end]
            own = self._hashes.get((root, piece))
            if own is None:
                own = self._remember(root, piece)
            found.append(own)
            root = own
        return found

    def _remember(self, root: int, piece: bytes) -> int:
        if len(self._hashes) >= _MAX_HASHES:
            self._hashes.clear()
        own = self._hashes[root, piece] = next_hash(root, self.expand(piece))
        return own
