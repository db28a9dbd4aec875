"""Token ids of simulated engines: one for each four bytes of a prompt's text."""

from __future__ import annotations

#: Bytes of text per token; also the bytes of a packed token id.
TEXT_TOKEN_BYTES = 4


def simulated_tokens(text: bytes) -> bytes:
    """Return the packed token ids of a prompt: its text, filled up to whole tokens. An empty prompt has one token.

    Example
    -------
    >>> simulated_tokens(b"Hello")
    b'Hello\\x00\\x00\\x00'
    """
    size = max(1, -(-len(text) // TEXT_TOKEN_BYTES)) * TEXT_TOKEN_BYTES
    return text.ljust(size, b"\0")
