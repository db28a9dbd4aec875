"""The engine that is calibrated, as `measure` calls it: prompts in, times and reported tokens out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request.

    Parameters
    ----------
    prompt_tokens, cached_tokens:
        As the engine reports them; None without a report.
    tokens_s:
        Times of the output tokens from the start of the request, the first one first.
    error:
        None for a complete answer.
    is_connected:
        False if the connection failed or the time was up: no answer of the engine.
    """

    prompt_tokens: int | None
    cached_tokens: int | None
    tokens_s: tuple[float, ...]
    error: str | None = None
    is_connected: bool = True

    @property
    def ttft_s(self) -> float:
        """Return the time to the first token of a complete answer."""
        return self.tokens_s[0]


class MeasuredEngine(Protocol):
    """An engine without other load."""

    async def generate(self, prompts: Sequence[str], *, output_tokens: int) -> list[Answer]:
        """Return the answers to prompts that are sent at once, in their order."""
        ...

    async def round_trip_s(self) -> float:
        """Return the time of an empty request."""
        ...

    def now_s(self) -> float:
        """Return the time on a clock that only goes forward."""
        ...

    async def pause(self, seconds: float) -> None:
        """Leave the engine idle for so long."""
        ...


class Prompts:
    """Prompts of random words, of about a given number of tokens; no two begin alike.

    Parameters
    ----------
    seed:
        The same seed gives the same prompts.

    Example
    -------
    >>> prompts = Prompts(seed=1)
    >>> prompts.set_tokens_per_word(words=100, tokens=200)
    >>> len(prompts.draw(1000).split())
    500
    """

    def __init__(self, *, seed: int) -> None:
        self._random = random.Random(seed)
        #: A word of three letters and its space is a token for most tokenizers, or two.
        self._tokens_per_word = 1.0

    def set_tokens_per_word(self, *, words: int, tokens: int) -> None:
        """Set the tokens per word from a prompt that the engine has counted."""
        self._tokens_per_word = max(tokens / words, 1e-3)

    def draw(self, tokens: int) -> str:
        """Return new text of about so many tokens."""
        words = max(1, round(tokens / self._tokens_per_word))
        letters = "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz", k=3 * words))
        return "".join(f"{letters[start : start + 3]} " for start in range(0, 3 * words, 3))
