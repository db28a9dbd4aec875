"""Multi-turn requests through a router, and how far each of its estimates was off what the engine reports."""

from __future__ import annotations

import random
from typing import NamedTuple

import httpx

CONVERSATIONS = 60


class Wrong(NamedTuple):
    """A request whose estimate was wrong: its place in the run, its conversation and replica, both in tokens."""

    request: int
    conversation: int
    replica: str
    estimated: int
    cached: int


class Conversations:
    """Multi-turn requests in an order of its seed.

    Parameters
    ----------
    url:
        The router's; may be replaced.
    block_tokens:
        Of the engines. An estimate may be off by one block.
    """

    def __init__(self, url: str, *, model: str, block_tokens: int, seed: int = 7) -> None:
        self.url = url
        self._model = model
        self._block_tokens = block_tokens
        self._random = random.Random(seed)
        self._turns: list[list[dict[str, str]]] = [[] for _ in range(CONVERSATIONS)]
        self.off: list[int] = []
        #: Those that were off by more than a block.
        self.wrong: list[Wrong] = []
        self.cached: list[int] = []

    def words(self, count: int) -> str:
        return " ".join(self._random.choice(("alpha", "beta", "gamma", "delta", "omega")) for _ in range(count))

    def ask(self, http: httpx.Client) -> None:
        number = self._random.randrange(CONVERSATIONS)
        turns = self._turns[number]
        if len(turns) > 8:
            turns.clear()
        turns.append({"role": "user", "content": f"{number} {self.words(30)}"})
        body = {"model": self._model, "messages": turns, "temperature": 0, "max_tokens": 4, "ignore_eos": True}
        answer = http.post(f"{self.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        cached = (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        # An engine itself estimates nothing.
        estimated = int(answer.headers.get("x-gorgo-estimated-cached-tokens", cached))
        self.off.append(abs(estimated - cached))
        if self.off[-1] > self._block_tokens:
            self.wrong.append(Wrong(len(self.off), number, answer.headers["x-gorgo-replica"], estimated, cached))
        self.cached.append(cached)
        turns.append({"role": "assistant", "content": found["choices"][0]["message"]["content"] or ""})

    def run(self, count: int) -> float:
        """Send so many requests; return the share of them whose estimate was within one block."""
        self.off.clear()
        self.wrong.clear()
        with httpx.Client(timeout=60) as http:
            for _ in range(count):
                self.ask(http)
        return sum(off <= self._block_tokens for off in self.off) / count
