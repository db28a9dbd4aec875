"""Size of a KV pool from which of the prompts sent before are still cached.

Theory of operation: an engine evicts what was used least recently. So a prompt is cached exactly if all that was used
since, and it itself, fit into the pool: each lookup gives a bound on the size from below or from above. A lookup uses
the prompt, cached or not, and so it becomes the most recent one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Tokens of a KV pool; `is_lower_bound` if nothing was evicted in the time."""

    tokens: int
    is_lower_bound: bool


class UsedPrompts:
    """Prompts in order of their last use, and the bounds on the pool that lookups have given.

    Example
    -------
    >>> used = UsedPrompts()
    >>> for name in "abcdefgh":
    ...     used.add(name, 100)
    >>> used.add_bound("a", cached=False), used.upper
    (None, 800)
    >>> used.add_bound("e", cached=True), used.lower  # a, h, g, f and e itself
    (None, 500)
    >>> used.next_prompt()  # e, a, h, g, f and d itself: 600, between 500 and 800
    'd'
    """

    def __init__(self) -> None:
        #: Tokens by prompt, the least recently used first.
        self._tokens: dict[str, int] = {}
        #: The pool has at least `lower` tokens, and fewer than `upper`; None without an evicted prompt.
        self.lower = 0
        self.upper: int | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def oldest(self) -> str:
        """Return the least recently used prompt."""
        return next(iter(self._tokens))

    @property
    def total(self) -> int:
        """Return the tokens of all prompts."""
        return sum(self._tokens.values())

    def add(self, prompt: str, tokens: int) -> None:
        """Record a new prompt."""
        self._tokens[prompt] = tokens

    def add_bound(self, prompt: str, *, cached: bool) -> None:
        """Record a lookup of a prompt."""
        size = self._distance(prompt)
        if cached:
            self.lower = max(self.lower, size)
        else:
            self.upper = size if self.upper is None else min(self.upper, size)
        self._tokens[prompt] = self._tokens.pop(prompt)

    def next_prompt(self) -> str | None:
        """Return the prompt whose lookup halves what is unknown of the size; None if no prompt is within the bounds."""
        if self.upper is None:
            return None
        middle, size = (self.lower + self.upper) / 2, 0
        best, least = None, self.upper - middle
        for prompt, tokens in reversed(self._tokens.items()):
            size += tokens
            if self.lower < size < self.upper and abs(size - middle) < least:
                best, least = prompt, abs(size - middle)
        return best

    def _distance(self, prompt: str) -> int:
        size = 0
        for other, tokens in reversed(self._tokens.items()):
            size += tokens
            if other == prompt:
                return size
        raise KeyError(prompt)
