"""The workload of a simulation from a trace: blocks by the ids of the trace, or by the proxy's fingerprint of its text.

Owns the conversion. Ids already stand for prefixes of whole 512-token blocks. A row with a body has the fingerprint of
its text, in blocks of the same size. The hash for session affinity is that of a replay: of the text of the first 256
tokens. `fingerprinted` is for comparisons with a live run: the Router then gets the fingerprints that the proxy
computes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import ceil

import numpy as np

from gorgo.core.prefix.residency import BLOCK_HASH_BYTES
from gorgo.core.prompt.fingerprint import Fingerprinter, head_of, prefix_hash
from gorgo.core.prompt.parse import message_ends, read_prompt, token_boundaries
from gorgo.lab.prompt_text import BYTES_PER_TOKEN, body_of, head_text
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.traces import BLOCK_TOKENS, TraceRequest, next_turns, scheduled_s

_CHAT = "/v1/chat/completions"
#: Key of fingerprints of a trace's text; any value will do, because the prompts of a trace are not hostile.
_KEY = 0
_MASK = (1 << 64) - 1


def feed_of(
    requests: Sequence[TraceRequest],
    *,
    time_scale: float = 1.0,
    block_tokens: int = BLOCK_TOKENS,
    with_outputs: bool = False,
    closed_loop: bool = False,
) -> list[SimRequest]:
    """Requests of a trace in the order of their times; `time_scale` acts here, once.

    `block_tokens` is the size of the blocks of their ids. With `with_outputs` an answer is the text that the next
    prompt of its conversation goes on with, as in live traffic. In a replay the engine generates another text, which
    no later prompt has. In a closed loop a turn of a session follows the end of the answer before it.
    """
    feed = [
        _by_ids(request, time_scale, block_tokens) if request.hash_ids else _by_text(request, time_scale)
        for request in requests
    ]
    feed = _with_outputs(requests, feed, block_tokens) if with_outputs else feed
    return _closed(requests, feed, time_scale) if closed_loop else feed


def _closed(requests: Sequence[TraceRequest], feed: Sequence[SimRequest], time_scale: float) -> list[SimRequest]:
    before = {turn.index: (index, think_s * time_scale) for index, (turn, think_s) in next_turns(requests).items()}
    return [
        replace(one, after=before[one.index][0], think_s=before[one.index][1]) if one.index in before else one
        for one in feed
    ]


def fingerprinted(
    requests: Sequence[TraceRequest], *, model: str, key: int, block_bytes: int, time_scale: float = 1.0
) -> list[SimRequest]:
    """The same as the proxy sees them when they are replayed, by the fingerprint of their text under `key`."""
    fingerprinter = Fingerprinter(key=key, block_bytes=block_bytes)
    feed = []
    for request in requests:
        body = body_of(request, model)
        fingerprint = fingerprinter(read_prompt(_CHAT, json.loads(body)))
        tokens = ceil(fingerprint.text_bytes / BYTES_PER_TOKEN)
        feed.append(
            SimRequest(
                index=request.index,
                arrival_s=scheduled_s(request, time_scale),
                prompt_tokens=tokens,
                output_tokens=request.output_tokens,
                blocks=fingerprint.blocks,
                prefix_hash=fingerprint.prefix_hash,
                body_bytes=len(body),
                boundaries=token_boundaries(fingerprint.boundaries, size=fingerprint.text_bytes, tokens=tokens),
                session_id=request.session,
            )
        )
    return feed


def _by_ids(request: TraceRequest, time_scale: float, block_tokens: int) -> SimRequest:
    ids = request.hash_ids
    full = request.input_tokens // block_tokens
    return SimRequest(
        index=request.index,
        arrival_s=scheduled_s(request, time_scale),
        prompt_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
        blocks=np.array([number & _MASK for number in ids[:full]], dtype="<u8").tobytes(),
        prefix_hash=_prefix_hash(request, block_tokens),
        body_bytes=request.input_tokens * BYTES_PER_TOKEN + _envelope_bytes(),
        boundaries=_boundaries(request),
        session_id=request.session,
    )


def _with_outputs(requests: Sequence[TraceRequest], feed: Sequence[SimRequest], block_tokens: int) -> list[SimRequest]:
    """Add the full blocks of each answer, from the next longer prompt of its user that has all full blocks of its own.

    The last request of a conversation and requests without a user have none.
    """
    later: dict[tuple[str, bytes], bytes] = {}
    simulated_feed = []
    for request, simulated in zip(reversed(requests), reversed(feed), strict=True):
        blocks = simulated.blocks
        if request.user is not None and blocks:
            longer = later.get((request.user, blocks[-BLOCK_HASH_BYTES:]), b"")
            tokens = simulated.prompt_tokens + simulated.output_tokens
            output = longer[len(blocks) : tokens // block_tokens * BLOCK_HASH_BYTES]
            simulated = replace(simulated, output_blocks=output) if output else simulated
            for end in range(BLOCK_HASH_BYTES, len(blocks), BLOCK_HASH_BYTES):
                later[request.user, blocks[end - BLOCK_HASH_BYTES : end]] = blocks
        simulated_feed.append(simulated)
    return simulated_feed[::-1]


def _by_text(request: TraceRequest, time_scale: float) -> SimRequest:
    """Return the blocks of a prompt by its text; without a text it shares no block."""
    if request.body is None:
        blocks, body_bytes = b"", request.input_tokens * BYTES_PER_TOKEN + _envelope_bytes()
    else:
        fingerprint = _fingerprinter()(read_prompt(_CHAT, request.body))
        blocks = fingerprint.blocks[: request.input_tokens // BLOCK_TOKENS * 8]
        body_bytes = len(body_of(request, "model"))
    return SimRequest(
        index=request.index,
        arrival_s=scheduled_s(request, time_scale),
        prompt_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
        blocks=blocks,
        prefix_hash=_prefix_hash(request),
        body_bytes=body_bytes,
        boundaries=_boundaries(request),
        session_id=request.session,
    )


def _boundaries(request: TraceRequest) -> tuple[int, ...]:
    """Return the tokens at the end of each message: those of the trace, else those of the body."""
    if request.boundaries or request.body is None:
        return request.boundaries
    prompt = read_prompt(_CHAT, request.body)
    ends = message_ends([start for start, _ in prompt.message_starts], len(prompt.text))
    return token_boundaries(ends, size=len(prompt.text), tokens=request.input_tokens)


def _prefix_hash(request: TraceRequest, block_tokens: int = BLOCK_TOKENS) -> int:
    """Return the hash of the first tokens, as a proxy computes it for the body of a replay."""
    body = request.body
    if body is None:
        body = {"messages": [{"role": "user", "content": head_text(request, block_tokens).decode("ascii")}]}
    return prefix_hash(*head_of(read_prompt(_CHAT, body)))


@cache
def _fingerprinter() -> Fingerprinter:
    return Fingerprinter(key=_KEY, block_bytes=BLOCK_TOKENS * BYTES_PER_TOKEN)


@cache
def _envelope_bytes() -> int:
    """Return the fields of a body other than its prompt."""
    return len(body_of(TraceRequest(0, 0.0, 1, 100), "model")) - BYTES_PER_TOKEN
