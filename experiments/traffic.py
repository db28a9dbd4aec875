"""Traffic of the runs: shapes at a rate, chats, questions on long contexts, conversations, windows end to end.

Owns the feeds: each depends on the traffic's parameters and a seed alone. Times are in seconds, lengths in tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from heapq import merge
from itertools import islice
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gorgo.core.prefix.residency import BLOCK_HASH_BYTES
from gorgo.errors import TraceError
from gorgo.lab.datasets import load_requests
from gorgo.lab.datasets.catalogue import generate_requests
from gorgo.lab.datasets.prefix_shapes import GroupsShape, SharingShape
from gorgo.lab.sim.workload import BLOCK_TOKENS, SimRequest
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.traces import TraceFilters, load_trace

Stream: TypeAlias = SharingShape | GroupsShape | str
ConversationKind = Literal["continued", "branching", "resumed"]

#: Requests drawn for one that is used: those with prompts beyond the bound are dropped.
DRAWN_PER_REQUEST = 1.6
#: Fewer requests than this are no traffic: the least of a phase, and of a whole run.
LEAST_OF_PHASE, LEAST = 10, 20
#: Requests of different phases and streams share nothing: their blocks differ in these bits.
_STREAM_BITS = 48
#: Bytes that name one token of one text, and bits of a token's place in its text.
_TOKEN_BYTES, _PLACE_BITS = 8, 24
#: Bytes of a token's text; texts of answers are apart from those of prompts.
_TEXT_BYTES, _ANSWERS = 4, 1 << 39


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """So many requests at a mean rate, or in steps of equal time."""

    streams: tuple[Stream, ...]  #: Side by side, each with an equal part of the requests; a string is a trace's file.
    requests: int
    rates_per_s: tuple[float, ...]  #: One rate, or those of the steps; the texts of one step return in the next.

    @property
    def step_s(self) -> float:
        return self.requests / sum(self.rates_per_s)

    @property
    def duration_s(self) -> float:
        return self.step_s * len(self.rates_per_s)

    def arrival_s(self, share: float) -> float:
        """Return when so large a share of the requests has come."""
        come, now_s = share * sum(self.rates_per_s), 0.0
        for rate in self.rates_per_s[:-1]:
            if come <= rate:
                return now_s + self.step_s * come / rate
            come, now_s = come - rate, now_s + self.step_s
        return now_s + self.step_s * come / self.rates_per_s[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasedTraffic:
    """Phases one after the other, so that load, sharing or lengths change at a request.

    A shape is drawn at the rate wanted, cut to so many requests, and stretched to the rate exactly, so that runs of two
    seeds have the same mean load.

    Example
    -------
    >>> from experiments.systems.lodestar import sharing
    >>> feed = feed_of_traffic(sharing(0.5, requests=200, rate_per_s=10.0), seed=1)
    >>> len(feed), round(feed[-1].arrival_s)
    (200, 20)
    """

    name: str  #: Shown in tables, with the rate.
    phases: tuple[Phase, ...]
    max_input: int = 24_000  #: Longer prompts are dropped.
    output_tokens: int | None = None  #: Of every answer; None: as drawn. 1 is prefill only.
    block_tokens: int = 64  #: Of a prompt's prefix; 512 where a stream is a file.
    with_outputs: bool = False  #: Whether a next turn begins with the answer that the engine generated.

    @property
    def requests(self) -> int:
        return sum(phase.requests for phase in self.phases)

    @property
    def rate_per_s(self) -> float:
        return round(self.requests / sum(phase.duration_s for phase in self.phases), 3)

    @property
    def label(self) -> str:
        rates = dict.fromkeys(f"{rate:g}" for phase in self.phases for rate in phase.rates_per_s)
        return f"{self.name}, {' to '.join(rates)}/s"

    @property
    def traces(self) -> list[str]:
        return [stream for phase in self.phases for stream in phase.streams if isinstance(stream, str)]

    def scaled(self, factor: float) -> PhasedTraffic:
        """Return the same with so many times the requests in each phase."""
        counts = [max(LEAST_OF_PHASE, round(phase.requests * factor)) for phase in self.phases]
        phases = (replace(phase, requests=count) for phase, count in zip(self.phases, counts, strict=True))
        return self if factor == 1 else replace(self, phases=tuple(phases))

    def feed(self, seed: int) -> Iterator[SimRequest]:
        """Yield the requests in the order of time; raise `TraceError` where a trace is too short."""
        begins_s = 0.0
        for number, phase in enumerate(self.phases):
            streams = [
                self._stream(phase, stream, seed, mark=(number * len(phase.streams) + place) << _STREAM_BITS)
                for place, stream in enumerate(phase.streams)
            ]
            for request in merge(*streams, key=lambda request: request.arrival_s):
                yield replace(request, arrival_s=request.arrival_s + begins_s)
            begins_s += phase.duration_s

    def _stream(self, phase: Phase, stream: Stream, seed: int, *, mark: int) -> Iterator[SimRequest]:
        """Yield the stream's part of a phase, which begins at 0."""
        count = phase.requests // len(phase.streams)
        filters = TraceFilters(max_input=self.max_input, limit=count)
        if isinstance(stream, str):
            requests, block_tokens = load_trace(stream, filters), BLOCK_TOKENS
        else:
            rate_per_s, block_tokens = phase.requests / phase.duration_s / len(phase.streams), self.block_tokens
            shape = _drawn(stream, count, rate_per_s, seed + (mark >> _STREAM_BITS) * 1000)
            requests = filters.apply(generate_requests(shape, block_tokens=block_tokens))
        if len(requests) < count:
            raise TraceError(f"{self.name}: {len(requests)} requests pass the filters; expected {count}")
        feed = feed_of(requests, block_tokens=block_tokens, with_outputs=self.with_outputs)
        last_s = max(feed[-1].arrival_s, 1e-9)
        for request in feed:
            yield replace(
                request, arrival_s=phase.arrival_s(request.arrival_s / last_s), blocks=marked(request.blocks, mark),
                output_tokens=request.output_tokens if self.output_tokens is None else self.output_tokens,
                output_blocks=marked(request.output_blocks, mark), prefix_hash=request.prefix_hash ^ mark,
            )  # fmt: skip


