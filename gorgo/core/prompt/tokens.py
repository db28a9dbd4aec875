"""The tokens of a prompt: estimated from its size, exact, or those of a simulated engine.

Owns one ratio of UTF-8 bytes of prompt text per token for each model, fed by `prompt_tokens` of responses
(`BytesPerToken`), the record of exact tokens (`ExactPrompt`), and the token ids of simulated engines
(`simulated_tokens`). Leaves tokenizers to `gorgo.live.tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from gorgo.core.lru import Lru
from gorgo.core.record import record

#: English prose and code under the usual vocabularies; used until a model reports its counts.
PRIOR_BYTES_PER_TOKEN = 4.0
#: Text lies between one byte a token (rare scripts, random bytes) and 16 (long runs of blanks). Beyond them the count
#: is of images or of the template, not of text, and teaches nothing.
LOW, HIGH = 1.0, 16.0
#: What the prior weighs: one long prompt outweighs it, one "hello" does not.
PRIOR_TOKENS = 1_000.0
#: Older prompts fade: once so many tokens are counted, all of them count half.
MEMORY_TOKENS = 1_000_000.0
#: A client names the model, so their number and length are bounded.
MAX_MODELS = 1_000
MAX_NAME = 256


@dataclass(slots=True)
class _ModelRatio:
    text_bytes: float = PRIOR_BYTES_PER_TOKEN * PRIOR_TOKENS
    tokens: float = PRIOR_TOKENS


class BytesPerToken:
    """Bytes per token of each model: the mean over its requests, weighted by tokens and decaying.

    Example
    -------
    >>> ratios = BytesPerToken()
    >>> ratios.learn("tiny", text_bytes=20_000, prompt_tokens=9_000)
    >>> ratios.ratio("tiny"), ratios.ratio("another")
    (2.4, 4.0)
    """

    def __init__(self) -> None:
        self._models = Lru[str | None, _ModelRatio](MAX_MODELS)

    def ratio(self, model: str | None) -> float:
        """Return the bytes per token of `model`; the prior for a new one."""
        ratio = self._models.get(_key(model))
        return PRIOR_BYTES_PER_TOKEN if ratio is None else ratio.text_bytes / ratio.tokens

    def learn(self, model: str | None, *, text_bytes: int, prompt_tokens: int) -> None:
        """Take in that a prompt of `text_bytes` bytes had `prompt_tokens` tokens."""
        if prompt_tokens <= 0 or not LOW <= text_bytes / prompt_tokens <= HIGH:
            return
        key = _key(model)
        ratio = self._models.use(key)
        if ratio is None:
            ratio = _ModelRatio()
            self._models.put(key, ratio)
        ratio.text_bytes += text_bytes
        ratio.tokens += prompt_tokens
        if ratio.tokens > MEMORY_TOKENS:
            ratio.text_bytes /= 2
            ratio.tokens /= 2


def _key(model: str | None) -> str | None:
    return None if model is None or len(model) > MAX_NAME else model


@record
class ExactPrompt:
    """What exact tokens tell of a prompt.

    Parameters
    ----------
    model:
        Its model with a tokenizer; `None` where the client sent token ids.
    tokens:
        Their number.
    kv_hashes:
        Own hashes of its full blocks, by tokens per block (`core.prefix.kv_source`).
    boundaries:
        Tokens at the end of each message, ascending; empty if they are not known exactly.
    """

    model: str | None
    tokens: int
    kv_hashes: Mapping[int, Sequence[int]]
    boundaries: Sequence[int] = ()


# Token ids of simulated engines: one for each four bytes of a prompt's text.


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
