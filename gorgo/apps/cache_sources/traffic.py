"""Traffic of the comparisons: chats by a shape, questions on a few long contexts, and conversations of three kinds.

Owns the feeds. Times are in seconds, lengths in tokens; a feed depends on its parameters and a seed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gorgo.apps.cache_sources.prompts import TextChain
from gorgo.apps.datasets import load_requests
from gorgo.apps.simulate.feed import feed_of
from gorgo.apps.traces import TraceFilters
from gorgo.sim.workload import BLOCK_TOKENS, SimRequest

ConversationKind = Literal["continued", "branching", "resumed"]

#: Bytes of a token's text.
_TEXT_BYTES = 4
#: Texts of answers are apart from those of prompts.
_ANSWERS = 1 << 39


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTraffic:
    """Requests of a shape that pass `filters`, at a multiple of its own load."""

    name: str
    trace: str
    requests: int
    load: float = 1.0
    block_tokens: int = BLOCK_TOKENS
    filters: TraceFilters = field(default_factory=TraceFilters)

    def feed(self, seed: int) -> Iterator[SimRequest]:
        filters = replace(self.filters, limit=self.requests)
        requests = load_requests(self.trace, filters, seed=seed, block_tokens=self.block_tokens)
        yield from feed_of(requests, time_scale=1.0 / self.load, block_tokens=self.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextTraffic:
    """Questions on long contexts.

    Parameters
    ----------
    contexts, context_tokens:
        Their number and length.
    popularity:
        The n-th is drawn in proportion to 1/n to this power.
    first_share:
        Share of all requests on the first context; `None`: by its popularity.
    question_tokens, output_tokens:
        Medians.
    """

    name: str
    contexts: int
    context_tokens: int
    requests: int
    rate_per_s: float
    popularity: float = 0.0
    first_share: float | None = None
    question_tokens: int = 200
    output_tokens: int = 100
    block_tokens: int = 64

    def feed(self, seed: int) -> Iterator[SimRequest]:
        rng = np.random.default_rng([seed, self.contexts])
        start = TextChain(block_tokens=self.block_tokens)
        contexts = [start.followed_by(number + 1, self.context_tokens) for number in range(self.contexts)]
        shares = self._shares()
        now_s = 0.0
        for number in range(self.requests):
            now_s += float(rng.exponential(1.0 / self.rate_per_s))
            chosen = int(rng.choice(self.contexts, p=shares))
            prompt = contexts[chosen].followed_by(self.contexts + number + 1, _length(rng, self.question_tokens, 0.3))
            yield _request(prompt, now_s, _length(rng, self.output_tokens, 0.5), chosen)

    def _shares(self) -> NDArray[np.float64]:
        shares: NDArray[np.float64] = np.arange(1, self.contexts + 1, dtype=float) ** -self.popularity
        if self.first_share is not None:
            shares[1:] *= (1.0 - self.first_share) / shares[1:].sum()
            shares[0] = self.first_share
        shares /= shares.sum()
        return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationTraffic:
    """Conversations behind a few system prompts, whose next turn begins with all texts before it.

    Parameters
    ----------
    kind:
        `continued`: turn after turn. `branching`: half of the turns are sent twice, in other words, and both go on.
        `resumed`: each has a long pause after half of its turns.
    starts_per_s:
        Conversations that begin.
    turns_mean, pause_s:
        Turns of a conversation (geometric), and the mean of the long pause.
    """

    kind: ConversationKind
    requests: int
    starts_per_s: float
    system_prompts: int = 64
    system_tokens: int = 800
    turns_mean: float = 6.0
    turn_tokens: int = 120
    answer_tokens: int = 180
    think_s: float = 12.0
    pause_s: float = 90.0
    block_tokens: int = 16

    @property
    def name(self) -> str:
        return f"{self.kind} conversations"

    def feed(self, seed: int) -> Iterator[SimRequest]:
        requests: list[SimRequest] = []
        rng, now_s = np.random.default_rng([seed, len(self.kind)]), 0.0
        texts = iter(range(self.system_prompts + 1, 1 << 30))
        while True:
            requests += self._conversation(rng, now_s, texts)
            now_s += float(rng.exponential(1.0 / self.starts_per_s))
            requests.sort(key=lambda request: request.arrival_s)
            if len(requests) >= self.requests and requests[self.requests - 1].arrival_s < now_s:
                return (yield from requests[: self.requests])

    def _conversation(self, rng: np.random.Generator, now_s: float, texts: Iterator[int]) -> Iterator[SimRequest]:
        system = int(rng.integers(self.system_prompts))
        prompt = TextChain(block_tokens=self.block_tokens).followed_by(system + 1, self.system_tokens)
        turns = int(rng.geometric(1.0 / self.turns_mean))
        branches = [(prompt, now_s, turns)]
        while branches:
            prompt, at_s, turns = branches.pop()
            for left in range(turns, 0, -1):
                twice = self.kind == "branching" and left > 1 and rng.random() < 0.5
                for copy in range(2 if twice else 1):
                    turn = prompt.followed_by(next(texts), _length(rng, self.turn_tokens, 0.5))
                    output_tokens = _length(rng, self.answer_tokens, 0.5)
                    answered = turn.followed_by(_ANSWERS + next(texts), output_tokens)
                    yield _request(turn, at_s, output_tokens, system, answered)
                    following_s = at_s + 0.03 * output_tokens + float(rng.exponential(self.think_s))
                    if self.kind == "resumed" and left == turns // 2 + 1:
                        following_s += float(rng.exponential(self.pause_s))
                    if copy == 0:
                        main = answered, following_s
                    else:
                        branches.append((answered, following_s, (left - 1) // 2))
                prompt, at_s = main


Traffic = ChatTraffic | ContextTraffic | ConversationTraffic


@lru_cache(maxsize=2)
def feed_of_traffic(traffic: Traffic, seed: int) -> Sequence[SimRequest]:
    """Return the requests in the order of time, the first at 0.

    Example
    -------
    >>> traffic = ContextTraffic(name="contexts", contexts=4, context_tokens=640, requests=50, rate_per_s=5.0)
    >>> feed = feed_of_traffic(traffic, seed=1)
    >>> len(feed), len({request.blocks[:80] for request in feed})
    (50, 4)
    """
    found = list(islice(traffic.feed(seed), traffic.requests))
    begin_s = found[0].arrival_s
    return tuple(
        replace(request, index=index, arrival_s=request.arrival_s - begin_s) for index, request in enumerate(found)
    )


def _request(
    prompt: TextChain, at_s: float, output_tokens: int, first_text: int, answered: TextChain | None = None
) -> SimRequest:
    return SimRequest(
        index=0,
        arrival_s=at_s,
        prompt_tokens=prompt.tokens,
        output_tokens=output_tokens,
        blocks=prompt.blocks,
        prefix_hash=first_text,
        body_bytes=_TEXT_BYTES * prompt.tokens,
        output_blocks=b"" if answered is None else answered.blocks[len(prompt.blocks) :],
        boundaries=prompt.boundaries,
    )


def _length(rng: np.random.Generator, median: int, sigma: float) -> int:
    return max(1, round(median * float(np.exp(sigma * rng.standard_normal()))))