def one_phase(name: str, *streams: Stream, requests: int, rates_per_s: tuple[float, ...], **more: Any) -> PhasedTraffic:
    """Return shapes or files side by side at one rate, or in steps of equal time; `more` are fields of the traffic."""
    phase = Phase(streams=streams, requests=requests, rates_per_s=rates_per_s)
    return PhasedTraffic(name=name, phases=(phase,), **more)


def _drawn(shape: SharingShape | GroupsShape, count: int, rate_per_s: float, seed: int) -> SharingShape | GroupsShape:
    drawn = round(count * DRAWN_PER_REQUEST) + 10
    if isinstance(shape, GroupsShape):
        return replace(shape, seed=seed, rate_per_s=rate_per_s, duration_s=drawn / rate_per_s)
    return replace(shape, seed=seed, rate_per_s=rate_per_s, requests=drawn)


def marked(blocks: bytes, mark: int) -> bytes:
    """Return block hashes that no other mark has."""
    return (np.frombuffer(blocks, dtype="<u8") ^ np.uint64(mark)).tobytes() if mark and blocks else blocks


class _NamedTraffic:
    """Traffic that is drawn or cut as a whole: its label is its name."""

    __slots__ = ()
    name: str
    requests: int
    trace: str | None = None

    @property
    def label(self) -> str:
        return self.name

    @property
    def traces(self) -> list[str]:
        return [] if self.trace is None else [self.trace]

    def scaled(self, factor: float) -> _NamedTraffic:
        return self if factor == 1 else replace(self, requests=max(LEAST, round(self.requests * factor)))  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True)
