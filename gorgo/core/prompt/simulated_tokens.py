"""Token ids of simulated engines: one for each four bytes of a prompt's text."""

from __future__ import annotations

from hashlib import blake2b

#: Bytes of text per token; also the bytes of a packed token id.
TEXT_TOKEN_BYTES = 4


def simulated_tokens(text: bytes, adapter: str | None = None) -> bytes:
    """Return the packed token ids of a prompt: its text, filled up to whole tokens. An empty prompt has one token.

    The first token differs for each adapter, so adapters share no prefix.

    Example
    -------
    >>> simulated_tokens(b"Hello")
    b'Hello\\x00\\x00\\x00'
    """
    size = max(1, -(-len(text) // TEXT_TOKEN_BYTES)) * TEXT_TOKEN_BYTES
    tokens = text.ljust(size, b"\0")
    if adapter is None:
        return tokens
    key = adapter.encode("utf-8", "replace")[:64]
    first = blake2b(tokens[:TEXT_TOKEN_BYTES], key=key, digest_size=TEXT_TOKEN_BYTES).digest()
    return first + tokens[TEXT_TOKEN_BYTES:]
