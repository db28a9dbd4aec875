"""The prefixes of a prompt that have a route: at the ends of its messages, else every 128 tokens.

Theory of operation. Ends of messages are aligned down to 16 tokens, the block of most engines, so that a small error of
an estimate changes no key. A prefix is known by the hash of its last block: with exact tokens that of 16 tokens, else
that of the text, whose blocks have some 64. An end is then aligned to those.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gorgo.core.messages.request import RouteRequest
from gorgo.core.prompt.depths import depths_of, marked_depths
from gorgo.policies.sticky.routes import RouteKey

#: Tokens to which ends of messages are aligned, and of the shortest prefix before that: Ranvier's.
ALIGNED_TOKENS = 16
LEAST_TOKENS = 4
_HASH_BYTES = 8


class Prefix(NamedTuple):
    """A prefix of a prompt: the key of its route, and its length in tokens."""

    key: RouteKey
    tokens: float


def prefixes_of(request: RouteRequest) -> list[Prefix]:
    """Return the prefixes of a prompt, the shortest first, each once."""
    if not request.boundaries:
        return even_prefixes(request)
    ends = [end for end in request.boundaries if end >= LEAST_TOKENS]
    fine = max((size for size in request.kv_hashes if ALIGNED_TOKENS % size == 0), default=None)
    return _by_text(request, ends) if fine is None else _by_tokens(request, ends, fine)


def even_prefixes(request: RouteRequest) -> list[Prefix]:
    """Return the prefixes every 128 tokens of the text."""
    depths = depths_of(len(request.blocks) // _HASH_BYTES, request.block_tokens)
    return [_text_prefix(request, depth) for depth in depths]


def remote_prefixes(request: RouteRequest) -> list[Prefix]:
    """Return the prefixes that other routers name."""
    full_blocks = len(request.blocks) // _HASH_BYTES
    depths = marked_depths(full_blocks, request.block_tokens, request.boundaries)
    return [_text_prefix(request, depth) for depth in depths]


def _by_tokens(request: RouteRequest, ends: Iterable[int], block_tokens: int) -> list[Prefix]:
    hashes = request.kv_hashes[block_tokens]
    step = ALIGNED_TOKENS // block_tokens
    depths = dict.fromkeys(end // ALIGNED_TOKENS for end in ends)
    return [
        Prefix(_token_key(request, hashes[depth * step - 1]), float(depth * ALIGNED_TOKENS))
        for depth in depths
        if 0 < depth * step <= len(hashes)
    ]


def _token_key(request: RouteRequest, own_hash: int) -> RouteKey:
    """Return the key of a hash of tokens, which is that of no text."""
    return request.recorded_model, b"tokens" + own_hash.to_bytes(_HASH_BYTES, "little")


def _by_text(request: RouteRequest, ends: Iterable[int]) -> list[Prefix]:
    full = len(request.blocks) // _HASH_BYTES
    depths = dict.fromkeys(int(end / request.block_tokens) for end in ends)
    return [_text_prefix(request, depth) for depth in depths if 0 < depth <= full]


def _text_prefix(request: RouteRequest, depth: int) -> Prefix:
    key = request.recorded_model, request.blocks[(depth - 1) * _HASH_BYTES : depth * _HASH_BYTES]
    return Prefix(key, depth * request.block_tokens)
