"""Bytes per token, learned: what turns the size of a prompt into tokens without a tokenizer.

Owns one ratio per model, fed by `usage.prompt_tokens` of responses. Unit: UTF-8 bytes of prompt text per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from gorgo.core.lru import Lru

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
