"""Text for prompts of which a trace has only the hashes, and what such a trace can say of sessions.

Owns the text of a block, the body of a replayed request, and the warning for a policy that chooses by the session's key
on a trace in which most requests have one key.

One token is four bytes: a syllable and a space. Block text follows from its id alone (SHAKE-256), so that prompts share
exactly the prefix that their `hash_ids` share, on every machine and in every run.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.policy.interface import Policy
from gorgo.core.prompt.parse import read_prompt
from gorgo.lab.traces import BLOCK_TOKENS, TraceRequest

BYTES_PER_TOKEN = 4
BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN
#: Of the hash that stands for a session without an id.
HEAD_TOKENS = 256


def _syllables() -> NDArray[np.uint32]:
    """256 different four-byte words; a digest byte picks one."""
    firsts, vowels, lasts = "bdfgklmnprstvwyz", "aeio", "nrst"
    words = "".join(first + vowel + last + " " for first in firsts for vowel in vowels for last in lasts)
    return np.frombuffer(words.encode("ascii"), dtype=np.uint32)


_SYLLABLES = _syllables()


def block_text(key: int | str, block_tokens: int = BLOCK_TOKENS) -> bytes:
    """The text of a block, four bytes a token."""
    picks = hashlib.shake_256(str(key).encode()).digest(block_tokens)
    return _SYLLABLES[np.frombuffer(picks, dtype=np.uint8)].tobytes()


def prompt_text(
    hash_ids: Sequence[int], input_tokens: int, *, rest: str = "rest", block_tokens: int = BLOCK_TOKENS
) -> bytes:
    """Exactly `4 * input_tokens` ASCII bytes; text beyond the ids comes from `rest`, a key of this request alone."""
    size = input_tokens * BYTES_PER_TOKEN
    blocks = [block_text(hash_id, block_tokens) for hash_id in hash_ids]
    missing = max(0, -(-(size - len(blocks) * block_tokens * BYTES_PER_TOKEN) // BLOCK_BYTES))
    blocks += [block_text(f"{rest}/{number}") for number in range(missing)]
    return b"".join(blocks)[:size]


def request_text(request: TraceRequest) -> bytes:
    """The prompt of a request that has no body of its own."""
    return prompt_text(request.hash_ids, request.input_tokens, rest=_rest(request), block_tokens=request.block_tokens)


def body_of(request: TraceRequest, model: str) -> bytes:
    """A streaming chat completion that gives exactly the trace's number of output tokens, where engines allow it."""
    body: dict[str, Any] = dict(request.body) if request.body is not None else {"messages": [_message(request)]}
    body.pop("max_completion_tokens", None)  # `max_tokens` below takes its place
    body |= {
        "model": model,
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


def _message(request: TraceRequest) -> dict[str, str]:
    return {"role": "user", "content": request_text(request).decode("ascii")}


def head_text(request: TraceRequest, block_tokens: int = BLOCK_TOKENS) -> bytes:
    """Return the first 256 tokens of `request_text`, or all if it has fewer.

    Of ids of smaller blocks the text of the last one within 256 tokens stands for them all: it names that prefix.
    """
    tokens, ids = min(request.input_tokens, HEAD_TOKENS), request.hash_ids
    last = min(max(HEAD_TOKENS // block_tokens, 1), len(ids))
    return prompt_text(ids[:last][-1:], tokens, rest=_rest(request))


def beginning(request: TraceRequest) -> Hashable:
    """Return what stands for the first tokens of a prompt: the same for requests that begin alike."""
    if request.body is not None:
        return read_prompt("/v1/chat/completions", request.body).text[: HEAD_TOKENS * BYTES_PER_TOKEN]
    return head_text(request)


def _rest(request: TraceRequest) -> str:
    """Return the key of the text beyond the ids."""
    return f"request {request.index}"


# Policies that choose by the key of a session, on traces in which most requests have one key.


#: Above it one replica gets more than half of the requests, whatever the fleet.
WARN_SHARE = 0.5


def is_keyed(policy: Policy) -> bool:
    """Return whether the policy chooses by the session's key alone: its class has `by_session = True`."""
    return bool(getattr(policy, "by_session", False))


def largest_share(keys: Iterable[Hashable]) -> float:
    """Return the share of the most common key; 0 without a key.

    >>> largest_share(["a", "b", "a", "a"])
    0.75
    """
    counts = Counter(keys)
    return max(counts.values()) / counts.total() if counts else 0.0


def warning(policy: str, share: float | None) -> str | None:
    """Return the warning for a share of requests with one key; None if there is nothing to warn of."""
    if share is None or share <= WARN_SHARE:
        return None
    return (
        f"{policy}: no request has a session id and {share:.0%} begin with the same tokens: they share one key, and "
        "one replica gets them. The trace suits no policy that is keyed by user or session"
    )
