"""Measurement of an engine: which requests are sent, and which points and sizes follow from the answers.

Owns the plan, and what the answers tell: gaps between tokens, sizes of a KV pool, shares of a cached beginning. Leaves
the calls to a `MeasuredEngine` and the fit to `gorgo.lab.calibrate.fit`.

The engine serves no other load, so that every time is that of the request alone. Load is bounded: one
request at a time, but for decode batches of at most `max_batch`, and no phase starts after its share of the time.

- Prefill: new prompts of growing length, then prompts behind a cached beginning; the median of some repetitions.
- Decode: batches that share one cached prompt, so that their prefill is short; the median gap while all of them decode.
- Step budget, of vLLM's scheduler: a prompt beside a decode, whose long gaps count the steps.
- Shared beginnings: how much of a cached beginning is found, and in which steps.
- KV pool, where the engine does not report it: distinct prompts until the first is evicted, then a search by age.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, gcd
from statistics import median
from typing import Protocol

from gorgo.errors import CalibrationError
from gorgo.lab.calibrate.fit import CHUNKS, DecodePoint, PrefillPoint


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


# What gaps between tokens tell: the time of a decode step, and how many steps a prompt takes beside decodes.
#
# With vLLM's scheduler a long prompt is computed in chunks that share their steps with decodes. A request that decodes
# meanwhile has one long gap per step, so the long gaps count the steps, and steps of a known prompt tell the budget.


#: A gap is long if it exceeds a decode step by this share of what the longest gap does.
_LONG_SHARE = 0.12
#: The last chunk may be short. Below the first share of a whole one it makes no long gap, above the second it does.
_SHORT_CHUNKS = (0.05, 0.2)
#: Where the longest gap is below so many decode steps, noise could make it.
_LEAST_STALL = 3.0


@dataclass(frozen=True, slots=True)
class Stalls:
    """Steps in which a prompt was computed beside a decode."""

    new_tokens: int
    steps: int


def decode_point(answers: Sequence[Answer]) -> DecodePoint | None:
    """Return the median gap between the last first token and the first last one; None if a request failed.

    >>> two = [Answer(100, 0, (0.10, 0.12, 0.14, 0.16, 0.18, 0.20)), Answer(100, 99, (0.12, 0.14, 0.16, 0.18, 0.20))]
    >>> point = decode_point(two)
    >>> point.batch, point.context_tokens, round(point.step_s, 3)
    (2, 207, 0.02)
    """
    if any(answer.error is not None or len(answer.tokens_s) < 2 or not answer.prompt_tokens for answer in answers):
        return None
    start_s = max(answer.tokens_s[0] for answer in answers)
    end_s = min(answer.tokens_s[-1] for answer in answers)
    gaps, context = [], 0.0
    for answer in answers:
        inside = [(index, at) for index, at in enumerate(answer.tokens_s) if start_s <= at <= end_s]
        gaps += [after[1] - before[1] for before, after in pairwise(inside)]
        if inside:
            context += (answer.prompt_tokens or 0) + (inside[0][0] + inside[-1][0]) / 2 + 1
    return DecodePoint(len(answers), round(context), median(gaps)) if len(gaps) >= len(answers) else None


def stalls(decoding: Answer, prompt: Answer) -> Stalls | None:
    """Return in how many steps `prompt` was computed while `decoding` decoded; None where gaps do not show it.

    >>> decoding = Answer(30, 0, (0.01, 0.11, 0.21, 0.31, 0.32, 0.33, 0.34, 0.35))
    >>> stalls(decoding, Answer(1500, 0, (0.31,)))
    Stalls(new_tokens=1500, steps=3)
    """
    if decoding.error or prompt.error or not prompt.tokens_s or prompt.prompt_tokens is None:
        return None
    first_s = prompt.ttft_s
    times_s = [0.0, *decoding.tokens_s]
    gaps = [(after <= first_s, after - before) for before, after in pairwise(times_s)]
    meanwhile, later = [gap for inside, gap in gaps if inside], [gap for inside, gap in gaps if not inside]
    if not meanwhile or len(later) < 3:
        return None
    step_s, longest_s = median(later), max(meanwhile)
    if longest_s < _LEAST_STALL * step_s:
        return None
    least_s = step_s + _LONG_SHARE * (longest_s - step_s)
    return Stalls(prompt.prompt_tokens - (prompt.cached_tokens or 0), sum(gap >= least_s for gap in meanwhile))


def step_budget(measured: Sequence[Stalls]) -> int | None:
    """Return the common budget of a step that explains the counted steps best; None without any.

    A prompt of one step tells that the budget is not smaller: of budgets that explain all alike the largest counts.

    >>> step_budget([Stalls(5000, 10), Stalls(3000, 6)]), step_budget([Stalls(5000, 1)]), step_budget([])
    (512, 16384, None)
    """
    if not measured:
        return None

    def error(budget: int) -> int:
        return sum(_missed(one, one.new_tokens / budget) for one in measured)

    return min(sorted(CHUNKS, reverse=True), key=error)


def _missed(one: Stalls, chunks: float) -> int:
    """Return by how much the counted steps are not those of so many chunks; a short last one may be seen or not."""
    return min(abs(one.steps - max(1, ceil(chunks - short))) for short in _SHORT_CHUNKS)


# Size of a KV pool from which of the prompts sent before are still cached.
#
# Theory of operation: an engine evicts what was used least recently. So a prompt is cached exactly if all that was
# used since, and it itself, fit into the pool: each lookup gives a bound on the size from below or from above. A
# lookup uses the prompt, cached or not, and so it becomes the most recent one.


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


# What an engine finds of a cached beginning: which share, and in which steps.


#: A smaller share is no rounding by the tokenizer.
WHOLE_SHARE = 0.97
#: No engine has smaller pages; a smaller common divisor of a few lengths is chance.
LEAST_STEP = 8


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The found share of a cached beginning, and the step in tokens (a page, a checkpoint) in which it is found.

    The share is 0 if nothing was found of any beginning: an engine without a prefix cache.
    """

    found_share: float
    step_tokens: int

    @property
    def is_cached(self) -> bool:
        """Whether the engine has a prefix cache."""
        return self.found_share > 0