class ChatTraffic(_NamedTraffic):
    """Requests of a shape that pass `filters`, at a multiple of its own load."""

    name: str
    trace: str
    requests: int
    load: float = 1.0
    block_tokens: int = BLOCK_TOKENS
    filters: TraceFilters = field(default_factory=TraceFilters)

    def at(self, load: float) -> ChatTraffic:
        return replace(self, load=load, name=f"{self.name}@{load:g}")

    def feed(self, seed: int) -> Iterator[SimRequest]:
        filters = replace(self.filters, limit=self.requests)
        requests = load_requests(self.trace, filters, seed=seed, block_tokens=self.block_tokens)
        yield from feed_of(requests, time_scale=1.0 / self.load, block_tokens=self.block_tokens)


@dataclass(frozen=True, kw_only=True)
class ContextTraffic(_NamedTraffic):
    """Questions on long contexts."""

    name: str
    contexts: int
    context_tokens: int
    requests: int
    rate_per_s: float
    popularity: float = 0.0  #: The n-th context is drawn in proportion to 1/n to this power.
    first_share: float | None = None  #: Share of all requests on the first context; None: by its popularity.
    question_tokens: int = 200  #: Median, as of the answers.
    output_tokens: int = 100
    block_tokens: int = 64

    def feed(self, seed: int) -> Iterator[SimRequest]:
        rng = np.random.default_rng([seed, self.contexts])
        start = TextChain(block_tokens=self.block_tokens)
        contexts = [start.followed_by(number + 1, self.context_tokens) for number in range(self.contexts)]
        shares, now_s = self._shares(), 0.0
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


@dataclass(frozen=True, kw_only=True)
class ReuseTraffic(_NamedTraffic):
    """Prompts of even lengths, of which a part is a prefix that returns after an even number of others."""

    name: str
    requests: int
    rate_per_s: float
    lengths: tuple[int, int]  #: Least and most tokens of a prompt; those of one prefix are of one length.
    output_mean: float  #: Of the normal distribution of answers, tokens.
    output_deviation: float
    shared_share: float = 0.5  #: Share of a prompt that is its prefix.
    new_share: float = 0.1  #: Share of the requests that begin a prefix.
    distance_max: int = 80  #: Distinct prefixes between two uses of one: from 0 to so many, each number as often.
    block_tokens: int = 64

    def feed(self, seed: int) -> Iterator[SimRequest]:
        rng, now_s = np.random.default_rng([seed, self.distance_max]), 0.0
        start, recent = TextChain(block_tokens=self.block_tokens), deque[tuple[int, int, TextChain]]()
        for number in range(self.requests):
            now_s += float(rng.exponential(1.0 / self.rate_per_s))
            if not recent or rng.random() < self.new_share:
                tokens = int(rng.integers(self.lengths[0], self.lengths[1] + 1))
                shared = start.followed_by(number + 1, round(self.shared_share * tokens))
                used = number, tokens, shared
            else:
                place = -1 - min(int(rng.integers(self.distance_max + 1)), len(recent) - 1)
                used = recent[place]
                del recent[place]
            recent.append(used)
            if len(recent) > self.distance_max + 1:
                recent.popleft()
            first, tokens, shared = used
            prompt = shared.followed_by(self.requests + number + 1, tokens - shared.tokens)
            output_tokens = max(1, round(rng.normal(self.output_mean, self.output_deviation)))
            yield _request(prompt, now_s, output_tokens, first)


