"""The workload of a simulation: requests with their arrival and the identity of their prompt, without text.

Owns the record. Programs above create requests from a trace, a log or a generator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gorgo.core.prefix.residency import BLOCK_HASH_BYTES

#: Tokens of a trace's block, and so of an item in a simulated engine's cache.
BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """One request.

    Parameters
    ----------
    index:
        Names it; unique in its feed.
    arrival_s:
        When it reaches the proxy, from the start of the run.
    prompt_tokens, output_tokens:
        Lengths; exactly `output_tokens` are generated.
    blocks:
        One 8-byte hash per *full* block, in order, each standing for the whole prefix up to its end. Both the Router
        and the engines' caches know the prompt by them.
    prefix_hash:
        64-bit hash of the first 256 tokens.
    session_id:
        Session key of the client, if any.
    body_bytes:
        Length of the body.
    output_blocks:
        The blocks that follow `blocks` in the engine's cache once the answer is there; empty where no later prompt goes
        on with it.
    boundaries:
        Prompt tokens at the end of each message, ascending; empty: unknown.
    after, think_s:
        In a closed loop, the index of the request whose end it follows, and how long after it; `arrival_s` is then what
        an open loop would have. None: it comes at `arrival_s`.
    """

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: bytes
    prefix_hash: int
    session_id: str | None = None
    body_bytes: int = 0
    output_blocks: bytes = b""
    boundaries: tuple[int, ...] = ()
    after: int | None = None
    think_s: float = 0.0

    def rest(self, tokens: int, *, block_tokens: int) -> SimRequest:
        """Return the request that goes on with its answer behind the first `tokens`: the end of a longer prompt."""
        prompt_tokens, blocks = self.prompt_tokens + tokens, self.blocks + self.output_blocks
        size = max(len(self.blocks), prompt_tokens // block_tokens * BLOCK_HASH_BYTES)
        return replace(
            self,
            prompt_tokens=prompt_tokens,
            output_tokens=self.output_tokens - tokens,
            blocks=blocks[:size],
            output_blocks=blocks[size:],
            body_bytes=self.body_bytes * prompt_tokens // self.prompt_tokens,
        )

    def __post_init__(self) -> None:
        assert len(self.blocks) % BLOCK_HASH_BYTES == len(self.output_blocks) % BLOCK_HASH_BYTES == 0, "whole hashes"


def scaled(feed: Iterable[SimRequest], time_scale: float) -> Sequence[SimRequest]:
    """The same requests in `time_scale` times the time: 2.0 is half the load."""
    if time_scale == 1.0:
        return tuple(feed)
    return tuple(
        replace(request, arrival_s=request.arrival_s * time_scale, think_s=request.think_s * time_scale)
        for request in feed
    )