def shared_prefix(pairs: Sequence[tuple[int, int]]) -> SharedPrefix | None:
    """Return the share and the step from pairs of (tokens of the beginning, tokens found of it).

    >>> shared_prefix([(1100, 1024), (1790, 1536), (2330, 2048), (5390, 5120)])
    SharedPrefix(found_share=1.0, step_tokens=512)
    >>> shared_prefix([(1000, 601), (2000, 1199), (4000, 2402)])
    SharedPrefix(found_share=0.6, step_tokens=1)
    >>> shared_prefix([(1000, 0), (2000, 0)]).is_cached
    False
    """
    if not pairs:
        return None
    if not any(cached for _, cached in pairs):
        return SharedPrefix(0.0, 1)
    divisor = gcd(*(cached for _, cached in pairs))
    step = divisor if divisor >= LEAST_STEP else 1
    # The expected loss to rounding is half a step.
    shares = [min(1.0, (cached + (step - 1) / 2) / tokens) if cached else 0.0 for tokens, cached in pairs]
    share = round(median(shares), 2)
    return SharedPrefix(1.0 if share >= WHOLE_SHARE else share, step)


#: Pairs on both sides of each common size of a prefill step, so that its constant shows.
PREFILL_TOKENS = (
    *(128, 256, 490, 540, 980, 1080, 1500, 1960, 2160),
    *(3000, 3930, 4330, 6000, 7860, 8660, 12_000, 17_000, 24_000),
)
#: (cached, new) tokens.
CACHED_TOKENS = ((4096, 256), (4096, 2048), (12_288, 256), (12_288, 2048), (12_288, 6144))
REPEATS = 5
#: By which a repetition is longer than the one before, so that no length is warm: an engine may compile for each one.
LONGER_TOKENS = 5
#: Before it, s: a request that is alone finds caches and clocks of an idle engine. vLLM on a CPU took 6 to 17 % longer
#: after 0.1 s than at once.
PAUSE_S = 0.1
#: Of the requests that time a prefill: vLLM sends a first token a step later where more follow.
PREFILL_OUTPUT_TOKENS = 4
#: A length is not repeated after so long: a slow engine has long prompts left, whose times vary less.
REPEAT_S = 10.0
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64)
#: Context of each request of a batch.
DECODE_CONTEXTS = (256, 2048, 6144)
DECODE_TOKENS = 48
#: Prompts that are computed beside a decode: shares of the longest, and tokens. The decode outlasts 40 steps of them.
BUDGET_SHARES, BUDGET_TOKENS = (0.95, 0.6), 12_000
BUDGET_REPEATS, BUDGET_OUTPUT_TOKENS = 3, 64
#: Lengths of shared beginnings: primes, so that a step shows as the greatest common divisor of what is found.
SHARED_TOKENS = (1103, 1789, 2333, 3169, 4211, 5393, 6607)
#: Behind a shared beginning, so that prompts differ.
REST_TOKENS = 64
#: Of the pool; its size is known within one of them.
FILL_TOKENS = 8192
#: Prompts before the first lookup of the oldest; then at each doubling.
FIRST_LOOKUP = 8
#: Share of a cached prompt that even an engine with partial hits finds; an evicted one shares a template at most.
LEAST_FOUND = 0.2
#: Of the first prompt: long enough that the chat template does not count, and at most four tokens each.
WORDS = 300
#: Calls in a row without an answer, after which the engine counts as dead; fewer may be a network's fault.
LOST_IN_A_ROW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of one calibration.

    Parameters
    ----------
    time_s:
        No request starts later.
    max_input:
        Longest prompt, tokens.
    max_batch:
        Most requests at once.
    fill_s:
        Longest time for the KV pool.
    """

    time_s: float = 600.0
    max_input: int = 24_000
    max_batch: int = 64
    fill_s: float = 240.0


class Measurement:
    """One calibration of one engine."""

    def __init__(
        self, engine: MeasuredEngine, prompts: Prompts, bounds: Bounds, *, advance: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._bounds = bounds
        self._advance = advance
        self._started_s = engine.now_s()
        #: Requests sent, and prompts that the engine refused: too long for it, most likely.
        self.requests = 0
        self.refused: list[str] = []
        self._lost_in_a_row = 0

    @property
    def elapsed_s(self) -> float:
        """Return the time since the start."""
        return self._engine.now_s() - self._started_s

    async def learn_words(self) -> None:
        """Learn the tokens per word. Raises `CalibrationError` if the engine fails or reports no usage."""
        text = self._prompts.draw(WORDS)
        answer = await self._one(text)
        if answer is None:
            raise CalibrationError(f"the engine failed a short request: {self.refused[-1]}")
        if answer.prompt_tokens is None:
            raise CalibrationError("the engine reports no usage; expected prompt_tokens in the last event of a stream")
        self._prompts.set_tokens_per_word(words=len(text.split()), tokens=answer.prompt_tokens)

    async def prefill(self) -> list[PrefillPoint]:
        """Return times to the first token by new and cached tokens."""
        points = []
        for tokens in self._within(PREFILL_TOKENS):
            points += await self._repeat(tokens)
        for cached, new in CACHED_TOKENS:
            if cached + new > self._bounds.max_input or self._time_is_up:
                continue
            beginning = self._prompts.draw(cached)
            if await self._one(beginning) is None:
                continue
            points += await self._repeat(new, beginning)
        return points

    async def decode(self) -> list[DecodePoint]:
        """Return times per token by batch and context."""
        points = []
        for context in DECODE_CONTEXTS:
            if context > self._bounds.max_input or self._time_is_up:
                continue
            prompt = self._prompts.draw(context)
            await self._one(prompt)
            for batch in BATCHES:
                if batch > self._bounds.max_batch or self._time_is_up:
                    break
                answers = await self._send([prompt] * batch, DECODE_TOKENS)
                point = decode_point(answers)
                if point is not None:
                    points.append(point)
                self._advance(f"decode, batch {batch}")
        return points

    async def step_budget(self) -> int | None:
        """Return the tokens of a step that has prefill and decodes; None where gaps between tokens do not show it."""
        stalls_of_sizes: list[Stalls] = []
        for share in BUDGET_SHARES:
            tokens = round(share * min(self._bounds.max_input, BUDGET_TOKENS))
            for _ in range(BUDGET_REPEATS):
                if self._time_is_up:
                    break
                prompts = [self._prompts.draw(REST_TOKENS), self._prompts.draw(tokens)]
                stalled = stalls(*await self._send(prompts, BUDGET_OUTPUT_TOKENS))
                self._advance(f"step budget, {tokens} tokens")
                stalls_of_sizes += [stalled] if stalled else []
        return step_budget(stalls_of_sizes)

    async def shared_prefix(self) -> SharedPrefix | None:
        """Return what is found of cached beginnings; None without reports of cached tokens."""
        pairs = []
        for tokens in self._within(SHARED_TOKENS):
            beginning = self._prompts.draw(tokens)
            first = await self._one(beginning)
            second = await self._one(beginning + self._prompts.draw(REST_TOKENS))
            self._advance(f"shared beginning, {tokens} tokens")
            if first and second and first.prompt_tokens and second.cached_tokens is not None:
                pairs.append((first.prompt_tokens, second.cached_tokens))
        return shared_prefix(pairs)

    async def pool(self) -> PoolSize | None:
        """Return the size of the KV pool; None without reports of cached tokens."""
        used = UsedPrompts()
        until_s = min(self.elapsed_s + self._bounds.fill_s, self._bounds.time_s)
        size = min(FILL_TOKENS, self._bounds.max_input)
        while self.elapsed_s < until_s and used.upper is None:
            text = self._prompts.draw(size)
            answer = await self._one(text)
            if answer is None or answer.prompt_tokens is None:
                return None
            used.add(text, answer.prompt_tokens)
            self._advance(f"KV pool, {used.total:,} tokens")
            is_power_of_two = len(used) & (len(used) - 1) == 0
            if is_power_of_two and len(used) >= FIRST_LOOKUP and not await self._add_bound(used, used.oldest):
                return None
        while (prompt := used.next_prompt()) is not None and not self._time_is_up:
            if not await self._add_bound(used, prompt):
                return None
        return PoolSize(used.lower, is_lower_bound=used.upper is None) if used.lower else None

    async def _add_bound(self, used: UsedPrompts, prompt: str) -> bool:
        """Record whether a prompt is cached; return False if the engine does not report it."""
        answer = await self._one(prompt)
        self._advance("KV pool, lookup")
        if answer is None or answer.cached_tokens is None or not answer.prompt_tokens:
            return False
        used.add_bound(prompt, cached=answer.cached_tokens > LEAST_FOUND * answer.prompt_tokens)
        return True

    async def _repeat(self, tokens: int, cached: str = "") -> list[PrefillPoint]:
        """Return one point, the median of some requests with about `tokens` new ones behind the text `cached`.

        No two have one length, as in traffic. Nothing if the engine refuses, or does not report cached tokens.
        """
        points: list[PrefillPoint] = []
        until_s = self.elapsed_s + REPEAT_S
        while len(points) < REPEATS and not self._time_is_up and (not points or self.elapsed_s < until_s):
            text = cached + self._prompts.draw(tokens + len(points) * LONGER_TOKENS)
            await self._engine.pause(PAUSE_S)
            answer = await self._one(text, output_tokens=PREFILL_OUTPUT_TOKENS)
            self._advance(f"prefill, {tokens} tokens")
            if answer is None or answer.prompt_tokens is None or (cached and answer.cached_tokens is None):
                break
            hits = answer.cached_tokens or 0
            points.append(PrefillPoint(answer.prompt_tokens - hits, hits, answer.ttft_s))
        # The fastest is what the engine can do, and the median what a request gets.
        return [sorted(points, key=lambda point: point.ttft_s)[(len(points) - 1) // 2]] if points else []

    async def _one(self, prompt: str, *, output_tokens: int = 1) -> Answer | None:
        """Return the answer to one request; None if it failed, with the reason in `refused`."""
        (answer,) = await self._send([prompt], output_tokens)
        if answer.error is None and answer.tokens_s:
            return answer
        self.refused.append(answer.error or "no token")
        return None

    async def _send(self, prompts: Sequence[str], output_tokens: int) -> list[Answer]:
        self.requests += len(prompts)
        answers = await self._engine.generate(prompts, output_tokens=output_tokens)
        self._lost_in_a_row = 0 if any(answer.is_connected for answer in answers) else self._lost_in_a_row + 1
        if self._lost_in_a_row == LOST_IN_A_ROW:
            raise CalibrationError(
                f"the engine stopped answering after {self.requests - LOST_IN_A_ROW} requests: {answers[0].error}"
            )
        return answers

    def _within(self, lengths: Sequence[int]) -> Iterator[int]:
        for tokens in lengths:
            if tokens <= self._bounds.max_input and not self._time_is_up:
                yield tokens

    @property
    def _time_is_up(self) -> bool:
        return self.elapsed_s >= self._bounds.time_s