@dataclass(frozen=True, kw_only=True)
class ConversationTraffic(_NamedTraffic):
    """Conversations behind a few system prompts, whose next turn begins with all texts before it."""

    #: `continued`: turn after turn. `branching`: half of the turns are sent twice, in other words, and both go on.
    #: `resumed`: each has a long pause after half of its turns.
    kind: ConversationKind
    requests: int
    starts_per_s: float  #: Conversations that begin.
    system_prompts: int = 64
    system_tokens: int = 800
    turns_mean: float = 6.0  #: Turns of a conversation (geometric).
    turn_tokens: int = 120
    answer_tokens: int = 180
    think_s: float = 12.0
    pause_s: float = 90.0  #: Mean of the long pause.
    block_tokens: int = 16

    @property
    def name(self) -> str:  # type: ignore[override]
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
        branches = [(prompt, now_s, int(rng.geometric(1.0 / self.turns_mean)))]
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


Traffic: TypeAlias = PhasedTraffic | ChatTraffic | ContextTraffic | ReuseTraffic | ConversationTraffic


@lru_cache(maxsize=2)
def feed_of_traffic(traffic: Traffic, seed: int) -> Sequence[SimRequest]:
    """Return the requests in the order of time; the first is at 0, but for phases, which have a duration.

    Example
    -------
    >>> traffic = ContextTraffic(name="contexts", contexts=4, context_tokens=640, requests=50, rate_per_s=5.0)
    >>> feed = feed_of_traffic(traffic, seed=1)
    >>> len(feed), len({request.blocks[:80] for request in feed})
    (50, 4)
    """
    found = list(islice(traffic.feed(seed), traffic.requests))
    begin_s = 0.0 if isinstance(traffic, PhasedTraffic) else found[0].arrival_s
    return tuple(
        replace(request, index=index, arrival_s=request.arrival_s - begin_s) for index, request in enumerate(found)
    )


def _request(
    prompt: TextChain, at_s: float, output_tokens: int, first_text: int, answered: TextChain | None = None
) -> SimRequest:
    return SimRequest(
        index=0, arrival_s=at_s, prompt_tokens=prompt.tokens, output_tokens=output_tokens, blocks=prompt.blocks,
        prefix_hash=first_text, body_bytes=_TEXT_BYTES * prompt.tokens, boundaries=prompt.boundaries,
        output_blocks=b"" if answered is None else answered.blocks[len(prompt.blocks) :],
    )  # fmt: skip


def _length(rng: np.random.Generator, median: int, sigma: float) -> int:
    return max(1, round(median * float(np.exp(sigma * rng.standard_normal()))))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextChain:
    """A prompt as a sequence of texts, a value, so that conversations can branch from any of their turns.

    Blocks are equal where all texts up to their end are.

    Example
    -------
    >>> start = TextChain(block_tokens=16).followed_by(1, 40)
    >>> one, other = start.followed_by(2, 40), start.followed_by(3, 40)
    >>> one.tokens, one.boundaries, len(one.blocks) // 8
    (80, (40, 80), 5)
    >>> one.blocks[:16] == other.blocks[:16], one.blocks == other.blocks
    (True, False)
    """

    block_tokens: int
    tokens: int = 0  #: Length.
    blocks: bytes = b""  #: The hash of each full block.
    tail: bytes = b""  #: What follows the last full block.
    boundaries: tuple[int, ...] = ()  #: Tokens at the end of each text.

    def followed_by(self, text: int, tokens: int) -> TextChain:
        """Return the prompt with the first `tokens` of a text behind it."""
        places = np.arange(tokens, dtype=np.uint64) | np.uint64(text << _PLACE_BITS)
        rest = self.tail + places.astype("<u8").tobytes()
        size = self.block_tokens * _TOKEN_BYTES
        parent, found = self.blocks[-BLOCK_HASH_BYTES:], [self.blocks]
        for end in range(size, len(rest) + 1, size):
            parent = blake2b(parent + rest[end - size : end], digest_size=BLOCK_HASH_BYTES).digest()
            found.append(parent)
        total = self.tokens + tokens
        return TextChain(
            block_tokens=self.block_tokens, tokens=total, blocks=b"".join(found), tail=rest[len(rest) // size * size :],
            boundaries=(*self.boundaries, total),
        )  # fmt: skip
